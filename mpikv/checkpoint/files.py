"""The files of checkpoints: one that is being written and becomes the checkpoint by a rename, and one that is read.

A checkpoint that is being written lies beside its place, under a name of its own, until it is whole and on the disk;
only then does it take the place, in one step of the file system. What a killed job leaves there is removed by the next
save to the same path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError, Unsupported
from ..typing import Array
from .contents import LARGEST_HEADER, Contents, Header, parse

__all__ = ["NONCE", "Draft", "Reader", "Source", "inspect"]

NONCE = 16
"""Bytes at the beginning of a draft by which the other ranks know it."""
_SUFFIX = ".mpikv-part"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Draft:
    """A checkpoint that is being written, seen by one rank."""

    def __init__(self, path: str) -> None:
        # Of a symbolic link it is the file behind that is replaced.
        self.path = os.path.realpath(path)
        self._draft = self.path + _SUFFIX
        self._file = -1
        self._made = False

    def create(self, nonce: Array) -> None:
        """Make the file, and draw what it begins with into ``nonce``. On the root.

        Raises:
            CheckpointError: another job is writing it.
            OSError: it cannot be made there.
        """
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise FileExistsError(errno.EEXIST, "a checkpoint would replace what is no file", self.path)
        with _leftover(self._draft):
            self._file = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._made = True
            _lock(self._file, self._draft)
        nonce[:] = np.frombuffer(os.urandom(NONCE), np.uint8)
        self.write(nonce.data, 0)
        self.flush()

    def attach(self, nonce: Array) -> None:
        """Open the file that the root has made. On the other ranks.

        Raises:
            Unsupported: this host does not see it.
        """
        with contextlib.suppress(FileNotFoundError):
            self._file = os.open(self._draft, os.O_RDWR | os.O_CLOEXEC)
        if self._file < 0 or os.pread(self._file, NONCE, 0) != nonce.tobytes():
            raise Unsupported(
                f"this rank does not see the file {self._draft!r} that the root has made; give all ranks one path, of "
                "a file system that all hosts share"
            )

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Write all of it there."""
        rest = memoryview(content)
        while rest:
            done = os.pwrite(self._file, rest, offset)
            rest, offset = rest[done:], offset + done

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self._file)

    def commit(self, contents: Contents, sums: Array) -> None:
        """Write the header and put the file into its place. On the root, when all ranks have written and flushed."""
        self.write(contents.header(sums), 0)
        os.fsync(self._file)
        os.replace(self._draft, self.path)
        self._made = False
        directory = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Let go of the file; remove it unless it was committed."""
        if self._made:
            with contextlib.suppress(OSError):  # then the next save removes it
                os.unlink(self._draft)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._made = -1, False


@contextlib.contextmanager
def _leftover(path: str) -> Iterator[None]:
    """Remove what a killed job has left at the path; hold it meanwhile, so that no other job does the same."""
    try:
        left = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        _lock(left, path)
        # Not emptied: a rank of the killed job may still be writing to it.
        os.unlink(path)
        yield
    finally:
        os.close(left)


def _lock(file: int, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"another store is being saved to {path!r} now; save to another path") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # some file systems have none
            raise


class Source(NamedTuple):
    """A checkpoint as it was found at a path."""

    path: str
    header: Header
    identity: tuple[int, ...]
    """What tells this file from one that took its place: device, inode, size, and when it was changed."""


def inspect(path: str) -> Source:
    """Read the header of a checkpoint.

    Raises:
        CheckpointError: it is not a whole checkpoint.
        OSError: it cannot be read.
    """
    with _opened(path) as file:
        identity = _identity(file)
        try:
            return Source(path, _header(file), identity)
        except CheckpointError as error:
            raise CheckpointError(f"{path!r} cannot be loaded: {error}") from None


class Reader:
    """Reads the arrays of a checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._closing = contextlib.ExitStack()
        self._file = -1

    def open(self) -> None:
        """Open the file.

        Raises:
            CheckpointError: it is another one than was found before.
        """
        self._file = self._closing.enter_context(_opened(self._source.path))
        if _identity(self._file) != self._source.identity:
            raise CheckpointError(f"{self._source.path!r} was changed while it was loaded; load it again")

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill the memory with what lies at an offset of the arrays."""
        rest = memory
        offset += self._source.header.start
        while rest:
            done = os.preadv(self._file, [rest], offset)
            if not done:
                raise CheckpointError(f"{self._source.path!r} was cut off at byte {offset} while it was loaded")
            rest, offset = rest[done:], offset + done

    def close(self) -> None:
        self._closing.close()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    # Opening a named pipe would wait for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, ...]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _header(file: int) -> Header:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("it is not a file")
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    # Before any memory is taken for it.
    if found.st_size < 8 or length > min(found.st_size - 8, LARGEST_HEADER):
        raise CheckpointError(
            f"it has {found.st_size} bytes and begins with a header of {length}: it is no safetensors file, or was cut"
        )
    text = bytearray()
    while len(text) < length and (part := os.pread(file, length - len(text), 8 + len(text))):
        text += part
    if len(text) < length:
        raise CheckpointError(f"only {len(text)} of the {length} bytes of its header can be read")
    return parse(bytes(text), found.st_size)
