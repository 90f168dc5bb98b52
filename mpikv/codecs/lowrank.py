"""Matrices of low rank in place of a gradient: PowerSGD.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..options import count, store_checked_fields
from ..protocols import Array, Rounds, Sum


@dataclass(frozen=True)
class LowRank:
    """Sends two thin matrices with a product near the gradient, found by one step of the power method.

    A value of shape ``(n, a, b, …)`` is a matrix of n rows. A value that two matrices would not shrink, as a vector, is
    sent unchanged. The second matrix of a push starts the next one.

    Args:
        rank: columns of both matrices. Default 4.
        seed: all ranks draw the same first start from it.

    Example:
        >>> import numpy as np
        >>> gradient = np.outer([1, 2, 3], [1, 0, 1, 0]).astype(np.float32)  # of rank 1
        >>> codec = LowRank(rank=1)
        >>> rounds, summed = codec.exchange(gradient.ravel(), (3, 4), codec.state((3, 4)), None), None
        >>> try:
        ...     while True:
        ...         summed = rounds.send(summed).array  # of the only rank
        ... except StopIteration as done:
        ...     total, own = done.value
        >>> bool(np.allclose(total, gradient.ravel()))
        True
    """

    rank: int = count(4, low=1)
    seed: int = count(0)
    elementwise: ClassVar[Literal[False]] = False
    feedback: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        """Check both options; ConfigError for a bad one."""
        store_checked_fields(self, "lowrank: ")

    def settings(self) -> str:
        """Return a text of the name and the options."""
        return f"lowrank(rank={self.rank}, seed={self.seed})"

    def state(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return {'start': a random thin matrix}, equal on all ranks; {} if a value is sent unchanged. Local.

        It takes no message.
        """
        rows, columns = _sides(shape)
        # More columns than a side has cannot be orthogonal, and no fewer numbers need no factors.
        if self.rank > min(rows, columns) or (rows + columns) * self.rank >= rows * columns:
            return {}
        # Seeded by shape, not by key: all ranks draw the same start without a message.
        random = np.random.default_rng([self.seed, rows, columns])
        return {"start": random.standard_normal((columns, self.rank), np.float32)}

    def exchange(
        self, gradient: Array, shape: tuple[int, ...], state: Mapping[str, Array], residual: Array | None = None
    ) -> Rounds:
        """Yield two sums of thin matrices, and change ``state`` for the next push; return the value's sum,
        and this rank's own term in it.

        A value sent unchanged takes one sum.
        """
        if "start" not in state:
            total = yield Sum(gradient)
            return total, gradient
        matrix = gradient.reshape(_sides(shape))
        # The start is the same on all ranks, so the products can be summed.
        product = yield Sum((matrix @ state["start"]).reshape(-1))
        # Every rank factors the same summed bits on its own host; the columns are never exchanged.
        left = np.linalg.qr(product.reshape(-1, self.rank))[0]
        own = matrix.T @ left
        right = (yield Sum(own.reshape(-1))).reshape(own.shape)
        _start_next(state["start"], right)
        return (left @ right.T).reshape(-1), (left @ own.T).reshape(-1)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a value of this shape, seen as a matrix."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _start_next(start: Array, right: Array) -> None:
    """Overwrite ``start`` by the columns of ``right``, scaled to length 1; zero or infinite ones leave the old. Local.

    A column of zeros predicts nothing about the next gradient and would stay zero for ever: the old one remains.
    """
    lengths = np.sqrt(np.sum(np.square(right, dtype=np.float64), axis=0))
    known = np.isfinite(lengths) & (lengths > 0)
    start[:, known] = right[:, known] / lengths[known]
