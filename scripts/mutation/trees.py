"""Copies of the tree in which tests run, and sessions of pytest in them."""

import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

Item = TypeVar("Item")

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "emulated-cuda"
"""What the emulated GPU compiles, for all copies."""
END = 20.0
"""Seconds that a session gets to end its jobs when its time is up."""


class Change(Protocol):
    """One of a file of the package."""

    @property
    def path(self) -> str: ...

    def applied(self, source: bytes) -> bytes:
        """Return the source of the file with the change in it."""


@dataclass(frozen=True)
class Outcome:
    """How a session of pytest ended: what failed first, nothing when all passed."""

    failed: str
    text: str


class Tree:
    """A copy of all files that git knows, and a folder for what its tests leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        for name in names.decode().split("\0")[:-1]:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    def run_on(self, library: str, arguments: Sequence[str], limit: float) -> Outcome:
        """Run pytest in the copy, in the environment for an MPI library, or with CuPy on the ``emulated`` GPU; a
        session that takes longer than the limit, in seconds, fails.
        """
        python = str(python_of("cuda" if library == "emulated" else library))
        beneath = [python, "tests/support/cuda"] if library == "emulated" else []
        places = {"PYTHONPATH": self.folder, "TMPDIR": self.temporary, "EMULATED_CUDA_BUILT": BUILT}
        environment = os.environ | {name: str(place) for name, place in places.items()}
        command = [*beneath, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        log = self.temporary.with_name("log")
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(limit)
                overdue = process.poll() is None
            finally:
                self.end(process)
        if not overdue and process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM):
            raise RuntimeError("a session was ended by somebody else, which says nothing of the mutant; run it again")
        text = log.read_text(errors="replace")
        return Outcome(f"not done in {limit:.0f} s" if overdue else failed(process.returncode, text), text)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a session, and what it left running."""
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END)
        mark = f"TMPDIR={self.temporary}".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            # Processes end meanwhile, and others belong to other users.
            with suppress(OSError):
                if mark in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)
        process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()

    @contextmanager
    def planted(self, change: Change) -> Iterator[None]:
        """Have a change in the copy meanwhile."""
        path, original = self.folder / "mpikv" / change.path, self.folder.with_name("original")
        # From the copy, for others may change the original meanwhile.
        shutil.copy2(path, original)
        path.write_bytes(change.applied(path.read_bytes()))
        try:
            yield
        finally:
            # With its time, for the compiled module beside it to be taken again.
            shutil.copy2(original, path)


def in_trees(items: Iterable[Item], work: Callable[[Tree, Item], None], jobs: int) -> None:
    """Call ``work`` with a tree and each of the items, on so many trees at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.Queue[Tree] = queue.Queue()
        for number in range(jobs):
            trees.put(Tree(Path(folder) / str(number)))

        def one(item: Item) -> None:
            tree = trees.get()
            try:
                work(tree, item)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, items))


def failed(status: int, text: str) -> str:
    """Return the test that failed first, or how the session ended without one."""
    if status == 0:
        return ""
    if "ERROR: not found" in text or "ERROR: file or directory not found" in text:
        raise RuntimeError(f"a test is there no more, or a mutant hides it\n{text}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    return found[1] if found else f"the session: exit status {status}"


def python_of(library: str) -> Path:
    """Return the Python of the environment that scripts/test makes for an MPI library."""
    return ROOT / f".venv-{library}" / "bin" / "python"
