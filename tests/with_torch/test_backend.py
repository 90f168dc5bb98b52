"""The calls of the backend "mpikv" give what one process computes from the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from mpikv.cluster.environment import free_port

from .training import torch

dist = torch.distributed
Op = dist.ReduceOp

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.skipif(not hasattr(dist.ProcessGroup, "abort"), reason="this PyTorch is older than 2.7"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PyTorch 2.13 renames calls
]

DTYPES = [getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool")]


def numbers(rank: int, shape: Any, dtype: Any = torch.float32) -> Any:
    """Return the tensor of a rank: small whole numbers, so that every order of addition gives the same bits."""
    generator = torch.Generator().manual_seed(rank)
    found = torch.randint(0, 4, shape, generator=generator)
    return torch.complex(found.float(), found.float() + rank) if dtype.is_complex else found.to(dtype)


class Job:
    """A call's operands, made alike for each group that makes it."""

    def __init__(self, group: Any, asynchronous: bool, shape: Any, dtype: Any, strided: bool) -> None:
        self.group, self.asynchronous, self.shape, self.dtype = group, asynchronous, shape, dtype
        self.rank, self.size, self.strided = group.rank(), group.size(), strided

    def mine(self, part: Any = None, of: int | None = None) -> Any:
        """Return this rank's tensor, or one of its several tensors."""
        found = numbers((self.rank if of is None else of) + 10 * (part or 0), self.shape, self.dtype)
        return self._lay(found)

    def empty(self) -> Any:
        return self._lay(torch.zeros(self.shape, dtype=self.dtype))

    def _lay(self, tensor: Any) -> Any:
        """Return a tensor with the same elements, and gaps between them if asked for."""
        if not self.strided:
            return tensor
        wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]

    def go(self, call: Callable[..., Any], *operands: Any, **options: Any) -> None:
        work = call(*operands, group=self.group, async_op=self.asynchronous, **options)
        if self.asynchronous:
            assert work.wait()
            assert work.is_completed()


def all_reduce(job: Job, **options: Any) -> Any:
    job.go(dist.all_reduce, tensor := job.mine(), **options)
    return [tensor]


def broadcast(job: Job) -> Any:
    job.go(dist.broadcast, tensor := job.mine(), src=job.size - 1)
    return [tensor]


def reduce(job: Job) -> Any:
    job.go(dist.reduce, tensor := job.mine(), dst=job.size - 1)
    return [tensor] if job.rank == job.size - 1 else []


def all_gather(job: Job) -> Any:
    job.go(dist.all_gather, outs := [job.empty() for _ in range(job.size)], job.mine())
    return outs


def all_gather_into_tensor(job: Job) -> Any:
    out = torch.zeros((job.size * job.shape[0], *job.shape[1:]), dtype=job.dtype)
    job.go(dist.all_gather_into_tensor, out, job.mine())
    return [out]


def reduce_scatter(job: Job, **options: Any) -> Any:
    job.go(dist.reduce_scatter, out := job.empty(), [job.mine(part) for part in range(job.size)], **options)
    return [out]


def reduce_scatter_tensor(job: Job) -> Any:
    whole = torch.cat([job.mine(part) for part in range(job.size)])
    job.go(dist.reduce_scatter_tensor, out := job.empty(), whole)
    return [out]


def all_to_all(job: Job) -> Any:
    outs = [job.empty() for _ in range(job.size)]
    job.go(dist.all_to_all, outs, [job.mine(part) for part in range(job.size)])
    return outs


def all_to_all_single(job: Job) -> Any:
    out = torch.zeros((job.size * job.shape[0], *job.shape[1:]), dtype=job.dtype)
    job.go(dist.all_to_all_single, out, torch.cat([job.mine(part) for part in range(job.size)]))
    return [out]


def gather(job: Job) -> Any:
    outs = [job.empty() for _ in range(job.size)] if job.rank == 0 else None
    job.go(dist.gather, job.mine(), outs, dst=0)
    return outs or []


def scatter(job: Job) -> Any:
    ins = [job.mine(part) for part in range(job.size)] if job.rank == 0 else None
    job.go(dist.scatter, out := job.empty(), ins, src=0)
    return [out]


def total(tensors: list[Any]) -> Any:
    stacked = torch.stack(tensors)
    exact = stacked if stacked.is_complex() else stacked.double()
    return exact.sum(0).to(stacked.dtype)


EXPECTED: dict[Callable[..., Any], Callable[[Job, Callable[..., Any]], Any]] = {
    all_reduce: lambda job, of: [total([of(rank) for rank in range(job.size)])],
    broadcast: lambda job, of: [of(job.size - 1)],
    reduce: lambda job, of: [total([of(rank) for rank in range(job.size)])] * (job.rank == job.size - 1),
    all_gather: lambda job, of: [of(rank) for rank in range(job.size)],
    all_gather_into_tensor: lambda job, of: [torch.cat([of(rank) for rank in range(job.size)])],
    reduce_scatter: lambda job, of: [total([of(rank, job.rank) for rank in range(job.size)])],
    reduce_scatter_tensor: lambda job, of: [total([of(rank, job.rank) for rank in range(job.size)])],
    all_to_all: lambda job, of: [of(rank, job.rank) for rank in range(job.size)],
    all_to_all_single: lambda job, of: [torch.cat([of(rank, job.rank) for rank in range(job.size)])],
    gather: lambda job, of: [of(rank) for rank in range(job.size)] * (job.rank == 0),
    scatter: lambda job, of: [of(0, job.rank)],
}
"""What each call fills, from ``of(rank, part)``, the tensors of all ranks."""
REDUCTIONS = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)


@pytest.fixture
def group(comm: Any) -> Any:
    """Return the process group of all ranks, made by the first test."""
    if not dist.is_initialized():
        port, rank, size = (comm.bcast(free_port()), comm.rank, comm.size) if comm else (free_port(), 0, 1)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("mpikv", address, timedelta(seconds=15), rank=rank, world_size=size)
    return dist.group.WORLD


@pytest.fixture(scope="module", autouse=True)
def ended() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def check(call: Callable[..., Any], job: Job, **options: Any) -> None:
    def of(rank: int, part: int = 0) -> Any:
        return numbers(rank + 10 * part, job.shape, job.dtype)

    found, expected = call(job, **options), EXPECTED[call](job, of)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), (one, other)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("call", EXPECTED, ids=lambda call: call.__name__)
def test_a_call_of_any_size(group: Any, call: Any, asynchronous: bool, strided: bool) -> None:
    for shape in [(0,), (1,), (3, 5), (1 << 16, 3), (300_000,)]:
        check(call, Job(group, asynchronous, shape, torch.float32, strided))


@pytest.mark.parametrize("call", EXPECTED, ids=lambda call: call.__name__)
def test_a_call_of_any_type(group: Any, call: Any) -> None:
    for dtype in [*DTYPES, torch.complex64, *([] if call in REDUCTIONS else [torch.float8_e4m3fn])]:
        check(call, Job(group, False, (257,), dtype, strided=False))
