"""Kernels compiled from the sources of this package, and loaded once per process. It imports CuPy for the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...errors import TransportError, TransportUnavailable, ValueMismatch
from ...protocols import Array
from .images import image_of

__all__ = ["OPTIONS", "Kernel", "address_of", "kernel", "loaded", "pointer", "room", "source", "zeros"]

Kernel: TypeAlias = Callable[[tuple[int], tuple[int], tuple[Any]], None]
"""``kernel(grid, block, (arguments,))`` queues a launch on the present stream. The arguments are a numpy array of one
element, whose bytes are copied before it returns."""

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Every operation is rounded by itself, as IEEE 754 says: what gives the bits of numpy."""


HEADERS = {"norms.cu": ("pairwise.h",), "layerwise.cu": ("pairwise.h",)}
"""What comes before a file, besides ``numbers.h``."""


def source(name: str) -> str:
    """Return the text to compile for a file of this package."""
    folder = Path(__file__).parent
    return "".join((folder / part).read_text() for part in ("numbers.h", *HEADERS.get(name, ()), name))


def kernel(name: str, expression: str) -> Kernel:
    """Return the kernel of a C++ name, as ``cast<int32_kind, float32_kind>``, in a file of this package, ready to run
    on the present GPU.

    Raises:
        TransportUnavailable: CuPy, its compiler or a GPU is missing.
    """
    try:
        import cupy

        return loaded(name, expression, cupy.cuda.runtime.getDevice())
    except Exception as error:
        # NVRTC that is missing, of another version or for older GPUs: CuPy has an exception for each.
        raise TransportUnavailable(
            f"the CUDA kernel {expression} could not be loaded ({type(error).__name__}: {error}); "
            "it needs a GPU, CuPy and NVRTC: pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x with an older driver)"
        ) from error


@cache
def loaded(name: str, expression: str, ordinal: int) -> Kernel:
    """Return the kernel on a GPU, which is the present one."""
    import cupy

    image = image_of(cupy, source(name), OPTIONS, expression)
    module = cupy.cuda.function.Module()
    module.load(image.code)
    # A function keeps its module.
    return _by_address(expression, module.get_function(image.name), cupy.cuda.function.CPointer)


def _by_address(expression: str, function: Callable[..., None], parameter_at: Callable[[int], Any]) -> Kernel:
    """Return what launches a function of CuPy's by the address of its arguments. Of an array CuPy would have numpy list
    the fields, which takes 6 to 12 us for each launch; the address takes 1.5. It raises TransportError if CUDA failed,
    in this launch or before.
    """

    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any]) -> None:
        (given,) = arguments  # which live until the launch has copied them
        try:
            function(grid, block, (parameter_at(given.ctypes.data),))
        except RuntimeError as error:  # of the driver or of the runtime
            raise TransportError(f"the CUDA kernel {expression} could not be launched: {error}") from error

    return launch


def room(count: int) -> Array:
    """Return memory of the present GPU for so many float64, of any content. It is the present stream's, when it is
    given back.
    """
    import cupy

    memory: Array = cupy.empty(count, "float64")
    return memory


def zeros(count: int, dtype: np.dtype[Any]) -> Array:
    """Return zeros in memory of the present GPU."""
    import cupy

    memory: Array = cupy.zeros(count, dtype)
    return memory


def address_of(name: str, array: Array, dtype: np.dtype[Any], size: int) -> int:
    """Return where an array lies. A kernel that was given another one would write to what is not its own.

    Raises:
        ValueMismatch: it is not contiguous, or not of this dtype and size.
    """
    if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
        raise ValueMismatch(
            f"{name} of an update is {array.size} elements of {array.dtype.name}, strides {array.strides}; it must be "
            f"contiguous, {size} elements of {dtype.name}"
        )
    return pointer(array)


def pointer(array: Array) -> int:
    """Return where an array begins."""
    # Types are numpy's, and data.ptr is CuPy's.
    return int(array.data.ptr)  # type: ignore[attr-defined]
