"""Elementwise codecs without a kernel work on the host for a GPU."""

from __future__ import annotations

import numpy as np

from ..protocols import Array, ElementwiseCodec, Memory
from .options import SamePayloads


class HostFallback(SamePayloads):
    """An :class:`~mpikv.protocols.ElementwiseCodec` for GPU arrays that lets another one work on the host.

    It copies the inputs to the host, waits for them, and copies the results back.
    """

    def __init__(self, codec: ElementwiseCodec, memory: Memory) -> None:
        self.codec, self.feedback = codec, codec.feedback
        self._memory = memory

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Encode as the codec does."""
        # The codec writes on the host, and one copy moves the whole payload to the GPU.
        packed = np.empty(payload.size, np.uint8)
        left = None if residual is None else self._memory.to_host(residual)
        self.codec.encode(self._memory.to_host(gradient), packed, left)
        self._memory.copy([payload], [packed])
        if residual is not None and left is not None:
            self._memory.copy([residual], [left])

    def decode_add(self, payload: Array, total: Array) -> None:
        """Decode as the codec does."""
        summed = self._memory.to_host(total)
        self.codec.decode_add(self._memory.to_host(payload), summed)
        self._memory.copy([total], [summed])
