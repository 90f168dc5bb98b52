"""The updaters that are not optimizers: ASSIGN, and any Python callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from threading import get_ident
from typing import Any

import numpy as np

from ..cluster.printing import log
from ..errors import ConfigError, Unsupported, ValueMismatch
from ..memory.row_sparse import RowSparse
from ..protocols import Array, Key, Slots, Updater

_outline = attrgetter("dtype", "shape", "strides")

UPDATING: set[int] = set()
"""The threads that run an updater's function now."""


@contextmanager
def _updating() -> Iterator[None]:
    """In a with block: mark this thread as one that runs an updater's function, for :func:`check_outside`."""
    # A function may push to a store of one rank: then the outer call clears the mark.
    mine = {get_ident()} - UPDATING
    UPDATING.update(mine)
    try:
        yield
    finally:
        UPDATING.difference_update(mine)


def check_outside(what: str) -> None:
    """Raise Unsupported if this thread is in an updater's function: only the owner runs it, and others would not come.

    >>> check_outside("push")
    """
    if get_ident() in UPDATING:
        raise Unsupported(
            f"{what}: an updater runs only on the owner of a value, so the other ranks would not make this call; "
            "create and call other stores before the push, or after it"
        )


def check_state(updater: Updater, dtype: np.dtype[Any], state: Mapping[str, Array]) -> None:
    """Raise ConfigError unless the state has exactly the names that the updater's present options need. Local."""
    wanted = updater.slots(dtype)
    if wanted.keys() != state.keys():
        raise ConfigError(
            f"the optimizer was changed to keep {sorted(wanted)} per element and there is {sorted(state)}; call "
            "set_optimizer again, or make a new Trainer: the state then starts anew"
        )


class Assign:
    """The stored value becomes the sum. A store's updater until another is set."""

    elementwise = True
    may_raise = False
    assigns = True
    by_key = depends_on_count = False
    revision = 0

    def slots(self, dtype: np.dtype[Any]) -> Slots:
        """Return {}: no state is kept."""
        return {}

    def step(self, key: Key, count: int) -> None:
        """Return None: an update needs no numbers."""

    def update(self, step: None, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Copy the sum to the value, rounded if need be. Local."""
        self.bind(total, value, state)(step)

    def bind(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[None], None]:
        """Return a function that copies the sum to the value, rounded if need be; one that does nothing if both are the
        same memory.
        """
        # By address: the store passes another view over the value's memory, not the same object.
        if total.dtype == value.dtype and total.__array_interface__["data"] == value.__array_interface__["data"]:
            return lambda step: None  # the sum was made in its place
        return lambda step: np.copyto(value, total, casting="unsafe")

    def settings(self) -> str:
        """Return a constant text: any two are equal."""
        return "assign"


class CallableUpdater:
    """A user's ``f(key, input, stored)``. It changes ``stored`` in place or returns the new value."""

    elementwise = False
    may_raise = True
    assigns = False
    by_key = True
    depends_on_count = False
    revision = 0

    def __init__(self, function: Callable[[Any, Any, Array], Any]) -> None:
        """Keep the function, and numpy's present rules for floating-point errors, to run it under these."""
        self._function = function
        # Until the function has changed a value, each call is compared with a copy: one that never does is a mistake.
        self._unproven = True
        # The function runs under the caller's rules for overflows, not under the store's.
        self._rules = np.geterr()

    def slots(self, dtype: np.dtype[Any]) -> Slots:
        """Return {}: no state is kept."""
        return {}

    def step(self, key: Key, count: int) -> Key:
        """Return the key, the first argument of the user's function."""
        return key

    def update(self, step: Key, total: Array | RowSparse, value: Array, state: Mapping[str, Array]) -> None:
        """Call the user's function, and store its changes or its result in ``value``; may log once. An error of its
        own, or one for a misfit, may leave ``value`` changed.

        It gets an array, or rows, which are of the value's dtype here.

        It gets views, so changes of their shapes and flags do not reach the store's arrays.
        """
        outline, on_host = _outline(value), type(value) is np.ndarray
        before = value.copy() if self._unproven and on_host else None
        given = total if isinstance(total, RowSparse) else total.astype(value.dtype, copy=False).view()
        stored = value.view()
        with _updating(), np.errstate(**self._rules):
            result = self._function(step, given, stored)
        if not outline == _outline(stored) == _outline(value):
            raise ValueMismatch(
                f"the updater changed dtype, shape or strides of stored for key {step!r}, from {outline[0]}, "
                f"{outline[1]}, {outline[2]} to {stored.dtype}, {stored.shape}, {stored.strides}; change elements, for "
                "instance those of stored.reshape(-1), or return a new array"
            )
        if on_host:
            # A function may keep them. Writing later would hit memory of another value, or the sum of another push.
            stored.flags.writeable = (given.values if isinstance(given, RowSparse) else given).flags.writeable = False
        if result is not None:
            np.copyto(value, _check_result(step, result, value), casting="same_kind")
        elif before is not None and np.array_equal(before, value):
            self._warn_unchanged(step, given)
            return
        self._unproven = False

    def _warn_unchanged(self, step: Key, received: Array | RowSparse) -> None:
        """If an element of ``received`` is not zero, log that the function changed nothing, and let later updates
        compare no more. Otherwise do nothing.
        """
        if (received.values if isinstance(received, RowSparse) else received).any():
            self._unproven = False
            log(
                "the updater did not change key %r and returned None, although its input is not zero; to change the "
                "value, write stored += ... or stored[...] = ..., or return the new value: stored = ... only names "
                "another array",
                step,
            )

    def bind(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Key], None]:
        """Return a function that calls :meth:`update` with the key that it is given and these arrays."""
        return lambda step: self.update(step, total, value, state)

    def settings(self) -> str:
        """Return the module and qualified name of the user's function, for ranks to compare."""
        module = getattr(self._function, "__module__", "")
        return f"callable {module}.{getattr(self._function, '__qualname__', type(self._function).__name__)}"


def _check_result(key: Key, result: Any, value: Array) -> Array:
    """Return an updater's result as an array; TypeError or ValueMismatch if it cannot be stored."""
    if type(value) is not np.ndarray and type(result) is not type(value):
        raise TypeError(
            f"the updater returned a {_kind(result)} for key {key!r}, whose value is a {_kind(value)}; return an array "
            "of the GPU, or None and change the value in place"
        )
    if isinstance(result, np.ma.MaskedArray):
        raise TypeError(
            f"the updater returned a masked array for key {key!r}; a value has no mask: return array.filled(...)"
        )
    changed: Array = result if type(result) is type(value) else np.asarray(result)
    if changed.shape != value.shape:
        raise ValueMismatch(f"the updater returned shape {changed.shape} for key {key!r} of shape {value.shape}")
    if not np.can_cast(changed.dtype, value.dtype, "same_kind"):
        raise ValueMismatch(f"the updater returned {changed.dtype} for key {key!r} of {value.dtype}; use astype")
    return changed


def _kind(value: object) -> str:
    """Return the name of an object's type with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
