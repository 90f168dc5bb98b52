"""The state of :mod:`warnings` of each simulated process: its filters, and its function that shows warnings.

So ``pytest.warns`` and ``warnings.catch_warnings`` of one rank neither see nor disturb those of another.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["Warned"]


class Warned:
    """One process's state, as :class:`warnings.catch_warnings` keeps and restores it; at first the caller's."""

    def __init__(self) -> None:
        self._filters: list[Any] = list(warnings.filters)
        self._show, self._display = warnings.showwarning, _module._showwarnmsg_impl

    def pass_to(self, other: Warned) -> None:
        """Keep the installed state, and install another process's."""
        self._filters, self._show, self._display = _module.filters, _module.showwarning, _module._showwarnmsg_impl
        _module.filters, _module.showwarning, _module._showwarnmsg_impl = other._filters, other._show, other._display
        if self._filters != other._filters:
            # warnings remembers shown warnings until filters change, and entering this block counts as a change.
            with warnings.catch_warnings():
                pass


_module: Any = warnings
