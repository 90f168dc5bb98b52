"""Data of ranks: each rank's share of a dataset, and equal initial tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from ..creation import create
from ..store.kvstore import KVStore
from .calls import raising_on_all
from .tensors import tensors_of
from .weights import fill_from_root


def sampler(
    dataset: Any, *, kv: KVStore | None = None, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> Any:
    """Return a sampler of this rank's share, once ranks agree on length and options. Collective.

    Pass it to a ``DataLoader``, with the batch size of one rank: that of all ranks divided by
    ``sampler.num_replicas``. Call ``sampler.set_epoch(epoch)`` before each epoch, on every rank, to shuffle anew. Ranks
    compare the length of the dataset and the options below, once. They do not compare the elements.

    Args:
        dataset: anything that has a length, the same on every rank.
        kv: a store of the ranks that share the data; None: all ranks of the launch.
        shuffle: whether the order is random, by ``seed`` and the epoch.
        seed: the same on every rank.
        drop_last: whether to leave out the last elements if they cannot be shared out evenly. False gives some elements
            twice to fill the shares.

    Returns:
        A ``torch.utils.data.DistributedSampler``.

    Raises:
        RankMismatch: ranks have datasets of different lengths, or gave different options.
        TypeError: the dataset has no length.
        PeerFailed: another rank raised one of these.

    Example:
        >>> import mpikv.torch
        >>> list(mpikv.torch.sampler(range(3), shuffle=False))
        [0, 1, 2]
    """
    with create() if kv is None else nullcontext(kv) as store, raising_on_all(store, "sampler"):
        share = DistributedSampler(dataset, store.size, store.rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        options = f"shuffle={bool(shuffle)}, seed={seed}, drop_last={bool(drop_last)}"
        # A difference would make unequal numbers of steps, and a hang, or train twice on some elements.
        store.check_equal(f"a dataset of {len(dataset)} elements, {options}", "sampler")
        return share


def broadcast(tensors: Any, *, kv: KVStore | None = None) -> Any:
    """Fill tensors of every rank with the root's, in place, and return them. Collective.

    :func:`attach` does this for a model; call it for other tensors that must begin alike. It copies no states of
    optimizers: every rank loads the root's by ``optimizer.load_state_dict(kv.comm.bcast(optimizer.state_dict()))``.

    Args:
        tensors: a ``torch.nn.Module`` (its parameters and buffers), or a dict or a list of tensors, of the same shapes
            and dtypes on every rank.
        kv: a store without an updater, of the participating ranks; None: all ranks of the launch.

    Returns:
        ``tensors``.

    Raises:
        RankMismatch: ranks have different tensors.
        TypeError: ``tensors`` is none of these.
        PeerFailed: another rank raised one of these.

    Example:
        >>> import mpikv.torch, torch
        >>> mpikv.torch.broadcast([torch.ones(2)])
        [tensor([1., 1.])]
    """
    with create() if kv is None else nullcontext(kv) as store, raising_on_all(store, "broadcast"):
        named = tensors_of(tensors) if isinstance(tensors, torch.nn.Module) else tensors
        fill_from_root(store, "*broadcast/", named if isinstance(named, dict) else dict(enumerate(named)))
    return tensors
