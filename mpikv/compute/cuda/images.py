"""Compiled kernels on disk, in a folder of the one where CuPy keeps its own: a process finds what an earlier one made.

CuPy keeps those of its RawModule only. A file begins with a checksum of what it was made from and of what it holds, so
one that is cut off, or is another's, is made anew. Where files cannot be written, each process compiles for itself.
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

from ...cluster.printing import warn

__all__ = ["Image", "image_of", "kept"]

_SEAL = sha256().digest_size


class Image(NamedTuple):
    """What a GPU loads, machine code or PTX, and the name of the kernel in it."""

    code: bytes
    name: str


def image_of(cupy: Any, text: str, options: tuple[str, ...], expression: str) -> Image:
    """Return the kernel of a C++ name in a source, for the present GPU of CuPy: from disk, or compiled.

    Raises: what CuPy does where the kernel cannot be compiled.
    """

    def build() -> Image:
        # What cupy.RawModule compiles takes subnormal numbers for zero, whatever it is told: it adds -ftz=true.
        code, names = cupy.cuda.compiler.compile_using_nvrtc(
            text, options, name_expressions=(expression,), cache_in_memory=True
        )
        return Image(code, names[expression])

    compiler = _compiler(cupy)
    if compiler is None:
        return build()
    folder, facts = compiler
    return kept(folder, (*facts, *options, expression, text), build)


def _compiler(cupy: Any) -> tuple[Path, tuple[str, ...]] | None:
    """Return the folder for compiled kernels, and which compiler makes what for the present GPU; None where nothing is
    to be kept.

    CuPy compiles for the architecture of the GPU, or the newest one that it knows: to machine code, or with
    CUPY_COMPILE_WITH_PTX=1 to PTX.
    """
    compiler = cupy.cuda.compiler
    try:
        # CuPy has no public names for these. Somebody's own kind of cache has no folder.
        folder = Path(compiler._kernel_cache_backend._cache_dir, "mpikv")
        if compiler._get_bool_env_variable("CUPY_CACHE_IN_MEMORY", False):
            return None
        architecture = compiler._get_arch_for_options_for_nvrtc()
        return folder, (cupy.__version__, *architecture, _build_of(compiler, compiler._get_arch()))
    except AttributeError:
        return None


@cache
def _build_of(compiler: Any, architecture: str) -> str:
    """Return what the compiler says of itself: two builds may have one version. It takes 40 ms."""
    found: str = compiler._preprocess("", (), architecture, "nvrtc")
    return found


def kept(folder: Path, facts: Sequence[str], build: Callable[[], Image]) -> Image:
    """Return what was built of these facts, by this process or an earlier one. Processes may build one at once."""
    key = sha256(repr(tuple(facts)).encode()).digest()
    path = folder / key.hex()
    image = _read(path, key)
    if image is None:
        image = build()
        _write(path, key, image)
    return image


def _read(path: Path, key: bytes) -> Image | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn("the compiled kernel %s cannot be read: %s", path, error, level=logging.DEBUG)
        return None
    seal, body = content[:_SEAL], content[_SEAL:]
    if seal != sha256(key + body).digest():
        warn("the compiled kernel %s is damaged, and is compiled anew", path, level=logging.DEBUG)
        return None
    name, _, code = body.partition(b"\0")
    return Image(code, name.decode())


def _write(path: Path, key: bytes, image: Image) -> None:
    body = image.name.encode() + b"\0" + image.code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, sha256(key + body).digest() + body)
    except OSError as error:
        warn("the compiled kernel %s cannot be kept: %s", path, error, level=logging.DEBUG)


def _replace(path: Path, content: bytes) -> None:
    """Write a file of which nobody sees a part."""
    from tempfile import mkstemp  # which is slow to import

    descriptor, temporary = mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
