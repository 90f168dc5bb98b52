"""Restarts of a job: the folder in which its ranks keep commits, and whether they start again after a death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import ConfigError
from ..keep.folder import BRIEFING, Briefing, read_briefing, read_note, read_progress, write_briefing

_SHARED, _PREFIX = Path("/dev/shm"), "mpikv-keep-"
_RANKS = "-ranks"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Restarts:
    """Decides whether the ranks of a job start again. They do not after ``most`` restarts without a new commit."""

    def __init__(
        self, home: Path, size: int, most: int, stays: bool, tell: Callable[[str], None], flushed: bool = False
    ) -> None:
        """``home`` has a folder for each number of ranks. ``stays``: it is the user's, and the same command goes on
        from there. ``flushed``: the ranks flush each commit, as they do on several hosts.

        Raises:
            ConfigError: its commits may be incomplete.
        """
        self.folder = folder = home / f"{size}{_RANKS}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._home, self._most, self._stays, self._tell = home, most, stays, tell
        self._attempt = self._fruitless = 0
        self._mistakes = self._certain = set[tuple[str, int]]()
        self._commits, _ = read_progress(folder)
        # Only as many ranks can read them, and these ones may have older commits.
        others = [(read_progress(other)[1], str(other)) for other in home.glob(f"*{_RANKS}") if other != folder]
        self._other = max(others, default=(0, ""))
        # If commits are not flushed, a file may have a header after a power failure, and not what precedes it.
        self._boot = _BOOT.read_text() if _BOOT.exists() and not flushed else ""
        if self._commits and read_briefing(folder).boot not in ("", self._boot):
            before = "before the last boot of this host, or on another host"
            raise ConfigError(
                f"the commits in {folder} were made {'by ranks of one host' if flushed else before}, and may be "
                "incomplete; empty the folder to start from the beginning"
            )
        self._note("")

    def go_on(self, what: str, mistakes: Mapping[int, str] = MappingProxyType({})) -> bool:
        """Return whether to start the ranks again after a death, and tell the user.

        ``mistakes`` are errors of the program itself. One that comes twice in a row at the same step is certain to come
        again.
        """
        found = {(mistake, self._count_begun(rank)) for rank, mistake in mistakes.items()}
        self._certain, self._mistakes = found & self._mistakes, found
        commits, _ = read_progress(self.folder)
        self._fruitless = 1 if commits > self._commits else self._fruitless + 1
        self._commits = commits
        if self._certain or self._fruitless > self._most:
            return False
        self._attempt += 1
        self._note(what)
        self._tell(f"{what}; restart {self._attempt} from {self._place()}")
        return True

    def has_new_commit(self) -> bool:
        """Return whether the ranks have made a commit since they started."""
        return read_progress(self.folder)[0] > self._commits

    def end(self, status: int) -> str:
        """Return what there is to add to the reason for the end of the job; after success, remove its commits."""
        if status == 0:
            for briefing in self._home.glob(f"*{_RANKS}/{BRIEFING}"):
                shutil.rmtree(briefing.parent)
            return ""
        many, place = f"{self._most} restart{'s' * (self._most > 1)}", self._place()
        given_up = f"; {many} from {place} brought no new commit" if self._fruitless > self._most > 0 else ""
        if self._certain:
            given_up = f"; {min(self._certain)[0]} came twice at the same step, and would come again"
        again = f"; the same command goes on from {place}, unless it refuses the commits" if self._stays else ""
        return given_up + again

    def _count_begun(self, rank: int) -> int:
        """Return how many steps a rank has begun in all starts, of all its loops."""
        begun = 0
        for path in self.folder.glob(f"*.{rank}.0"):
            with path.open("rb") as file:
                begun += read_note(file.fileno())[0]
        return begun

    def _place(self) -> str:
        _, step = read_progress(self.folder)
        return f"step {step}" if step else "the beginning"

    def _note(self, why: str) -> None:
        write_briefing(self.folder, Briefing(self._attempt, why, self._boot, self._stays, *self._other))


@contextlib.contextmanager
def open_folder(given: str | None) -> Iterator[Path]:
    """Return the folder for commits: the given one, or one in shared memory that is removed at the end.

    Raises:
        ConfigError: it cannot be made, or another job has it.
    """
    try:
        if given is None:
            folder, lock = _make_folder()
        else:
            folder = Path(given).absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _lock(folder)
    except OSError as error:
        why = "another mpikv run uses it" if isinstance(error, BlockingIOError) else error.strerror
        raise ConfigError(
            f"no commits can be kept in {given or _SHARED}: {why}; give another folder by --keep"
        ) from None
    try:
        yield folder
    finally:
        if given is None:
            shutil.rmtree(folder)
        os.close(lock)


def _make_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHARED))
        # Another command may take it for one that was left, until it is locked.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder for the life of this process; return the handle.

    Raises:
        BlockingIOError: another process has it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    return handle


def find_folders(remove: bool = False) -> list[str]:
    """Return the folders of this user's commands that were killed; remove them on request."""
    found = []
    for folder in _SHARED.glob(f"{_PREFIX}*"):
        # It is another user's, still has its command, or was removed meanwhile.
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                lock = _lock(folder)
                if remove:
                    shutil.rmtree(folder)
                os.close(lock)
                found.append(str(folder))
    return found
