"""A weight and its gradient, and whether the gradient is a new one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import accumulator, castable, is_array, is_immutable, lies_on_host, source
from .errors import ConfigError, ValueMismatch, a_kind, known_names
from .located import Located, added_up, readable, writable
from .typing import Array, Gpu

__all__ = ["Parameter"]

_REQUESTS = ("write", "add", "null")


class Parameter:
    """A weight that a :class:`mpikv.Trainer` updates in place, with its gradient. All of it is local.

    Args:
        data: the weight: an array of any library that shares memory, of the host or of a GPU, which can be written. It
            is not copied.
        grad_req: ``write``: a gradient that is given replaces the last one. ``add``: it is added to those before it,
            until :meth:`zero_grad`. ``null``: the weight is not trained.
        lr_mult: factor of the learning rate; None leaves it to the optimizer's ``lr_mult``.
        wd_mult: factor of the weight decay; None leaves it to the optimizer's ``wd_mult``.

    All but ``data`` are attributes that may be set at any time, on every rank alike.

    Raises:
        TypeError: ``data`` is no array, or one that cannot be written.
        ConfigError: ``grad_req`` is unknown.

    Example:
        >>> import mpikv, numpy as np
        >>> weight = mpikv.Parameter(np.zeros(2), grad_req="add")
        >>> weight.grad = np.ones(2)
        >>> weight.grad = np.ones(2)
        >>> weight.grad, weight.fresh
        (array([2., 2.]), True)
    """

    def __init__(
        self, data: Any, grad_req: str = "write", lr_mult: float | None = None, wd_mult: float | None = None
    ) -> None:
        self._located = _writable(data)
        self._on_host = self._located.gpu is None
        self.data: Array = self._located.array
        """The weight, as an array over the memory that was given: numpy's, or on a GPU CuPy's."""
        self.grad_req = grad_req
        self.lr_mult, self.wd_mult = lr_mult, wd_mult
        self.fresh = False
        """Whether the gradient has been given since the last update. Set it after writing into :attr:`grad`."""
        self.summed = False
        """Whether the gradient is the sum over ranks, which :meth:`mpikv.Trainer.allreduce_grads` makes of it."""
        self.used = False
        """Whether an update has used the gradient, with ``grad_req="add"``: :meth:`zero_grad` comes before the next."""
        self.name = ""
        """What a Trainer calls it first; empty before there is one."""
        self._grad: Array | None = None

    @property
    def titled(self) -> str:
        """What messages call it."""
        return f"parameter {self.name!r}" if self.name else "a parameter"

    @property
    def gpu(self) -> Gpu | None:
        """The GPU on which the weight lies, and its gradient; None for the host."""
        return self._located.gpu

    @property
    def outline(self) -> Array:
        """An array of numpy's that lies where the weight does, to compare places by; nothing may be read from it."""
        return self._located.outline

    @property
    def grad_req(self) -> str:
        """What becomes of a gradient: ``write``, ``add`` or ``null``."""
        return self._grad_req

    @grad_req.setter
    def grad_req(self, request: str) -> None:
        if request not in _REQUESTS:
            raise ConfigError(known_names("grad_req", request, _REQUESTS))
        self._grad_req = request

    @property
    def grad(self) -> Array | None:
        """The gradient, or None before there is one.

        An array that is set is kept, not copied, and :meth:`mpikv.Trainer.allreduce_grads` writes the sum over ranks
        into it; with ``grad_req="add"`` it is copied or added. None discards the gradient. One that is set is of this
        rank, even if it is the array that holds a sum over ranks: change a sum by ``parameter.grad[...] *= 2``.

        Raises:
            ValueMismatch: the shape is not the weight's, or it lies elsewhere.
            ConfigError: it is to be added to a sum over ranks, or to one that was used up; ``zero_grad()`` comes before
                the next gradient.
        """
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is None:
            self.zero_grad()
            return
        if value is not self._grad:
            self._take(source(value) if self._on_host and type(value) is np.ndarray else self.brought(value))
        else:  # as after  parameter.grad *= 2, or after it was filled with another gradient
            self._check_addable()
            self.summed = False
        self.fresh = True

    def zero_grad(self) -> None:
        """Discard the gradient: the next one is the first."""
        self._grad, self.fresh, self.summed, self.used = None, False, False, False

    def brought(self, gradient: Any) -> Array:
        """Return a gradient as an array where the weight lies, without a copy.

        Raises:
            ValueMismatch: it lies elsewhere.
            TypeError: it is no array.
        """
        found = readable(gradient)
        if found.where != self._located.where:
            raise ValueMismatch(
                f"a gradient on {found.where} for {self.titled} on {self._located.where}; copy it there first"
            )
        return found.array

    def _take(self, array: Array) -> None:
        if array.shape != self.data.shape:
            raise ValueMismatch(f"a gradient of shape {array.shape} for {self.titled} of shape {self.data.shape}")
        if self._grad_req != "add":
            self._grad, self.summed = array, False
        elif self._grad is None:
            self._grad = array.copy() if self.gpu is None else added_up(self.gpu, (array,), array.dtype)
        else:
            self._check_addable()
            self._add(self._grad, array)

    def _add(self, grad: Array, array: Array) -> None:
        if self.gpu is None:
            np.add(grad, array, out=grad, casting="same_kind")
            return
        if not castable(array.dtype, grad.dtype):
            raise ValueMismatch(f"a gradient of {array.dtype} was to be added to one of {grad.dtype}")
        widest = max(accumulator(grad.dtype), array.dtype, key=lambda dtype: dtype.itemsize)
        self.gpu.copy((grad,), (added_up(self.gpu, (grad, array), widest),))

    def _check_addable(self) -> None:
        if self._grad_req == "add" and (self.summed or self.used):
            what = "the sum over ranks" if self.summed else "used up by an update"
            raise ConfigError(f"a gradient was to be added to one that is {what}; call zero_grad() after the update")

    def __repr__(self) -> str:
        grad = "none" if self._grad is None else "fresh" if self.fresh else "stale"
        return f"<mpikv.Parameter {self.data.shape} {self.data.dtype.name} grad_req={self._grad_req} gradient {grad}>"


def _writable(data: Any) -> Located:
    if isinstance(data, np.generic) or not is_array(data):
        raise TypeError(f"a parameter is an array, not {a_kind(data)}; pass numpy.array(value) and keep it")
    if not lies_on_host(data):
        return writable(data)
    if isinstance(data, np.ndarray) and not data.dtype.isnative:
        raise TypeError("a parameter in foreign byte order cannot be updated in place; pass value.astype(float)")
    array = source(data)
    if is_immutable(data) or not array.flags.writeable:
        raise TypeError(
            f"a parameter is updated in place, and this {type(data).__name__} is read-only; pass numpy.array(value)"
        )
    return Located(array, None)
