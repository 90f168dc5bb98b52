"""Rows of arrays of a GPU, by their numbers: one launch for each call, on the present stream.

Arrays are CuPy's, of the present GPU, and contiguous; the numbers are int64 and in range. Nothing here is an atomic
operation, and each sum has one order: it is that of the host, bit for bit.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...errors import ValueMismatch
from ...protocols import Array
from .copies import prepare as prepare_copies
from .loading import kernel, pointer

__all__ = ["ROWS", "add", "prepare", "put", "sum_runs", "take"]

ROWS = np.dtype(
    [
        ("source", np.uintp),
        ("target", np.uintp),
        ("ids", np.uintp),
        ("starts", np.uintp),
        ("count", np.int64),
        ("width", np.int64),
        ("piece", np.int64),
        ("shift", np.int64),
    ],
    align=True,
)
"""What one launch is given: ``Rows`` of rows.cu."""

THREADS, GROUP = 256, 4
"""How many threads a block has; of how many rows each has pieces, and how many numbers are added at once."""
WIDEST = 16
"""How many bytes are moved at once, at most."""


def prepare(dtype: np.dtype[Any], wide: np.dtype[Any]) -> None:
    """Compile what moves and adds rows of a dtype whose sums are of ``wide``, or load it. Local.

    Raises:
        TransportUnavailable: nothing can be compiled here.
    """
    for name in dict.fromkeys(("take_rows", "put_rows", _adding(dtype, wide), _adding(wide, wide))):
        kernel("rows.cu", name)
    prepare_copies(wide, dtype)


def take(table: Array, ids: Array, out: Array) -> None:
    """Copy the rows of these numbers to ``out``, one after the other."""
    _move("take_rows", table, out, ids)


def put(table: Array, ids: Array, rows: Array | None) -> None:
    """Copy rows, of the table's dtype, or zeros, to those of these numbers, each of which is there once."""
    _move("put_rows", rows, table, ids)


def add(table: Array, ids: Array, rows: Array) -> None:
    """Add rows to those of these numbers, each of which is there once."""
    _add(_adding(rows.dtype, table.dtype), rows, table, ids, ids.size, 0)


def sum_runs(rows: Array, order: Array, starts: Array, out: Array) -> None:
    """Fill ``out`` with sums of rows: the first is that of the numbers ``order[starts[0]:starts[1]]``, and so on."""
    _add(f"sum_runs<{rows.dtype.name}_kind>", rows, out, order, len(out), _address(starts))


def _adding(dtype: np.dtype[Any], wide: np.dtype[Any]) -> str:
    return f"add_rows<{dtype.name}_kind, {wide.name}_kind>"


def _move(name: str, source: Array | None, target: Array, ids: Array) -> None:
    nbytes = prod(target.shape[1:]) * target.itemsize
    places = 0 if source is None else _address(source), _address(target), _address(ids), 0
    # The widest that divides all of them.
    together = nbytes | places[0] | places[1] | WIDEST
    _launch(name, places, ids.size, nbytes, together & -together)


def _add(name: str, source: Array, target: Array, ids: Array, count: int, starts: int) -> None:
    places, width = (_address(source), _address(target), _address(ids), starts), prod(target.shape[1:])
    at_once = width % GROUP == 0 and not any(
        place % min(GROUP * array.itemsize, WIDEST) for place, array in zip(places, (source, target), strict=False)
    )
    _launch(name, places, count, width, GROUP if at_once else 1)


def _launch(name: str, places: tuple[int, int, int, int], count: int, size: int, piece: int) -> None:
    """Launch a kernel for so many rows, of that size each, in pieces."""
    width = size // piece
    if not count or not width:
        return
    shift = min((width - 1).bit_length(), THREADS.bit_length() - 1)
    arguments = np.zeros(1, ROWS)
    arguments[0] = (*places, count, width, piece, shift)
    kernel("rows.cu", name)((-(-count // (GROUP * (THREADS >> shift))),), (THREADS,), (arguments,))


def _address(array: Array) -> int:
    """Return where an array lies. Of one with gaps a kernel would write to what is not its own."""
    if not array.flags.c_contiguous:
        raise ValueMismatch(f"rows of shape {array.shape} have strides {array.strides}; they must be contiguous")
    return pointer(array)
