"""Bits of the codecs with two bits and one, made by hand from the rules of MXNet: what every implementation sends."""

import numpy as np

from mpikv import codecs

F32 = np.float32
ABOVE, BELOW = np.nextafter(F32(0.5), F32(1)), np.nextafter(F32(0.5), F32(0))


def one_in_each_byte(number, other, elements):
    """Return as many numbers as there are places in a byte for each byte, of which one, at a later place in each."""
    return [number if place % (elements + 1) == 0 else other for place in range(elements * elements)]


BITS = [
    # codec, gradient, payload, decoded, residual
    (
        codecs.TwoBit(0.5),
        [0.7, -0.6, 0.2, 0.5],
        "e3000000",
        [0.5, -0.5, 0, 0.5],
        [F32(0.7) - F32(0.5), F32(-0.6) + F32(0.5), F32(0.2), 0],
    ),
    (  # at, just above and just below the threshold, on both sides
        codecs.TwoBit(0.5),
        [0.5, ABOVE, BELOW, 0, -0.5, -ABOVE, -BELOW, -0.0],
        "f0a00000",
        [0.5, 0.5, 0, 0, -0.5, -0.5, 0, 0],
        [0, ABOVE - F32(0.5), BELOW, 0, 0, -ABOVE + F32(0.5), -BELOW, 0],
    ),
    # the masks of the four places of a byte
    (codecs.TwoBit(1), one_in_each_byte(1, 0, 4), "c0300c03", one_in_each_byte(1, 0, 4), [0] * 16),
    (codecs.TwoBit(1), one_in_each_byte(-1, 0, 4), "80200802", one_in_each_byte(-1, 0, 4), [0] * 16),
    # one step of the threshold for each push, however large
    (codecs.TwoBit(0.5), [100, -100], "e0000000", [0.5, -0.5], [99.5, -99.5]),
    # a 17th element begins another word, which ends in zeros
    (codecs.TwoBit(1), [0] * 16 + [2], "00000000c0000000", [0] * 16 + [1], [0] * 16 + [1]),
    (  # strictly above the threshold; 1 and -1 are sent, not the threshold
        codecs.OneBit(0.5),
        [0.5, ABOVE, BELOW, -3, 3, 0, 1.5, -0.5],
        "4a000000",
        [-1, 1, -1, -1, 1, -1, 1, -1],
        [1.5, ABOVE - F32(1), BELOW + F32(1), -2, 2, 1, 0.5, 0.5],
    ),
    (codecs.OneBit(0), [0.0, -0.0, 1e-30, -1e-30], "20000000", [-1, -1, 1, -1], [1, 1, -1, 1]),
    (codecs.OneBit(-1), [-1, -0.5, -2], "40000000", [-1, 1, -1], [0, -1.5, -1]),
    # the masks of the eight places of a byte
    (codecs.OneBit(0), one_in_each_byte(1, -1, 8), "8040201008040201", one_in_each_byte(1, -1, 8), [0] * 64),
    # zeros behind the last element
    (codecs.OneBit(0), [1] * 33, "ffffffff80000000", [1] * 33, [0] * 33),
]
