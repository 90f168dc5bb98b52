"""The state of a program's objects, as JSON and arrays. No pickle: a commit holds no code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import name_of
from ..checkpoint.header import parse_dtype
from ..errors import ValueMismatch, a_kind
from ..protocols import Array


class ObjectState(NamedTuple):
    """The functions that return an object's state, and give it a state back."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def find_state(name: str, kept: Any) -> ObjectState:
    """Return the state of an object that a program keeps under a name.

    >>> numbers = [1, 2]
    >>> get, put = find_state("numbers", numbers)
    >>> put([3])
    >>> numbers
    [3]
    """
    if isinstance(kept, tuple) and len(kept) == 2 and all(map(callable, kept)):
        return ObjectState(*kept)
    if isinstance(kept, np.random.Generator):
        bits = kept.bit_generator
        return ObjectState(lambda: bits.state, partial(setattr, bits, "state"))
    if isinstance(kept, random.Random):
        return ObjectState(kept.getstate, kept.setstate)
    if hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict"):
        return ObjectState(kept.state_dict, kept.load_state_dict)
    if isinstance(kept, (np.ndarray, dict, list)):
        return ObjectState(lambda: kept, partial(_refill, kept))
    raise TypeError(
        f"keep: {name} is {a_kind(kept)}, whose state cannot be put back into it; give an array, a dict, a list, a "
        "generator of numpy or of random, an object with state_dict() and load_state_dict(), or a pair of functions "
        "(get, set)"
    )


def _refill(target: Any, state: Any) -> None:
    """Give an array, a dict or a list its state back, in the arrays, dicts and lists that are in it."""
    if isinstance(target, np.ndarray):
        if not _are_alike(target, state):
            raise ValueMismatch(f"the array was {_show(state)} in the commit, and is {_show(target)} now")
        np.copyto(target, state)
    elif isinstance(target, dict):
        renewed = {key: _renew(target.get(key), value) for key, value in state.items()}
        target.clear()
        target.update(renewed)
    else:
        target[:] = [_renew(*pair) for pair in zip_longest(target[: len(state)], state)]


def _renew(old: Any, new: Any) -> Any:
    both = any(isinstance(old, kind) and isinstance(new, kind) for kind in (dict, list))
    if not both and not _are_alike(old, new):
        return new
    _refill(old, new)
    return old


def _are_alike(old: Any, new: Any) -> bool:
    arrays = isinstance(old, np.ndarray) and isinstance(new, np.ndarray)
    return arrays and (old.dtype, old.shape) == (new.dtype, new.shape)


def _show(array: Array) -> str:
    return f"{name_of(array.dtype)}{list(array.shape)}"


def encode(tree: Any, arrays: list[Array], where: str) -> Any:
    """Return a state in JSON's types; append its arrays to ``arrays``.

    >>> arrays = []
    >>> encode({"a": (1, np.arange(2))}, arrays, "x")
    {'dict': [['a', {'tuple': [1, {'array': ['int64', [2]]}]}]]}
    >>> arrays
    [array([0, 1])]

    Raises:
        TypeError: something of it, found at ``where``, is neither a number, a text, an array, None, nor a list, a tuple
            or a dict.
    """
    # numpy's numbers first: its float64 is a float, too.
    if isinstance(tree, np.generic):
        return {"number": encode(np.asarray(tree), arrays, where)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    # No masked array, whose mask would be lost.
    if type(tree) is np.ndarray and _is_of_numbers(tree.dtype):
        arrays.append(np.ascontiguousarray(tree))
        return {"array": [name_of(tree.dtype), list(tree.shape)]}
    if isinstance(tree, dict):
        pairs = tree.items()
        return {"dict": [[encode(each, arrays, f"{where}[{key!r}]") for each in (key, one)] for key, one in pairs]}
    if isinstance(tree, (list, tuple)):
        items = [encode(each, arrays, f"{where}[{number}]") for number, each in enumerate(tree)]
        return {"tuple": items} if isinstance(tree, tuple) else items
    what = a_kind(tree) + (f" of {tree.dtype!r}" if isinstance(tree, np.ndarray) else "")
    raise TypeError(
        f"keep: {where} is {what}, which no commit can hold; give a pair of functions (get, set) that turn the state "
        "into numbers, texts, arrays of numbers, None, and lists, tuples and dicts of them, and back"
    )


def _is_of_numbers(dtype: np.dtype[Any]) -> bool:
    return dtype.isnative and (dtype.kind in "biufc" or name_of(dtype) == "bfloat16")


def decode(tree: Any, take: Callable[[np.dtype[Any], Sequence[int]], Array]) -> Any:
    """Return a state from JSON's types; ``take`` returns its next array, of a dtype and shape."""
    if isinstance(tree, list):
        return [decode(each, take) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "array":
        return take(parse_dtype(inner[0]), inner[1])
    if kind == "number":
        return decode(inner, take)[()]
    if kind == "tuple":
        return tuple(decode(inner, take))
    return dict(decode(inner, take))
