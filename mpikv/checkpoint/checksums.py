"""CRC-32 of a range of bytes of which each rank has some: everybody sums what it has, and the sums are put together.

The CRC-32 of a range is the exclusive or of what its parts contribute, and a part contributes its own CRC-32, carried
over the bytes that follow it in the range. This is zlib's ``crc32_combine``, which Python does not offer, for many
parts at once.

Source: Mark Adler, zlib, crc32.c.
"""

from __future__ import annotations

import numpy as np

from ..typing import Array

__all__ = ["contributions"]

# The polynomial of CRC-32 and x**8, one byte, modulo it; the highest bit is the coefficient of 1.
_POLYNOMIAL = np.uint32(0xEDB88320)
_BYTE = 1 << (31 - 8)


def contributions(sums: Array, following: Array) -> Array:
    """Return what parts contribute to the CRC-32 of their range.

    Args:
        sums: the CRC-32 of each part, uint32.
        following: how many bytes of the range follow each part.

    Example:
        >>> from zlib import crc32
        >>> first, second = contributions(np.array([crc32(b"check"), crc32(b"point")], np.uint32), np.array([5, 0]))
        >>> int(first ^ second) == crc32(b"checkpoint")
        True
    """
    carried = sums.astype(np.uint32)
    power = _BYTE
    for bit in range(int(following.max(initial=0)).bit_length()):
        chosen = (following >> bit & 1).astype(np.bool_)
        carried[chosen] = _product(power, carried[chosen])
        power = int(_product(power, np.array([power], np.uint32))[0])
    return carried


def _product(factor: int, sums: Array) -> Array:
    """Multiply polynomials modulo that of CRC-32."""
    product, shifted = np.zeros_like(sums), sums
    for bit in range(31, -1, -1):
        if factor >> bit & 1:
            product ^= shifted
        shifted = shifted >> np.uint32(1) ^ _POLYNOMIAL * (shifted & np.uint32(1))
    return product
