"""The reductions: how the elements of several ranks become one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator, add, add_in_pairs, name_of
from ..errors import Unsupported
from ..protocols import Array


class Op(Enum):
    """A reduction. Of booleans the sum is their logical or; integers wrap."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @property
    def adds(self) -> bool:
        """Whether transports can make this reduction as a sum: true of SUM and MEAN."""
        return self in (Op.SUM, Op.MEAN)


_UFUNCS: dict[Op, np.ufunc] = {Op.PRODUCT: np.multiply, Op.MIN: np.minimum, Op.MAX: np.maximum}
_UFUNCS |= {Op.BAND: np.bitwise_and, Op.BOR: np.bitwise_or, Op.BXOR: np.bitwise_xor}
_FUNCTIONS = {op: function.reduce for op, function in _UFUNCS.items()}
# Elements of half precision per step, so that the step stays in the cache.
_BLOCK = 1 << 15


def check_reduction(op: Op, dtype: np.dtype[Any]) -> None:
    """Raise Unsupported if numbers of this dtype have no such reduction. Local."""
    exact, name = dtype.kind in "biu", name_of(dtype)
    if op is Op.MEAN and exact:
        raise Unsupported(f"the mean of {name} is not {name}; take the sum, or convert to a floating-point dtype first")
    if op in (Op.BAND, Op.BOR, Op.BXOR) and not exact:
        raise Unsupported(f"{op.value} is for integers and booleans, not for {name}")
    if op in (Op.MIN, Op.MAX) and dtype.kind == "c":
        raise Unsupported(f"complex numbers have no order, and so no {op.value}")


def combine(terms: Sequence[Array], out: Array, op: Op, size: int, in_pairs: bool = False) -> None:
    """Write the reduction of terms to ``out``, half precision by float32; a mean is their sum over ``size``. Of a sum's
    terms, only one of the first two may be ``out``.

    It is rounded once. Terms have the dtype of ``out``. Those of half precision may be float32, if the first is not or
    all are. Sums go from the first term to the last, or ``in_pairs``.

    >>> out = np.empty(2)
    >>> combine([np.array([1.0, 2.0]), np.array([5.0, 4.0])], out, Op.MEAN, 2)
    >>> out
    array([3., 3.])
    """
    if accumulator(out.dtype) is out.dtype:
        _combine(terms, out, op, size, in_pairs)
        return
    wide = np.empty(min(out.size, _BLOCK), np.float32)
    for low in range(0, out.size, _BLOCK):
        part, total = out[low : low + _BLOCK], wide[: out.size - low]
        _combine([term[low : low + _BLOCK] for term in terms], total, op, size, in_pairs)
        np.copyto(part, total, casting="unsafe")


def _combine(terms: Sequence[Array], out: Array, op: Op, size: int, in_pairs: bool) -> None:
    """Write the reduction of terms to ``out``, in its dtype, as :func:`combine`; a mean is their sum over ``size``."""
    if op.adds:
        (add_in_pairs if in_pairs else add)(terms, 0, out.size, out)
        if op is Op.MEAN:
            np.divide(out, size, out=out)
    else:
        # A copy of all terms, since one of them may be the result.
        _FUNCTIONS[op](np.asarray(terms, out.dtype), out=out)
