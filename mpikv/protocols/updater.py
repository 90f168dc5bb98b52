"""The seam of updaters: how the sum of a push changes a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from .arrays import Array, Key, Slots


class Updater(Protocol):
    """Changes a stored value by the sum of a push.

    An updater holds settings only. The store keeps the state of a value, a dict of arrays, beside the value and passes
    it in.
    """

    elementwise: bool
    """True if each element of the result depends on the same element of the inputs alone. A value may then be cut
    anywhere."""

    may_raise: bool
    """True if ``update`` may raise. The store then passes copies, and keeps them once every rank knows that none
    raised."""

    @property
    def depends_on_count(self) -> bool:
        """Whether :meth:`step` may differ between counts of the same key."""

    assigns: bool
    """Whether the value just becomes the sum. The store may then sum in its place: ``total`` is ``value``."""

    @property
    def by_key(self) -> bool:
        """Whether :meth:`step` may differ between keys of the same count."""

    revision: int
    """Changes whenever :meth:`settings` or a step may have changed. As long as it is equal, the store compares and
    computes nothing again."""

    def slots(self, dtype: np.dtype[Any]) -> Slots:
        """Return a dict, name to dtype, of a value's state arrays: zeros at first, ``master`` a copy of the value.
        Unsupported for a dtype that it cannot update.
        """

    def step(self, key: Key, count: int) -> Any:
        """Return the numbers of one update that depend on the key or on its ``count`` of updates (1 at the first); None
        if there are none.

        One call may update keys with equal steps.
        """

    def update(self, step: Any, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Change ``value`` and ``state`` in place by ``total``, which may be overwritten.

        Element-wise updaters get flat ranges, others the whole value in its shape. ``total`` is float32 for
        half-precision values.
        """

    def bind(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return a function of a step: each call updates these arrays as :meth:`update` does.

        The store binds once and calls often; each call reads the arrays' contents of that moment.
        """

    def settings(self) -> str:
        """Return class and options as text, to compare ranks: alike updaters, alike text; functions by name. Local."""
