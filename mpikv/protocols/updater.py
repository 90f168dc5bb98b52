"""The seam of updaters: how a value changes by the sum of a push."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from .arrays import Array, Key, Slots

__all__ = ["Updater"]


class Updater(Protocol):
    """Changes a stored value by the sum of a push.

    An updater holds settings only; the state of a value is a dict of arrays that the store keeps beside the value and
    passes in.
    """

    elementwise: bool
    """True when each element of the result depends on the same element of the inputs alone, so that a value may be cut
    anywhere."""

    may_raise: bool
    """True when ``update`` may raise. The store then passes copies and keeps them when every rank knows that none
    raised."""

    @property
    def depends_on_count(self) -> bool:
        """Whether :meth:`step` may differ between counts of the same key."""

    assigns: bool
    """Whether the value just becomes the sum, which may then be made in its place: ``total`` is ``value``."""

    @property
    def by_key(self) -> bool:
        """Whether :meth:`step` may differ between keys of the same count."""

    revision: int
    """Changes whenever :meth:`settings` or a step may have changed, so that nothing is compared or computed twice."""

    def slots(self, dtype: np.dtype[Any]) -> Slots:
        """Return the state arrays that a value of this dtype needs. They start as zeros, ``master`` as a copy of the
        value.
        """

    def step(self, key: Key, count: int) -> Any:
        """Return all that depends on the key or on how often it was updated, ``count`` (1 at the first), for one
        update.

        Keys whose steps are equal may be updated by one call.
        """

    def update(self, step: Any, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Change ``value`` and ``state`` in place by ``total``, which may be overwritten.

        Element-wise updaters get flat ranges, others the whole value in its shape. ``total`` is float32 for
        half-precision values.
        """

    def bind(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return a function of a step that does what :meth:`update` does to these arrays.

        For element-wise updaters. It is made once and called often, with whatever the arrays then hold.
        """

    def settings(self) -> str:
        """Describe the updater so that two ranks' descriptions are equal exactly when their updates are."""
