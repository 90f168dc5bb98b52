"""A model's buffers, such as the running means of batch normalization, of which every rank takes the root's."""

from __future__ import annotations

from typing import Any

import torch

from ..store.kvstore import KVStore

__all__ = ["ModelBuffers"]


class ModelBuffers:
    """The buffers of a model, brought along by a sum to which the root alone contributes."""

    def __init__(self, kv: KVStore, prefix: str, model: Any) -> None:
        """Collective."""
        self._is_root = kv.is_root
        # By module and name: a module may put another tensor in the place.
        self._places = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._keys = [f"{prefix}*buffer{number}" for number in range(len(self._places))]
        self._zeros = [torch.zeros_like(buffers[name]) for buffers, name in self._places]
        if self._keys:
            kv.init(self._keys, self._zeros)

    def add_to(self, keys: list[str], values: list[Any], outs: list[Any]) -> None:
        """Add the buffers to the arguments of a ``pushpull``."""
        tensors = [buffers[name] for buffers, name in self._places]
        keys += self._keys
        values += tensors if self._is_root else self._zeros
        outs += tensors
