"""The state of :mod:`warnings`, of which each process has its own: filters, and where warnings are shown.

``pytest.warns`` and ``warnings.catch_warnings`` of one rank so neither see nor disturb those of another.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["Warned"]

# What catch_warnings keeps and puts back.
_NAMES = ("filters", "showwarning", "_showwarnmsg_impl")


class Warned:
    """The state that a process has; at first, that of the thread which makes this."""

    def __init__(self) -> None:
        self._values: list[Any] = [list(warnings.filters), *(getattr(warnings, name) for name in _NAMES[1:])]

    def pass_to(self, other: Warned) -> None:
        """Keep what is in place now, and put another process's state there."""
        self._values = [getattr(warnings, name) for name in _NAMES]
        for name, value in zip(_NAMES, other._values, strict=True):
            setattr(warnings, name, value)
        if self._values[0] != other._values[0]:
            # Which has been shown once is remembered until filters change: to enter this block is to change them.
            with warnings.catch_warnings():
                pass
