"""Clipping of all gradients by their common norm, and scaling of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..optimizers import BLOCK
from ..optimizers.parts import sum_of_squares
from ..options import check_number, check_whole
from ..protocols import Array, Gpu
from .array_location import locate_target
from .parameter import Parameter

Item = TypeVar("Item")

_MOST = 2.0**64


def clip_global_norm(arrays: Iterable[Any], max_norm: float) -> float:
    """Scale arrays in place if their common 2-norm is finite and above ``max_norm``; return the norm before. Local.

    Call it between :meth:`mpikv.Trainer.allreduce_grads` and :meth:`mpikv.Trainer.update`. There the gradients are sums
    over ranks and equal on every rank; so are the norm and the result. They are not divided by the batch size yet, nor
    with ``average=True`` by the number of ranks. To bound the mean gradient, multiply ``max_norm`` by both.

    Args:
        arrays: writable arrays of floats, on the host or on GPUs, of any shapes. An array given several times, such as
            the gradient of a shared parameter, counts once. None, for a parameter without a gradient, does not count.
        max_norm: the bound, above 0.

    A GPU computes the sums of squares and the scaling on the current stream; the host waits for the sums, some bytes
    for each array. Sums and results have the same bits as on the host.

    Returns:
        The norm, computed in float64. If it is inf or nan, the arrays stay as they are.

    Raises:
        ConfigError: ``max_norm`` is not a number above 0.
        TypeError: an array cannot be written.
        Unsupported: an array on a GPU is not of floats.

    References: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks, ICML 2013.

    Example:
        >>> import mpikv, numpy as np
        >>> gradients = [np.array([3.0, 0.0]), np.array([[4.0]])]
        >>> mpikv.clip_global_norm(gradients, 1.0)
        5.0
        >>> gradients[0].round(6), gradients[1].round(6)
        (array([0.6, 0. ]), array([[0.8]]))
    """
    check_number("max_norm", max_norm, "(0, inf)")
    # By their places: of an array that is there twice the squares would count twice.
    given = map(locate_target, (array for array in arrays if array is not None))
    there = _by_gpu((gpu, array) for array, gpu in {each.extent: each for each in given}.values())
    here = there.pop(None, [])
    with np.errstate(all="ignore"):
        squares = [_sum_squares(array) for array in here]
        for gpu, some in there.items():
            squares += [each for each, _ in gpu.squares_and_finite(some, [array.dtype for array in some])]
        # fsum rounds once: the norm has the same bits whatever the order of the arrays.
        norm = math.sqrt(math.fsum(squares))
        if math.isfinite(norm) and norm > max_norm:
            for array in here:
                # In float64: half precision would round a small factor to few digits, or to zero.
                np.multiply(array, max_norm / norm, out=array, dtype=np.float64, casting="unsafe")
            for gpu, some in there.items():
                gpu.scale(some, max_norm / norm)
    return norm


def _by_gpu(pairs: Iterable[tuple[Gpu | None, Item]]) -> dict[Any, list[Item]]:
    """Return a dict of lists: the items by their GPU; the host's are under None. Local."""
    groups: dict[Any, list[Item]] = {}
    for gpu, item in pairs:
        groups.setdefault(gpu, []).append(item)
    return groups


def _sum_squares(array: Array) -> float:
    """Return the sum of an array's squares in float64, block by block. Local."""
    # BLAS's result depends on the number of threads. The square of a large half is infinite in its own dtype.
    flat, wide = array.reshape(-1), np.empty(BLOCK)
    return sum(sum_of_squares(flat[start : start + BLOCK], wide) for start in range(0, flat.size, BLOCK))


class LossScaler:
    """A factor of the loss; it keeps small gradients of half precision from becoming zero.

    Multiply the loss by :attr:`loss_scale`. A :class:`mpikv.Trainer` with this ``loss_scaler=`` divides the gradients
    by it, and asks all ranks whether one of them found an inf or a nan. If so, no rank makes the update, and the factor
    is halved. After ``window`` updates without one, it is doubled. Without a Trainer, ask the ranks by
    :meth:`mpikv.KVStore.any_rank`, and call :meth:`record` with the answer.

    Args:
        loss_scale: the first factor, from 2**-64 to 2**64; later ones stay in these bounds, too.
        window: updates before it is doubled.

    References: Micikevicius et al., Mixed precision training, ICLR 2018.

    Example:
        >>> import mpikv, numpy as np
        >>> scaler = mpikv.LossScaler(8.0, window=2)
        >>> for overflow in (True, False, False):
        ...     scaler.record(overflow)
        ...     print(scaler.loss_scale)
        4.0
        4.0
        8.0
    """

    def __init__(self, loss_scale: float = 2.0**16, window: int = 2000) -> None:
        self.loss_scale = check_number("loss_scale", loss_scale, f"[{1 / _MOST}, {_MOST}]", ": from 2**-64 to 2**64")
        """The current factor."""
        self._window, self._without = check_whole("window", window, 1), 0

    def state_dict(self) -> dict[str, float]:
        """Return a dict of the factor, and the number of updates since an overflow. Local."""
        return {"loss_scale": self.loss_scale, "without": self._without}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the factor, and the updates since an overflow, from a result of :meth:`state_dict`. Local."""
        self.loss_scale, self._without = state["loss_scale"], int(state["without"])

    def has_overflow(self, parameters: Iterable[Parameter]) -> bool:
        """Return whether a gradient holds an inf or nan, or would in the dtype of its weight; wait for GPUs. Local."""
        there = _by_gpu((p.gpu, (p.grad, p.data.dtype)) for p in parameters if p.grad is not None)
        with np.errstate(all="ignore"):
            if not all(np.isfinite(array.astype(dtype, copy=False)).all() for array, dtype in there.pop(None, [])):
                return True
        for gpu, some in there.items():
            # Integers and booleans are finite, whatever their rounding.
            floats = [pair for pair in some if pair[0].dtype.kind not in "biu"]
            found = gpu.squares_and_finite([array for array, _ in floats], [dtype for _, dtype in floats])
            if not all(finite for _, finite in found):
                return True
        return False

    def record(self, overflow: bool) -> None:
        """Halve the factor after an overflow; double it after each ``window`` results without one. Local."""
        self._without = 0 if overflow else self._without + 1
        if overflow:
            self.loss_scale = max(self.loss_scale / 2, 1 / _MOST)
        elif self._without % self._window == 0:
            self.loss_scale = min(self.loss_scale * 2, _MOST)
