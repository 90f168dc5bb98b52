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
        ("shift", np.int64),
    ],
    align=True,
)
"""What one launch is given: ``Rows`` of rows.cu."""

THREADS = 256
MOST_BLOCKS = 1 << 14


def prepare(dtype: np.dtype[Any], wide: np.dtype[Any]) -> None:
    """Compile what moves and adds rows of a dtype whose sums are of ``wide``, or load it. Local.

    Raises:
        TransportUnavailable: nothing can be compiled here.
    """
    for moved in dict.fromkeys((dtype, wide)):
        unit, _ = _unit(moved)
        kernel("rows.cu", f"take_rows<{unit}_kind>")
        kernel("rows.cu", f"put_rows<{unit}_kind>")
        kernel("rows.cu", _adding(moved, wide))
    prepare_copies(wide, dtype)


def take(table: Array, ids: Array, out: Array) -> None:
    """Copy the rows of these numbers to ``out``, one after the other."""
    _launch("take_rows", table, out, ids, ids.size)


def put(table: Array, ids: Array, rows: Array | None) -> None:
    """Copy rows, of the table's dtype, or zeros, to those of these numbers, each of which is there once."""
    _launch("put_rows", rows, table, ids, ids.size)


def add(table: Array, ids: Array, rows: Array) -> None:
    """Add rows to those of these numbers, each of which is there once."""
    _launch(_adding(rows.dtype, table.dtype), rows, table, ids, ids.size)


def sum_runs(rows: Array, order: Array, starts: Array, out: Array) -> None:
    """Fill ``out`` with sums of rows: the first is that of the numbers ``order[starts[0]:starts[1]]``, and so on."""
    _launch(f"sum_runs<{rows.dtype.name}_kind>", rows, out, order, len(out), starts)


def _adding(dtype: np.dtype[Any], wide: np.dtype[Any]) -> str:
    return f"add_rows<{dtype.name}_kind, {wide.name}_kind>"


def _unit(dtype: np.dtype[Any]) -> tuple[str, int]:
    """Return as what elements of a dtype are moved, and how many of those one is."""
    bits = 8 * min(dtype.itemsize, 8)
    return f"uint{bits}", 8 * dtype.itemsize // bits


def _launch(
    name: str, source: Array | None, target: Array, ids: Array, count: int, starts: Array | None = None
) -> None:
    width = prod(target.shape[1:])
    if "<" not in name:
        unit, each = _unit(target.dtype)
        name, width = f"{name}<{unit}_kind>", width * each
    shift = min(max(width - 1, 0).bit_length(), THREADS.bit_length() - 1)
    blocks = min(-(-count // (THREADS >> shift)), MOST_BLOCKS)
    if not blocks or not width:
        return
    arguments = np.zeros(1, ROWS)
    arguments["source"] = 0 if source is None else _address(source)
    arguments["target"], arguments["ids"] = _address(target), _address(ids)
    arguments["starts"] = 0 if starts is None else _address(starts)
    arguments["count"], arguments["width"], arguments["shift"] = count, width, shift
    kernel("rows.cu", name)((blocks,), (THREADS,), (arguments,))


def _address(array: Array) -> int:
    """Return where an array lies. Of one with gaps a kernel would write to what is not its own."""
    if not array.flags.c_contiguous:
        raise ValueMismatch(f"rows of shape {array.shape} have strides {array.strides}; they must be contiguous")
    return pointer(array)
