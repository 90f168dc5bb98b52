"""Plants the faults of gpu_faults.json, kinds of mistakes that often show only on a GPU, each for a test without one.

An entry has its kind and its name; its path in the folder ``mpikv``; what is there once, ``before``, and what it
becomes, ``after``; the test that has to fail, in ``tests/gpu/without``, as pytest is told, with the numbers of ranks
where it takes several; and the ``library`` whose environment the test needs, ``cuda`` where NVRTC is to find the fault.
It is ``emulated`` where the test is in ``tests/gpu/real``, or in ``emulated/`` beside it, and runs on the emulated GPU.
Whoever changes a line that a fault is planted in changes it there as well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .trees import ROOT, Outcome, Tree, in_trees

FOLDER, REAL, BESIDE = "tests/gpu/without", "tests/gpu/real", "tests/gpu"
PAGE = ROOT / "docs" / "reference" / "gpu-faults.md"
LIMIT = 600.0
"""Seconds for a test, on a busy machine."""


@dataclass(frozen=True)
class Fault:
    """One entry."""

    kind: str
    name: str
    path: str
    before: str
    after: str
    test: str
    library: str = "mpich"

    @property
    def folder(self) -> str:
        return folder_of(self.test, self.library)

    @property
    def title(self) -> str:
        return f"{self.kind}: {self.name}"

    def applied(self, source: bytes) -> bytes:
        """Return the source of the file with the change in it.

        Raises:
            LookupError: the file has changed.
        """
        if source.count(self.before.encode()) != 1:
            raise LookupError(f"{self.name}: mpikv/{self.path} has not once {self.before!r}")
        return source.replace(self.before.encode(), self.after.encode())


FAULTS = [Fault(**entry) for entry in json.loads(Path(__file__).with_name("gpu_faults.json").read_text())]


def plant(texts: Sequence[str], jobs: int) -> int:
    """Plant the faults with one of these texts in their names, or all; return how many were not found.

    The page is written when all were planted and found.

    Raises:
        SystemExit: a text is in no name.
    """
    if unknown := [text for text in texts if not any(text in fault.name for fault in FAULTS)]:
        raise SystemExit(f"no fault has {unknown[0]!r} in its name; the names are in scripts/mutation/gpu_faults.json")
    chosen = [fault for fault in FAULTS if not texts or any(text in fault.name for text in texts)]
    found: dict[str, str] = {}

    def check(tree: Tree, test: tuple[str, str]) -> None:
        if (outcome := attempt(tree, *test)).failed:
            raise SystemExit(f"{test[0]} fails without any fault: {outcome.failed}\n{outcome.text[-4000:]}")

    def find(tree: Tree, fault: Fault) -> None:
        with tree.planted(fault):
            outcome = attempt(tree, fault.test, fault.library)
        if outcome.failed:
            # The emulated GPU ends a session at once, as with an address that is not aligned.
            found[fault.title] = outcome.failed if "::" in outcome.failed else f"{fault.folder}/{fault.test}"
        print(f"{fault.title}\n    {outcome.failed or 'NOT FOUND'}", flush=True)

    in_trees(dict.fromkeys((fault.test, fault.library) for fault in chosen), check, jobs)
    in_trees(chosen, find, jobs)
    if len(found) == len(FAULTS):
        head = PAGE.read_text().partition("| fault |")[0]
        PAGE.write_text(head + table(found))
    return len(chosen) - len(found)


def folder_of(test: str, library: str) -> str:
    return FOLDER if library != "emulated" else BESIDE if test.startswith("emulated/") else REAL


def attempt(tree: Tree, test: str, library: str) -> Outcome:
    """Return how a session with a test ends."""
    names = [word if word.startswith("-") else f"{folder_of(word, library)}/{word}" for word in test.split()]
    return tree.run_on(library, ["-x", "--tb=short", *names], LIMIT)


def table(found: Mapping[str, str]) -> str:
    text = "| fault | in | found by |\n|---|---|---|\n"
    for fault in FAULTS:
        by = found[fault.title].removeprefix(f"{FOLDER}/").removeprefix("tests/gpu/").partition("[")[0]
        where = {"cuda": ", NVRTC", "emulated": ", emulated"}.get(fault.library, "")
        text += f"| {fault.title} | `{fault.path}` | `{by}`{where} |\n"
    return text
