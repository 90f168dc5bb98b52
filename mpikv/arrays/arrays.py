"""Arrays of any library as numpy arrays over the same memory, and the rules of dtypes.

numpy arrays pass through untouched. Other libraries' arrays are viewed without a copy, torch's through ``numpy()`` and
the rest through DLPack. No array library but numpy is ever imported here.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from math import prod
from typing import Any, TypeGuard, TypeVar

import numpy as np

from ..errors import Unsupported, ValueMismatch, a_kind, mark
from ..protocols.arrays import Array

Result = TypeVar("Result")

# By name: numpy gives bfloat16 the kind 'V' of raw bytes, so kinds alone cannot tell it.
_KINDS = {
    "bool": "bool",
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float"),
    **dict.fromkeys(("complex64", "complex128"), "complex"),
}
_HALVES = ("float16", "bfloat16")

# Devices whose memory the host can read: DLPack's kDLCPU and kDLCUDAHost (pinned host memory).
_HOST_DEVICES = (1, 3)
# Libraries with immutable arrays. Not every library honours DLPack's read-only flag.
_IMMUTABLE = ("jax", "jaxlib")
# From this size on memory is a mapping of its own, as in malloc (its default M_MMAP_THRESHOLD).
_MAPPED_BYTES = 128 << 10


def is_array(value: object) -> TypeGuard[Any]:
    """Return whether the value is an array of any library, a numpy scalar included."""
    return isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__dlpack_device__")


def lies_on_host(value: Any) -> bool:
    """Return whether the memory of an array of any library is the host's."""
    return isinstance(value, (np.ndarray, np.generic)) or int(value.__dlpack_device__()[0]) in _HOST_DEVICES


def lies_elsewhere(value: object) -> bool:
    """Return whether the value is an array, and its memory is not the host's, but a GPU's."""
    return type(value) is not np.ndarray and is_array(value) and not lies_on_host(value)


def is_immutable(out: Any) -> bool:
    """Return whether an array belongs to a library with immutable arrays."""
    return type(out).__module__.partition(".")[0] in _IMMUTABLE


def is_read_only(array: Any) -> bool:
    """Return whether an array of the host, of any library, cannot be written."""
    return isinstance(array, np.generic) or not source(array).flags.writeable


def check_mutable(out: Any) -> None:
    """Raise TypeError if an array, as a JAX array on a GPU, is of a library with immutable arrays. Local."""
    if is_immutable(out):
        text = f"a {type(out).__module__} array cannot be written to; pass an out= that can be"
        raise mark(TypeError(text), "unwritable")


def check_apart(out: Array) -> None:
    """Raise TypeError if elements of an array to fill may share memory: each would get the last one's number.

    numpy makes such arrays read-only; other libraries do not.

    >>> check_apart(np.zeros((4, 6))[::2, ::-1].T)
    >>> check_apart(np.lib.stride_tricks.as_strided(np.zeros(6), (4, 6), (0, 8)))
    Traceback (most recent call last):
    TypeError: the array to fill has several elements at one address: shape (4, 6), strides (0, 8)
    """
    # From the smallest stride up: each dimension must step beyond all that the smaller ones reach.
    reach = out.itemsize
    for stride, length in sorted((abs(step), each) for step, each in zip(out.strides, out.shape, strict=True)):
        if length > 1 and stride < reach and out.size:
            raise TypeError(
                f"the array to fill has several elements at one address: shape {out.shape}, strides {out.strides}"
            )
        reach += stride * (length - 1)


def source(value: Any) -> Array:
    """Return a numpy array to read ``value`` from, copied only for the byte order; raise for a GPU's, or no array.

    Raises:
        TypeError: not an array, or a masked one: its hidden elements would silently take part in sums.
        Unsupported: the array is on a GPU.
    """
    if type(value) is np.ndarray:
        array = value
    elif isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array has no defined sum over ranks; pass array.filled(0)")
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack_device__"):
        array = _from_library(value)
    else:
        maker = "cupy" if hasattr(value, "__cuda_array_interface__") else "numpy"
        advice = "value.to_dense()" if hasattr(value, "to_dense") else f"{maker}.asarray(value)"
        raise TypeError(f"expected an array, got {type(value).__name__}; {advice} makes one")
    # Sums and messages are made of bytes: another byte order would be added as if it were this one.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def target(out: Any) -> Array:
    """Return a numpy array over the memory of ``out`` to write to; raise if it is read-only, on a GPU, or no array.

    Raises:
        TypeError: not an array, or one that cannot be written, as JAX's.
        Unsupported: the array is on a GPU.
    """
    if isinstance(out, np.generic) or not is_array(out):
        error = TypeError(f"the array to fill is {a_kind(out)}, not an array that can be filled")
        raise mark(error, "unwritable") if is_array(out) else error
    array = out if type(out) is np.ndarray else np.asarray(out) if isinstance(out, np.ndarray) else _from_library(out)
    if not array.flags.writeable or is_immutable(out):
        text = (
            f"the array to fill is a read-only {type(out).__module__} array; pass a writable out=, or leave it out: a "
            "pull then returns new arrays, and a pushpull fills its values"
        )
        raise mark(TypeError(text), "unwritable")
    return array


def _from_library(value: Any) -> Array:
    """Return another library's host array as one of numpy over the same memory; raise Unsupported for a GPU's."""
    device = int(value.__dlpack_device__()[0])
    if device not in _HOST_DEVICES:
        raise Unsupported(
            f"the array is on a GPU (DLPack device type {device}); this call needs a host array: copy it to the host"
        )
    if type(value).__module__.partition(".")[0] == "torch":
        tensor = value.detach()
        if str(tensor.dtype) != "torch.bfloat16":
            return tensor.numpy()  # type: ignore[no-any-return]
        # numpy accepts torch's bfloat16 only as another 2-byte type.
        return tensor.view(sys.modules["torch"].int16).numpy().view(bfloat16())  # type: ignore[no-any-return]
    if isinstance(dtype := getattr(value, "dtype", None), np.dtype) and dtype.kind == "V":
        return np.asarray(value)  # numpy has no DLPack for the dtypes of ml_dtypes
    return np.from_dlpack(value)


def as_of_library(array: Array, original: Any) -> Any:
    """Return a host array as one of the library of ``original``, on its device: over the same memory, or a copy.

    The result shares memory if the library accepts it. On another device it is a new array.
    """
    if isinstance(original, np.ndarray):
        return array
    if isinstance(original, np.generic):
        return array[()]
    # By the array API: no library but numpy is ever imported here.
    namespace, device = original.__array_namespace__(), original.device
    if array.dtype.kind == "V" or not lies_on_host(original):
        return namespace.asarray(array, device=device)
    return namespace.from_dlpack(array, device=device)


def bfloat16() -> np.dtype[Any]:
    """Return numpy's bfloat16, from the package ml_dtypes; raise Unsupported if that is not installed."""
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported("bfloat16 needs the package ml_dtypes: pip install 'mpikv[bf16]'") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def storable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype if values of it can be stored and summed; else raise ValueMismatch."""
    if name_of(dtype) not in _KINDS:
        raise ValueMismatch(f"dtype {dtype} cannot be stored (known: {', '.join(_KINDS)})")
    return dtype


def castable(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether values may be cast silently: within one kind, and integers only where none can wrap.

    >>> castable(np.dtype("float64"), np.dtype("float32")), castable(np.dtype("int64"), np.dtype("float32"))
    (True, False)
    >>> castable(np.dtype("uint8"), np.dtype("int16")), castable(np.dtype("int64"), np.dtype("int8"))
    (True, False)
    """
    # By kinds, as numpy's "same_kind" would let integers wrap, and knows no bfloat16.
    if given == wanted:
        return True
    if _KINDS.get(given.name) != _KINDS.get(wanted.name) or given.name not in _KINDS:
        return False
    return given.kind not in "iu" or np.can_cast(given, wanted)


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype. Cached: numpy builds the text each time."""
    return str(dtype.name)


@cache
def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for sums of values of this dtype: float32 for half precision, else their own."""
    return np.dtype(np.float32) if dtype.name in _HALVES else dtype


def local_sum(arrays: Sequence[Array], dtype: np.dtype[Any], in_pairs: bool = False) -> Array:
    """Return the sum of arrays in a new one of ``accumulator(dtype)``, or a single array itself, uncast. Local.

    It adds from left to right, or as :func:`add_in_pairs` does.
    """
    if len(arrays) == 1:
        return arrays[0]  # no copy, and no cast either: the caller only reads it
    if in_pairs:
        terms = [(array.astype(accumulator(dtype), copy=False), False) for array in arrays]
        return _sum_tree(terms, accumulator(dtype))[0]
    # A copy, also where the dtype stays: the caller's first array must not become the sum.
    total = arrays[0].astype(accumulator(dtype))
    for array in arrays[1:]:
        np.add(total, array, out=total, dtype=total.dtype, casting="unsafe")
    return total


def add(terms: Sequence[Array], low: int, high: int, out: Array) -> None:
    """Write the sum of the terms' elements ``[low, high)`` to ``out``, in its dtype, from the first to the last."""
    if high - low < terms[0].size:
        terms = [term[low:high] for term in terms]
    if len(terms) == 1:
        np.copyto(out, terms[0])
        return
    # Terms of half precision are added in float32, and some may be float32: sums of other hosts travel unrounded.
    np.add(terms[0], terms[1], out, dtype=out.dtype)
    for term in terms[2:] if len(terms) > 2 else ():
        np.add(out, term, out, dtype=out.dtype)


def add_in_pairs(terms: Sequence[Array], low: int, high: int, out: Array, own: int | None = None) -> None:
    """Write the sum of the terms' elements ``[low, high)``, added as a binary tree, to ``out``.
    With ``own``, these elements of all terms but ``terms[own]`` are overwritten; they must have the dtype of ``out``.
    """
    # Terms shared out among ranks form the same halves of halves, so the order, and the bits, stay the same.
    parts = [(term[low:high], own is not None and number != own) for number, term in enumerate(terms)]
    np.copyto(out, _sum_tree(parts, out.dtype)[0])


def _sum_tree(terms: Sequence[tuple[Array, bool]], dtype: np.dtype[Any]) -> tuple[Array, bool]:
    """Add up (term, may be overwritten) pairs as a binary tree; return such a pair of the sum.
    Terms that may be overwritten serve as memory for sums. A single term of this dtype is returned itself.
    """
    if len(terms) == 1:
        if terms[0][0].dtype == dtype:
            return terms[0]
        return terms[0][0].astype(dtype), True
    middle = len(terms) // 2
    (left, over_left), (right, over_right) = _sum_tree(terms[:middle], dtype), _sum_tree(terms[middle:], dtype)
    # Else in new memory: a term may be the caller's, or another rank's.
    return np.add(left, right, out=left if over_left else right if over_right else None), True


def zeros(nbytes: int, alignment: int = 64, *, huge_pages: bool = False) -> Array:
    """Return zeroed bytes of private memory, aligned. Pages never written take no memory.

    Use huge pages only for memory written everywhere: the first written byte takes the whole page.

    Raises:
        MemoryError: the process cannot have as much.
    """
    if nbytes >= _MAPPED_BYTES:
        return _map_memory(nbytes, huge_pages)  # aligned to a page
    memory = np.zeros(nbytes + alignment, np.uint8)
    start = -address_of(memory) % alignment
    return memory[start : start + nbytes]


def _map_memory(nbytes: int, huge_pages: bool) -> Array:
    """Return a new mapping of zeros, freed with the last array over it; MemoryError if there is none."""
    # Not numpy.zeros: it asks for huge pages from 4 MB on, and an allocator may return memory that it has to fill with
    # zeros first.
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the process cannot allocate {nbytes} more bytes: {error}") from error
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(advice)
    return np.frombuffer(pages, np.uint8)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array of zeros at an alignment that other libraries, as JAX, adopt without a copy."""
    return zeros(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def quiet() -> Callable[..., Any]:
    """Return ``run(function, *arguments)``: it calls without numpy's floating-point warnings. Never nest its calls.

    The caller's own rules do not matter. The function sees the context variables of this moment.
    """
    # numpy 2 keeps the rules in a context. To enter it takes a tenth of the time of errstate, in every call of a store.
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return run_quietly
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context.run


def run_quietly(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function without numpy's floating-point warnings; return its result. Calls may be nested."""
    with np.errstate(all="ignore"):
        return function(*arguments)


def address_of(array: Array) -> int:
    """Return the address of a host array."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def disjoint(
    sources: Sequence[Sequence[Array]], targets: Sequence[Sequence[Array]], address: Callable[[Array], int] = address_of
) -> bool:
    """Return whether each key's targets may be written before other keys' sources are read; False if it is not sure.

    ``sources`` and ``targets`` hold the arrays of each key. One key's source and target may share memory. The answer is
    False if it would take long to find. ``address`` returns the address of an array.
    """
    flags = [array.flags for group in (*sources, *targets) for array in group]
    if not all(each.c_contiguous for each in flags):
        return False
    # An array that owns its memory overlaps only itself, so its identity serves as its address. numpy's address takes
    # ten times as long. CuPy says "own" of another library's memory, so its arrays need addresses.
    owned = address is address_of and all(each.owndata for each in flags)
    ranges: dict[tuple[int, int, int], bool] = {}
    for written, groups in ((False, sources), (True, targets)):
        for key, group in enumerate(groups):
            for array in group:
                low = id(array) if owned else address(array)
                ranges[low, low + (1 if owned else array.nbytes), key] = written
    return _are_apart(sorted((low, high, written) for (low, high, _), written in ranges.items()))


def _are_apart(ranges: Sequence[tuple[int, int, bool]]) -> bool:
    """Return whether no written range overlaps any other; ``ranges``: sorted (begin, end, written). Local."""
    reach = reach_written = 0
    for low, high, written in ranges:
        if low < reach_written or (written and low < reach):
            return False
        reach = max(reach, high)
        reach_written = max(reach_written, high) if written else reach_written
    return True
