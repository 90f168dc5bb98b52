"""What ranks copy at the end of ``join`` from the one that has made the most passes."""

from __future__ import annotations

from collections.abc import Iterable
from pickle import dumps, loads
from typing import Any

import torch

from ..store.kvstore import KVStore

__all__ = ["copy_from"]


def copy_from(
    kv: KVStore, leader: int, buffers: Iterable[Any], parameters: Iterable[Any], optimizers: Iterable[Any]
) -> None:
    """Give tensors, and states of optimizers, what they are on one rank. Collective.

    An error of a rank's own work, which may be a user's, has to be told to the others, as by ``raising_on_all``: none
    waits outside of a call of the store.
    """
    # As data: a graph that is alive has saved the buffers, and would refuse to go on when they have changed.
    tensors, optimizers = [*(one.data for one in buffers), *parameters], list(optimizers)
    packed = b""
    if kv.rank == leader:
        packed = dumps(([one.detach() for one in tensors], [one.state_dict() for one in optimizers]))
    kv.barrier()
    packed = kv.comm.bcast(packed, leader)
    if kv.rank != leader:
        told, states = loads(packed)
        with torch.no_grad():
            for one, other in zip(tensors, told, strict=True):
                one.copy_(other)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    kv.barrier()
