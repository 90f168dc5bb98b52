"""Looks at every use of memory by kernels that run on the host: what a GPU would stop at, pass over, or be slow at.

A compiler can call a function at each read and write (``-fsanitize=thread``); here these functions write down which
thread used which bytes. So a launch leaves a list, in which an array's end that is passed, an address that is not
aligned for its width, and two threads that use the same bytes without an order between them are found, whatever the
results are; and the bytes that a launch moves are counted.
"""

from __future__ import annotations

import ctypes
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .emulation import FLAGS, LAUNCH, compiler, doors

__all__ = ["ACCESS", "Uses", "Watch", "watched"]

ACCESS = np.dtype(
    [
        ("address", np.uint64),
        ("block", np.uint32),
        ("phase", np.uint32),
        ("thread", np.uint16),
        ("size", np.uint8),
        ("writes", np.bool_),
        ("whole", np.bool_),  # by one instruction, for which a GPU wants it aligned
        ("shared", np.bool_),  # memory of a block, not of the GPU
    ],
    align=True,
)
ROOM = 1 << 22
SECTOR, WARP = 32, 32
"""The bytes that a GPU moves at least, and the threads that go together."""

# What the compiler calls. The arguments of a launch, and what a thread keeps for itself, lie on the stack.
CALLED = """
#include <csetjmp>
#include <initializer_list>
#define BEGIN if (setjmp(stopped)) return;
#define UNWATCHED __attribute__((no_sanitize("thread")))
struct Access {
    unsigned long long address;
    unsigned int block, phase;
    unsigned short thread;
    unsigned char size;
    bool writes, whole, shared;
};
static Access* accesses;
static unsigned long long room, found;
static const char* stack;
static jmp_buf stopped;
extern const char __bss_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

UNWATCHED static void note(const void* address, int size, bool writes, bool whole) {
    const char* here = (const char*)address;
    if (here < stack && here > (const char*)__builtin_frame_address(0)) return;
    for (const void* own : {(void*)&threadIdx, (void*)&blockIdx, (void*)&blockDim, (void*)&gridDim, (void*)&phase})
        if (here == own) return;
    const bool shared = __bss_start <= here && here < _end;
    if (found < room)
        accesses[found] = {(unsigned long long)here, blockIdx.x, phase, (unsigned short)threadIdx.x,
                           (unsigned char)size, writes, whole, shared};
    found++;
    // A GPU stops here, and this processor may, too.
    if (whole && (unsigned long long)here % size) longjmp(stopped, 1);
}

#define WATCH(size)                                                                               \\
    extern "C" UNWATCHED void __tsan_read##size(void* address) { note(address, size, false, true); } \\
    extern "C" UNWATCHED void __tsan_write##size(void* address) { note(address, size, true, true); }
WATCH(1) WATCH(2) WATCH(4) WATCH(8) WATCH(16)
extern "C" UNWATCHED void __tsan_read_range(void* address, unsigned long size) {
    note(address, (int)size, false, false);
}
extern "C" UNWATCHED void __tsan_write_range(void* address, unsigned long size) {
    note(address, (int)size, true, false);
}
extern "C" UNWATCHED void __tsan_func_entry(void*) {}
extern "C" UNWATCHED void __tsan_func_exit() {}
extern "C" UNWATCHED void __tsan_init() {}
extern "C" UNWATCHED void watch(void* into, unsigned long long count) {
    accesses = (Access*)into, room = count, found = 0;
    stack = (const char*)__builtin_frame_address(0) + 65536;
}
extern "C" UNWATCHED unsigned long long watched() { return found; }
"""


class Watch(list["Uses"]):
    """What launches have used."""

    last: int | None = None
    """How many blocks of a launch run, from the end; None for all."""


def watched(name: str, text: str, names: Sequence[str], folder: Path, watch: Watch) -> dict[str, Callable[..., None]]:
    """Return a dict of some kernels of a text, which run on the host and append what they use."""
    path, made, library = (folder / f"watched-{name}-{zlib.crc32(text.encode())}.{end}" for end in ("cpp", "o", "so"))
    path.write_text(f"{text}{CALLED}{LAUNCH.replace('static void', 'UNWATCHED static void')}{doors(names)}")
    # Structures move as wholes, as a GPU moves them.
    flags = [*FLAGS, "-fno-tree-sra", "-fsanitize=thread", "-fPIC", "-c"]
    subprocess.run([compiler(), *flags, "-o", made, path], check=True)
    subprocess.run([compiler(), "-shared", "-o", library, made], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.watched.restype = ctypes.c_ulonglong
    memory = np.empty(ROOM, ACCESS)

    def noting(run: Callable[..., None]) -> Callable[..., None]:
        def launch(blocks: Any, threads: Any, given: Any) -> None:
            loaded.watch(ctypes.c_void_p(memory.ctypes.data), ctypes.c_ulonglong(memory.size))
            first = 0 if watch.last is None else max(0, blocks.value - watch.last)
            run(ctypes.c_uint(first), blocks, threads, given)
            assert loaded.watched() <= memory.size
            watch.append(Uses(memory[: loaded.watched()].copy()))

        return launch

    return {each: noting(getattr(loaded, f"launch_{i}")) for i, each in enumerate(names)}


@dataclass(frozen=True)
class Uses:
    """What one launch has used."""

    accesses: np.ndarray[Any, Any]

    @property
    def of_gpu(self) -> np.ndarray[Any, Any]:
        return self.accesses[~self.accesses["shared"]]

    def check(self, arrays: Mapping[Any, Any], unordered: Sequence[Any] = ()) -> None:
        """Raise if a GPU would, or if the result depends on which thread comes first, but for some of the arrays."""
        self._check_alignment()
        self._check_ends(arrays)
        self._check_order([arrays[name] for name in unordered])

    def _check_alignment(self) -> None:
        bad = self.accesses[self.accesses["whole"] & (self.accesses["address"] % self.accesses["size"] != 0)]
        assert not bad.size, f"{bad.size} uses of addresses that are not aligned, as {bad[0]}"

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
        if not found["writes"].any():
            return
        each = np.repeat(np.arange(found.size), found["size"])
        first = np.cumsum(found["size"], dtype=np.int64) - found["size"]
        uses = found[each]
        byte = uses["address"] + (np.arange(each.size) - first[each]).astype(np.uint64)
        # The memory of a block is another one for each block.
        owner = np.where(uses["shared"], uses["block"] + 1, 0)
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
        nbytes = [int(found["size"][found["writes"] == writes].sum()) for writes in (False, True)]
        return nbytes[0] / array.nbytes, nbytes[1] / array.nbytes

    def share_of(self, width: int, array: Any) -> float:
        """Return the share of the bytes of an array that is moved so many at once."""
        found = self.of_gpu[_is_inside(self.of_gpu, array)]
        return float(found["size"][found["size"] == width].sum() / found["size"].sum())

    def sectors(self, array: Any) -> float:
        """Return how many sectors the warps move for one that they need, counted request by request."""
        found = self.of_gpu[_is_inside(self.of_gpu, array)]
        # The requests of a warp: what its threads do the first time, the second time, and so on.
        keys = found["block"].astype(np.int64) << 17 | found["thread"].astype(np.int64) << 1 | found["writes"]
        order = np.argsort(keys, kind="stable")
        found, keys = found[order], keys[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        turn = np.arange(keys.size) - np.repeat(starts, np.diff(np.append(starts, keys.size)))
        warp = found["block"].astype(np.int64) << 12 | found["thread"].astype(np.int64) // WARP << 1 | found["writes"]
        last = found["address"] + found["size"] - 1
        sectors = np.concatenate([found["address"] // SECTOR, last // SECTOR])
        asked = np.unique(np.stack([np.tile(warp, 2), np.tile(turn, 2), sectors.astype(np.int64)]), axis=1).shape[1]
        return asked / (found["size"].sum() / SECTOR)


def _check_apart(uses: Any, starts: Any, who: Any, what: str) -> None:
    """Raise if of some uses, from each start to the next, one writes and another one is of somebody else."""
    several = np.minimum.reduceat(who, starts) != np.maximum.reduceat(who, starts)
    bad = np.flatnonzero(several & np.logical_or.reduceat(uses["writes"], starts))
    assert not bad.size, f"{bad.size} bytes are used by {what}, as by {uses[starts[bad[0]]]}"


def _range_of(array: Any) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


def _is_inside(found: Any, array: Any) -> Any:
    low, high = _range_of(array)
    return (found["address"] >= low) & (found["address"] + found["size"] <= high)
