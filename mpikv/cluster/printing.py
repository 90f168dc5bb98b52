"""How a rank prints and logs. An unwritable text is lost, and stops nothing.

A disk may be full, a stream closed, or the caller's own. An error raised here would end a thread that others wait for,
or come between an error and the end of the job.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def print_lines(text: str, prefix: str) -> None:
    """Print each line of a text with a prefix to standard error, after earlier output. Local; raises nothing.

    If the program's own ``sys.stderr`` fails, print to the error output of the process.
    """
    flush_output()
    # One write: those of several ranks share a pipe, and must not mix.
    lines = "".join(f"{prefix}{line}\n" for line in text.splitlines())
    any(_try_write(lines, stream) for stream in (sys.stderr, sys.__stderr__))


def flush_output() -> None:
    """Flush standard output and standard error; raises nothing. Local."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def log(text: str, *about: object, level: int = logging.WARNING, trace: BaseException | None = None) -> None:
    """Log a text, and the traceback of an error, to the logger "mpikv"; raises nothing. Local.

    The package logs in no other way: where standard error is closed, a handler raises, and one rank alone would leave
    its call.
    """
    with suppress(Exception):
        # With the place of the caller, not of this line.
        logging.getLogger("mpikv").log(level, text, *about, exc_info=trace, stacklevel=2)


def until_read(descriptors: Sequence[int] = (1, 2), seconds: float = 1.0) -> None:
    """Flush output; wait, ``seconds`` at most, until readers have taken it from those files that are pipes. Local.

    A launcher that is told to end its job drops the unread output of its ranks.
    """
    flush_output()
    # Not for ever: nobody may be reading.
    limit = time.monotonic() + seconds
    while any(map(_unread, descriptors)) and time.monotonic() < limit:
        time.sleep(1e-3)


def _try_write(text: str, stream: Any) -> bool:
    """Write a text to a stream and flush it; return whether that worked. Raises no Exception. Local."""
    with suppress(Exception):
        stream.write(text)
        if hasattr(stream, "flush"):
            stream.flush()
        return True
    return False


def _unread(descriptor: int) -> int:
    """Return the number of unread bytes in a pipe; 0 for a file of another kind, or a closed one. Local."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0
