"""The state of a program's objects, and options, as JSON and arrays. No pickle: no file holds code."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from .. import schedules
from ..arrays.arrays import name_of
from ..errors import CheckpointError, ConfigError, a_kind, brief
from ..protocols import Array
from ..schedules import Schedule
from .header import parse_dtype


def encode(tree: Any, arrays: list[Array], where: str) -> Any:
    """Return a state in JSON's types, and append its arrays to ``arrays``; TypeError if it holds anything else. Local.

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
    form = tree.dtype if type(tree) is np.ndarray and tree.dtype.isnative else None
    if form and (form.kind in "biufc" or name_of(form) == "bfloat16"):
        arrays.append(np.ascontiguousarray(tree))
        return {"array": [name_of(form), list(tree.shape)]}
    if is_tensor(tree):
        # As bytes: numpy lacks some of torch's dtypes.
        flat = tree.detach().cpu().contiguous().reshape(-1)
        arrays.append(flat.view(sys.modules["torch"].uint8).numpy())
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape), arrays[-1].nbytes]}
    if isinstance(tree, Schedule) and getattr(schedules, type(tree).__name__, None) is type(tree):
        return {"schedule": [type(tree).__name__, encode(asdict(tree), arrays, where)]}
    if isinstance(tree, Mapping):
        return {"dict": [[encode(one, arrays, f"{where}[{pair[0]!r}]") for one in pair] for pair in tree.items()]}
    if isinstance(tree, (list, tuple)):
        items = [encode(each, arrays, f"{where}[{number}]") for number, each in enumerate(tree)]
        return {"tuple": items} if isinstance(tree, tuple) else items
    what = a_kind(tree) + (f" of {tree.dtype!r}" if isinstance(tree, np.ndarray) else "")
    raise TypeError(
        f"{where} is {what}, which no commit and no checkpoint can hold: they hold numbers, texts, arrays of numbers, "
        "tensors, None, and lists, tuples and dicts of them; kv.keep also takes a pair of functions (get, set) that "
        "turn a state into these, and back"
    )


def is_tensor(tree: Any) -> bool:
    """Return whether this is a dense torch tensor; False if torch was not imported. Local."""
    # Without an import, which takes seconds: a tensor's owner has made it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tree, torch.Tensor) and tree.layout == torch.strided


def decode(tree: Any, take: Callable[[np.dtype[Any], Sequence[int]], Array]) -> Any:
    """Return a state from JSON's types and its arrays: ``take`` returns these one by one, of a dtype and shape. Local.

    A forged one may raise any error.
    """
    if isinstance(tree, list):
        return [decode(each, take) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "array":
        return take(parse_dtype(inner[0]), inner[1])
    if kind == "tensor":
        return _make_tensor(take(np.dtype(np.uint8), [inner[2]]), *inner[:2])
    if kind == "number":
        return decode(inner, take)[()]
    if kind == "tuple":
        return tuple(decode(inner, take))
    if kind == "schedule":
        name, arguments = inner
        # The name comes from a file: it may name schedules only, and nothing else of that module.
        if name not in schedules.__all__:
            raise ValueError(f"no schedule is called {name!r}")
        return getattr(schedules, name)(**decode(arguments, take))
    if kind == "dict":
        return dict(decode(inner, take))
    raise ValueError(f"no kind of value is called {kind!r}")


def _make_tensor(memory: Array, dtype: str, shape: Sequence[int]) -> Any:
    """Return a new tensor with these bytes; ConfigError if torch is not imported. Local."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise ConfigError("this state has tensors; import torch before it is loaded")
    return torch.from_numpy(memory.copy()).view(getattr(torch, dtype)).reshape(shape)


def list_parts(tree: Any, where: str) -> list[memoryview]:
    """Return the bytes of a state, of its text and arrays, these not copied; TypeError as :func:`encode`. Local."""
    arrays: list[Array] = []
    text = json.dumps(encode(tree, arrays, where)).encode()
    # As bytes, whatever the dtype: bfloat16 has no buffer.
    parts = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return [memoryview(len(text).to_bytes(8, "little") + text), *parts]


def pack(tree: Any, where: str) -> Array:
    """Return a state as one new array of bytes; TypeError as :func:`encode`. Local."""
    return np.frombuffer(b"".join(list_parts(tree, where)), np.uint8)


def unpack(memory: Array, name: str, copies: bool = True) -> Any:
    """Return a state from its bytes; CheckpointError, with this ``name`` of it, if they hold none. Local.

    Its arrays are ``copies``, or else views of the memory, at any address there.

    Raises:
        CheckpointError: they are not those of a state, or it has tensors, and torch is not imported.
    """
    at = 8 + int.from_bytes(memory[:8].tobytes(), "little")

    def take(dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
        """Return the next array, and go on behind it. Local."""
        nonlocal at
        begin, at = at, at + dtype.itemsize * math.prod(shape)
        array = memory[begin:at].copy() if copies else memory[begin:at]
        return array.view(dtype).reshape(shape)

    with reading(name):
        return decode(json.loads(memory[8:at].tobytes()), take)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """In a with block: raise ValueError, TypeError and such as CheckpointError: a file may hold any bytes. Local."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the state {brief(repr(name), 40)} of the checkpoint cannot be read: {error}") from None
