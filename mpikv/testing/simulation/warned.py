"""The state of :mod:`warnings`, of which each process has its own: filters, and where warnings are shown.

``pytest.warns`` and ``warnings.catch_warnings`` of one rank so neither see nor disturb those of another.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["Warned"]


class Warned:
    """What :class:`warnings.catch_warnings` keeps and puts back, of one process; at first, of the caller's."""

    def __init__(self) -> None:
        self._filters: list[Any] = list(warnings.filters)
        self._show, self._display = warnings.showwarning, _module._showwarnmsg_impl

    def pass_to(self, other: Warned) -> None:
        """Keep what is in place now, and put another process's state there."""
        self._filters, self._show, self._display = _module.filters, _module.showwarning, _module._showwarnmsg_impl
        _module.filters, _module.showwarning, _module._showwarnmsg_impl = other._filters, other._show, other._display
        if self._filters != other._filters:
            # What was shown once is remembered until filters change, and to enter this block is to change them.
            with warnings.catch_warnings():
                pass


_module: Any = warnings
