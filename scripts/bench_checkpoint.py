"""Time a save and a load beside plain calls for the same bytes, in turns, and show the memory that they take.

    mpikv run -n 2 scripts/bench_checkpoint.py

The store has float32 values and the state of Adam, a third of the bytes each. Plain means: each rank writes its part of
the bytes to a file of its own, a MiB at a time, and waits until it is on the disk; then it reads it into new memory. No
checksum, no header, no second look. Files are removed before each turn, which is not timed. What was written is read
from the page cache, by both: on a disk that is slower than memory, the checksums weigh less.

A save with ``wait=False`` is timed until it returns, beside a copy of as many bytes from memory to memory, which is the
least that it could take; then its ``wait()`` is, with nothing done between.

Into a store without keys a checkpoint is read once; into one that has its keys twice, since nothing is changed before
all of it was found good. Times are those of the slowest rank, medians of the rounds, and so are the ratios within a
round. Extra memory is the largest resident set meanwhile, less that before, or, where a load makes the store's own
memory, less that after.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpikv

KEYS = 16
PIECE = 1 << 20
BOUND = 1.5
"""Wanted: save and load within so many times the plain write and read."""
BLOCKED = 2.0
"""Wanted: a save with ``wait=False`` returns within so many times a copy in memory."""
MEMORY = 64 << 20
"""Wanted: at most so many bytes of extra memory per rank."""


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank takes."""
    comm = MPI.COMM_WORLD
    comm.Barrier()
    started = time.perf_counter()
    work()
    return comm.allreduce(time.perf_counter() - started, MPI.MAX)


def resident(name: str) -> int:
    """Return the bytes of ``VmRSS``, the resident set, or of ``VmHWM``, its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Make the peak what is resident now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def write_plain(path: Path, content: np.ndarray) -> None:
    whole = content.data
    with path.open("wb", buffering=0) as file:
        for begin in range(0, whole.nbytes, PIECE):
            file.write(whole[begin : begin + PIECE])
        os.fsync(file)


def read_plain(path: Path, nbytes: int) -> np.ndarray:
    content = np.empty(nbytes, np.uint8)
    whole = content.data
    with path.open("rb", buffering=0) as file:
        for begin in range(0, nbytes, PIECE):
            file.readinto(whole[begin : begin + PIECE])
    return content


class Bench:
    """One store, one checkpoint, and the same bytes in plain files."""

    def __init__(self, folder: Path, nbytes: int, transport: str) -> None:
        comm = MPI.COMM_WORLD
        self.transport, self.checkpoint = transport, folder / "checkpoint"
        self.plain, self.nbytes = folder / f"plain-{comm.rank}", nbytes // comm.size
        self.content = np.random.default_rng(comm.rank).integers(0, 256, self.nbytes, np.uint8)
        self.copy = self.content.copy()
        self.kv = mpikv.create(transport=transport)
        self.names = [f"layer{number}" for number in range(KEYS)]
        arrays = [np.ones(nbytes // (12 * KEYS), np.float32)] * KEYS
        self.kv.init(self.names, arrays)
        self.kv.set_optimizer("adam")
        self.kv.push(self.names, arrays)

    def round(self) -> dict[str, float]:
        """Return the seconds of each step, and the bytes of extra memory of this rank."""
        found: dict[str, float] = {}
        self._remove()
        found["write"] = timed(lambda: write_plain(self.plain, self.content))
        found["read"] = timed(lambda: read_plain(self.plain, self.nbytes))
        self._remove()
        found["copy"] = timed(lambda: np.copyto(self.copy, self.content))
        found["issue"] = timed(self._issue)
        found["wait"] = timed(lambda: self.work.wait())
        self._remove()
        before = forget_peak()
        found["save"] = timed(lambda: self.kv.save(self.checkpoint))
        found["save_memory"] = resident("VmHWM") - before
        other = mpikv.create(transport=self.transport)
        forget_peak()
        found["load"] = timed(lambda: other.load(self.checkpoint))
        found["load_memory"] = resident("VmHWM") - resident("VmRSS")
        other.close()
        before = forget_peak()
        found["reload"] = timed(lambda: self.kv.load(self.checkpoint))
        found["reload_memory"] = resident("VmHWM") - before
        return found

    def _issue(self) -> None:
        self.work = self.kv.save(self.checkpoint, wait=False)

    def _remove(self) -> None:
        self.plain.unlink(missing_ok=True)
        if self.kv.is_root:
            self.checkpoint.unlink(missing_ok=True)
        os.sync()


def evaluate(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians, the ratios, and the most memory of any rank."""
    comm = MPI.COMM_WORLD
    steps = ("write", "read", "copy", "issue", "wait", "save", "load", "reload")
    seconds = {name: np.array([one[name] for one in rounds]) for name in steps}
    row = {f"{name}_s": float(np.median(times)) for name, times in seconds.items()}
    plain = seconds["write"] + seconds["read"]
    row["save_ratio"] = float(np.median(seconds["save"] / seconds["write"]))
    row["issue_ratio"] = float(np.median(seconds["issue"] / seconds["copy"]))
    row["load_ratio"] = float(np.median(seconds["load"] / seconds["read"]))
    row["reload_ratio"] = float(np.median(seconds["reload"] / seconds["read"]))
    row["ratio"] = float(np.median((seconds["save"] + seconds["load"]) / plain))
    row["ratio_reload"] = float(np.median((seconds["save"] + seconds["reload"]) / plain))
    for name in ("save_memory", "load_memory", "reload_memory"):
        row[name] = comm.allreduce(max(one[name] for one in rounds), MPI.MAX)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=1e9, help="size of the checkpoint (default 1e9)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5), after one that warms up")
    parser.add_argument("--transport", default="auto", help="transport of the stores (default auto)")
    parser.add_argument("--folder", help="where the files are (default: the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        bench = Bench(Path(comm.bcast(own)), int(options.bytes), options.transport)
        rounds = [bench.round() for _ in range(options.rounds + 1)][1:]
        row = evaluate(rounds)
        about = f"{options.bytes / 1e9:g} GB, {comm.size} ranks, transport {bench.kv.transport}, {len(rounds)} rounds"
        bench.kv.close()
        comm.Barrier()
    if comm.rank:
        return
    if options.json:
        print(json.dumps({"about": about, **row}))
        return
    print(about)
    print(f"{'':26}{'plain':>10}{'mpikv':>10}{'ratio':>8}{'extra memory per rank':>24}")
    write, read = row["write_s"], row["read_s"]
    for name, plain, took, ratio in (
        ("save", write, row["save_s"], row["save_ratio"]),
        ("load, new store", read, row["load_s"], row["load_ratio"]),
        ("load over the same keys", read, row["reload_s"], row["reload_ratio"]),
    ):
        extra = row[{"save": "save_memory", "load, new store": "load_memory"}.get(name, "reload_memory")]
        print(f"{name:26}{plain:>8.2f} s{took:>8.2f} s{ratio:>8.2f}{extra / 2**20:>20.1f} MiB")
    for name, key in (("save and load, new store", "ratio"), ("save and load, same keys", "ratio_reload")):
        print(f"{name:46}{row[key]:>8.2f}{'' if row[key] <= BOUND else f'  above {BOUND}'}")
    blocked, floor = row["issue_s"], row["copy_s"]
    print(
        f"save with wait=False returns after {blocked * 1e3:.0f} ms, and wait() after {row['wait_s']:.2f} s more; "
        f"a copy in memory takes {floor * 1e3:.0f} ms: ratio {row['issue_ratio']:.2f}"
        f"{'' if row['issue_ratio'] <= BLOCKED else f'  above {BLOCKED}'}"
    )
    if (most := max(row[name] for name in ("save_memory", "load_memory", "reload_memory"))) > MEMORY:
        print(f"extra memory of {most / 2**20:.1f} MiB, above {MEMORY >> 20}")


if __name__ == "__main__":
    main()
