"""The files of checkpoints: one that is being written and becomes the checkpoint by a rename, and one that is read.

A checkpoint that is being written lies beside its place, under a name of its own, until it is whole and on the disk;
only then does it take the place, in one step of the file system. While its job lives the root has it locked. What a
killed job leaves is not locked, by which the next save to the same path knows it, and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cluster.runtime import present
from ..errors import CheckpointError, Unsupported
from ..protocols import Array
from .header import LARGEST_HEADER, Header, parse_header

__all__ = ["MOST_PARTS", "NONCE", "Draft", "Reader", "Source", "inspect"]

NONCE = 8
"""Random bytes in the name of a draft, by which the other ranks know it and no other job takes it."""
MOST_PARTS = os.sysconf("SC_IOV_MAX")
"""Parts that the system writes, or reads, in one call."""
_SUFFIX = ".mpikv-part"
# Bytes of a checkpoint's name that are kept in its draft's, for which most file systems allow 255.
_LONGEST_STEM, _CUT_STEM = 200, 100
# Some file systems have no locks, and some cannot flush a folder.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


class Draft:
    """A checkpoint that is being written, seen by one rank."""

    def __init__(self, path: str) -> None:
        # Of a symbolic link it is the file behind that is replaced.
        self.path = os.path.realpath(path)
        self._draft = ""
        self._file = self._folder = -1
        self._mode: int | None = None
        # The process that has made the file and not put it into its place: a child forked from it is to leave it there.
        self._maker = 0

    def create(self, nonce: Array) -> None:
        """Make the file, and draw what its name ends with into ``nonce``. On the root.

        Raises:
            CheckpointError: another job is writing to the path.
            OSError: it cannot be made there.
        """
        self._mode = _mode_of(self.path)
        # All that may be refused is asked for before the present checkpoint is replaced.
        self._folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._remove_leftovers()
        nonce[:] = np.frombuffer(os.urandom(NONCE), np.uint8)
        self._draft = self._draft_path(nonce)
        # Until it is whole it is not to be read by more than may read what it replaces.
        mode = 0o666 if self._mode is None else self._mode | 0o600
        self._file = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self._maker = present().process
        self._lock(self._file)
        self._check_there()

    def attach(self, nonce: Array) -> None:
        """Open the file that the root has made. On the other ranks.

        Raises:
            Unsupported: this host does not see it.
        """
        self._draft = self._draft_path(nonce)
        try:
            self._file = os.open(self._draft, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Unsupported(
                f"this rank cannot see the root's new file {self._draft!r}; give all ranks the same path, on a file "
                "system that all hosts share"
            ) from None

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write all of up to :data:`MOST_PARTS` there, one behind the other."""
        while parts:
            done = os.pwritev(self._file, parts, offset)
            parts, offset = _rest(parts, done), offset + done

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self._file)

    def commit(self, header: Header, sums: Array) -> None:
        """Write the header and put the file into its place. On the root, when all ranks have written and flushed.

        Raises:
            CheckpointError: the draft was removed meanwhile.
            OSError: the file could not be put there; or it was, and the message says so.
        """
        self.write([memoryview(header.encode(sums))], 0)
        if self._mode is not None and _mode(os.fstat(self._file)) != self._mode:
            os.fchmod(self._file, self._mode)
        os.fsync(self._file)
        self._check_there()
        os.replace(self._draft, self.path)
        self._maker = 0
        try:
            os.fsync(self._folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise OSError(
                    error.errno,
                    "the new checkpoint is saved, but a power failure may lose it: its folder could not be synced to "
                    f"the disk ({error.strerror})",
                    self.path,
                ) from error

    def close(self) -> None:
        """Let go of the file; remove it unless it was committed."""
        if self._maker == present().process and _is_at(self._file, self._draft):
            with contextlib.suppress(OSError):  # then the next save removes it
                os.unlink(self._draft)
        for file in (self._file, self._folder):
            if file >= 0:
                os.close(file)
        self._file, self._folder, self._maker = -1, -1, 0

    def _draft_path(self, nonce: Array) -> str:
        """Return a path that no other draft has."""
        return f"{self._stem()}.{nonce.tobytes().hex()}{_SUFFIX}"

    def _stem(self) -> str:
        """Return what the paths of all drafts of this checkpoint begin with."""
        folder, name = os.path.split(self.path)
        whole = os.fsencode(name)
        if len(whole) > _LONGEST_STEM:
            name = f"{whole[:_CUT_STEM].decode(errors='ignore')}.{zlib.crc32(whole):08x}"
        return os.path.join(folder, name)

    def _remove_leftovers(self) -> None:
        """Remove the drafts that killed jobs have left.

        Raises:
            CheckpointError: the job of one of them is alive.
        """
        folder, stem = os.path.split(self._stem())
        left = re.compile(rf"{re.escape(stem)}\.[0-9a-f]{{{2 * NONCE}}}{re.escape(_SUFFIX)}")
        for name in os.listdir(self._folder):
            if left.fullmatch(name):
                self._remove_leftover(os.path.join(folder, name))

    def _remove_leftover(self, path: str) -> None:
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or of another user: not in the way in any case
            return
        try:
            # Not emptied: a rank of the killed job may still be writing to it.
            if self._lock(file) and _is_at(file, path):
                with contextlib.suppress(PermissionError):
                    os.unlink(path)
        finally:
            os.close(file)

    def _lock(self, file: int) -> bool:
        """Lock a draft of this checkpoint; return whether the file system has locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another store is being saved to {self.path!r} now; save to another path") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _check_there(self) -> None:
        """Raise CheckpointError unless the draft is still at its path."""
        # Between its making and its lock another job may have taken it for a leftover.
        if not _is_at(self._file, self._draft):
            raise CheckpointError(
                f"the draft {self._draft!r} was removed, by another store that is being saved to that path or by hand; "
                "save again, or to another path"
            )


def _is_at(file: int, path: str) -> bool:
    """Return whether an open file is the one that is at a path now."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _mode(found: os.stat_result) -> int:
    return stat.S_IMODE(found.st_mode) & 0o777


def _mode_of(path: str) -> int | None:
    """Return who may read and write the file that a checkpoint replaces; None where there is none.

    Raises:
        FileExistsError: what is there is no file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(errno.EEXIST, "a checkpoint can replace only a regular file", path)
    return _mode(found)


class Source(NamedTuple):
    """A checkpoint as it was found at a path."""

    path: str
    header: Header
    sums: Array
    """The CRC-32 of each chunk of the arrays, uint32."""
    start: int
    """Where the arrays begin in the file."""
    identity: tuple[int, ...]
    """What tells this file from one that took its place: device, inode, size, and when it was changed."""


def inspect(path: str) -> Source:
    """Read the header of a checkpoint.

    Raises:
        CheckpointError: it is not a whole checkpoint.
        OSError: it cannot be read.
    """
    file = _open(path)
    try:
        identity, text = _identity(file), _read_header(file)
        return Source(path, *parse_header(text, identity[2]), 8 + len(text), identity)
    except CheckpointError as error:
        raise CheckpointError(f"{path!r} cannot be loaded: {error}") from None
    finally:
        os.close(file)


class Reader:
    """Reads the arrays of a checkpoint."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._file = -1

    def open(self) -> None:
        """Open the file.

        Raises:
            CheckpointError: it is another one than was found before.
        """
        self._file = _open(self.source.path)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file that is open is another one than was found, or was changed since."""
        if _identity(self._file) != self.source.identity:
            raise CheckpointError(f"{self.source.path!r} was changed while it was loaded; load it again")

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill up to :data:`MOST_PARTS` with what lies from an offset of the arrays on, one after the other."""
        offset += self.source.start
        while parts:
            done = os.preadv(self._file, parts, offset)
            if not done:
                raise CheckpointError(f"{self.source.path!r} was truncated at byte {offset} while it was loaded")
            parts, offset = _rest(parts, done), offset + done

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _rest(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return what is left of parts of which so many bytes are done."""
    for number, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[number + 1 :]]
        done -= part.nbytes
    return ()


def _open(path: str) -> int:
    # Opening a named pipe would wait for a writer.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _identity(file: int) -> tuple[int, ...]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_header(file: int) -> bytes:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("it is not a file")
    with open(file, "rb", closefd=False) as stream:
        length = int.from_bytes(stream.read(8), "little")
        # Before any memory is taken for it.
        if found.st_size < 8 or length > min(found.st_size - 8, LARGEST_HEADER):
            raise CheckpointError(
                f"it has {found.st_size} bytes and announces a header of {length}: it is not a safetensors file, or "
                "is truncated"
            )
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(f"only {len(text)} of the {length} bytes of its header can be read")
    return text
