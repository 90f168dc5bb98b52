"""A model's buffers, such as the running means of batch normalization, of which every rank takes the root's."""

from __future__ import annotations

from typing import Any

import torch

from ..store.kvstore import KVStore

__all__ = ["ModelBuffers"]


class ModelBuffers:
    """The buffers of a model, brought along by a sum to which the root alone contributes: a row for each dtype."""

    def __init__(self, kv: KVStore, prefix: str, model: Any) -> None:
        """Collective."""
        self._kv, self._is_root = kv, kv.is_root
        self._places: dict[Any, list[tuple[Any, str]]] = {}
        """By dtype, the buffers' modules and names: a module may put another tensor in the place."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel():
                    self._places.setdefault(buffer.dtype, []).append((module._buffers, name))
        sizes = {dtype: sum(one.numel() for one in self._tensors(dtype)) for dtype in self._places}
        self._rows = [torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()]
        """What this rank contributes: zeros, but on the root."""
        self._outs = [torch.zeros_like(row) for row in self._rows]
        self._keys = [f"{prefix}*buffers/{dtype}" for dtype in sizes]
        if self._keys:
            kv.init(self._keys, self._rows)

    def release(self) -> None:
        """Give the store's memory back. Collective."""
        if self._keys:
            self._kv.delete(self._keys)

    def add_to(self, keys: list[str], values: list[Any], outs: list[Any]) -> None:
        """Add the buffers to the arguments of a ``pushpull``."""
        if self._is_root:
            for dtype, row in zip(self._places, self._rows, strict=True):
                torch.cat([one.reshape(-1) for one in self._tensors(dtype)], out=row)
        keys += self._keys
        values += self._rows
        outs += self._outs

    def take(self) -> None:
        """Give the buffers what the ``pushpull`` has brought."""
        if self._is_root:
            return
        for dtype, out in zip(self._places, self._outs, strict=True):
            # As data: a graph that is alive has saved the buffers, and would refuse to go on when they have changed.
            tensors = [one.data for one in self._tensors(dtype)]
            parts = out.split([one.numel() for one in tensors])
            torch._foreach_copy_(tensors, [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])

    def _tensors(self, dtype: Any) -> list[Any]:
        return [buffers[name] for buffers, name in self._places[dtype]]
