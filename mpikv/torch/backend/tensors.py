"""Tensors as flat arrays, and what a reduction may do to them.

A dense tensor is shown in place. Any other is copied, and copied back where it receives. Numpy has no type for some
tensors: complex numbers are pairs of floats, and types that are only moved are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...arrays.arrays import bfloat16, name_of
from ...collectives import operations
from ...collectives.operations import Op, check_reduction
from ...errors import Unsupported
from ...protocols import Array

_WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_OF_NUMPY = {getattr(torch, name) for name in ("bool", *_WHOLE, "float16", "float32", "float64")}
# PyTorch's names of reductions that have another one here.
_OPS = {"AVG": Op.MEAN, "PREMUL_SUM": Op.SUM}
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Elements from which on PyTorch adds half precision faster than numpy, and the most per call: PyTorch shares out more
# among its threads, which may be busy with a backward pass.
_FEW, _BLOCK = 1 << 13, 1 << 15


def reduction_of(options: Any) -> tuple[Op, Any]:
    """Return the reduction that PyTorch's options name, by default the sum, and each term's factor or None. Local.

    The factor is a number or a tensor.

    Raises:
        KeyError: there is no such reduction here.

    >>> reduction_of(dist.ReduceOp.AVG)
    (<Op.MEAN: 'mean'>, None)
    """
    asked = getattr(options, "reduceOp", options)
    if asked is None or isinstance(asked, dist.ReduceOp.RedOpType):
        asked = dist.ReduceOp(dist.ReduceOp.SUM if asked is None else asked)
    kind, factor = asked.__getstate__()
    return _OPS.get(kind.name) or Op[kind.name], factor


def check_kinds(op: Op, tensors: Iterable[Any]) -> None:
    """Raise Unsupported unless there is the reduction ``op`` for the dtypes of all tensors. Local."""
    for kind in {tensor.dtype for tensor in tensors}:
        _check_kind(op, kind)


@cache
def _check_kind(op: Op, kind: Any) -> None:
    """Raise Unsupported unless there is the reduction ``op`` for tensors of dtype ``kind``. Cached. Local."""
    if kind in _OF_NUMPY or kind == torch.bfloat16:
        check_reduction(op, flat(torch.empty(0, dtype=kind)).dtype)
    elif not (kind.is_complex and op.adds):
        raise Unsupported(f"there is no {op.value} of {kind} here; convert the tensor first")


def describe(tensor: Any) -> str:
    """Return a tensor's dtype and shape as a text. Local.

    >>> describe(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def check_movable(tensor: Any) -> None:
    """Raise Unsupported unless a tensor lies on the host and has strides. Local.

    >>> check_movable(torch.zeros(2, device="meta"))
    Traceback (most recent call last):
    mpikv.errors.Unsupported: the backend 'mpikv' moves tensors of the host, and this one is on meta; ...
    """
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"the backend 'mpikv' moves tensors of the host, and this one is on {tensor.device}; for those of GPUs "
            "make a second group, dist.new_group(backend='nccl'), and pass it as group="
        )
    if tensor.layout != torch.strided:
        raise Unsupported(f"{tensor.layout} tensors have all_reduce with SUM alone here; use tensor.to_dense()")


def _check_writable(tensors: Iterable[Any]) -> None:
    """Raise Unsupported unless tensors to fill lie on the host, strided, and none is expanded (stride 0). Local."""
    for tensor in tensors:
        check_movable(tensor)
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise Unsupported(
                f"{describe(tensor)} is expanded: several of its elements lie in one place, so it cannot be filled; "
                "pass tensor.contiguous()"
            )


def _dense(tensor: Any, factor: Any) -> Any:
    """Return a tensor itself, or a dense copy of it, times a factor if there is one. Local."""
    if factor is not None:
        tensor = (tensor * factor).to(tensor.dtype)  # a factor with more bits would change it
    return tensor.resolve_conj().resolve_neg().contiguous()  # itself, if it is dense


def flat(tensor: Any) -> Array:
    """Return a flat array over a dense tensor's memory: of real pairs if complex, of bytes if numpy lacks its dtype.
    Local.

    >>> flat(torch.tensor([1j])).tolist()
    [0.0, 1.0]
    """
    row = tensor.detach().view(-1)
    if row.dtype not in _OF_NUMPY:
        if row.dtype == torch.bfloat16:
            return row.view(torch.int16).numpy().view(bfloat16())  # type: ignore[no-any-return]
        row = torch.view_as_real(row).view(-1) if row.is_complex() else row.view(torch.uint8)
    return row.numpy()  # type: ignore[no-any-return]


def read(tensor: Any, factor: Any = None) -> Array:
    """Return a tensor's elements times a factor, flat: its memory if that needs no copy. Unsupported off the host."""
    check_movable(tensor)
    return flat(_dense(tensor.detach(), factor))


def as_flat(tensors: Sequence[Any], factor: Any = None) -> tuple[list[Array], Callable[[], None]]:
    """Return a flat array for each tensor, and a function to call once they are filled. An array is over the tensor's
    memory; if that is not dense, or with a factor, it is a copy, and the function copies it back. Local.

    Raises:
        Unsupported: a tensor is not on the host, not strided, or expanded.
    """
    _check_writable(tensors)
    own = [tensor.detach() for tensor in tensors]
    dense = [_dense(tensor, factor) for tensor in own]
    copied = [(tensor, one) for tensor, one in zip(own, dense, strict=True) if one is not tensor]

    def put_back() -> None:
        """Overwrite the tensors that were copied by their copies. Local."""
        for tensor, one in copied:
            tensor.copy_(one)

    return [flat(one) for one in dense], put_back


def split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Return views of an array's parts of ``counts`` elements, one after the other. Local.

    >>> [part.tolist() for part in split(flat(torch.arange(3)), [1, 0, 2])]
    [[0], [], [1, 2]]
    """
    return [array[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def read_parts(operand: Any, size: int, factor: Any = None) -> list[Array]:
    """Return an array to read for each of ``size`` ranks: of a list of tensors, or of one in equal parts. Local."""
    if not isinstance(operand, torch.Tensor):
        return [read(tensor, factor) for tensor in operand]
    array = read(operand, factor)
    return split(array, [array.size // size] * size)


def join_parts(operand: Any, size: int) -> tuple[Array, list[int], Callable[[], None]]:
    """Return an array to receive ``size`` parts, the lengths of the parts, and a function to call then: it copies the
    array to ``operand``. For one dense tensor the array is over its memory. Local.

    The operand is a list of tensors, or one in equal parts.
    """
    if isinstance(operand, torch.Tensor):
        (array,), put_back = as_flat([operand])
        return array, [array.size // size] * size, put_back
    _check_writable(operand)
    numbers = [tensor.numel() for tensor in operand]
    whole = operand[0].detach().new_empty(sum(numbers))
    array = flat(whole)
    width = array.size // max(whole.numel(), 1)

    def put_back_each() -> None:
        """Overwrite each tensor of the list by its part of the array. Local."""
        for tensor, part in zip(operand, whole.split(numbers), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return array, [number * width for number in numbers], put_back_each


def combine(terms: Sequence[Array], out: Array, op: Op, size: int, in_pairs: bool = False) -> None:
    """Combine terms into ``out`` as :func:`~mpikv.collectives.operations.combine`, but sum half precision by PyTorch.

    >>> terms = list(np.random.default_rng(0).standard_normal((3, 100_000)).astype(np.float16))
    >>> for size in (2, 3):
    ...     out, expected = np.empty((2, 100_000), np.float16)
    ...     combine(terms[:size], out, Op.SUM, size)
    ...     operations.combine(terms[:size], expected, Op.SUM, size)
    ...     print((out == expected).all())
    True
    True
    """
    kind = _HALVES.get(name_of(out.dtype)) if op is Op.SUM and out.size >= _FEW and not in_pairs else None
    if kind is None or any(term.dtype != out.dtype for term in terms):
        operations.combine(terms, out, op, size, in_pairs)
        return
    rows = [torch.from_numpy(row.view(np.int16)).view(kind).split(_BLOCK) for row in (*terms, out)]
    for first, *others, into in zip(*rows, strict=True):
        if len(others) == 1:  # widened, added and rounded in one pass
            torch.add(first, *others, out=into)
            continue
        total = first.float()
        for other in others:
            total += other  # widened as it is added
        into.copy_(total)
