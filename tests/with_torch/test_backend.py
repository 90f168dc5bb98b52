"""The calls of the backend "mpikv" give what one process computes from the tensors of all ranks."""

import functools
import gc
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .training import is_too_old, torch

dist = torch.distributed
Op = dist.ReduceOp

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    is_too_old,
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


UFUNCS = {
    name: getattr(np, ufunc)
    for name, ufunc in {
        "PRODUCT": "multiply",
        "MIN": "minimum",
        "MAX": "maximum",
        "BAND": "bitwise_and",
        "BOR": "bitwise_or",
        "BXOR": "bitwise_xor",
    }.items()
}


@pytest.mark.parametrize("name", ["AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"])
def test_every_operation(group: Any, name: str) -> None:
    ufunc = UFUNCS.get(name, np.add)
    dtype = torch.int32 if name.startswith("B") else torch.float64
    rows = [numbers(rank, (400, 3), dtype) for rank in range(group.size())]
    expected = torch.from_numpy(functools.reduce(ufunc, [row.numpy() for row in rows]))
    op = dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(Op, name)
    expected = {"AVG": expected / group.size(), "PREMUL_SUM": expected * 0.5}.get(name, expected)
    mine = rows[group.rank()]
    dist.all_reduce(reduced := mine.clone(), op)
    assert torch.equal(reduced, expected)
    share = torch.empty_like(mine)
    dist.reduce_scatter(share, [mine] * group.size(), op)
    assert torch.equal(share, expected)
    assert torch.equal(mine, rows[group.rank()])


def test_parts_may_differ_in_size(group: Any) -> None:
    rank, size = group.rank(), group.size()
    outs = [torch.empty(other) for other in range(size)]
    dist.all_gather(outs, torch.full((rank,), float(rank)))
    assert [out.tolist() for out in outs] == [[float(other)] * other for other in range(size)]
    # Rank r sends r + 1 rows to each rank, and so receives other + 1 rows from each other one.
    rows = torch.full(((rank + 1) * size, 2), float(rank))
    out = torch.empty(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(out, rows, [other + 1 for other in range(size)], [rank + 1] * size)
    assert out[:, 0].tolist() == [float(other) for other in range(size) for _ in range(other + 1)]


def test_sparse_tensors_are_summed(group: Any) -> None:
    indices = torch.tensor([[group.rank(), 3]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mine = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)
    dist.all_reduce(mine)
    expected = torch.zeros(5, 2)
    for rank in range(group.size()):
        expected[rank] += values[0]
        expected[3] += values[1]
    assert torch.equal(mine.to_dense(), expected)


def test_objects_and_coalesced_calls(group: Any) -> None:
    rank, size = group.rank(), group.size()
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank})
    assert everybody == [{"rank": other, "text": "x" * other} for other in range(size)]
    told = [rank, "told"]
    dist.broadcast_object_list(told, src=size - 1)
    assert told == [size - 1, "told"]
    tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.float64)]
    with dist._coalescing_manager(async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    works.wait()
    assert all((tensor == size).all() for tensor in tensors)


def test_groups_of_some_ranks(group: Any) -> None:
    rank, size = group.rank(), group.size()
    first, last = dist.new_group(list(range(max(1, size - 1)))), dist.new_group([size - 1])
    for part in (first, last):
        if part is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(tensor := torch.ones(2), group=part)
            assert (tensor == part.size()).all()
            assert dist.get_process_group_ranks(part)[part.rank()] == rank
            dist.destroy_process_group(part)
    dist.barrier()


def test_a_future_has_the_result(group: Any) -> None:
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().tolist() == [2.0 * group.size()] * 2


def test_calls_are_made_in_the_order_of_issue(group: Any) -> None:
    """A function of a future makes calls of its own and waits for them, while later calls are queued."""
    seen = []

    def again(_: Any) -> int:
        dist.all_reduce(inner := torch.ones(1), async_op=True)
        dist.all_reduce(inner)
        seen.append(inner.item())
        return 0

    # The function is given before the next call is issued, as DDP does: given later, it may run after that call.
    calls = (dist.all_reduce(torch.full((100_000,), 1.0), async_op=True) for _ in range(4))
    futures = [call.get_future().then(again) for call in calls]
    assert [future.wait() for future in futures] == [0] * 4
    assert seen == [group.size() ** 2.0] * 4


def test_a_function_of_a_future_waits_for_a_message(group: Any) -> None:
    """Also in the thread that makes the queued calls: a message is in no queue."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()

    def receive(_: Any) -> Any:
        work = group.recv([into := torch.zeros(1)], left)
        threading.Timer(0.2, group.send, ([torch.full((1,), float(group.rank()))], right)).start()
        return work.wait() and into.item()

    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(2)]
    assert works[1].get_future().then(receive).wait() == left


def test_a_message_that_has_ended_keeps_no_tensor(group: Any) -> None:
    gc.disable()
    try:
        kept = weakref.ref(tensor := torch.zeros(3))
        works = [group.recv([tensor], group.rank(), 0), group.send([torch.ones(3)], group.rank(), 0)]
        while works:
            works.pop().wait()
        del tensor
        assert kept() is None
    finally:
        gc.enable()


def loss_of(model: Any, rank: int, size: int) -> Any:
    draw = torch.randn(12, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return model(draw[rank::size]).square().mean()


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=str,
)
def test_ddp_trains_as_one_process(group: Any, options: dict[str, Any]) -> None:
    model, alone = network(), network()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    for one, forward, size in ((model, wrapped, group.size()), (alone, alone, 1)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2 and forward is wrapped and not options:
                with wrapped.no_sync():
                    loss_of(forward, group.rank(), size).backward()
                optimizer.zero_grad()
            loss_of(forward, group.rank() if size > 1 else 0, size).backward()
            optimizer.step()
    for trained, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.deadline(60)  # the hooks import half of PyTorch
@pytest.mark.parametrize("name", ["fp16", "power_sgd"])
def test_ddp_with_a_hook_trains_as_over_gloo(group: Any, name: str) -> None:
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks")
    trained = []
    for backend in ("mpikv", "gloo"):
        part, model = dist.new_group(backend=backend), network().float()
        # One bucket: with several, gloo's threads make PowerSGD's calls in another order on each rank, and hang.
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=part)
        if name == "fp16":
            wrapped.register_comm_hook(part, hooks.default_hooks.fp16_compress_hook)
        else:
            state = hooks.powerSGD_hook.PowerSGDState(part, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
            wrapped.register_comm_hook(state, hooks.powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(lambda rows, forward=wrapped: forward(rows.float()), group.rank(), group.size()).backward()
            optimizer.step()
        trained.append([parameter.detach() for parameter in model.parameters()])
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
