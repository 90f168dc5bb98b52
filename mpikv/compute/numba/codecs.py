"""Codecs with error feedback as compiled loops: one pass over memory, with the bits of numpy.

A loop makes the float32 operations of :class:`~mpikv.codecs.ErrorFeedback` and its codec on each element, in the same
order. It has one signature: read-only and writable arrays use the same code.

The module imports numba; only ``kernels="numba"`` imports the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import numba
import numpy as np

from ...codecs.bits import OneBit, TwoBit
from ...codecs.casts import LARGEST_FLOAT16, Bfloat16, Float16
from ...codecs.feedback import ElementwiseFeedback
from ...codecs.options import SamePayloads
from ...protocols import Array, Codec, ElementwiseCodec
from .compiling import compile_cached
from .half_rules import CONVERTS, bfloat16_as_single, bfloat16_of, float16_as_single, float16_of

_SINGLE, _BYTE = numba.types.float32, numba.types.uint8
_READ_SINGLES, _READ_BYTES = (numba.types.Array(kind, 1, "C", readonly=True) for kind in (_SINGLE, _BYTE))
_ENCODE = numba.void(_READ_SINGLES, _BYTE[::1], _SINGLE[::1], _SINGLE)
_DECODE = numba.void(_READ_BYTES, _SINGLE[::1], _SINGLE[:, ::1])
# Elements per step: whole words of any payload, and their codes stay in the L1 cache.
_CHUNK = 1024


class _Loops(NamedTuple):
    encode: Callable[..., None]
    """``encode(gradient, payload, residual, bound)``; the bound is the threshold, or the largest float16."""
    decode_add: Callable[..., None]
    """``decode_add(payload, total, decoded)``; ``decoded`` is the codec's table of values per byte, or empty."""


def codec(given: Codec) -> Codec:
    """Return the compiled codec with the same payloads, or the codec itself if it has no loop."""
    if isinstance(given, ElementwiseFeedback) and type(given.codec) in _LOOPS:
        return CompiledRanges(given)
    return given


class CompiledRanges(SamePayloads):
    """The compiled form of an :class:`~mpikv.protocols.ElementwiseCodec`."""

    feedback: ClassVar[Literal[True]] = True

    def __init__(self, codec: ElementwiseFeedback) -> None:
        """Compile the loops, or load them from disk."""
        self.codec = codec
        loops = _LOOPS[type(codec.codec)]
        self._encode = compile_cached(loops.encode, _ENCODE)
        self._decode_add = compile_cached(loops.decode_add, _DECODE)
        self._bound = np.float32(getattr(codec.codec, "threshold", LARGEST_FLOAT16))
        self._decoded = getattr(codec.codec, "decoded", np.empty((0, 0), np.float32))

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Encode residual plus gradient into the payload; the encoding error replaces the residual (never None)."""
        self._encode(gradient, payload, residual, self._bound)

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add the decoded payload to ``total``, in place and in one pass."""
        self._decode_add(payload, total, self._decoded)


# --- Loops. Every number is float32: with a Python number, numba would compute in float64. The inner loops select and
# never branch, and their indices stay visibly inside the arrays; so LLVM vectorizes them.


def _encode_two_bits(gradient: Any, payload: Any, residual: Any, threshold: Any) -> None:
    """Write the codes of residual plus gradient into the payload, and leave the encoding error in the residual."""
    none = np.float32(0)
    codes = np.empty(_CHUNK, np.uint8)
    for low in range(0, residual.size, _CHUNK):
        left, added = residual[low : low + _CHUNK], gradient[low : low + _CHUNK]
        for i in range(left.size):
            kept = left[i] + added[i]
            above, below = kept >= threshold, kept <= -threshold
            left[i] = kept - (threshold if above else -threshold if below else none)
            codes[i] = above * 3 | below * 2
        codes[left.size :] = 0
        words = payload[low // 4 : (low + _CHUNK) // 4]
        for i in range(words.size):
            words[i] = codes[4 * i] << 6 | codes[4 * i + 1] << 4 | codes[4 * i + 2] << 2 | codes[4 * i + 3]


def _encode_one_bit(gradient: Any, payload: Any, residual: Any, threshold: Any) -> None:
    """Write the codes of residual plus gradient into the payload, and leave the encoding error in the residual."""
    one = np.float32(1)
    bits = np.empty(_CHUNK, np.uint8)
    for low in range(0, residual.size, _CHUNK):
        left, added = residual[low : low + _CHUNK], gradient[low : low + _CHUNK]
        for i in range(left.size):
            kept = left[i] + added[i]
            sent = one if kept > threshold else -one
            left[i] = kept - sent
            bits[i] = kept > threshold
        bits[left.size :] = 0
        words = payload[low // 8 : (low + _CHUNK) // 8]
        for i in range(words.size):
            high = bits[8 * i] << 7 | bits[8 * i + 1] << 6 | bits[8 * i + 2] << 5 | bits[8 * i + 3] << 4
            words[i] = high | bits[8 * i + 4] << 3 | bits[8 * i + 5] << 2 | bits[8 * i + 6] << 1 | bits[8 * i + 7]


def _add_two_bits(payload: Any, total: Any, table: Any) -> None:
    """Add to ``total`` the values of the payload's codes; ``table[byte]`` has the four values of a byte."""
    whole = total.size // 4
    for byte in range(whole):
        code = payload[byte]
        for i in range(4):
            total[4 * byte + i] += table[code, i]
    for i in range(total.size - 4 * whole):
        total[4 * whole + i] += table[payload[whole], i]


def _add_one_bit(payload: Any, total: Any, table: Any) -> None:
    """Add to ``total`` the values of the payload's codes; ``table[byte]`` has the eight values of a byte."""
    whole = total.size // 8
    for byte in range(whole):
        code = payload[byte]
        for i in range(8):
            total[8 * byte + i] += table[code, i]
    for i in range(total.size - 8 * whole):
        total[8 * whole + i] += table[payload[whole], i]


def _encode_bfloat16(gradient: Any, payload: Any, residual: Any, threshold: Any) -> None:
    """Write residual plus gradient, rounded, to the payload, the error to the residual; threshold is unused."""
    halves = payload.view(np.uint16)
    for i in range(residual.size):
        kept = residual[i] + gradient[i]
        half = np.uint16(bfloat16_of(kept))
        halves[i], residual[i] = half, kept - bfloat16_as_single(half)


def _add_bfloat16(payload: Any, total: Any, table: Any) -> None:
    """Add the payload to ``total``, in float32. The table is not used."""
    halves = payload.view(np.uint16)
    for i in range(total.size):
        total[i] += bfloat16_as_single(halves[i])


def _encode_float16(gradient: Any, payload: Any, residual: Any, largest: Any) -> None:
    """Write residual plus gradient, clipped and rounded, into the payload, and leave the error in the residual."""
    halves = payload.view(np.uint16)
    for i in range(residual.size):
        kept = residual[i] + gradient[i]
        half = float16_of(min(max(kept, -largest), largest))
        halves[i], residual[i] = half, kept - float16_as_single(half)


def _add_float16(payload: Any, total: Any, table: Any) -> None:
    """Add the payload to ``total``, in float32. The table is not used."""
    halves = payload.view(np.uint16)
    for i in range(total.size):
        total[i] += float16_as_single(halves[i])


_LOOPS: dict[type[ElementwiseCodec], _Loops] = {
    TwoBit: _Loops(_encode_two_bits, _add_two_bits),
    OneBit: _Loops(_encode_one_bit, _add_one_bit),
    Bfloat16: _Loops(_encode_bfloat16, _add_bfloat16),
}
if CONVERTS:
    _LOOPS[Float16] = _Loops(_encode_float16, _add_float16)
