"""Where the commands print to: a pipe may lose its reader, as in ``mpikv info | head -1``."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

__all__ = ["UNREAD", "has_lost_reader", "until_unread"]

UNREAD = 128 + signal.SIGPIPE
"""The status of a command whose output nobody reads any more, as the shell has it of one that SIGPIPE ended."""


def until_unread(command: Callable[[], int]) -> int:
    """Run a command and return its status, or without a word :data:`UNREAD`."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        # Python flushes it once more at the end, and would tell of the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def has_lost_reader() -> bool:
    """Return whether the standard output is a pipe that nobody reads any more."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is closed, or none of the system's
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
