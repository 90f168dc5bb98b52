"""Half precision on the wire: two bytes per element, rounded to nearest, ties to even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..protocols import Array
from .options import BLOCK

# The largest finite float16. Without the clip, an element above it would become infinite, and its residual too.
LARGEST_FLOAT16 = 65504.0


class _Cast:
    """The common part of both casts."""

    elementwise: ClassVar[Literal[True]] = True
    feedback: ClassVar[Literal[False]] = False

    def nbytes(self, count: int) -> int:
        """Return the payload's size in bytes for ``count`` elements: two for each."""
        return 2 * count


@dataclass(frozen=True)
class Float16(_Cast):
    """Sends float16: 11 significant bits, from 6e-8 to 65504. Larger numbers are sent as the largest.

    With :class:`~mpikv.codecs.ErrorFeedback` the rest follows with later pushes.

    Example:
        >>> import numpy as np
        >>> codec, payload, total = Float16(), np.empty(4, np.uint8), np.zeros(2, np.float32)
        >>> codec.encode(np.array([0.1, 1e6], np.float32), payload)
        >>> codec.decode_add(payload, total)
        >>> [float(x) for x in total]
        [0.0999755859375, 65504.0]
    """

    def settings(self) -> str:
        """Return the text "fp16()"."""
        return "fp16()"

    def encode(self, gradient: Array, payload: Array, residual: Array | None = None) -> None:
        """Write the gradient into the payload, clipped to ±65504 and rounded to float16. The residual is not used."""
        halves = payload.view(np.float16)
        for low in range(0, gradient.size, BLOCK):
            part = gradient[low : low + BLOCK]
            halves[low : low + BLOCK] = np.clip(part, -LARGEST_FLOAT16, LARGEST_FLOAT16)

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add the payload's numbers to ``total`` in place, in float32."""
        np.add(total, payload.view(np.float16), out=total)


@dataclass(frozen=True)
class Bfloat16(_Cast):
    """Sends bfloat16: 8 significant bits, over all of float32's range. Needs no package.

    Example:
        >>> import numpy as np
        >>> codec, payload, total = Bfloat16(), np.empty(4, np.uint8), np.zeros(2, np.float32)
        >>> codec.encode(np.array([0.1, 1e20], np.float32), payload)
        >>> codec.decode_add(payload, total)
        >>> [float(x) for x in total]
        [0.10009765625, 9.972771014849226e+19]
    """

    def settings(self) -> str:
        """Return the text "bf16()"."""
        return "bf16()"

    def encode(self, gradient: Array, payload: Array, residual: Array | None = None) -> None:
        """Write the gradient into the payload, rounded to bfloat16. The residual is not used."""
        halves = payload.view(np.uint16)
        for low in range(0, gradient.size, BLOCK):
            bits = gradient[low : low + BLOCK].view(np.uint32)
            # Adds just below one half of the bits cut off, and one more if the last kept bit is odd: ties to even.
            rounded = np.right_shift(bits, 16)
            rounded &= 1
            rounded += 0x7FFF
            rounded += bits
            rounded >>= 16
            halves[low : low + BLOCK] = rounded

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add the payload's numbers to ``total`` in place, in float32."""
        halves = payload.view(np.uint16)
        for low in range(0, total.size, BLOCK):
            part = total[low : low + BLOCK]
            # A bfloat16 is the upper half of a float32.
            wide = halves[low : low + BLOCK].astype(np.uint32)
            wide <<= 16
            np.add(part, wide.view(np.float32), out=part)
