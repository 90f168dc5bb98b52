"""The codecs of two bits and of one, with error feedback, on a GPU. The bits are those of numpy.

Encoding is one launch that reads and writes each residual once; so is decoding.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from ..codecs.bits import OneBit, TwoBit
from ..codecs.feedback import RangeFeedback
from ..errors import Unsupported
from ..typing import Array
from .loading import kernel

__all__ = ["CODES", "CudaRanges"]

CODES = np.dtype(
    [
        ("gradient", np.uintp),
        ("numbers", np.uintp),
        ("payload", np.uintp),
        ("size", np.int64),
        ("bytes", np.int64),
        ("threshold", np.float64),
    ],
    align=True,
)
"""What one launch is given: ``Codes`` of codes.cu."""

THREADS, MOST_BLOCKS = 256, 2048
_CODES = {TwoBit: "two_bits", OneBit: "one_bit"}


class CudaRanges:
    """A :class:`~mpikv.typing.RangeCodec` that does on a GPU what another one does.

    Arrays are CuPy's, contiguous, and of the dtypes that a codec is given.

    Raises:
        Unsupported: there is no kernel for the codec.
        TransportUnavailable: nothing can be compiled here.
    """

    elementwise: ClassVar[Literal[True]] = True
    feedback: ClassVar[Literal[True]] = True

    def __init__(self, codec: RangeFeedback) -> None:
        inside = codec.codec
        if not isinstance(inside, (TwoBit, OneBit)):
            raise Unsupported(
                f"the codec {codec.settings()} has no CUDA kernel (known: 1bit, 2bit, both with feedback)"
            )
        code = _CODES[type(inside)]
        self._codec, self._threshold = codec, inside.threshold
        self._encode, self._decode_add = (kernel("codes.cu", f"{verb}<{code}>") for verb in ("encode", "decode_add"))

    def settings(self) -> str:
        """Describe the codec, whose payloads are the same."""
        return self._codec.settings()

    def nbytes(self, count: int) -> int:
        """Return what the codec needs."""
        return self._codec.nbytes(count)

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Do what the codec does, on the present stream."""
        assert residual is not None
        given = self._given(residual, payload)
        given["gradient"] = _address(gradient)
        if payload.size:
            self._encode((_blocks(payload.size),), (THREADS,), (given,))

    def decode_add(self, payload: Array, total: Array) -> None:
        """Do what the codec does, on the present stream."""
        if total.size:
            self._decode_add((_blocks(total.size),), (THREADS,), (self._given(total, payload),))

    def _given(self, numbers: Array, payload: Array) -> Array:
        given = np.zeros(1, CODES)
        given[0] = (0, _address(numbers), _address(payload), numbers.size, payload.size, self._threshold)
        return given


def _address(array: Array) -> int:
    return int(array.data.ptr)  # type: ignore[attr-defined]


def _blocks(count: int) -> int:
    return min(-(-count // THREADS), MOST_BLOCKS)
