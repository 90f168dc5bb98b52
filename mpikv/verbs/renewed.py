"""Arrays that a call fills in place of a caller's, and the results made of them.

Arrays of JAX are never written to, and numpy's may be read-only. A call that would fill one returns a structure of the
same dicts, lists and tuples instead, with a new array of the same library, shape and dtype in its place.

Integers that an array cannot hold would wrap in it. So a call fills an array of the stored dtype first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import as_of_library, narrows
from ..errors import ValueMismatch, settled
from ..protocols import Array, Key, Memory

Groups: TypeAlias = "Sequence[Sequence[Array]]"
"""For each key, the arrays to fill."""


class Renewed:
    """A caller's structure with arrays of numpy in place of those that cannot be written, until they are filled."""

    def __init__(self, given: Any, stand_in: Callable[[Any], Array | None]) -> None:
        """``stand_in`` returns an array for one that cannot be written, None for others, or raises."""
        self._stand_in = stand_in
        self._originals: dict[int, Any] = {}
        self.arrays = _map_leaves(given, self._take_stand_in)

    def finish(self) -> Any:
        """Return the caller's structure, with the filled arrays as arrays of the caller's library. Local."""
        try:
            of = self._originals
            return _map_leaves(self.arrays, lambda leaf: as_of_library(leaf, of[id(leaf)]) if id(leaf) in of else leaf)
        except Exception as error:
            settled(error)  # the ranks have made their call, and each makes its own arrays
            raise

    def _take_stand_in(self, leaf: Any) -> Any:
        """Return the stand-in of a leaf, and note it for :meth:`finish`; the leaf itself if it needs none. Local."""
        array = self._stand_in(leaf)
        if array is None:
            return leaf
        self._originals[id(array)] = leaf
        return array


class Widened:
    """A call's result whose arrays get their integers after a check that these fit."""

    def __init__(self, result: Any, outs: Sequence[tuple[Key, Array, Array]], memory: Memory) -> None:
        """``outs``: for some keys the array to be filled, and the one of the stored dtype that the call fills."""
        self._result, self._outs, self._memory = result, outs, memory

    def finish(self) -> Any:
        """Check that the integers fit, and copy them to the caller's arrays; return the call's result. Local.

        Raises:
            ValueMismatch: some do not fit; no array was changed, and the other ranks have made their call.
        """
        for key, out, wide in self._outs:
            check_out(key, wide, out.dtype, self._memory)
        self._memory.copy([out for _, out, _ in self._outs], [wide for *_, wide in self._outs])
        return answer(self._result)


Filled = (Renewed, Widened)
"""Results to be made by :func:`answer` once the arrays are filled."""


def answer(result: Any) -> Any:
    """Return a call's result; if new arrays stand in for the caller's, first copy or convert from these. Local."""
    return result.finish() if type(result) in Filled else result


def widened(
    keys: Sequence[Key], dtypes: Sequence[np.dtype[Any]], groups: Groups, memory: Memory, result: Any = None
) -> tuple[Groups, Any]:
    """Return arrays to fill, new ones for integers of a narrower dtype, and the result for :func:`answer`. Local.

    Where an integer dtype of the caller's is narrower, a new array of the stored dtype takes the array's place, and a
    :class:`Widened` takes that of ``result``.
    """
    outs: list[tuple[Key, Array, Array]] = []

    def stand_in(key: Key, dtype: np.dtype[Any], out: Array) -> Array:
        if not narrows(dtype, out.dtype):
            return out
        outs.append((key, out, memory.empty(out.shape, dtype)))
        return outs[-1][-1]

    filled = [
        tuple(stand_in(key, dtype, out) for out in group)
        for key, dtype, group in zip(keys, dtypes, groups, strict=True)
    ]
    return (filled, Widened(result, outs, memory)) if outs else (groups, result)


def check_integers(what: str, array: Array, dtype: np.dtype[Any], memory: Memory, advice: str) -> None:
    """Raise ValueMismatch if integers of an array would wrap in a dtype. Waits for a GPU's array. Local."""
    if not narrows(array.dtype, dtype) or not array.size:
        return
    # The smallest and the largest, as Python's ints: numpy would compare int64 and uint64 as floats.
    here, known = memory.to_host(array), np.iinfo(dtype)
    for number in int(here.min()), int(here.max()):
        if not known.min <= number <= known.max:
            raise ValueMismatch(f"{what} has {number}, and {dtype.name} holds {known.min} to {known.max}; {advice}")


def check_out(key: Key, array: Array, dtype: np.dtype[Any], memory: Memory) -> None:
    """Raise ValueMismatch if pulled integers would wrap in this rank's out. Waits for a GPU's array. Local."""
    try:
        advice = f"the array to fill of this rank was left as it was, pass an out of {array.dtype.name}"
        check_integers(f"the value of key {key!r}", array, dtype, memory, advice)
    except ValueMismatch as error:
        settled(error)  # only this rank knows its out: the others have made their call
        raise


def contained(like: Sequence[Any], leaves: list[Any]) -> Any:
    """Return the leaves in a list, tuple or named tuple like another. Local.

    >>> contained(("a", "b"), [1, 2])
    (1, 2)
    """
    if type(like) is list:
        return leaves
    return type(like)(*leaves) if hasattr(like, "_fields") else type(like)(leaves)  # type: ignore[call-arg]


def _map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure of the same dicts, lists and tuples, with ``change(leaf)`` for each leaf. Local."""
    if isinstance(tree, Mapping):
        return _make_mapping(tree, {key: _map_leaves(leaf, change) for key, leaf in tree.items()})
    if isinstance(tree, (list, tuple)):
        return contained(tree, [_map_leaves(leaf, change) for leaf in tree])
    return change(tree)


def _make_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the type of ``like`` with these items: a mutable one is copied and updated. Local."""
    if not isinstance(like, MutableMapping):
        return type(like)(items)  # type: ignore[call-arg]
    new = copy(like)
    new.update(items)
    return new
