"""Gathers, scatters and adds rows of arrays on a GPU: one launch per call, on the current stream.

Arrays are CuPy's, of the current GPU, and contiguous; row numbers are int64 and in range. No kernel uses atomics, and
each sum has one order: the host's, bit for bit.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...errors import ValueMismatch
from ...protocols import Array
from .copies import prepare as prepare_copies
from .loading import argument_dtype, gpu_pointer, kernel

THREADS, GROUP = 256, 4
"""Threads per block; rows per thread, which are also the numbers added at once."""
WIDEST = 16
"""Most bytes per load or store."""


def prepare(dtype: np.dtype[Any], wide: np.dtype[Any]) -> None:
    """Compile or load the kernels for rows of a dtype, with sums in ``wide``. Local.

    Raises:
        TransportUnavailable: the kernels cannot be compiled here.
    """
    for name in dict.fromkeys(("take_rows", "put_rows", _add_kernel_name(dtype, wide), _add_kernel_name(wide, wide))):
        kernel("rows.cu", name)
    prepare_copies(wide, dtype)


def take(table: Array, ids: Array, out: Array) -> None:
    """Queue a copy of the rows ``ids`` of a table into ``out``. Local."""
    _move("take_rows", table, out, ids)


def put(table: Array, ids: Array, rows: Array | None) -> None:
    """Queue a copy of rows of the table's dtype, or zeros, to the rows ``ids`` of a table. ``ids`` must be distinct."""
    _move("put_rows", rows, table, ids)


def add(table: Array, ids: Array, rows: Array) -> None:
    """Queue an addition of rows to a table's rows ``ids``, which must be distinct: two threads would race for a row."""
    _add(_add_kernel_name(rows.dtype, table.dtype), rows, table, ids, ids.size, 0)


def sum_runs(rows: Array, order: Array, starts: Array, out: Array) -> None:
    """Queue sums of rows into ``out``: ``out[i]`` sums the rows ``order[starts[i]:starts[i + 1]]``. Local."""
    _add(f"sum_runs<{rows.dtype.name}_kind>", rows, out, order, len(out), _address(starts))


def _add_kernel_name(dtype: np.dtype[Any], wide: np.dtype[Any]) -> str:
    """Return the C++ name of the kernel that adds rows of a dtype to rows of ``wide``. Local."""
    return f"add_rows<{dtype.name}_kind, {wide.name}_kind>"


def _move(name: str, source: Array | None, target: Array, ids: Array) -> None:
    """Queue a gather or a scatter of rows, in the widest loads and stores that addresses and row length allow."""
    nbytes = prod(target.shape[1:]) * target.itemsize
    places = 0 if source is None else _address(source), _address(target), _address(ids), 0
    # Its lowest set bit is the widest power of two that divides all addresses and the row length.
    together = nbytes | places[0] | places[1] | WIDEST
    _launch(name, places, ids.size, nbytes, together & -together)


def _add(name: str, source: Array, target: Array, ids: Array, count: int, starts: int) -> None:
    """Queue kernel ``name``, an add_rows or sum_runs of ``count`` rows or runs; four elements at once where aligned."""
    places, width = (_address(source), _address(target), _address(ids), starts), prod(target.shape[1:])
    # A vector access must be aligned to its own size; else elements go one by one.
    at_once = width % GROUP == 0 and not any(
        place % min(GROUP * array.itemsize, WIDEST) for place, array in zip(places, (source, target), strict=False)
    )
    _launch(name, places, count, width, GROUP if at_once else 1)


def _launch(name: str, places: tuple[int, int, int, int], count: int, size: int, piece: int) -> None:
    """Queue a kernel on the addresses ``places`` for ``count`` rows of ``size``, in pieces; nothing for no rows."""
    width = size // piece
    if not count or not width:
        return
    shift = min((width - 1).bit_length(), THREADS.bit_length() - 1)
    arguments = np.zeros(1, argument_dtype("rows.cu", "Rows"))
    arguments[0] = (*places, count, width, piece, shift)
    kernel("rows.cu", name)((-(-count // (GROUP * (THREADS >> shift))),), (THREADS,), (arguments,))


def _address(array: Array) -> int:
    """Return an array's GPU address; ValueMismatch if it has gaps: a kernel would write to them. Local."""
    if not array.flags.c_contiguous:
        raise ValueMismatch(f"rows of shape {array.shape} have strides {array.strides}; they must be contiguous")
    return gpu_pointer(array)
