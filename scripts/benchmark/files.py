"""Groups of one checkpoint: a save and a load, beside the same bytes in plain files and in memory."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpikv import KVStore, SaveWork
from mpikv.cli.bench.cases import Comparison, Factory, Group, Inputs
from mpikv.cli.bench.keysets import KeySet, key_set
from mpikv.cli.bench.peers import Memcpy
from mpikv.cli.bench.rounds import Contender
from mpikv.cli.bench.single import shown
from mpikv.cli.bench.stores import open_store
from mpikv.protocols import Array

from .options import Options

_ROUNDS, _QUICK_ROUNDS = 15, 3

# Bytes per plain call: a piece stays in the rank's cache while it reads the next.
_PIECE = 1 << 20

# A load over known keys reads twice, and sums once, before it changes anything. It has no bound: plain reads do less.
_GOALS = {
    ("save, wait=False", "memcpy"): ("save with wait=False until it returns / memcpy", 2.0),
    ("save", "write"): ("save / plain writes", None),
    ("load", "read"): ("load over the same keys / plain reads", None),
    ("load, new store", "read, new memory"): ("load into a new store / plain reads into new memory", 2.0),
}


def one_file(comm: Any, options: Options, name: str) -> Group:
    """Return the group with that name: few large keys, or many small ones. Local."""
    if name == "large-file":
        nbytes = 1 << (16 if options.quick else 26)
        keys = KeySet(f"4 keys of {shown(nbytes)}", ((nbytes // 4,),) * 4)
        bounded = comm.size == 2 and not options.quick
    else:
        keys, bounded = key_set("many", quick=options.quick), False
    return Group(
        name,
        f"a file of {keys.title} ({keys.nbytes / 1e6:.3g} MB)",
        keys,
        None,
        options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        _contenders(comm, options.settings, keys),
        [
            Comparison(f"{keys.title}: {goal}", ours, peer, bound if bounded else None)
            for (ours, peer), (goal, bound) in _GOALS.items()
        ],
        # Per rank: gradients and results. Once: four stores, a copy of one, and the peers' memory.
        needed_bytes=keys.nbytes * (2 * comm.size + 10),
        # Read and written.
        floors=dict.fromkeys((case for pair in _GOALS for case in pair), 8),
    )


def _contenders(comm: Any, settings: Mapping[str, Any], keys: KeySet) -> dict[str, Factory]:
    inputs, share = Inputs(comm.rank, keys), keys.nbytes // comm.size

    def ours(kind: Callable[..., Contender]) -> Factory:
        return lambda: partial(kind, comm, settings, keys, inputs.gradients)

    def plain(kind: Callable[[Array], Contender]) -> Factory:
        def prepare() -> Callable[[], Contender]:
            memory = np.ones(share, np.uint8)
            return lambda: kind(memory)

        return prepare

    return {
        "save": ours(_Save),
        "write": plain(_Write),
        "save, wait=False": ours(_SaveAside),
        "memcpy": plain(lambda memory: Memcpy([memory], [memory.copy()])),
        "load": ours(_Load),
        "read": plain(_Read),
        "load, new store": ours(_LoadNew),
        "read, new memory": plain(partial(_Read, new=True)),
    }


class _Checkpoint:
    """A store of sums, and its file in a folder visible to all ranks."""

    exact = False

    def __init__(self, comm: Any, settings: Mapping[str, Any], keys: KeySet, gradients: list[Array]) -> None:
        self._comm, self._settings, self._keys = comm, settings, keys
        self._folder = Path(comm.bcast(tempfile.mkdtemp(prefix="mpikv-bench-") if comm.rank == 0 else ""))
        self._path = self._folder / "checkpoint"
        self._kv = self._open()
        self._kv.push(keys.keys, gradients)

    def _open(self) -> KVStore:
        return open_store(self._keys, None, self._settings)

    def _remove(self) -> None:
        if self._comm.rank == 0:
            self._path.unlink(missing_ok=True)

    def results(self) -> list[Array]:
        """Return the values of a new store after it has loaded the file."""
        other = self._open()
        other.load(self._path)
        values: list[Array] = other.pull(self._keys.keys)
        other.close()
        return values

    def close(self) -> None:
        self._kv.close()
        if self._comm.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Save(_Checkpoint):
    def prepare(self) -> None:
        self._remove()

    def step(self) -> None:
        self._kv.save(self._path)


class _SaveAside(_Checkpoint):
    """The part of a save before it returns; the rest is not timed."""

    _work: SaveWork | None = None

    def prepare(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._remove()

    def step(self) -> None:
        self._work = self._kv.save(self._path, wait=False)

    def results(self) -> list[Array]:
        assert self._work is not None
        self._work.wait()
        return super().results()


class _Load(_Checkpoint):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kv.save(self._path)

    def step(self) -> None:
        self._kv.load(self._path)

    def results(self) -> list[Array]:
        self._kv.set(self._keys.keys, [np.zeros(shape, np.float32) for shape in self._keys.shapes])
        self.step()
        values: list[Array] = self._kv.pull(self._keys.keys)
        return values


class _LoadNew(_Load):
    """A load into a store without keys; making the store is not timed."""

    def prepare(self) -> None:
        self._kv.close()
        self._kv = open_store(KeySet("no keys", ()), None, self._settings)

    def results(self) -> list[Array]:
        values: list[Array] = self._kv.pull(self._keys.keys)
        return values


class _Write:
    """Each rank writes its part of the bytes to a file of its own, and waits for the disk."""

    exact = None

    def __init__(self, memory: Array) -> None:
        self._memory, self._folder = memory.data, tempfile.mkdtemp(prefix="mpikv-bench-")
        self._path = Path(self._folder, "plain")

    def prepare(self) -> None:
        self._path.unlink(missing_ok=True)

    def step(self) -> None:
        with self._path.open("wb", buffering=0) as file:
            for begin in range(0, self._memory.nbytes, _PIECE):
                file.write(self._memory[begin : begin + _PIECE])
            os.fsync(file)

    def results(self) -> list[Array]:
        return []

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _Read(_Write):
    """Reads the same bytes from the page cache, into the memory they came from or into ``new`` memory."""

    def __init__(self, memory: Array, new: bool = False) -> None:
        super().__init__(memory)
        self._new = new
        super().step()

    def prepare(self) -> None:
        pass

    def step(self) -> None:
        memory = np.empty(self._memory.nbytes, np.uint8).data if self._new else self._memory
        with self._path.open("rb", buffering=0) as file:
            for begin in range(0, memory.nbytes, _PIECE):
                file.readinto(memory[begin : begin + _PIECE])
