"""The files of checkpoints: a draft that becomes the checkpoint by a rename, and a reader.

A draft lies beside the checkpoint's path, under a name of its own, until it is whole and on the disk. Then one rename
replaces the path. The root holds a lock on the draft as long as its job lives. A killed job's draft is not locked: the
next save to the same path finds it by that, and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cluster.runtime import present
from ..errors import CheckpointError, Unsupported
from ..protocols import Array
from .header import LARGEST_HEADER, Header, parse_header

NONCE = 8
"""Random bytes in the name of a draft. The other ranks know the draft by them, and no other job draws the same."""
# Most buffers per system call (pwritev, preadv).
_MOST_PARTS = os.sysconf("SC_IOV_MAX")
_SUFFIX = ".mpikv-part"
# Some file systems have no locks, and some cannot flush a folder.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


class Draft:
    """A checkpoint under construction, seen by one rank."""

    def __init__(self, path: str) -> None:
        """Find the file behind a symbolic link; open nothing yet."""
        # Behind a symbolic link, replace the file and not the link: the rename must stay in the file's own folder.
        self.path = os.path.realpath(path)
        self._draft = ""
        self._file = self._folder = -1
        self._mode: int | None = None
        # The creator's process id until the rename. A forked child inherits the object, and must not remove the file.
        self._maker = 0

    def create(self, nonce: Array) -> None:
        """Remove old drafts, or raise if one is locked; make and lock a new one; fill ``nonce`` at random. Root only.

        Raises:
            CheckpointError: another job is writing to the path.
            OSError: the file cannot be created.
        """
        self._mode = _mode_of(self.path)
        # Ask for everything that may be refused before the old checkpoint is replaced.
        self._folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for left in glob.glob(f"{glob.escape(self.path)}.{2 * NONCE * '[0-9a-f]'}{_SUFFIX}"):
            self._remove_leftover(left)
        nonce[:] = np.frombuffer(os.urandom(NONCE), np.uint8)
        self._draft = self._draft_path(nonce)
        # Others may read the new checkpoint only if they may read the one it replaces, even before it is whole.
        mode = 0o666 if self._mode is None else self._mode | 0o600
        self._file = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self._maker = present().process
        self._lock(self._file)
        self._check_there()

    def attach(self, nonce: Array) -> None:
        """Open the root's new file on another rank; Unsupported if this host does not see it. Local.

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
        """Write all of the buffers, one behind the other, from an offset in the file. Local."""
        write_parts(self._file, parts, offset)

    def flush(self) -> None:
        """Wait until the written bytes are on the disk. Local."""
        os.fdatasync(self._file)

    def commit(self, header: Header, sums: Array) -> None:
        """Write the header, flush, and rename the file to its path. On the root only, once all ranks have flushed. An
        OSError may come after the rename, if only the folder's sync failed.

        Raises:
            CheckpointError: the draft was removed meanwhile.
            OSError: the rename failed, or only its sync to the disk failed; the message says which.
        """
        self.write([memoryview(header.encode(sums))], 0)
        if self._mode is not None and _mode(os.fstat(self._file)) != self._mode:
            os.fchmod(self._file, self._mode)
        # First the content, then the name: after a power failure the path holds the old or the new checkpoint, whole.
        os.fsync(self._file)
        self._check_there()
        os.replace(self._draft, self.path)
        # From here on the file is the checkpoint: close() must not remove it.
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
        """Close the file; its creator removes it unless it was committed. Local."""
        if self._maker == present().process and _is_at(self._file, self._draft):
            with contextlib.suppress(OSError):  # then the next save removes it, since its lock is gone
                os.unlink(self._draft)
        for file in (self._file, self._folder):
            if file >= 0:
                os.close(file)
        self._file, self._folder, self._maker = -1, -1, 0

    def _draft_path(self, nonce: Array) -> str:
        """Return the path of the draft with these random bytes: the checkpoint's, with them and a suffix. Local."""
        return f"{self.path}.{nonce.tobytes().hex()}{_SUFFIX}"

    def _remove_leftover(self, path: str) -> None:
        """Remove another job's draft, unless another user has it or there are no locks; CheckpointError if that job
        holds its lock. Local.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it was removed meanwhile, or belongs to another user: then it is not in our way
            return
        try:
            # Unlink, never truncate: a rank of the killed job may still be writing to the file.
            if self._lock(file) and _is_at(file, path):
                with contextlib.suppress(PermissionError):
                    os.unlink(path)
        finally:
            os.close(file)

    def _lock(self, file: int) -> bool:
        """Lock a draft's open file, return True; False without locks there; CheckpointError if a job has it. Local."""
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
        """Raise CheckpointError unless the draft is still at its path. Local."""
        # Another job may have locked and removed it as a leftover, between its creation and its lock.
        if not _is_at(self._file, self._draft):
            raise CheckpointError(
                f"the draft {self._draft!r} was removed, by another store that is being saved to that path or by hand; "
                "save again, or to another path"
            )


def _is_at(file: int, path: str) -> bool:
    """Return whether the path names this open file now. Local."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _mode(found: os.stat_result) -> int:
    """Return a file's permission bits. Local."""
    return stat.S_IMODE(found.st_mode) & 0o777


def _mode_of(path: str) -> int | None:
    """Return the permissions of the file at a path, None without one; FileExistsError if it is not regular. Local.

    Raises:
        FileExistsError: the path names no regular file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(errno.EEXIST, "a checkpoint can replace only a regular file", path)
    return _mode(found)


class Source(NamedTuple):
    """A checkpoint found at a path."""

    path: str
    header: Header
    sums: Array
    """The CRC-32 of each chunk of the arrays, uint32."""
    start: int
    """Byte offset of the arrays in the file."""
    identity: tuple[int, ...]
    """Device, inode, size and modification time: they differ if another file takes the path."""


def inspect(path: str) -> Source:
    """Return a checkpoint's Source: header, checksums and identity, read now; CheckpointError if it is no whole
    checkpoint, OSError if it cannot be opened or read. Local.
    """
    file = _open(path)
    try:
        # Identity first: a change during the read is then noticed by the next check.
        identity, text = _identity(file), _read_header(file)
        return Source(path, *parse_header(text, identity[2]), 8 + len(text), identity)
    except CheckpointError as error:
        raise CheckpointError(f"{path!r} cannot be loaded: {error}") from None
    finally:
        os.close(file)


class Reader:
    """Reads the arrays of a checkpoint. Local."""

    def __init__(self, source: Source) -> None:
        """Keep the source; :meth:`open` opens the file."""
        self.source = source
        self._file = -1

    def open(self) -> None:
        """Open the file; CheckpointError if the path has another one by now. Local.

        Raises:
            CheckpointError: the path has another file than before.
        """
        self._file = _open(self.source.path)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the open file is not that of the source, or was changed since. Local."""
        if _identity(self._file) != self.source.identity:
            raise CheckpointError(f"{self.source.path!r} was changed while it was loaded; load it again")

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill buffers, one behind the other, from an offset among the arrays; CheckpointError at the file's end.
        Local.
        """
        offset += self.source.start
        while parts:
            done = os.preadv(self._file, parts[:_MOST_PARTS], offset)
            # At the end of a file the system reads nothing, and reports no error.
            if not done:
                raise CheckpointError(f"{self.source.path!r} was truncated at byte {offset} while it was loaded")
            parts, offset = _rest(parts, done), offset + done

    def close(self) -> None:
        """Close the file, if it is open. Local."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_parts(file: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write all of the buffers to an open file, one behind the other, from an offset in it. Local."""
    while parts:
        # The system may write less than asked, e.g. at a signal or near a full disk.
        done = os.pwritev(file, parts[:_MOST_PARTS], offset)
        parts, offset = _rest(parts, done), offset + done


def _rest(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return the buffers without their first ``done`` bytes. Local."""
    for number, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[number + 1 :]]
        done -= part.nbytes
    return ()


def _open(path: str) -> int:
    """Open a file for reading and return its descriptor; never wait for the writer of a named pipe. Local."""
    # O_NONBLOCK: opening a named pipe would wait for a writer. It has no effect on regular files.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _identity(file: int) -> tuple[int, ...]:
    """Return a file's device, inode, size and modification time, to notice a change. Local."""
    found = os.fstat(file)
    # The modification time tells that the same file was written again; the others tell another file of that path.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_header(file: int) -> bytes:
    """Return a file's header, as bytes; CheckpointError if it is no regular file, or of an impossible length. Local."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("it is not a file")
    with open(file, "rb", closefd=False) as stream:
        length = int.from_bytes(stream.read(8), "little")
        # Check the length before allocating: in a damaged file it may be any number.
        if found.st_size < 8 or length > min(found.st_size - 8, LARGEST_HEADER):
            raise CheckpointError(
                f"it has {found.st_size} bytes and announces a header of {length}: it is not a safetensors file, or "
                "is truncated"
            )
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(f"only {len(text)} of the {length} bytes of its header can be read")
    return text
