"""Looks at every use of memory by kernels on the emulated GPU: what a GPU would pass over, or be slow at.

The emulated GPU writes down which thread used which bytes. So a launch leaves a list, in which an array's end that is
passed, and two threads that use the same bytes without an order between them are found, whatever the results are; and
the bytes that a launch moves are counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

ACCESS = np.dtype(
    [
        ("address", np.uint64),
        ("launch", np.uint32),
        ("block", np.uint32),
        ("phase", np.uint32),
        ("thread", np.uint16),
        ("size", np.uint8),
        ("kind", np.uint8),
    ],
    align=True,
)
WRITES, SHARED = 1, 2
"""Bits of the kind; memory of a block is shared, and none of the GPU's."""
ROOM = 1 << 22
SECTOR, WARP = 32, 32
"""The bytes that a GPU moves at least, and the threads that go together."""


class _Watch(ctypes.Structure):
    """The emulated driver's, as in tests/support/cuda/ptx.h."""

    _fields_ = (
        ("accesses", ctypes.c_void_p),
        ("room", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
        ("launches", ctypes.c_uint32),
        ("last", ctypes.c_uint32),
    )


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@contextmanager
def watched(last: int = 0) -> Iterator[list[Uses]]:
    """Yield a list, which has what each launch of this process has used, in order, when the context ends. Of a launch
    only so many blocks run, from the end; 0 for all.
    """
    import cupy

    watch, memory, found = _Watch.in_dll(_driver(), "emulated_watch"), np.empty(ROOM, ACCESS), list[Uses]()
    cupy.cuda.Device().synchronize()
    watch.accesses, watch.found, watch.launches, watch.last = memory.ctypes.data, 0, 0, last
    watch.room = ROOM
    try:
        yield found
        cupy.cuda.Device().synchronize()
    finally:
        watch.room = watch.last = 0
    assert watch.found <= ROOM
    accesses = memory[: watch.found]
    found += [Uses(accesses[accesses["launch"] == number].copy()) for number in range(watch.launches)]


def lend(address: int, nbytes: int) -> None:
    """Let kernels use memory of the host, for the rest of the process."""
    _driver().emulated_lend(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


@dataclass(frozen=True)
class Uses:
    """What one launch has used."""

    accesses: np.ndarray[Any, Any]

    @property
    def of_gpu(self) -> np.ndarray[Any, Any]:
        return self.accesses[self.accesses["kind"] & SHARED == 0]

    def check(self, arrays: Mapping[Any, Any], unordered: Sequence[Any] = ()) -> None:
        """Raise if memory beside these arrays is used, or if the result depends on which thread comes first, but for
        some of the arrays.
        """
        self._check_ends(arrays)
        self._check_order([arrays[name] for name in unordered])

    def _check_ends(self, arrays: Mapping[Any, Any]) -> None:
        found, inside = self.of_gpu, np.zeros(self.of_gpu.size, np.bool_)
        for array in arrays.values():
            inside |= _is_inside(found, array)
        bad = found[~inside]
        ranges = {name: _range_of(array) for name, array in arrays.items()}
        assert not bad.size, f"{bad.size} uses of memory that is in none of {ranges}, as {bad[0]}"

    def _check_order(self, unordered: Sequence[Any]) -> None:
        """Bytes that somebody writes are used by one thread, or by threads of one block that waited in between."""
        found = self.accesses
        for array in unordered:
            found = found[~_is_inside(found, array)]
        if not _writes(found).any():
            return
        each = np.repeat(np.arange(found.size), found["size"])
        first = np.cumsum(found["size"], dtype=np.int64) - found["size"]
        uses = found[each]
        byte = uses["address"] + (np.arange(each.size) - first[each]).astype(np.uint64)
        # The memory of a block is another one for each block.
        owner = np.where(uses["kind"] & SHARED, uses["block"] + 1, 0)
        order = np.lexsort((uses["thread"], uses["phase"], uses["block"], byte, owner))
        uses, byte, owner = uses[order], byte[order], owner[order]
        starts = np.flatnonzero(np.append(True, (byte[1:] != byte[:-1]) | (owner[1:] != owner[:-1])))
        _check_apart(uses, starts, uses["block"], "blocks")
        phases = np.append(True, (uses["phase"][1:] != uses["phase"][:-1]) | (uses["block"][1:] != uses["block"][:-1]))
        phases[starts] = True
        _check_apart(uses, np.flatnonzero(phases), uses["thread"], "threads that do not wait for each other")

    def moved(self, array: Any) -> tuple[float, float]:
        """Return how often each byte of an array is read and written, on average."""
        found = self.of_gpu[_is_inside(self.of_gpu, array)]
        nbytes = [int(found["size"][_writes(found) == writes].sum()) for writes in (False, True)]
        return nbytes[0] / array.nbytes, nbytes[1] / array.nbytes

    def share_of(self, width: int, array: Any) -> float:
        """Return the share of the bytes of an array that is moved so many at once."""
        found = self.of_gpu[_is_inside(self.of_gpu, array)]
        return float(found["size"][found["size"] == width].sum() / found["size"].sum())

    def sectors(self, array: Any) -> float:
        """Return how many sectors the warps move for one that they need, counted request by request."""
        found = self.of_gpu[_is_inside(self.of_gpu, array)]
        # The requests of a warp: what its threads do the first time, the second time, and so on.
        keys = found["block"].astype(np.int64) << 17 | found["thread"].astype(np.int64) << 1 | _writes(found)
        order = np.argsort(keys, kind="stable")
        found, keys = found[order], keys[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        turn = np.arange(keys.size) - np.repeat(starts, np.diff(np.append(starts, keys.size)))
        warp = found["block"].astype(np.int64) << 12 | found["thread"].astype(np.int64) // WARP << 1 | _writes(found)
        last = found["address"] + found["size"] - 1
        sectors = np.concatenate([found["address"] // SECTOR, last // SECTOR])
        asked = np.unique(np.stack([np.tile(warp, 2), np.tile(turn, 2), sectors.astype(np.int64)]), axis=1).shape[1]
        return asked / (found["size"].sum() / SECTOR)


def _writes(uses: Any) -> Any:
    return uses["kind"] & WRITES != 0


def _check_apart(uses: Any, starts: Any, who: Any, what: str) -> None:
    """Raise if of some uses, from each start to the next, one writes and another one is of somebody else."""
    several = np.minimum.reduceat(who, starts) != np.maximum.reduceat(who, starts)
    bad = np.flatnonzero(several & np.logical_or.reduceat(_writes(uses), starts))
    assert not bad.size, f"{bad.size} bytes are used by {what}, as by {uses[starts[bad[0]]]}"


def _range_of(array: Any) -> tuple[int, int]:
    return array.data.ptr, array.data.ptr + array.nbytes


def _is_inside(found: Any, array: Any) -> Any:
    low, high = _range_of(array)
    return (found["address"] >= low) & (found["address"] + found["size"] <= high)
