"""The record of a machine: what came of each step, written after each, and added to by later commands."""

import ctypes
import hashlib
import json
import os
import re
import time
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

from . import aims
from .step import ROOT, Step
from .table import STEPS

Record: TypeAlias = dict[str, Any]

_SOURCES = ("mpikv/**/*.py", "mpikv/**/*.cu", "mpikv/**/*.h", "scripts/gpu_steps/*.py", "tests/gpu/**/*.py")


def sources() -> str:
    """Return a short digest of the code that the steps run, by which a record of other code is told apart."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in ROOT.glob(pattern)}):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def machine() -> str:
    """Return the name of the GPUs that the driver shows, or that there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no GPU"
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(100)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "no GPU"
    driver.cuDeviceGetName(name, 100, 0)
    gpu = name.value.decode()
    return gpu if count.value == 1 else f"{count.value} {gpu}"


class Book:
    """The records of all steps on a machine, in ``<out>/<machine>.json`` and, for people, ``.md``."""

    def __init__(self, folder: Path, machine: str, code: str) -> None:
        """Begin with what earlier commands have written there.

        Raises:
            OSError: the folder cannot be made, read or written to, or is for real GPUs, and this is none.
            ValueError: a file of that name is no record.
        """
        if "emulated" in machine and folder.resolve() == ROOT / "docs" / "gpu":
            raise PermissionError(f"it is for GPUs, and this is an {machine}; pass another folder")
        self.machine, self._code = machine, code
        name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"the folder {folder} cannot be written to")
        self._json, self.page = folder / f"{name}.json", folder / f"{name}.md"
        self.records = self._read()

    def _read(self) -> dict[str, Record]:
        """Return the records of steps that there still are."""
        if not self._json.exists():
            return {}
        try:
            found = json.loads(self._json.read_text())
        except ValueError as error:
            raise ValueError(f"{self._json} is no record of gpu_check ({error}); move it away") from error
        if not isinstance(found, dict) or not all(map(_is_record, found.values())):
            raise ValueError(f"{self._json} is no record of gpu_check; move it away")
        return {name: found[name] for name in STEPS if name in found}

    def lacks(self, name: str) -> bool:
        """Return whether a step has still to be run: it never was, with this code, or there was no time for it."""
        record = self.records.get(name, {})
        return record.get("sources") != self._code or bool(record.get("unreached"))

    def left(self) -> list[str]:
        """Return the steps that have still to be run; last those that spent a budget, as they may spend the next."""
        return sorted(filter(self.lacks, STEPS), key=self._spent_a_budget)

    def _spent_a_budget(self, name: str) -> bool:
        record = self.records.get(name, {})
        return bool(record.get("unreached") and record["seconds"])

    def add(self, name: str, record: Record) -> None:
        """Add a record and write all of them, with those that another command has written meanwhile. What a step
        without time leaves does not replace what it once found.
        """
        self.records = self._read()
        if not record.get("unreached") or self.records.get(name, record).get("unreached"):
            self.records[name] = {**record, "sources": self._code}
        ordered = {step: self.records[step] for step in STEPS if step in self.records}
        for path, text in (
            (self._json, json.dumps(ordered, indent=1) + "\n"),
            (self.page, page(self.machine, ordered, self.summary())),
        ):
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.write_text(text)
            new.replace(path)

    def summary(self) -> str:
        """Return how many steps came out how, and what to do about the others."""
        left, came = self.left(), dict[str, list[str]]()
        for name, record in self.records.items():
            came.setdefault("left" if name in left else record["status"], []).append(name)
        well, skipped, failed = (came.get(status, []) for status in ("ok", "skip", "fail"))
        counts = f"{len(well)} ok, {len(skipped)} skipped, {len(failed)} failed, {len(left)} left"
        lines = [f"{len(STEPS)} steps: {counts}"]
        if failed:
            lines.append(f"failed: {', '.join(failed)}; scripts/gpu_check --steps {failed[0]}  runs one again")
        if left:
            lines.append("left: the next  scripts/gpu_check  runs them")
        return "\n".join(lines)


def _is_record(found: object) -> bool:
    return isinstance(found, dict) and {"status", "seconds"} <= found.keys()


def judge(step: Step, status: int | None, output: str, errors: str) -> Record:
    """Return what a step's exit status and output mean."""
    found = None
    for line in output.splitlines():
        found = numbers_in(line) or found
    said = (output + errors)[-4000:]
    if status is None:
        return {"status": "fail", "reason": f"did not end in {step.seconds:g} s", "numbers": found, "output": said}
    if found is None or status:
        why = ": ".join(filter(None, [f"exit status {status}", cause(said)]))
        return {"status": "fail", "reason": why, "numbers": found, "output": said}
    return {"status": "skip", "reason": found["skip"]} if "skip" in found else {"status": "ok", "numbers": found}


def cause(said: str) -> str:
    r"""Return the last line of an output that tells an exception, if one does.

    >>> cause('[rank 1/2]   File "a.py", line 3\n[rank 1/2] mpikv.errors.Stalled: push: late\nmpikv run: rank 1 ended')
    'mpikv.errors.Stalled: push: late'
    """
    found = re.findall(r"^(?:\[rank \d+/\d+\] )?([A-Za-z_][\w.]*: \S.*)$", said, re.MULTILINE)
    return shorten(found[-1], 200, placeholder=" ...") if found else ""


def numbers_in(line: str) -> Record | None:
    """Return the numbers that a step has printed in a line, if it is such a line.

    >>> numbers_in('{"ms": 1.5}'), numbers_in("{noise"), numbers_in("noise")
    ({'ms': 1.5}, None, None)
    """
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def shown(value: Any) -> str:
    """Return a number with three digits, and anything else as a text for a table.

    >>> shown(1234.56), shown(0.012345), shown([]), shown(["a", 1.5])
    ('1235', '0.0123', '', 'a; 1.5')
    """
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    return str(value).replace("|", r"\|").replace("\n", " ")


def page(machine: str, records: dict[str, Record], summary: str) -> str:
    """Return the page for people."""
    lines = [f"# mpikv on {machine}", "", f"Written by `scripts/gpu_check` on {time.strftime('%Y-%m-%d')}."]
    lines += ["", "```", summary, "```", ""]
    lines += ["## Aims", "", *aims.table(records), "", "## Steps", "", _LEGEND, ""]
    lines += ["| step | it tries | result | seconds | code |", "|---|---|---|---|---|"]
    for name, record in records.items():
        reason = f": {shown(record['reason'])}" if "reason" in record else ""
        cells = name, STEPS[name].what, record["status"] + reason, record["seconds"], record.get("sources", "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for name, record in records.items():
        if record.get("numbers"):
            lines += ["", f"## {name}", "", STEPS[name].what, "", "| figure | value |", "|---|---|"]
            lines += [f"| {what} | {shown(value)} |" for what, value in record["numbers"].items()]
        if record["status"] == "fail":
            lines += ["", f"## {name} failed", "", f"`scripts/gpu_check --steps {name}` runs it again. It printed:", ""]
            lines += ["```", record["output"].strip(), "```"]
    return "\n".join(lines) + "\n"


_LEGEND = """\
A step is *ok*; or *skip*, with the reason why it was not run; or *fail*: its error is below, under its name. A number
at the end of a name counts ranks. Where ranks share a GPU, their times show that a step works, not how fast it is. Rows
with different *code* are of different versions of mpikv."""
