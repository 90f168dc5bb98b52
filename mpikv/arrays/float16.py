"""Half precision to float32 and back, as fast as numpy's vector instructions are.

numpy is built for any processor and converts float16 one by one; that takes twenty times as long as adding. Here every
step is one operation on a whole block of integers or float32, in the cache, and takes a quarter to half of that time. A
table of all halves takes twice as long as moving their bits. The bits are numpy's: nearest, ties to even. Blocks with
NaN, infinities, or numbers that round to infinity go to numpy. ml_dtypes converts bfloat16 fast enough.
"""

from __future__ import annotations

import threading

import numpy as np

from ..protocols.arrays import Array

# Elements per step: with input and output some 600 KB, so a step stays in the cache.
_BLOCK = 1 << 15
# Below, numpy's own conversion takes less time than a dozen calls.
_FEW = 8192

# A float16 with its bits shifted to float32's places is too small by the difference of the exponents' biases:
# 2 ** (127 - 15).
_SHIFT = 13
_MOVED = np.uint32(0x8FFFE000).view(np.int32)
_TOO_SMALL = np.float32(2.0**112)
_SMALLEST = np.float32(2.0**-149)
_NOT_FINITE = 0x7C00
# The smallest number that rounds to infinity: half a unit in the last place above 65504.
_TOO_LARGE = np.float32(65520)
_SMALLEST_NORMAL = np.float32(2.0**-14)
_EXPONENT = 0x7F800000
_LAST_PLACE = 13 << 23
_BIAS = -(126 << 10) & 0xFFFF


class _Scratch(threading.local):
    """Memory for temporary arrays, each thread's own."""

    def __init__(self) -> None:
        self.singles = np.empty(_BLOCK, np.float32)
        self.words, self.more_words = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.uint32)
        self.bits, self.negative = np.empty(_BLOCK, np.uint16), np.empty(_BLOCK, np.bool_)


_scratch = _Scratch()
# An array of one number: np.maximum of two arrays takes a quarter of the time of an array and a number.
_smallest_normals = np.full(_BLOCK, _SMALLEST_NORMAL)


def widen(halves: Array, out: Array) -> None:
    """Write float16 or bfloat16 numbers to ``out`` as float32. Both arrays are flat and of one size.

    >>> wide = np.empty(2, np.float32)
    >>> widen(np.array([0.1, -65504], np.float16), wide)
    >>> [float(each) for each in wide]
    [0.0999755859375, -65504.0]
    """
    if type(halves) is not np.ndarray or halves.dtype != np.float16 or halves.size < _FEW or subnormals_vanish():
        np.copyto(out, halves)
        return
    for low in range(0, halves.size, _BLOCK):
        _widen_float16(halves[low : low + _BLOCK], out[low : low + _BLOCK])


def subnormals_vanish() -> bool:
    """Return whether this thread's processor treats subnormal numbers as zero."""
    # Other libraries may set that at any time: torch's set_flush_denormal, and code compiled for speed alone. A float16
    # with shifted bits is subnormal on its way, and would be lost.
    return bool(_SMALLEST * _TOO_SMALL == 0)


def add_widened(total: Array, halves: Array) -> None:
    """Add float16 or bfloat16 numbers to ``total``, of float32. Both arrays are flat and of one size."""
    wide = _scratch.singles
    for low in range(0, halves.size, _BLOCK):
        part = total[low : low + _BLOCK]
        widen(halves[low : low + _BLOCK], wide[: part.size])
        np.add(part, wide[: part.size], out=part)


def narrow(singles: Array, out: Array) -> None:
    """Write float32 numbers to ``out``, rounded to float16 or bfloat16. Both arrays are flat and of one size.

    >>> half = np.empty(3, np.float16)
    >>> narrow(np.array([0.1, 65519, 2.0**-25], np.float32), half)
    >>> [float(each) for each in half]
    [0.0999755859375, 65504.0, 0.0]
    """
    if type(out) is not np.ndarray or out.dtype != np.float16 or singles.size < _FEW:
        np.copyto(out, singles, casting="unsafe")
        return
    for low in range(0, singles.size, _BLOCK):
        _narrow_float16(singles[low : low + _BLOCK], out[low : low + _BLOCK])


def _widen_float16(halves: Array, out: Array) -> None:
    """Write a block of float16 numbers to ``out`` as float32, by moving bits; numpy converts NaN and infinity."""
    magnitudes = np.bitwise_and(halves.view(np.uint16), 0x7FFF, out=_scratch.bits[: halves.size])
    if magnitudes.max() >= _NOT_FINITE:
        np.copyto(out, halves)
        return
    words = out.view(np.int32)
    np.copyto(words, halves.view(np.int16))  # the sign fills the upper half; the mask keeps one bit of it
    np.left_shift(words, _SHIFT, out=words)
    np.bitwise_and(words, _MOVED, out=words)
    np.multiply(out, _TOO_SMALL, out=out)


def _narrow_float16(singles: Array, out: Array) -> None:
    """Write a block of float32 numbers to ``out`` as float16, by moving bits; numpy converts NaN and infinity."""
    size, scratch = singles.size, _scratch
    magnitude = np.abs(singles, out=scratch.words[:size].view(np.float32))
    if not magnitude.max() < _TOO_LARGE:  # "not <", so NaN comes here too
        np.copyto(out, singles, casting="unsafe")
        return
    # Take the power of two with the ulp of the rounded half. The processor's addition to it rounds as required. The
    # difference of the two numbers' bits is the half's significand; its exponent is added. At last only the lower 16
    # bits are kept, which drops the exponent of the power of two.
    power = np.maximum(magnitude, _smallest_normals[:size], out=scratch.more_words[:size].view(np.float32))
    exponent = power.view(np.uint32)
    np.bitwise_and(exponent, _EXPONENT, out=exponent)
    np.add(exponent, _LAST_PLACE, out=exponent)
    np.add(magnitude, power, out=magnitude)
    np.right_shift(exponent, _SHIFT, out=exponent)
    significand = magnitude.view(np.uint32)
    np.add(significand, exponent, out=significand)
    bits = scratch.bits[:size]
    np.copyto(bits, significand, casting="unsafe")
    np.add(bits, _BIAS, out=bits)
    signed = out.view(np.uint16)
    np.copyto(signed, np.signbit(singles, out=scratch.negative[:size]))
    np.left_shift(signed, 15, out=signed)
    np.bitwise_or(signed, bits, out=signed)
