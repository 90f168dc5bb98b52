"""The record of a machine: what came of each step, written after each, and added to by later commands."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any, TypeAlias

from . import aims
from .step import ROOT, Step
from .table import STEPS

Record: TypeAlias = "dict[str, Any]"

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
        """Begin with what earlier commands have written there."""
        self.machine, self._code = machine, code
        name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self.page = folder / f"{name}.json", folder / f"{name}.md"
        self.records: dict[str, Record] = json.loads(self._json.read_text()) if self._json.exists() else {}

    def lacks(self, name: str) -> bool:
        """Return whether a step has still to be run: it never was, with this code, or there was no time for it."""
        record = self.records.get(name, {})
        return record.get("sources") != self._code or bool(record.get("unreached"))

    def add(self, name: str, record: Record) -> None:
        """Add a record and write all of them. What a step without time leaves does not replace what it once found."""
        if not record.get("unreached") or name not in self.records:
            self.records[name] = {**record, "sources": self._code}
        ordered = {step: self.records[step] for step in STEPS if step in self.records}
        for path, text in (
            (self._json, json.dumps(ordered, indent=1) + "\n"),
            (self.page, page(self.machine, ordered)),
        ):
            new = path.with_suffix(".new")
            new.write_text(text)
            new.replace(path)


def judge(step: Step, status: int | None, output: str, errors: str) -> Record:
    """Return what a step's exit status and output mean."""
    found = None
    for line in output.splitlines():
        found = numbers_in(line) or found
    said = (output + errors)[-4000:]
    if status is None:
        return {"status": "fail", "reason": "did not end in time", "numbers": found, "output": said}
    if found is None or (status and not step.dies):
        return {"status": "fail", "reason": f"exit status {status}", "numbers": found, "output": said}
    if "skip" in found:
        return {"status": "skip", "reason": found["skip"]}
    return {"status": "ok", "numbers": found}


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

    >>> shown(1234.56), shown(0.012345), shown([]), shown({"abort": "hangs", "s": 1.5})
    ('1235', '0.0123', '', 'abort hangs; s 1.5')
    """
    if isinstance(value, dict):
        value = [f"{name} {shown(each)}" for name, each in value.items()]
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    return str(value).replace("|", r"\|").replace("\n", " ")


def page(machine: str, records: dict[str, Record]) -> str:
    """Return the page for people."""
    lines = [f"# mpikv on {machine}", "", f"Written by `scripts/gpu_check` on {time.strftime('%Y-%m-%d')}.", ""]
    if any(STEPS[name].ranks > 1 for name in records):
        lines += ["Of several ranks the numbers are functional only where they share a GPU: no claim of speed.", ""]
    lines += ["## Aims", "", *aims.table(records), "", "## Steps", ""]
    lines += ["| step | result | seconds | code |", "|---|---|---|---|"]
    for name, record in records.items():
        reason = f": {shown(record['reason'])}" if "reason" in record else ""
        lines.append(f"| {name} | {record['status']}{reason} | {record['seconds']} | {record.get('sources', '')} |")
    for name, record in records.items():
        if record.get("numbers"):
            lines += ["", f"## {name}", "", "| what | value |", "|---|---|"]
            lines += [f"| {what} | {shown(value)} |" for what, value in record["numbers"].items()]
        if record["status"] == "fail":
            lines += ["", f"## {name} failed", "", "```", record["output"].strip(), "```"]
    return "\n".join(lines) + "\n"
