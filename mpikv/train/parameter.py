"""Parameters: named weights with their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator, address_of, castable, is_array, is_immutable, lies_on_host, local_sum, source
from ..engine.keys import flatten
from ..errors import ConfigError, ValueMismatch, a_kind
from ..memory.host import HOST, HostMemory
from ..options import check_choice
from ..protocols import Array, Gpu
from .array_location import Located, add_up, locate_source, locate_target

# Bound on numpy's search for common elements of two arrays, in candidate solutions (max_work).
_MOST_WORK = 100_000


class Parameter:
    """A weight that a :class:`mpikv.Trainer` updates in place, with its gradient. All methods are local.

    Args:
        data: the weight: a writable array of any library that shares memory, on the host or on a GPU. It is not copied.
        grad_req: ``write``: a new gradient replaces the last one. ``add``: it is added to the earlier ones, until
            :meth:`zero_grad`. ``null``: the weight is not trained.
        lr_mult: factor of the learning rate; None leaves it to the optimizer's ``lr_mult``.
        wd_mult: factor of the weight decay; None leaves it to the optimizer's ``wd_mult``.

    All but ``data`` are attributes; set them at any time, on every rank alike.

    Raises:
        TypeError: ``data`` is no array, or is not writable.
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
        # Not copied: the program and the Trainer see the same weight.
        self._located = _locate_writable(data)
        self._on_host = self._located.gpu is None
        self.data: Array = self._located.array
        """The weight, as an array over the given memory: numpy's, or on a GPU CuPy's."""
        self.grad_req = grad_req
        self.lr_mult, self.wd_mult = lr_mult, wd_mult
        self.fresh = False
        """Whether the gradient is newer than the last update. Set it after writing into :attr:`grad`."""
        self.summed = False
        """Whether the gradient is the sum over ranks, made by :meth:`mpikv.Trainer.allreduce_grads`."""
        self.used = False
        """Whether an update has used the gradient, with ``grad_req="add"``; call :meth:`zero_grad` before the next."""
        self.name = ""
        """The first name in a Trainer; empty before there is one."""
        self._grad: Array | None = None

    @property
    def title(self) -> str:
        """The parameter in words, for messages: by its name, if it has one."""
        return f"parameter {self.name!r}" if self.name else "a parameter"

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of the weight and its gradient; None for the host."""
        return self._located.gpu

    @property
    def memory(self) -> HostMemory | Gpu:
        """The memory of the weight's device; it makes and copies arrays."""
        return HOST if self.gpu is None else self.gpu

    @property
    def grad_req(self) -> str:
        """The use of a new gradient: ``write``, ``add`` or ``null``."""
        return self._grad_req

    @grad_req.setter
    def grad_req(self, request: str) -> None:
        """Set the use of new gradients; ConfigError for another word. Local."""
        self._grad_req = check_choice("grad_req", request, ("write", "add", "null"))

    @property
    def grad(self) -> Array | None:
        """The gradient, or None before there is one. Local.

        Setting an array keeps it without a copy, and :meth:`mpikv.Trainer.allreduce_grads` writes the sum over ranks
        into it. With ``grad_req="add"`` the array is copied or added. None discards the gradient. A gradient that is
        set counts as this rank's own, even if its array holds a sum over ranks. To change a sum, write
        ``parameter.grad[...] *= 2``.

        Raises:
            ValueMismatch: the shape or the device is not the weight's; or, with "add", the dtype is not cast to that
                of the weight, or of the earlier gradient.
            ConfigError: the earlier gradient is a sum over ranks, or was used by an update; call ``zero_grad()``
                before the next gradient.
        """
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        """Keep a gradient, uncopied, as fresh; with "add" copy it, or add it to earlier ones; None discards. Local."""
        if value is None:
            self.zero_grad()
            return
        if value is not self._grad:
            self._take(source(value) if self._on_host and type(value) is np.ndarray else self._locate(value))
        else:  # e.g. after  parameter.grad *= 2, or after the array was filled with another gradient
            self._check_addable()
            self.summed = False
        self.fresh = True

    def zero_grad(self) -> None:
        """Set :attr:`grad` to None, without writing zeros into the array; the next gradient starts anew. Local."""
        self._grad, self.fresh, self.summed, self.used = None, False, False, False

    def set_sum(self, gradients: Sequence[Any]) -> None:
        """Give :attr:`grad` the sum of several gradients, a new array, as for several names of one parameter. With
        "add" it is added to the earlier ones. Local.

        Raises:
            ValueMismatch: the shape, dtype or device of one does not fit.
        """
        arrays = [self._locate(gradient) for gradient in gradients]
        shape, dtype = self.data.shape, self.data.dtype
        for array in arrays:
            if array.shape != shape or not castable(array.dtype, dtype):
                raise ValueMismatch(
                    f"a gradient of shape {array.shape} and {array.dtype} does not fit {self.title} of shape {shape} "
                    f"and {dtype}"
                )
        self.grad = local_sum(arrays, dtype) if self.gpu is None else add_up(self.gpu, arrays, accumulator(dtype))

    def poison(self) -> None:
        """Overwrite the gradient's array, which is the caller's, by NaN. Local."""
        assert self._grad is not None
        if self.gpu is None:
            self._grad.fill(np.nan)
        else:
            self.gpu.scale((self._grad,), math.nan)

    def mark_used(self) -> None:
        """Note that an update has used the gradient: it is fresh no more, nor a sum unless ``grad_req`` is "add"."""
        self.fresh = False
        self.used = self._grad_req == "add"  # the next gradient must not be added to it
        self.summed = self.summed and self.used

    def _locate(self, gradient: Any) -> Array:
        """Return a gradient as an array on the weight's device, copied only for byte order; raise for others. Local."""
        found = locate_source(gradient)
        if found.where != self._located.where:
            raise ValueMismatch(
                f"the gradient is on {found.where} and {self.title} on {self._located.where}; copy the gradient there "
                "first"
            )
        return found.array

    def _take(self, array: Array) -> None:
        """Keep an array as the gradient, or with "add" copy or add it; raise if it does not fit. Leave ``fresh``.
        Local.
        """
        if array.shape != (shape := self.data.shape):
            raise ValueMismatch(f"a gradient of shape {array.shape} does not fit {self.title} of shape {shape}")
        if self._grad_req != "add":
            self._grad, self.summed = array, False
            return
        wanted = self.data.dtype if self._grad is None else self._grad.dtype
        # By castable, as numpy's "same_kind" would let integers wrap.
        if not castable(array.dtype, wanted):
            raise ValueMismatch(
                f"a gradient of {array.dtype} cannot be added up in {wanted} for {self.title}; cast it with astype"
            )
        if self._grad is None:
            # A copy: later gradients are added in place, and the caller's array must not change.
            self._grad = array.copy() if self.gpu is None else add_up(self.gpu, (array,), array.dtype)
        else:
            self._check_addable()
            self._add(self._grad, array)

    def _add(self, grad: Array, array: Array) -> None:
        """Add an array to the gradient in place, summed in the wider dtype; queued on a GPU. Local."""
        if self.gpu is None:
            np.add(grad, array, out=grad, casting="same_kind")
            return
        # As numpy's add does on the host, in the wider dtype, rounded once.
        widest = max(accumulator(grad.dtype), array.dtype, key=lambda dtype: dtype.itemsize)
        self.gpu.copy((grad,), (add_up(self.gpu, (grad, array), widest),))

    def _check_addable(self) -> None:
        """Raise ConfigError if ``grad_req`` is "add" and nothing can be added: the gradient is a sum, or was used."""
        if self._grad_req == "add" and (self.summed or self.used):
            what = "the sum over ranks" if self.summed else "used by an update already"
            raise ConfigError(f"a gradient cannot be added to one that is {what}; call zero_grad() after the update")

    def __repr__(self) -> str:
        grad = "none" if self._grad is None else "fresh" if self.fresh else "stale"
        return f"<mpikv.Parameter {self.data.shape} {self.data.dtype.name} grad_req={self._grad_req} gradient {grad}>"


def name_parameters(params: Any) -> dict[str, Parameter]:
    """Return the arrays of a nested dict as Parameters by sorted names, and name them; equal memory is one. Local.

    Raises:
        ConfigError: the dict is empty.
        ValueMismatch: two parameters share some, but not all, of their memory.
        TypeError: ``params`` is no such dict.
    """
    if not isinstance(params, Mapping):
        remedy = "; pass dict(model.named_parameters())" if hasattr(params, "named_parameters") else ""
        raise TypeError(f"params is a dict of names and arrays, not {a_kind(params)}{remedy}")
    names, values = flatten(params)
    if other := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"the name of a parameter is a str, not {a_kind(other[0])}: {other[0]!r}")
    if not names:
        raise ConfigError("a Trainer without parameters has nothing to train")
    known: dict[Any, Parameter] = {}
    named: dict[str, Parameter] = {}
    for name, value in sorted(zip(map(str, names), values, strict=True), key=itemgetter(0)):
        parameter = value if isinstance(value, Parameter) else Parameter(value)
        # Empty arrays may share an address, and are no ties of weights.
        place = id(value) if parameter is value or not parameter.data.size else parameter._located.extent
        named[name] = parameter = known.setdefault(place, parameter)
        parameter.name = parameter.name or name
    _check_overlap(first_names(named))
    return named


def first_names(named: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return each parameter once, by the first of its names. Local."""
    # Reversed, so that the first of several names stays.
    names = {parameter: name for name, parameter in reversed(list(named.items()))}
    return {name: parameter for name, parameter in named.items() if names[parameter] == name}


def _check_overlap(parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueMismatch if two parameters share elements, or may: both would update them. Local."""
    # As numpy sees the places, also of arrays on GPUs: only addresses count.
    outlines = {name: parameter._located.outline for name, parameter in parameters.items() if parameter.data.size}
    reaching: list[tuple[int, str]] = []
    for low, high, name in sorted((*_byte_bounds(outline), name) for name, outline in outlines.items()):
        # Sorted by their first byte: only earlier arrays that reach beyond it can overlap.
        reaching = [(end, other) for end, other in reaching if end > low]
        for _, other in reaching:
            # It also returns True if the layouts are too hard to compare. numpy's types lack max_work as an int.
            if np.may_share_memory(outlines[other], outlines[name], max_work=_MOST_WORK):  # type: ignore[arg-type]
                raise ValueMismatch(
                    f"parameters {other!r} and {name!r} overlap in memory, in part or as two objects; give one array "
                    "or one Parameter both names to tie them, or pass copies"
                )
        reaching.append((high, name))


def _byte_bounds(array: Array) -> tuple[int, int]:
    """Return the address of the first byte of an array, and the address after its last byte. Local."""
    start = address_of(array)
    spans = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    return start + sum(min(span, 0) for span in spans), start + sum(max(span, 0) for span in spans) + array.itemsize


def _locate_writable(data: Any) -> Located:
    """Return the caller's array with its GPU, to update in place; TypeError if it cannot be written. Local."""
    if isinstance(data, np.generic) or not is_array(data):
        raise TypeError(f"a parameter is an array, not {a_kind(data)}; pass numpy.array(value) and keep it")
    if not lies_on_host(data):
        return locate_target(data)
    if isinstance(data, np.ndarray) and not data.dtype.isnative:
        raise TypeError("a parameter in foreign byte order cannot be updated in place; pass value.astype(float)")
    array = source(data)
    if is_immutable(data) or not array.flags.writeable:
        raise TypeError(
            f"a parameter is updated in place, and this {type(data).__name__} is read-only; pass numpy.array(value)"
        )
    return Located(array, None)
