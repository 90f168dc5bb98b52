"""The gradients of a model's parameters in the store's memory, and their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import Unsupported
from ..protocols import Array
from .tensors import tensor_over


class Gradient:
    """A parameter's gradient. After the first pass ``parameter.grad`` is the store's buffer."""

    __slots__ = ("array", "bucket", "buffer", "kind", "memory", "name", "parameter")

    def __init__(self, name: str, parameter: Any) -> None:
        """Note the parameter's dtype, shape and device; a :class:`Bucket` gives it a buffer later. Local."""
        self.name, self.parameter = name, parameter
        self.kind = _kind(parameter)
        self.array: Any = None
        """This rank's buffer of the key, once there is one."""
        self.memory: Any = None
        """A tensor over the buffer."""
        self.buffer: Any = None
        """The tensor for ``parameter.grad``, over the same memory; ``model.double()`` may give it other memory."""
        self.bucket: Bucket

    def stage(self, scale: float) -> bool:
        """Scale ``parameter.grad`` into the buffer, and set it to the buffer; if it is None, zero the buffer and return
        False. Before there is a buffer, only check the gradient. Local.

        The sum arrives in the buffer.

        Raises:
            Unsupported: the gradient cannot be summed.
        """
        if self.buffer is None:
            self.check()
            return True
        if self.memory.data_ptr() != self.array.ctypes.data:  # e.g. after model.share_memory()
            self.memory = tensor_over(self.array, self.parameter)
        grad, buffer = self.parameter.grad, self.buffer
        kept = buffer.data_ptr() == self.memory.data_ptr()
        if grad is buffer and kept:
            if scale != 1.0:
                grad.mul_(scale)
            return True
        if grad is None:
            self.memory.zero_()
            return False
        self.check()
        # Scale before the sum: in half precision the sum of all ranks could overflow, and the mean would not.
        torch.mul(grad, scale, out=self.memory)
        self.buffer = buffer if kept else self.memory.detach()
        self.parameter.grad = self.buffer
        return True

    def check(self) -> None:
        """Raise Unsupported unless there is a gradient to be summed, of the attached dtype, shape and device. Local."""
        grad = self.parameter.grad
        if grad is None:
            raise Unsupported(
                f"another hook removed the gradient of {self.name!r} before the exchange (an optimizer in backward "
                "does this); call optimizer.step when backward has returned"
            )
        if grad.layout != torch.strided:
            raise Unsupported(
                f"the gradient of {self.name!r} is sparse, and ranks would have to add up all of it; make it dense, as "
                "torch.nn.Embedding(sparse=False) does, or push rows: mpikv.RowSparse"
            )
        if grad.requires_grad:
            raise Unsupported(
                f"the gradient of {self.name!r} has a graph of its own (create_graph=True), lost in the exchange; "
                "call backward in no_sync() for it, or use torch.autograd.grad"
            )
        if _kind(grad) != self.kind:
            raise Unsupported(
                f"the gradient of {self.name!r} is {_form(_kind(grad))} and was {_form(self.kind)} when the model was "
                "attached; call detach(), and attach the model as it is now, with a new optimizer"
            )


class Bucket:
    """Gradients of one call."""

    def __init__(self, keys: Sequence[str], gradients: Sequence[Gradient], arrays: Sequence[Array]) -> None:
        """Give gradients this bucket, and buffers in the store, ``arrays``; leave ``parameter.grad``. Local."""
        self.keys, self.arrays = list(keys), list(arrays)
        self.gradients, self.missing = gradients, len(gradients)
        self.nbytes = sum(array.nbytes for array in arrays)
        for gradient, array in zip(gradients, arrays, strict=True):
            # Sums arrive in the array from now on. ``parameter.grad`` is not set yet.
            gradient.bucket, gradient.array = self, array
            gradient.memory = tensor_over(array, gradient.parameter)
            gradient.buffer = gradient.memory.detach()


def fill_buckets(gradients: Iterable[Gradient], first: int, most: int) -> list[list[Gradient]]:
    """Return the gradients in order, in groups of ``most`` bytes or just above, the first of ``first``. Local.

    The first one ends at ``first`` bytes, so that its exchange begins early.
    """
    groups: list[list[Gradient]] = []
    filled, room = 0, 0
    for gradient in gradients:
        if filled >= room:
            filled, room = 0, most if groups else min(first, most)
            groups.append([])
        groups[-1].append(gradient)
        filled += gradient.parameter.numel() * gradient.parameter.element_size()
    return groups


def _kind(tensor: Any) -> tuple[Any, Any, Any]:
    """Return a tensor's dtype, shape and device. Local."""
    return tensor.dtype, tensor.shape, tensor.device


def _form(kind: tuple[Any, Any, Any]) -> str:
    """Return a result of :func:`_kind` as a text for errors. Local."""
    dtype, shape, device = kind
    return f"{dtype}{list(shape)} on {device}"
