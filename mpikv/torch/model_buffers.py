"""A model's buffers, such as the running means of batch normalization: every rank copies the root's."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import Unsupported
from ..store.kvstore import KVStore
from .tensors import init_sums


class ModelBuffers:
    """Copies the root's buffers by a sum with zeros from all other ranks: one row for each dtype."""

    def __init__(self, kv: KVStore, prefix: str, model: Any) -> None:
        """Find the model's buffers, and init a key of zeros for each dtype's sum; Unsupported if elements of one buffer
        share memory. The root's buffers travel later: by :meth:`add_to`, a ``pushpull``, :meth:`take`. Collective.
        """
        self._is_root = kv.is_root
        self._places: dict[Any, list[tuple[Any, str, str]]] = {}
        """For each dtype the buffers as (module's dict, name, full name): a module may replace a tensor later."""
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel():
                    whole = f"{path}.{name}".removeprefix(".")
                    _check_apart(whole, buffer)
                    self._places.setdefault(buffer.dtype, []).append((module._buffers, name, whole))
        self._lengths = {dtype: list(map(_length, self._tensors(dtype))) for dtype in self._places}
        self._rows = [torch.zeros(sum(lengths), dtype=dtype) for dtype, lengths in self._lengths.items()]
        """This rank's addends: zeros, but on the root."""
        self._outs = [torch.zeros_like(row) for row in self._rows]
        self._keys = [f"{prefix}*buffers/{dtype}" for dtype in self._places]
        if self._keys:
            init_sums(kv, prefix, self._keys, self._rows)

    def add_to(self, keys: list[str], values: list[Any], outs: list[Any]) -> None:
        """Append keys, addends and results to the lists of a ``pushpull``, on the root after copying its buffers to the
        addends; after that call comes :meth:`take`. Unsupported if a buffer's length has changed. Local.

        Raises:
            Unsupported: a buffer has another length than before.
        """
        for dtype, row in zip(self._places, self._rows, strict=True):
            tensors = self._tensors(dtype)
            if (found := list(map(_length, tensors))) != self._lengths[dtype]:
                raise self._fault(dtype, found)
            if self._is_root:
                # Only the root's row is filled: all others stay zero, and the sum over ranks is the root's.
                torch.cat([one.reshape(-1) for one in tensors], out=row)
        keys += self._keys
        values += self._rows
        outs += self._outs

    def take(self) -> None:
        """Copy the results of the ``pushpull`` to the buffers; the root's stay. Local."""
        if self._is_root:
            return
        for dtype, out in zip(self._places, self._outs, strict=True):
            # By .data, past autograd's version counter: a live graph has saved the buffers, and would refuse to run.
            tensors = [one.data for one in self._tensors(dtype)]
            parts = out.split(self._lengths[dtype])
            torch._foreach_copy_(tensors, [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])

    def _tensors(self, dtype: Any) -> list[Any]:
        """Return the present tensors, in order, of buffers that had this dtype at first; None for a lost one. Local."""
        return [buffers.get(name) for buffers, name, _ in self._places[dtype]]

    def _fault(self, dtype: Any, found: list[int]) -> Unsupported:
        """Return an Unsupported error about the first buffer of another length. Local."""
        changes = zip(self._places[dtype], self._lengths[dtype], found, strict=True)
        (_, _, name), before, now = next(change for change in changes if change[1] != change[2])
        return Unsupported(
            f"the buffer {name!r} has {now} elements, and had {before} when the model was attached; call detach(), and "
            "attach the model as it is now, or pass buffers='each', if ranks may have buffers of their own"
        )


def _length(buffer: Any) -> int:
    """Return a buffer's number of elements; 0 for None. Local."""
    return 0 if buffer is None else buffer.numel()


def _check_apart(name: str, buffer: Any) -> None:
    """Raise Unsupported if a dimension of this buffer, longer than 1, has stride 0, as after expand(): torch cannot
    fill it. Local.
    """
    if any(length > 1 and not stride for length, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        raise Unsupported(
            f"the buffer {name!r} has strides {buffer.stride()} for shape {tuple(buffer.shape)}, so that elements "
            "share memory; register tensor.clone(), or pass buffers='each', if ranks may have buffers of their own"
        )
