"""Checks and copies lists of thousands of small numpy arrays: a Python call for each would cost more than its work.

A loop reads the arrays' headers in place: ``PyArrayObject_fields`` of numpy's ``ndarraytypes.h``, after the head of the
Python object. numpy has had this layout since 1.7, and extension modules are compiled for it. A test with some arrays
checks the layout before the first use; if it fails, the loops are not used.

A loop holds Python's lock, so no array changes or disappears meanwhile; its arguments keep the arrays alive.

The module imports numba; only ``kernels="numba"`` imports the module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic

from ...arrays.arrays import address_of
from ...protocols import Array
from .compiling import compile_cached, inner

# With fewer arrays, starting a loop takes as long as numpy's calls.
_FEW = 16
# Byte offsets of the fields in an object; the type is the last word of the object's head.
_HEAD = object.__basicsize__
_TYPE, _DATA, _NDIM, _SHAPE, _BASE, _DTYPE, _FLAGS = (_HEAD + 8 * words for words in (-1, 0, 1, 2, 4, 5, 6))
_C_CONTIGUOUS, _WRITEABLE = 0x1, 0x400


def bind_list(arrays: Sequence[Array]) -> BoundList | None:
    """Return a BoundList that compiled loops check and copy; None for few arrays, gaps, or unknown layout. Local."""
    alike = len(arrays) >= _FEW and _reads_headers() and all(array.flags.c_contiguous for array in arrays)
    return BoundList(arrays) if alike else None


class BoundList:
    """A :class:`mpikv.protocols.BoundList`."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        """Keep contiguous arrays alive, to compare and copy lists with; compile nothing yet. Local."""
        self._count, self._objects = len(arrays), _objects_of(arrays)
        self._sizes = np.array([array.nbytes for array in arrays], np.int64)
        self._begin = address_of(self._objects)

    def fits(self, others: Sequence[Any], writable: bool, own: bool) -> bool:
        """Return whether the others have this list's length, classes, shapes and dtypes, and are contiguous; with
        ``writable`` also writable, with ``own`` no views. Local.
        """
        # Lengths first: the loop below reads as many addresses as this list has.
        if len(others) != self._count:
            return False
        objects, flags = _objects_of(others), _C_CONTIGUOUS | (_WRITEABLE if writable else 0)
        return bool(compile_cached(_all_alike)(address_of(objects), self._begin, self._count, flags, own))

    def take(self, others: Sequence[Any]) -> bool:
        """Copy the others into the arrays; return False at the first misfit: earlier ones are copied then. Local."""
        return self._copy(others, _C_CONTIGUOUS, taking=True)

    def give(self, others: Sequence[Any]) -> bool:
        """Copy the arrays into the others; return False as :meth:`take`. Local."""
        return self._copy(others, _C_CONTIGUOUS | _WRITEABLE, taking=False)

    def _copy(self, others: Sequence[Any], flags: int, taking: bool) -> bool:
        """Copy the others into the arrays if ``taking``, else the arrays into the others. Return False at the first
        misfit, or other without these flags: earlier ones are copied then. Local.
        """
        if len(others) != self._count:
            return False
        objects = _objects_of(others)
        return bool(compile_cached(_copy_all)(address_of(objects), self._begin, self._sizes, flags, taking))


def _objects_of(arrays: Sequence[Any]) -> Array:
    """Return an object array of the arrays: the loop reads their addresses from it, and it keeps them alive."""
    return np.fromiter(arrays, object, len(arrays))


@cache
def _reads_headers() -> bool:
    """Return whether numpy's array objects have the known layout, tried on a few arrays."""
    base = np.zeros((3, 4), np.float32)
    frozen = base.copy()
    frozen.flags.writeable = False
    samples = (base, frozen, base[1:, ::2], np.zeros((), np.int8))
    large = np.dtype(np.intp).itemsize == 8 and np.ndarray.__basicsize__ >= _FLAGS + 4
    return large and all(map(_has_known_header, samples))


def _has_known_header(array: Array) -> bool:
    """Return whether the fields read at an array's address are those that numpy tells."""
    words = {at: ctypes.c_uint64.from_address(id(array) + at).value for at in (_TYPE, _DATA, _BASE, _DTYPE)}
    numbers = {at: ctypes.c_int32.from_address(id(array) + at).value for at in (_NDIM, _FLAGS)}
    base = 0 if array.base is None else id(array.base)
    flags = array.flags.c_contiguous * _C_CONTIGUOUS + array.flags.writeable * _WRITEABLE
    return (
        words == {_TYPE: id(type(array)), _DATA: address_of(array), _BASE: base, _DTYPE: id(array.dtype)}
        and numbers[_NDIM] == array.ndim
        and numbers[_FLAGS] & (_C_CONTIGUOUS | _WRITEABLE) == flags
    )


# --- Loops


def _all_alike(objects: int, others: int, count: int, flags: int, own: bool) -> bool:
    """Return whether each array is like its counterpart. The arguments are addresses of arrays of object addresses."""
    for i in range(count):  # noqa: SIM110 - numba knows no all()
        if not _is_alike(_word(objects + 8 * i), _word(others + 8 * i), flags, own):
            return False
    return True


def _copy_all(objects: int, own: int, nbytes: Any, flags: int, taking: bool) -> bool:
    """Copy from arrays to ``own`` ones if ``taking``, else back; return False at the first misfit: earlier ones are
    copied then. Arguments are addresses of arrays of object addresses.
    """
    for i in range(nbytes.size):
        array, mine = _word(objects + 8 * i), _word(own + 8 * i)
        # Checked again: another thread may have changed an array since ``fits``.
        if not _is_alike(array, mine, flags, False):
            return False
        target, source = (mine, array) if taking else (array, mine)
        _move(_word(target + _DATA), _word(source + _DATA), nbytes[i])
    return True


@inner
def _is_alike(array: Any, other: Any, flags: Any, own: Any) -> Any:
    """Return whether an array has another's type, dtype, shape and these flags; with ``own`` also no base."""
    ndim = _number(other + _NDIM)
    if (
        _word(array + _TYPE) != _word(other + _TYPE)
        or _word(array + _DTYPE) != _word(other + _DTYPE)
        or _number(array + _NDIM) != ndim
        or _number(array + _FLAGS) & flags != flags
        or (own and _word(array + _BASE) != 0)
    ):
        return False
    shape, wanted = _word(array + _SHAPE), _word(other + _SHAPE)
    for axis in range(ndim):  # noqa: SIM110
        if _word(shape + 8 * axis) != _word(wanted + 8 * axis):
            return False
    return True


def _loading(bits: int) -> Callable[..., Any]:
    """Return numba's code generator for reading an integer of ``bits`` bits at an address."""
    kind: Any = getattr(numba.types, f"int{bits}")

    def read(_: Any, address: Any) -> Any:
        """Return the signature and the code generator of the read, as numba's ``intrinsic`` asks for."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Emit the read; return its result."""
            return builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))

        return kind(numba.types.int64), build

    return read


def _moving(_: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Return the signature and the code generator of an intrinsic of numba that copies bytes between two addresses."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Emit the copy; return the value of a function without a result."""
        to, start = (builder.inttoptr(each, ir.IntType(8).as_pointer()) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, start, arguments[2], 1)
        return context.get_dummy_value()

    return numba.types.void(*[numba.types.int64] * 3), build


_word: Any = intrinsic(_loading(64))
_number: Any = intrinsic(_loading(32))
_move: Any = intrinsic(_moving)
