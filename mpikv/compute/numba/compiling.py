"""Compiles loops with numba and caches them on disk. Only ``kernels="numba"`` imports the module."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def compile_cached(loop: Callable[..., None], signature: Any = None, kind: str = "") -> Callable[..., Any]:
    """Return the loop compiled, or loaded from disk; without ``signature`` its first call does that. Local.

    numba numbers the versions of a function in its cache. Ranks that compile different versions at the same time use
    one number twice. So each ``kind`` of arrays has a function of its own, and so has each kind of processor.
    """
    assert isinstance(loop, FunctionType)
    named = FunctionType(loop.__code__, loop.__globals__, loop.__name__)
    # Compute nodes with different processors may share one cache directory.
    processor = zlib.crc32(f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}".encode())
    named.__qualname__ = f"{loop.__name__}-{kind}{processor:08x}"
    make: Any = numba.njit  # its stub does not know signatures
    options = {"error_model": "numpy", "nogil": True}  # other threads of the rank run beside it
    try:
        function: Callable[..., Any] = make(signature, cache=True, **options)(named)
    except RuntimeError:  # numba found no writable cache directory
        function = make(signature, **options)(named)
    return function


def inner(function: Function) -> Function:
    """Return a function that compiled loops can call, compiled together with the first of them. A decorator."""
    return cast(Function, numba.njit(function, error_model="numpy"))
