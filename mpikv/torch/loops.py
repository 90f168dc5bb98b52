"""Loops of steps in PyTorch's programs, for restarts after a death."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from ..creation import create
from ..errors import Unsupported
from .generators import RandomState


def steps(total: int, *, path: Any = None, save_every: float = 600.0, **kept: Any) -> Iterator[int]:
    """Make a store, keep objects in it, and return an iterator of steps, as :meth:`mpikv.KVStore.steps`. Collective.

    Such a loop is one of ``DistributedDataParallel`` on the backend ``mpikv``, say. After a death under ``mpikv run
    --restarts N``, or from ``path``, the loop goes on where it was. It restores the objects of ``kept`` in place, and
    PyTorch's, numpy's and Python's own generators. Each rank keeps its own copies. Call it after the model is wrapped.
    Collective over all ranks of the launch, as are ends of steps.

    Args:
        total: the number of steps, from 0.
        path: as in :meth:`mpikv.KVStore.steps`.
        save_every: as there.
        kept: the objects that a step changes, by names: model, optimizer, scheduler, scaler, and others that
            :meth:`mpikv.KVStore.keep` takes.

    Raises:
        Unsupported: the ranks of ``torch.distributed`` are not those of an MPI launch, as under torchrun.
        Exception: as :meth:`mpikv.KVStore.keep` and :meth:`mpikv.KVStore.steps`.

    Example:
        >>> import mpikv.torch, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> for step in mpikv.torch.steps(3, model=model, optimizer=optimizer):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
    """
    distributed = torch.distributed
    with ExitStack() as failing:
        kv = failing.enter_context(create())
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() != kv.size:
            raise Unsupported(
                f"steps: torch.distributed has {distributed.get_world_size()} ranks, and MPI {kv.size}; start the "
                "program by mpikv run"
            )
        kv.keep(random=RandomState(), **kept)
        loop = kv.steps(total, path=path, save_every=save_every)
        failing.pop_all()  # the store stays open for the loop
    return loop
