"""The commands' output: a pipe may lose its reader, as in ``mpikv info | head -1``."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

UNREAD = 128 + signal.SIGPIPE
"""The exit status if the output has lost its reader: the shell's status of a process ended by SIGPIPE."""


def open_closed_files() -> None:
    """Open the null device in place of closed standard files. A launcher refuses to start without them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def until_unread(command: Callable[[], int]) -> int:
    """Run a command and return its status; return :data:`UNREAD`, without a message, if the reader is gone."""
    try:
        try:
            return command()
        finally:
            _lose_errors()
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        # Python flushes stdout again at exit, and would print the same error: give it a working file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _lose_errors() -> None:
    """Give standard error a working file if it is full: Python flushes it at exit, and would end with status 120."""
    try:
        print(end="", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def has_lost_reader() -> bool:
    """Return whether the standard output is a pipe without a reader."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is closed, or is no file of the system
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
