"""Lets CuPy's module of CUDA's runtime call another one. That of CUDA is linked into it, so no library replaces it."""

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "cupy_backends.cuda.api.runtime"
_FUNCTION, _SYMBOLS = 2, 2
# mov rax, address; jmp rax. And before it, where a function is missing: mov rdi, its name.
_JUMP, _NAME = b"\x48\xb8%b\xff\xe0", b"\x48\xbf%b"


class Attaching(MetaPathFinder, Loader):
    """Finds the module as others do, and changes what it calls before it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec: ModuleSpec | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                self._spec, made = spec, ModuleSpec(name, self, origin=spec.origin)
                made.has_location = True
                return made
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._spec is not None
        assert self._spec.loader is not None
        assert spec.origin is not None
        libraries = [
            ctypes.CDLL(str(self._folder / name), ctypes.RTLD_GLOBAL) for name in ("libcuda.so.1", "libnccl.so.2")
        ]
        module = self._spec.loader.create_module(self._spec)
        attach(Path(spec.origin).resolve(), libraries[0])
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert self._spec is not None
        assert self._spec.loader is not None
        self._spec.loader.exec_module(module)


def attach(path: Path, library: Any) -> None:
    """Write a jump to the library's function over each one of CUDA's runtime in a loaded module."""
    if platform.machine() != "x86_64":
        raise ImportError(f"the emulated CUDA writes jumps of x86-64, and this machine is of {platform.machine()}")
    base = _base_of(path)
    missing = ctypes.cast(library.emulated_missing, ctypes.c_void_p).value
    assert missing is not None
    names = [(name, place, size) for name, place, size in _functions(path) if name.startswith("cuda") and size > 22]
    for name, place, size in names:
        _unprotect(base + place, size)
        try:
            own = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            code = _JUMP % struct.pack("<Q", own)
        except AttributeError:
            _kept.append(text := ctypes.create_string_buffer(name.encode()))
            code = _NAME % struct.pack("<Q", ctypes.addressof(text)) + _JUMP % struct.pack("<Q", missing)
        ctypes.memmove(base + place, code, len(code))


_kept: list[Any] = []


def _base_of(path: Path) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return int(line.partition("-")[0], 16)
    raise ImportError(f"{path} is not loaded")


def _unprotect(address: int, size: int) -> None:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), 7):  # read, write, execute
        raise ImportError(f"CuPy's module cannot be changed in memory: errno {ctypes.get_errno()}")


def _functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, address and size of all functions of a shared library of 64 bits, local ones too."""
    content = path.read_bytes()
    start, each, count = struct.unpack_from("<Q", content, 40)[0], *struct.unpack_from("<HH", content, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + number * each) for number in range(count)]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        strings = sections[link][4]
        for place in range(offset, offset + size, 24):
            name, info, _, _, address, length = struct.unpack_from("<IBBHQQ", content, place)
            if info & 15 == _FUNCTION and length:
                begin = strings + name
                yield content[begin : content.index(b"\0", begin)].decode(), address, length
