"""Structures of arrays like a caller's, in which new arrays stand for those that cannot be written.

Arrays of JAX are never written to, and numpy's may be read-only. A call that would fill one returns a structure of the
same dicts, lists and tuples instead, with a new array of the same library, shape and dtype in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

from ..arrays.arrays import as_of_library
from ..errors import settled
from ..protocols import Array

__all__ = ["Renewed", "answer", "contained"]


class Renewed:
    """A caller's structure, in which numpy's arrays stand for those that cannot be written, until they are filled."""

    def __init__(self, given: Any, stand_in: Callable[[Any], Array | None]) -> None:
        """``stand_in`` returns an array for one that cannot be written, None for others, or raises."""
        self._stand_in = stand_in
        self._originals: dict[int, Any] = {}
        self.arrays = _replaced(given, self._filled)

    def made(self) -> Any:
        """Return the structure that the caller is given, now that the arrays are filled."""
        try:
            return _replaced(self.arrays, self._returned)
        except Exception as error:
            settled(error)  # the ranks have made their call, and each makes its own arrays
            raise

    def _filled(self, leaf: Any) -> Any:
        array = self._stand_in(leaf)
        if array is None:
            return leaf
        self._originals[id(array)] = leaf
        return array

    def _returned(self, leaf: Any) -> Any:
        original = self._originals.get(id(leaf))
        return leaf if original is None else as_of_library(leaf, original)


def answer(result: Any) -> Any:
    """Return what a call returns to its caller."""
    return result.made() if type(result) is Renewed else result


def contained(like: Sequence[Any], leaves: list[Any]) -> Any:
    """Return the leaves in a list or a tuple like another, which may be named.

    >>> contained(("a", "b"), [1, 2])
    (1, 2)
    """
    if type(like) is list:
        return leaves
    return type(like)(*leaves) if hasattr(like, "_fields") else type(like)(leaves)  # type: ignore[call-arg]


def _replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return _mapped(tree, {key: _replaced(leaf, change) for key, leaf in tree.items()})
    if isinstance(tree, (list, tuple)):
        return contained(tree, [_replaced(leaf, change) for leaf in tree])
    return change(tree)


def _mapped(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a dict like another: a copy of that has its order, and its default."""
    if not isinstance(like, MutableMapping):
        return type(like)(items)  # type: ignore[call-arg]
    new = copy(like)
    new.update(items)
    return new
