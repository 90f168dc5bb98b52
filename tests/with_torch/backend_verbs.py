"""Every call of the backend "mpikv", messages of pairs, groups of some ranks, and the end of one. For torchrun."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

fault = sys.argv[1] if len(sys.argv) > 1 else ""
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if fault == "late" and rank == 1:
    time.sleep(8)
try:
    dist.init_process_group("mpikv", timeout=timedelta(seconds=3 if fault else 60))
except Exception as error:
    print(f"rank {rank}: {type(error).__name__} {error}", flush=True)
    raise SystemExit(1) from None


def row(number: float) -> torch.Tensor:
    return torch.full((1000,), number)


def same(tensor: torch.Tensor, number: float) -> None:
    assert (tensor == number).all(), (tensor, number)


def collectives() -> None:
    total = size * (size + 1) / 2
    dist.all_reduce(t := row(rank + 1))
    same(t, total)
    dist.broadcast(t := row(rank), src=size - 1)
    same(t, size - 1)
    dist.reduce(t := row(rank + 1), dst=0)
    assert rank or (t == total).all()
    dist.all_gather(outs := [row(-1) for _ in range(size)], row(rank))
    dist.all_gather_into_tensor(whole := row(0).repeat(size), row(rank))
    for other, out in enumerate(outs):
        same(out, other)
        same(whole[1000 * other : 1000 * (other + 1)], other)
    dist.reduce_scatter_tensor(t := row(0), row(rank + 1).repeat(size))
    same(t, total)
    dist.all_to_all_single(t := torch.zeros(size), torch.full((size,), float(rank)))
    assert t.tolist() == list(range(size))
    dist.scatter(t := row(0), [row(other) for other in range(size)] if rank == 0 else None)
    same(t, rank)
    dist.gather(row(rank), outs if rank == 0 else None)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 10_000 * rank})
    assert [one["rank"] for one in objects] == list(range(size))  # type: ignore[index]
    dist.barrier()


def messages() -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for length in (1, 1000, 300_000):
        sends = [dist.P2POp(dist.isend, torch.full((length,), float(rank + tag)), right, tag=tag) for tag in (2, 1)]
        into = {tag: torch.zeros(length) for tag in (1, 2)}
        receives = [dist.P2POp(dist.irecv, tensor, left, tag=tag) for tag, tensor in into.items()]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        for tag, tensor in into.items():
            same(tensor, left + tag)
    if rank == 0:
        sources = {dist.recv(tensor := torch.zeros(3, 4).t()) for _ in range(size - 1)}
        assert sources == set(range(1, size))
        same(tensor, 5)
    else:
        dist.send(torch.full((3, 4), 5.0).t(), 0)
    wrong = dist.irecv(torch.zeros(3), left, tag=9)
    dist.send(torch.zeros(4), right, tag=9)
    with pytest.raises(ValueError, match=f"rank {left} has sent 16 bytes, which are lost"):
        wrong.wait()


def parts() -> None:
    for members in ([0, size - 1], list(range(size))):
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(t := row(1), group=group)
            same(t, len(members))
            dist.destroy_process_group(group)


def mistakes() -> None:
    with pytest.raises(RuntimeError, match="ranks disagree"):
        dist.all_reduce(torch.zeros(3 + (rank == 1)))
    dist.all_reduce(t := row(1))
    same(t, size)
    if size > 2:
        with pytest.raises(RuntimeError, match=r"new_group: rank \d makes a group of .*, and rank \d one of"):
            dist.new_group([0, 1] if rank == 0 else [*range(size)])


if fault in ("recv", "barrier"):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (lambda: dist.recv(row(0), 1), dist.barrier)[fault == "barrier" :]:
        try:
            call()
        except Exception as error:
            print(f"rank {rank}: {type(error).__name__} {error}", flush=True)
    raise SystemExit(1)
for verb in (collectives, messages, parts, mistakes):
    verb()
maps = Path("/proc/self/maps").read_text()
loaded = "libmpi" in maps, "mpi4py.MPI" in sys.modules
dist.destroy_process_group()
time.sleep(0.5 * (rank == 0))  # the others come first, to torchrun's store with the words of the group before
dist.init_process_group("mpikv")
collectives()
dist.destroy_process_group()
print(f"rank {rank}: all is well, MPI loaded {loaded}\n", end="", flush=True)  # in one write, as -u makes two
