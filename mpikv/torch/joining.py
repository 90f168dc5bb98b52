"""The copy at the end of ``join``, from a rank with the most passes."""

from __future__ import annotations

from collections.abc import Iterable
from pickle import dumps, loads
from typing import Any

import torch

from ..store.kvstore import KVStore


def copy_from(
    kv: KVStore, leader: int, buffers: Iterable[Any], parameters: Iterable[Any], optimizers: Iterable[Any]
) -> None:
    """Copy tensors and optimizer states from one rank to all. Collective.

    The caller must report an error of one rank to the others, e.g. by ``raising_on_all``: user code runs here, and no
    rank waits outside of a call of the store.
    """
    # By .data, past autograd's version counter: a live graph has saved the buffers, and would refuse to run backward.
    tensors, optimizers = [*(one.data for one in buffers), *parameters], list(optimizers)
    packed = b""
    if kv.rank == leader:
        packed = dumps(([one.detach() for one in tensors], [one.state_dict() for one in optimizers]))
    kv.barrier()
    packed = kv.comm.bcast(packed, leader)
    if kv.rank != leader:
        copies, states = loads(packed)
        with torch.no_grad():
            for one, other in zip(tensors, copies, strict=True):
                one.copy_(other)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    kv.barrier()
