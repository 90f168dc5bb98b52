"""The largest elements of a value, with their places.

With error feedback: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..options import number, store_checked_fields
from ..protocols import Array, Gather, Rounds


@dataclass(frozen=True)
class TopK:
    """Sends the elements of each value with the largest magnitude: 8 bytes for each of them.

    Of equal ones the first are sent. Each rank chooses its own.

    Args:
        ratio: the part of a value's elements, above 0 and up to 1, rounded up, so at least one. Default 0.01.

    Example:
        >>> import numpy as np
        >>> gradient = np.array([0.1, -3.0, 0.2, 2.0], np.float32)
        >>> rounds = TopK(ratio=0.5).exchange(gradient, (4,), {})
        >>> payload = next(rounds).payload
        >>> try:
        ...     rounds.send([payload, payload])  # of two ranks that had the same gradient
        ... except StopIteration as done:
        ...     total, own = done.value
        >>> total, own
        (array([ 0., -6.,  0.,  4.], dtype=float32), array([ 0., -3.,  0.,  2.], dtype=float32))
    """

    ratio: float = number(0.01, "(0, 1]")

    elementwise: ClassVar[Literal[False]] = False
    feedback: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        """Check the ratio, and store it as a float; ConfigError for a bad one."""
        store_checked_fields(self, "topk: ")

    def settings(self) -> str:
        """Return a text of the name and the option."""
        return f"topk(ratio={self.ratio!r})"

    def chosen(self, size: int) -> int:
        """Return the number of elements that are sent of a value of ``size`` elements."""
        # 0.07 * 100 is a little more than 7; without the rounding, ceil would make it 8.
        return min(max(math.ceil(round(self.ratio * size, 6)), 1), size)

    def state(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return {}: nothing is kept between pushes."""
        return {}

    def exchange(
        self, gradient: Array, shape: tuple[int, ...], state: Mapping[str, Array], residual: Array | None = None
    ) -> Rounds:
        """Yield one gather of the largest elements and their places; return the sum, and this rank's own term in it,
        both dense.
        """
        count = self.chosen(gradient.size)
        places = largest(gradient, count)
        # Places before numbers: both are then aligned.
        dtype = np.dtype(np.uint32 if gradient.size <= 1 << 32 else np.int64)
        middle = count * dtype.itemsize
        payload = np.empty(middle + 4 * count, np.uint8)
        payload[:middle].view(dtype)[:] = places
        payload[middle:].view(np.float32)[:] = gradient[places]
        total = np.zeros_like(gradient)
        for part in (yield Gather(payload)):
            # += with an index adds each place once: a rank sends no place twice.
            total[part[:middle].view(dtype)] += part[middle:].view(np.float32)
        own = np.zeros_like(gradient)
        own[places] = gradient[places]
        return total, own


def largest(values: Array, count: int) -> Array:
    """Return the indices of the ``count`` largest magnitudes, rising; of equal ones the first. No NaN may be inside.

    >>> import numpy as np
    >>> largest(np.array([1, -2, 2, 2], np.float32), 2)
    array([1, 2])
    """
    sizes = np.abs(values)
    if count >= values.size:
        return np.arange(values.size)
    # The smallest magnitude that is sent; of its equals, perhaps only some.
    bound = np.partition(sizes, values.size - count)[values.size - count]
    # All above the bound, and of its equals the first: every run chooses the same ones.
    above = np.flatnonzero(sizes > bound)
    equal = np.flatnonzero(sizes == bound)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))
