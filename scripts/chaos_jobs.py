"""Runs a job of ``scripts/chaos``, and returns what came of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_ranks import Task, fill

import mpikv
from mpikv.testing.simulation import cluster

HARD_DEADLINE = 60.0
"""Seconds after which a job hangs."""
LAUNCHER_SIGNALS = {"SIGINT to mpikv run": signal.SIGINT, "SIGTERM to mpikv run": signal.SIGTERM}

Records = dict[str, dict[int, dict[str, Any]]]


@dataclass
class Job:
    """A job that has ended, and its records."""

    task: Task
    folder: Path
    status: int
    ended: float
    output: str
    hung: bool = False

    def __post_init__(self) -> None:
        self.records: Records = {}
        for path in sorted(self.folder.glob("*.json")):
            name, rank, _ = path.name.rsplit(".", 2)
            self.records.setdefault(name, {})[int(rank)] = json.loads(path.read_text())

    def problems(self) -> Iterator[str]:
        """Yield what no job may do, whatever its task."""
        if self.hung:
            yield "HANG"
        left = list(self._leftovers())
        if left:
            yield "left behind: " + ", ".join(left)
        for rank, record in self.records.get("wrong", {}).items():
            yield f"rank {rank}: {record['text']}"

    def _leftovers(self) -> Iterator[str]:
        """Yield what is still there of processes and files; removes it, so that other jobs have peace."""
        for record in self.records.get("rank", {}).values():
            if _alive(record["pid"]):
                yield f"process {record['pid']}"
                os.kill(record["pid"], signal.SIGKILL)
            for file in record["files"]:
                if os.path.exists(file):
                    yield file
                    os.unlink(file)

    def loaded(self) -> str:
        """Load the checkpoint that an end has left, on as many simulated ranks, and save it again to the same path;
        return ``old`` or ``new``, the state that it has, bit for bit, or what is wrong.
        """
        path, begun = self.folder / "checkpoint", int((self.folder / "begun").read_text())
        if not path.exists():
            return "no checkpoint" if begun else "old"

        def save_loaded(comm: Any) -> None:
            with mpikv.create(comm=comm) as kv:
                kv.load(path)
                kv.save(path)

        def save_filled(comm: Any, number: int) -> None:
            with mpikv.create(comm=comm) as kv:
                fill(kv, number)
                kv.save(self.folder / "reference")

        try:
            cluster(self.task.size).run(save_loaded)
        except (mpikv.MPIKVError, OSError) as error:
            return f"the checkpoint cannot be loaded: {error}"
        if list(self.folder.glob("*-part")):
            return "a save did not remove the draft that was left"
        for outcome, number in (("new", begun), ("old", begun - 1)):
            cluster(1).run(lambda comm, number=number: save_filled(comm, number))
            if path.read_bytes() == (self.folder / "reference").read_bytes():
                return outcome
        return f"what was loaded is neither state {begun - 1} nor state {begun}"


def run_job(task: Task, folder: Path) -> Job:
    """Run a job to its end."""
    (folder / "task").write_text(json.dumps(asdict(task)))
    command = [sys.executable, "-m", "mpikv", "run", "-n", str(task.size), str(Path(__file__).with_name("chaos"))]
    with (folder / "output").open("wb") as file:
        process = subprocess.Popen(
            [*command, "inside", str(folder)], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    hung = not _wait(process, task, folder)
    ended = time.monotonic()
    output = (folder / "output").read_text(errors="replace").replace("\0", "")
    return Job(task, folder, process.returncode, ended, output, hung)


def _wait(process: subprocess.Popen[bytes], task: Task, folder: Path) -> bool:
    """Wait for the job, which is sent a signal once all ranks are ready; return whether it ended by itself."""
    limit = time.monotonic() + HARD_DEADLINE
    number = LAUNCHER_SIGNALS.get(next(iter(task.faults), ""))
    try:
        while process.poll() is None and time.monotonic() < limit:
            if number is not None and len(list(folder.glob("ready.*.json"))) == task.size:
                process.send_signal(number)
                number = None
            time.sleep(0.02)
        return process.poll() is not None
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
