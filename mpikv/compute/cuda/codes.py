"""Elementwise codecs on a GPU: two bits, one bit, and half precision, with the bits of numpy.

One launch encodes, and reads and writes each residual once; one launch decodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...codecs import Bfloat16, Float16, OneBit, TwoBit
from ...codecs.feedback import ElementwiseFeedback
from ...codecs.options import SamePayloads
from ...protocols import Array
from .loading import argument_dtype, gpu_pointer, kernel

PART, THREADS = 1 << 12, 256
"""Elements per block, and threads per block."""
# The names of the codecs in codes.cu, and the bits of an element.
_CODES: dict[type[Any], tuple[str, int]] = {
    TwoBit: ("two_bits", 2),
    OneBit: ("one_bit", 1),
    Float16: ("float16_code", 16),
    Bfloat16: ("bfloat16_code", 16),
}


def has_code(codec: Any) -> bool:
    """Return whether there is a kernel for this codec. Local.

    >>> from mpikv import codecs
    >>> has_code(codecs.create("2bit")), has_code(codecs.create("topk"))
    (True, False)
    """
    return type(_inside(codec)) in _CODES  # not a subclass: its rule may differ


def _inside(codec: Any) -> Any:
    """Return the codec inside of error feedback, or the codec itself. Local."""
    return codec.codec if type(codec) is ElementwiseFeedback else codec


class CudaCodec(SamePayloads):
    """The CUDA form of an :class:`~mpikv.protocols.ElementwiseCodec`, with the same results as on the host.

    Arrays are CuPy's, contiguous, and of the codec's dtypes.

    Raises:
        TransportUnavailable: the kernels cannot be compiled here.
    """

    def __init__(self, codec: Any) -> None:
        """Compile or load the kernels of a codec for which :func:`has_code` is true, on the current GPU."""
        self.codec, self.feedback = codec, codec.feedback
        rule = _inside(codec)
        name, self._bits = _CODES[type(rule)]
        self._threshold = getattr(rule, "threshold", 0.0)
        # Names only: each GPU has its own kernel, looked up at each launch.
        self._encode, self._decode_add = (f"{verb}<{name}>" for verb in ("encode", "decode_add"))
        for expression in (self._encode, self._decode_add):
            kernel("codes.cu", expression)

    def encode(self, gradient: Array, payload: Array, residual: Array | None = None) -> None:
        """Queue an encoding into the payload: of the gradient, or with feedback of residual plus gradient; the error
        then replaces the residual. Local.
        """
        if gradient.size:
            given = self._given(residual, payload, gradient.size)
            given["gradient"] = gpu_pointer(gradient)
            kernel("codes.cu", self._encode)((self._blocks(payload),), (THREADS,), (given,))

    def decode_add(self, payload: Array, total: Array) -> None:
        """Queue the codec's decoding on the current stream: it adds the payload to ``total``. Local."""
        if total.size:
            given = self._given(total, payload, total.size)
            kernel("codes.cu", self._decode_add)((self._blocks(payload),), (THREADS,), (given,))

    def _given(self, numbers: Array | None, payload: Array, size: int) -> Array:
        """Return a launch's argument, a numpy record; ``numbers``: residual or total. The gradient's address is 0."""
        given = np.zeros(1, argument_dtype("codes.cu", "Codes"))
        numbers_at = 0 if numbers is None else gpu_pointer(numbers)
        given[0] = (0, numbers_at, gpu_pointer(payload), size, payload.size, self._threshold)
        return given

    def _blocks(self, payload: Array) -> int:
        """Return the number of blocks of a launch for this payload. Local."""
        return -(-payload.size * 8 // (self._bits * PART))
