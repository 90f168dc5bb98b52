"""Arrays that a call fills in place of a caller's, and the results made of them.

Arrays of JAX are never written to, and numpy's may be read-only. A call that would fill one returns a structure of the
same dicts, lists and tuples instead, with a new array of the same library, shape and dtype in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

from ..arrays.arrays import as_of_library
from ..errors import mark
from ..protocols import Array


class Renewed:
    """A caller's structure with arrays of numpy in place of those that cannot be written, until they are filled."""

    def __init__(self, given: Any, stand_in: Callable[[Any], Array | None]) -> None:
        """Set ``arrays`` to a copy of a structure: a leaf becomes ``stand_in(leaf)``, or stays itself where that is
        None. Raise as ``stand_in`` does. Local.
        """
        self._stand_in = stand_in
        self._originals: dict[int, Any] = {}
        self.arrays = _map_leaves(given, self._take_stand_in)

    def finish(self) -> Any:
        """Once the stand-ins are filled, return a structure like the caller's, of its library's arrays. Local."""
        try:
            of = self._originals
            return _map_leaves(self.arrays, lambda leaf: as_of_library(leaf, of[id(leaf)]) if id(leaf) in of else leaf)
        except Exception as error:
            mark(error, "settled")  # the ranks have made their call, and each makes its own arrays
            raise

    def _take_stand_in(self, leaf: Any) -> Any:
        """Return the stand-in of a leaf, and note it for :meth:`finish`; the leaf itself if it needs none. Local."""
        array = self._stand_in(leaf)
        if array is None:
            return leaf
        self._originals[id(array)] = leaf
        return array


def answer(result: Any) -> Any:
    """Return the result, or the finished structure of a :class:`Renewed`, once its arrays are filled. Local."""
    return result.finish() if type(result) is Renewed else result


def make_sequence(like: Sequence[Any], leaves: list[Any]) -> Any:
    """Return the leaves in a sequence of the type of ``like``: a list (``leaves`` itself), tuple or named tuple. Local.

    >>> make_sequence(("a", "b"), [1, 2])
    (1, 2)
    """
    if type(like) is list:
        return leaves
    return type(like)(*leaves) if hasattr(like, "_fields") else type(like)(leaves)  # type: ignore[call-arg]


def _map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a new structure of the same types of mapping, list and tuple, with ``change(leaf)`` per leaf. Local."""
    if isinstance(tree, Mapping):
        return _make_mapping(tree, {key: _map_leaves(leaf, change) for key, leaf in tree.items()})
    if isinstance(tree, (list, tuple)):
        return make_sequence(tree, [_map_leaves(leaf, change) for leaf in tree])
    return change(tree)


def _make_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a new mapping of the type of ``like`` with these items; if mutable, a copy of ``like``, updated. Local."""
    if not isinstance(like, MutableMapping):
        return type(like)(items)  # type: ignore[call-arg]
    new = copy(like)
    new.update(items)
    return new
