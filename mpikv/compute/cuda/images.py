"""A disk cache of compiled kernels, in a folder inside of CuPy's cache.

CuPy caches the kernels of its RawModule only. A file begins with a checksum over its key and its content. A truncated
file, or one of another key, is compiled anew. If files cannot be written, each process compiles for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from ...cluster.printing import log

_SEAL = sha256().digest_size


class Image(NamedTuple):
    """A GPU's program, as machine code or PTX, and the name of the kernel in it."""

    code: bytes
    name: str


def compiled_image(cupy: Any, text: str, options: tuple[str, ...], expression: str) -> Image:
    """Return a kernel's code for the current GPU, not loaded yet: from the cache on disk, or compiled and kept. Local.

    Raises: CuPy's exceptions if the kernel cannot be compiled.
    """

    def build() -> Image:
        # Not by cupy.RawModule: it always adds -ftz=true, and flushes subnormal numbers to zero.
        code, names = cupy.cuda.compiler.compile_using_nvrtc(
            text, options, name_expressions=(expression,), cache_in_memory=True
        )
        return Image(code, names[expression])

    if (compiler := _compiler(cupy)) is None:
        return build()
    folder, facts = compiler
    return cached_image(folder, (*facts, *options, expression, text), build)


def _compiler(cupy: Any) -> tuple[Path, tuple[str, ...]] | None:
    """Return the cache folder and the facts that identify the compiler and its target; None if nothing shall be cached.

    CuPy compiles for the GPU's architecture, or for the newest it knows. The result is machine code, or PTX with
    CUPY_COMPILE_WITH_PTX=1.
    """
    compiler = cupy.cuda.compiler
    try:
        # CuPy has no public names for these. A user's own cache backend has no folder.
        folder = Path(compiler._kernel_cache_backend._cache_dir, "mpikv")
        if compiler._get_bool_env_variable("CUPY_CACHE_IN_MEMORY", False):
            return None
        architecture = compiler._get_arch_for_options_for_nvrtc()
        return folder, (cupy.__version__, *architecture, _build_of(compiler, compiler._get_arch()))
    except AttributeError:
        return None


@cache
def _build_of(compiler: Any, architecture: str) -> str:
    """Return the compiler's output for an empty source: two builds may have one version. It takes 40 ms."""
    found: str = compiler._preprocess("", (), architecture, "nvrtc")
    return found


def cached_image(folder: Path, facts: Sequence[str], build: Callable[[], Image]) -> Image:
    """Return the kernel of these facts from its file in the folder; without one, build it and write the file.

    Two processes may both do so.
    """
    key = sha256(repr(tuple(facts)).encode()).digest()
    path = folder / key.hex()
    image = _read(path, key)
    if image is None:
        image = build()
        _write(path, key, image)
    return image


def _read(path: Path, key: bytes) -> Image | None:
    """Return the image in a file; None if the file is missing, damaged or unreadable, with a line in the log."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log("the compiled kernel %s cannot be read: %s", path, error, level=logging.DEBUG)
        return None
    seal, body = content[:_SEAL], content[_SEAL:]
    # The seal covers the key, so a file under the wrong name does not pass.
    if seal != sha256(key + body).digest():
        log("the compiled kernel %s is damaged, and is compiled anew", path, level=logging.DEBUG)
        return None
    name, _, code = body.partition(b"\0")
    return Image(code, name.decode())


def _write(path: Path, key: bytes, image: Image) -> None:
    """Write an image to a file; log a failure, and raise nothing."""
    body = image.name.encode() + b"\0" + image.code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, sha256(key + body).digest() + body)
    except OSError as error:
        log("the compiled kernel %s cannot be kept: %s", path, error, level=logging.DEBUG)


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that no reader sees a part of it: write beside it, then rename."""
    from tempfile import mkstemp  # slow to import

    descriptor, temporary = mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
