"""The state of a program's objects, and how it returns into them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.trees import is_tensor
from ..errors import ValueMismatch, a_kind


class ObjectState(NamedTuple):
    """The functions that return an object's state, and give it a state back."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    owner: object = None
    """The owner of sums of gradients in the store; this state has its weights."""
    after: Callable[[], object] = lambda: None
    """Called when all ranks have restored. Collective."""
    draws: bool = False
    """Whether it is that of generators: on another number of ranks they may start anew, and nothing else may."""


def find_state(name: str, kept: Any) -> ObjectState:
    """Return an ObjectState of an object, array, dict or list: how to get and set its state; TypeError without. Local.

    >>> numbers = [1, 2]
    >>> find_state("numbers", numbers).set([3])
    >>> numbers
    [3]
    """
    if hasattr(kept, "object_state"):
        return ObjectState(*kept.object_state())
    if isinstance(kept, tuple) and len(kept) == 2 and all(map(callable, kept)):
        return ObjectState(*kept)
    if isinstance(kept, np.random.Generator):
        bits = kept.bit_generator
        return ObjectState(lambda: bits.state, partial(setattr, bits, "state"), draws=True)
    if isinstance(kept, random.Random):
        return ObjectState(kept.getstate, kept.setstate, draws=True)
    if hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict"):
        return ObjectState(kept.state_dict, kept.load_state_dict)
    if isinstance(kept, (dict, list)) or _is_array(kept):
        return ObjectState(lambda: kept, partial(_refill, kept))
    raise TypeError(
        f"keep: {name} is {a_kind(kept)}, whose state cannot be put back into it; give an array, a tensor, a dict, a "
        "list, a generator of numpy or of random, an object with state_dict() and load_state_dict(), or a pair of "
        "functions (get, set)"
    )


def _refill(target: Any, state: Any) -> None:
    """Give an array, tensor, dict or list its state back in place; ValueMismatch if it is an array of another form."""
    if _is_array(target):
        if not _are_alike(target, state):
            raise ValueMismatch(f"the array was {_show(state)} in the commit, and is {_show(target)} now")
        # In place, which a tensor with gradients allows by this alias only.
        getattr(target, "detach", lambda: target)()[...] = state
    elif isinstance(target, dict):
        renewed = {key: _renew(target.get(key), value) for key, value in state.items()}
        target.clear()
        target.update(renewed)
    else:
        target[:] = [_renew(*pair) for pair in zip_longest(target[: len(state)], state)]


def _renew(old: Any, new: Any) -> Any:
    """Refill the old array, tensor, dict or list in place, and return it; if the new one is not alike, return that."""
    both = any(isinstance(old, kind) and isinstance(new, kind) for kind in (dict, list))
    if not both and not _are_alike(old, new):
        return new
    _refill(old, new)
    return old


def _are_alike(old: Any, new: Any) -> bool:
    """Return whether both are arrays or tensors, with the same dtype and shape."""
    return _is_array(old) and _is_array(new) and _show(old) == _show(new)


def _is_array(kept: Any) -> bool:
    """Return whether this is a numpy array or a tensor."""
    return isinstance(kept, np.ndarray) or is_tensor(kept)


def _show(array: Any) -> str:
    """Return an array's dtype and shape as a text."""
    # A tensor's dtype begins with torch.
    return f"{array.dtype}{list(array.shape)}"
