"""A loop of PyTorch that ends and starts again gives the bits of one that goes through."""

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.keep.state import find_state

from .training import torch

pytestmark = pytest.mark.ranks(1, 2, 3)


def make() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    parts = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(comm: Any, path: Path, total: int, how: str) -> tuple[int, Any]:
    """Return the number of steps made, and all that the next one depends on."""
    (model, optimizer, scheduler), made = make(), 0
    steps: Any = partial(mpikv.torch.steps, model=model, optimizer=optimizer)
    with ExitStack() as at_end:
        if how != "plain":
            kv = at_end.enter_context(mpikv.create(comm=comm, timeout=10))
            attached = mpikv.torch.attach(model, optimizer, kv=kv, update=how)
            at_end.callback(attached.detach)
            steps = attached.steps
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0 if comm is None else comm.rank)
        for _ in steps(total, path=path, scheduler=scheduler):
            inputs = torch.randn(16, 4) * (1 + random.random() + np.random.random())
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            made += 1
        state = [tensor.tolist() for tensor in model.state_dict().values()]
        return made, (state, torch.rand(1).item(), random.random(), np.random.random(), scheduler.get_last_lr())


@pytest.mark.parametrize("how", ["local", "store", "plain"])
@pytest.mark.feature("steps-of-torch")
def test_a_loop_goes_on(comm: Any, folder: Path, how: str) -> None:
    wanted = train(comm, folder / "whole", 5, how)
    assert train(comm, folder / "run", 3, how)[0] == 3
    assert train(comm, folder / "run", 5, how) == (2, wanted[1])


def test_kept_tensors_stay_the_same_objects(kv: Any, folder: Path) -> None:
    weight, average = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, dtype=torch.bfloat16)
    kv.init("w", np.zeros(2))
    kv.keep(weight=weight, other={"average": average, "step": 0})
    for _ in kv.steps(2, path=folder / "run"):
        weight.data += 1 + kv.rank
        average += 3
    with mpikv.create(comm=kv.comm, timeout=10) as again:
        weight.data.zero_()
        average.zero_()
        again.init("w", np.zeros(2))
        again.keep(weight=weight, other={"average": average, "step": 0})
        assert list(again.steps(2, path=folder / "run")) == []
        assert weight.tolist() == [2 + 2 * kv.rank] * 2
        assert average.tolist() == [6, 6]
    with pytest.raises(mpikv.ValueMismatch, match=r"was torch.float32\[2\] in the commit, and is torch.int64"):
        find_state("w", torch.zeros(2, dtype=torch.int64)).set(weight.detach())


def test_sums_of_gradients_are_in_no_checkpoint(kv: Any, folder: Path) -> None:
    model, optimizer, _ = make()
    kv.init("own", np.ones(2))
    attached = mpikv.torch.attach(model, optimizer, kv=kv)
    model(torch.ones(4, 4)).sum().backward()
    kv.save(folder / "own")
    with mpikv.create(comm=kv.comm) as other:
        other.load(folder / "own")
        assert other.keys() == ("own",)
    with pytest.raises(mpikv.Unsupported, match="is a key of sums of gradients, whose owner"):
        kv.steps(3, path=folder / "run")
    attached.detach()


@pytest.mark.ranks(2)
def test_a_failed_call_leaves_no_store_open(comm: Any) -> None:
    before = [*mpikv.store.kvstore.open_stores()]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(mpikv.Unsupported, match="has 1 ranks, and MPI 2"):
        mpikv.torch.steps(3)
    torch.distributed.destroy_process_group()
    assert mpikv.store.kvstore.open_stores() == before
