"""Compiled kernels in CuPy's cache on disk, in which CuPy itself keeps the kernels of its RawModule only.

The cache checks each file, and no reader sees a part of one. If files cannot be written, each process compiles for
itself.
"""

from __future__ import annotations

import logging
from functools import cache
from hashlib import sha256
from typing import Any

from ...cluster.printing import log


def compiled_image(cupy: Any, text: str, options: tuple[str, ...], expression: str) -> tuple[bytes, str]:
    """Return a kernel's code for the current GPU, and its name there: from the cache on disk, or compiled anew. Local.

    The code is machine code or PTX, and not loaded yet. New code is kept in the cache.

    Raises: CuPy's exceptions if the kernel cannot be compiled.
    """
    file = _name_file(cupy, (*options, expression, text))
    if file and (content := _ask_cache(cupy, "load", file)):
        name, _, code = content.partition(b"\0")
        return code, name.decode()
    # Not by cupy.RawModule: it always adds -ftz=true, and flushes subnormal numbers to zero.
    code, names = cupy.cuda.compiler.compile_using_nvrtc(
        text, options, name_expressions=(expression,), cache_in_memory=True
    )
    if file:
        _ask_cache(cupy, "save", file, names[expression].encode() + b"\0" + code, text)
    return code, names[expression]


def _name_file(cupy: Any, facts: tuple[str, ...]) -> str:
    """Return a name for a file of the cache by all that its code depends on; "" if nothing shall be kept. Local.

    CuPy compiles for the GPU's architecture, or for the newest it knows. The result is machine code, or PTX with
    CUPY_COMPILE_WITH_PTX=1.
    """
    compiler = cupy.cuda.compiler
    try:
        # CuPy has no public names for these.
        if compiler._get_bool_env_variable("CUPY_CACHE_IN_MEMORY", False):
            return ""
        architecture = compiler._get_arch_for_options_for_nvrtc()
        every = (cupy.__version__, *architecture, _build_of(compiler, compiler._get_arch()), *facts)
    except AttributeError:
        return ""
    return f"mpikv-{sha256(repr(every).encode()).hexdigest()}"


@cache
def _build_of(compiler: Any, architecture: str) -> str:
    """Return the compiler's output for an empty source, which tells apart builds of one version. It takes 40 ms."""
    return str(compiler._preprocess("", (), architecture, "nvrtc"))


def _ask_cache(cupy: Any, verb: str, file: str, *given: Any) -> Any:
    """Load or save a file by CuPy's cache on disk, and return its answer; log a failure, and return None. Local."""
    try:
        return getattr(cupy.cuda.compiler._kernel_cache_backend, verb)(file, *given)
    except Exception as error:  # of any kind: the cache may be the user's own
        log("CuPy's cache cannot %s a compiled kernel: %s", verb, error, level=logging.DEBUG)
        return None
