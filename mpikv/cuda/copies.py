"""Copies of many arrays of a GPU by one launch, with casts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..typing import Array
from .loading import Kernel, kernel

__all__ = ["PAIRS", "copy", "prepare"]

MOST = 144
PAIRS = np.dtype(
    [
        ("source", np.uintp, MOST),
        ("target", np.uintp, MOST),
        ("size", np.int64, MOST),
        ("end", np.uint32, MOST),
        ("count", np.uint32),
    ],
    align=True,
)
"""What one launch is given: ``Pairs`` of copies.cu. CUDA takes 4096 bytes at most on every GPU."""

PART, CAST_PART = 1 << 15, 1 << 12
"""How much of a pair one block copies: bytes, and elements that are cast."""
THREADS = 256

Facts: TypeAlias = "list[tuple[int, int, int]]"
"""Of each pair where its source and its target lie, and its size: in bytes, or in elements to be cast."""

_CAST = frozenset(
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    ]
)
"""The dtypes that are cast to each other."""


def copy(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy each source to its target, on the present stream: contiguous ones by one launch for all of one dtype, and
    one for all of the same cast. Local.

    Args:
        targets: CuPy's arrays of the present GPU. None overlaps another, nor a source that is not its own.
        sources: arrays of the shapes of the targets, of any dtype.

    Casts are those of numpy's ``casting="unsafe"``. As there, a float that no integer of the target is near becomes any
    number. Arrays that are not contiguous, and dtypes that are not numpy's, are left to CuPy.

    Raises:
        TransportUnavailable: nothing can be compiled here.
    """
    same: Facts = []
    casts: defaultdict[tuple[np.dtype[Any], np.dtype[Any]], Facts] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        wanted, dtype = target.dtype, source.dtype
        if not (target.flags.c_contiguous and source.flags.c_contiguous):
            target[...] = source
        elif wanted == dtype:
            same.append((source.data.ptr, target.data.ptr, target.nbytes))  # type: ignore[attr-defined]
        elif dtype.name in _CAST and wanted.name in _CAST:
            casts[dtype, wanted].append((source.data.ptr, target.data.ptr, target.size))  # type: ignore[attr-defined]
        else:
            target[...] = source
    if same:
        _launch(_copying(), same, PART)
    for (dtype, wanted), facts in casts.items():
        _launch(_casting(dtype.name, wanted.name), facts, CAST_PART)


def prepare(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Compile what copies arrays of one dtype to such of another, or load it. Local."""
    if dtype == wanted:
        _copying()
    elif dtype.name in _CAST and wanted.name in _CAST:
        _casting(dtype.name, wanted.name)


def _launch(run: Kernel, facts: Facts, part: int) -> None:
    for low in range(0, len(facts), MOST):
        pairs = np.array(facts[low : low + MOST], np.int64)
        count = len(pairs)
        ends = np.cumsum(-(-pairs[:, 2] // part))
        blocks = int(ends[-1])
        if not blocks:
            continue
        arguments = np.zeros(1, PAIRS)
        given = arguments[0]
        given["source"][:count] = pairs[:, 0]
        given["target"][:count] = pairs[:, 1]
        given["size"][:count] = pairs[:, 2]
        given["end"][:count] = ends
        given["count"] = count
        run((blocks,), (THREADS,), (arguments,))


def _copying() -> Kernel:
    return kernel("copies.cu", "copy_bytes")


def _casting(dtype: str, wanted: str) -> Kernel:
    return kernel("copies.cu", f"cast<{dtype}_kind, {wanted}_kind>")
