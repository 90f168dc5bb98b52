"""Loops compiled by numba and kept on disk. It imports numba, and is imported when numba's kernels are asked for."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba

__all__ = ["inner", "kept"]

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def kept(loop: Callable[..., None], signature: Any = None, kind: str = "") -> Callable[..., Any]:
    """Return the compiled loop, which is kept on disk for each kind of processor: compiled now, or without a signature
    when it is called.

    numba numbers the versions of one function there, and ranks that compile different ones at the same time give out
    one number twice. So each ``kind`` that is called with other arrays is a function of its own, on each processor.
    """
    assert isinstance(loop, FunctionType)
    named = FunctionType(loop.__code__, loop.__globals__, loop.__name__)
    processor = zlib.crc32(f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}".encode())
    named.__qualname__ = f"{loop.__name__}-{kind}{processor:08x}"
    make: Any = numba.njit  # whose stub knows no decorated signatures
    try:
        function: Callable[..., Any] = make(signature, cache=True, error_model="numpy")(named)
    except RuntimeError:  # there is no directory that can be written
        function = make(signature, error_model="numpy")(named)
    return function


def inner(function: Function) -> Function:
    """Make a function callable in loops. A decorator."""
    return cast(Function, numba.njit(function, error_model="numpy"))
