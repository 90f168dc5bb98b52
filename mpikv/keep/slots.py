"""The files of commits: two for each rank and loop, in a folder of ``mpikv run``.

A commit is written to the file that does not have the newest one. Its header comes last, and the header before is
voided first: so a file has one whole commit or none, wherever its writer was killed. What a process has written stays
when it is killed; a host that stops loses it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..checkpoint.files import write_parts
from ..cluster.runtime import present
from ..errors import CheckpointError, ConfigError
from ..protocols import Array
from .folder import FORM, HEADER, NOTE_AT, Commit, read_header, read_note, seal

# Where the state begins in a file.
_BEGIN = 4096
_VOID = memoryview(bytes(HEADER.size))
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
# Seconds between two attempts to take a lock.
_NAP = 0.01


class Slots:
    """The two files of one rank for one loop. Local."""

    def __init__(self, folder: Path, loop: int, rank: int, flushes: bool = False) -> None:
        """Name the files; open none yet. ``flushes``: commits outlive this host, in a folder on a disk that others
        share.
        """
        self.folder, self._rank, self._flushes = folder, rank, flushes
        self._paths = [folder / f"{loop}.{rank}.{slot}" for slot in range(2)]
        self._files: list[int] = []

    def open(self, seconds: float) -> None:
        """Make or open both files; wait up to ``seconds`` for their lock; ConfigError if another process keeps it.

        Raises:
            ConfigError: one still has them after so many seconds.
        """
        try:
            self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in self._paths]
        except FileNotFoundError:
            raise ConfigError(
                f"the host {present().host} does not see {self.folder}; let --keep name a folder on a file system that "
                "all hosts share"
            ) from None
        until = present().now() + seconds
        # The kernel gives the lock back when the last process with the file has ended, and its last write is done.
        while not self._lock():
            if present().now() > until:
                _, process = self.read_note()
                raise ConfigError(
                    f"the commits in {self._paths[0]} are still locked after {seconds:g} s: process {process} of an "
                    "earlier start, or a child of it, is alive; end it, and start again"
                )
            present().sleep(_NAP)

    def _lock(self) -> bool:
        """Try once to lock the first file, for both; return whether it worked. ConfigError if there are no locks."""
        try:
            fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            where = f"the file system of {self.folder} on the host {present().host}"
            raise ConfigError(f"{where} has no locks ({error.strerror}); let --keep name a folder on another") from None
        return True

    def release(self) -> None:
        """Unlock the files for others, and close them."""
        if self._files:
            # The map of the note has them open, too.
            fcntl.flock(self._files[0], fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the files. In a forked child this closes only its copies: the parent keeps the lock."""
        while self._files:
            os.close(self._files.pop())

    __del__ = close

    def newest(self) -> Commit:
        """Read both files' headers, and return the one of the highest epoch; of epoch 0 if there is no commit. The
        state is not checked.
        """
        return max(map(read_header, self._files))

    def void_after(self, epoch: int) -> None:
        """Overwrite with zeros the headers of commits after an epoch: not all ranks have these commits."""
        for file in self._files:
            if read_header(file).epoch > epoch:
                write_parts(file, [_VOID], 0)

    def reserve(self, parts: Sequence[memoryview]) -> int:
        """Enlarge both files, if too small for a commit of these buffers; return the offset of its end in a file;
        MemoryError without room.

        Raises:
            CheckpointError: a file has lost the end of its commit, or its header.
            MemoryError: there is too little room; the files keep their commits.
        """
        end = _BEGIN + sum(part.nbytes for part in parts)
        for slot, file in enumerate(self._files):
            size = os.fstat(file).st_size
            # A kill leaves a whole header or zeros.
            if size < (found := read_header(file)).end or (not found.epoch and any(os.pread(file, HEADER.size, 0))):
                raise self._damage(slot)
            try:
                if size < end:
                    os.posix_fallocate(file, size, end - size)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                space = os.statvfs(self.folder)
                raise MemoryError(
                    f"the commits of this rank take {2 * end} bytes in {self.folder}, which has "
                    f"{space.f_bavail * space.f_frsize} left; start with mpikv run --keep DIR, a folder with more room"
                ) from None
        return end

    def write(self, epoch: int, step: int, parts: Sequence[memoryview]) -> None:
        """Write a commit over that of ``epoch`` - 2, flushed if it shall outlive the host; MemoryError without room.

        It may enlarge the files.

        Raises:
            CheckpointError: another program has cut a file off, or changed its header.
            MemoryError: there is too little room; the files keep their commits.
        """
        # The state may have grown: room is taken before the commit there is voided.
        end = self.reserve(parts)
        file = self._files[epoch % 2]
        write_parts(file, [_VOID], 0)
        self._flush(file)
        write_parts(file, parts, _BEGIN)
        self._flush(file)
        write_parts(file, [memoryview(seal(Commit(epoch, step, FORM, end, self._sum_up(file, end)[0])))], 0)
        self._flush(file)

    def _flush(self, file: int) -> None:
        """If commits outlive the host, wait until the file's content is on its disk."""
        # A host that is lost could else leave a header, and not what precedes it.
        if self._flushes:
            os.fsync(file)

    def read(self, commit: Commit) -> Array:
        """Return the bytes of a commit's state: read-only memory of its file, overwritten by a later commit;
        CheckpointError if it is damaged.

        Raises:
            CheckpointError: it is damaged, or another rank's.
        """
        crc, memory = self._sum_up(self._files[commit.epoch % 2], commit.end)
        if crc != commit.crc or commit.form != FORM:
            raise self._damage(commit.epoch % 2)
        return memory

    def _sum_up(self, file: int, end: int) -> tuple[int, Array]:
        """Map the state in an open file, up to the file's offset ``end``; return its CRC-32, begun with the rank, and
        the map, read-only. A later commit changes it.
        """
        memory = np.frombuffer(mmap.mmap(file, end, access=mmap.ACCESS_READ), np.uint8)[_BEGIN:]
        return zlib.crc32(memory.data, self._rank), memory

    def _damage(self, slot: int) -> CheckpointError:
        """Return, not raise, an error that one of the two files is damaged."""
        return CheckpointError(
            f"the commit in {self._paths[slot]} is damaged, or of another rank or version of mpikv; remove this file "
            "to go on from the newest commit that all ranks have then"
        )

    def read_note(self) -> tuple[int, int]:
        """Return from this rank's first file the number after the highest step begun by any start, and the process of
        the last start.
        """
        return read_note(self._files[0])

    def map_note(self) -> memoryview:
        """Write this process into the note; return the note, a writable map of the file: [steps begun, process]. Local.

        A call of the system in each step would take longer.
        """
        note = memoryview(mmap.mmap(self._files[0], _BEGIN))[NOTE_AT:].cast("q")
        note[1] = present().process
        return note
