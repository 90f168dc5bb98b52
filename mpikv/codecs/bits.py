"""Two bits or one for each element, bit for bit as MXNet's: codes, their order in memory, thresholds, arithmetic.

=======  ==========================================================  ============================
codec    an element, with its residual                               decodes to
=======  ==========================================================  ============================
2bit     ``>= threshold``: 11; ``<= -threshold``: 10; else 00        threshold, -threshold, 0
1bit     ``> threshold``: 1; else 0                                  1, -1
=======  ==========================================================  ============================

The first element has the highest bits of the first byte. A payload has whole words of 4 bytes; the last one ends in
zeros. All arithmetic is float32, one operation at a time, so any implementation has the same bits.

One bit per element with error feedback: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", 2014. Two: Strom, "Scalable Distributed DNN Training Using Commodity
GPU Cloud Computing", 2015.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from ..options import check_float32
from ..protocols import Array
from .options import BLOCK


class _Codes(ABC):
    """The common part of codecs with fixed-length codes in bytes."""

    elementwise: ClassVar[Literal[True]] = True
    feedback: ClassVar[Literal[False]] = False
    per_byte: ClassVar[int]

    @abstractmethod
    def values(self) -> tuple[float, ...]:
        """Return the number that each code decodes to, in the order of the codes."""

    def nbytes(self, count: int) -> int:
        """Return the payload's size in bytes for ``count`` elements: whole words of 4 bytes."""
        return 4 * -(-count // (4 * self.per_byte))

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add to each element of ``total``, in place, the value of its code; bits behind the last are ignored."""
        for low in range(0, total.size, BLOCK):
            part = total[low : low + BLOCK]
            begin, count = low // self.per_byte, -(-part.size // self.per_byte)
            # Each byte is an index of the table of 256. "clip" checks none; the default would, and take a buffer.
            codes = payload[begin : begin + count]
            decoded = np.take(self.decoded, codes, axis=0, mode="clip")
            np.add(part, decoded.reshape(-1)[: part.size], out=part)

    @cached_property
    def decoded(self) -> Array:
        """The values of each byte's codes, ``(256, per_byte)``."""
        bits = 8 // self.per_byte
        # Made once per codec: one look-up then decodes four or eight elements.
        codes = np.arange(256)[:, None] >> np.arange(8 - bits, -1, -bits) & 2**bits - 1
        table: Array = np.array(self.values(), np.float32)[codes]
        return table


@dataclass(frozen=True)
class TwoBit(_Codes):
    """Sends the sign of elements of at least ``threshold`` in magnitude, and nothing else: 2 bits per element.

    Without :class:`~mpikv.codecs.ErrorFeedback` smaller elements are lost. With it they add up, and one threshold at a
    time is sent.

    Args:
        threshold: above 0, in the unit of the gradient; larger ones send less. Default 0.5.

    Example:
        >>> import numpy as np
        >>> codec, payload = TwoBit(0.5), np.empty(4, np.uint8)
        >>> codec.encode(np.array([0.7, -0.6, 0.2, 0.5], np.float32), payload)
        >>> payload[0] == 0b11_10_00_11
        np.True_
        >>> total = np.zeros(4, np.float32)
        >>> codec.decode_add(payload, total)
        >>> total
        array([ 0.5, -0.5,  0. ,  0.5], dtype=float32)
    """

    threshold: float = 0.5
    per_byte: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Store the threshold as a float, not rounded to float32; ConfigError for a bad one."""
        object.__setattr__(self, "threshold", check_float32("2bit: threshold", self.threshold, "(0, inf)"))

    def values(self) -> tuple[float, ...]:
        """Return the numbers that the codes 0 to 3 decode to: 0, 0 (not used), -threshold, threshold."""
        return 0.0, 0.0, -self.threshold, self.threshold

    def settings(self) -> str:
        """Return a text of the name and the threshold."""
        return f"2bit(threshold={self.threshold!r})"

    def encode(self, gradient: Array, payload: Array, residual: Array | None = None) -> None:
        """Write the codes of the gradient into the payload, zeros after them. The residual is not used."""
        threshold = np.float32(self.threshold)
        for low in range(0, gradient.size, BLOCK):
            part, words = gradient[low : low + BLOCK], payload[low // 4 : (low + BLOCK) // 4]
            whole = np.zeros(4 * words.size, np.uint8)  # the payload ends in zeros
            codes, below = whole[: part.size], (part <= -threshold).view(np.uint8)
            np.greater_equal(part, threshold, out=codes.view(np.bool_))
            # A comparison leaves 0 or 1 in each byte: 0b11 for above, 0b10 for below; both never meet.
            codes *= 3
            below *= 2
            codes |= below
            # Four codes become the lowest byte of a word. The product is a sum of shifted numbers without common bits:
            # the highest byte has the first code above the second, and so on.
            packed = whole.view("<u4")
            np.multiply(packed, 1 << 30 | 1 << 20 | 1 << 10 | 1, out=packed)
            packed >>= 24
            words[:] = packed


@dataclass(frozen=True)
class OneBit(_Codes):
    """Sends 1 for elements above ``threshold`` and -1 for all others: 1 bit per element.

    Useless without :class:`~mpikv.codecs.ErrorFeedback`: only feedback corrects the excess. Gradients should be
    of the order of 1 or smaller.

    Args:
        threshold: any finite number; it decides, but is not sent. Default 0.5, as MXNet's; 0 is the better choice for
            gradients of either sign.

    Example:
        >>> import numpy as np
        >>> codec, payload = OneBit(0.0), np.empty(4, np.uint8)
        >>> codec.encode(np.array([0.7, -0.6, 0.0], np.float32), payload)
        >>> payload[0] == 0b100_00000
        np.True_
        >>> total = np.zeros(3, np.float32)
        >>> codec.decode_add(payload, total)
        >>> total
        array([ 1., -1., -1.], dtype=float32)
    """

    threshold: float = 0.5
    per_byte: ClassVar[int] = 8

    def __post_init__(self) -> None:
        """Store the threshold as a float, not rounded to float32; ConfigError for a bad one."""
        object.__setattr__(self, "threshold", check_float32("1bit: threshold", self.threshold, "(-inf, inf)"))

    def values(self) -> tuple[float, ...]:
        """Return the numbers that the codes 0 and 1 decode to: -1 and 1."""
        return -1.0, 1.0

    def settings(self) -> str:
        """Return a text of the name and the threshold."""
        return f"1bit(threshold={self.threshold!r})"

    def encode(self, gradient: Array, payload: Array, residual: Array | None = None) -> None:
        """Write the codes of the gradient into the payload, zeros after them. The residual is not used."""
        threshold = np.float32(self.threshold)
        for low in range(0, gradient.size, BLOCK):
            packed = np.packbits(gradient[low : low + BLOCK] > threshold)
            words = payload[low // 8 : (low + BLOCK) // 8]
            words[: packed.size] = packed
            words[packed.size :] = 0
