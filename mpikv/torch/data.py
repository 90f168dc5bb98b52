"""What ranks need of data: a share of a dataset each, and tensors that begin alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from ..create import create
from ..store.kvstore import KVStore
from .failures import raising_on_all

__all__ = ["broadcast", "sampler"]


def sampler(
    dataset: Any, *, kv: KVStore | None = None, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> Any:
    """Return a sampler that gives each rank its own share of a dataset, all shares being of one length.

    Collective. Give it to a ``DataLoader``, with the batch of one rank: the batch of all ranks divided by
    ``sampler.num_replicas``. Call ``sampler.set_epoch(epoch)`` before each epoch, on every rank, to shuffle anew. Ranks
    compare the length of the dataset and the options below, once. They do not compare the elements.

    Args:
        dataset: anything that has a length, the same on every rank.
        kv: a store of the ranks among which the data are shared; None: all ranks of the launch.
        shuffle: whether the order is random, by ``seed`` and the epoch.
        seed: the same on every rank.
        drop_last: whether the last elements are left out if they cannot be shared out evenly. False gives some
            elements twice, in place of those that are missing.

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
    if kv is None:
        with create() as own:
            return sampler(dataset, kv=own, shuffle=shuffle, seed=seed, drop_last=drop_last)
    with raising_on_all(kv, "sampler"):
        share = DistributedSampler(dataset, kv.size, kv.rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        told = (
            f"a dataset of {len(dataset)} elements, shuffle={bool(shuffle)}, seed={seed}, drop_last={bool(drop_last)}"
        )
        # Ranks would else make unequal numbers of steps, or train on some elements twice.
        kv.check_equal(told, "sampler")
        return share


def broadcast(tensors: Any, *, kv: KVStore | None = None) -> Any:
    """Fill tensors of every rank with the root's, in place.

    Collective. :func:`attach` does this for a model; call it for what else must begin alike.

    Args:
        tensors: a ``torch.nn.Module``, whose parameters and buffers are meant, or a dict or a list of tensors, of the
            same shapes and dtypes on every rank.
        kv: a store without an updater, of the ranks that take part; None: all ranks of the launch.

    Returns:
        ``tensors``.

    Raises:
        RankMismatch: ranks have other tensors.
        TypeError: ``tensors`` is none of these.
        PeerFailed: another rank raised one of these.

    Example:
        >>> import mpikv.torch, torch
        >>> mpikv.torch.broadcast([torch.ones(2)])
        [tensor([1., 1.])]
    """
    if kv is None:
        with create() as own:
            return broadcast(tensors, kv=own)
    with raising_on_all(kv, "broadcast"):
        named = tensors_of(tensors) if isinstance(tensors, torch.nn.Module) else tensors
        fill_from_root(kv, "*broadcast/", named if isinstance(named, dict) else dict(enumerate(named)))
    return tensors


def tensors_of(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a model by name, those too that its ``state_dict`` leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fill_from_root(kv: KVStore, prefix: str, named: dict[Any, Any]) -> None:
    """Fill tensors with the root's. Collective."""
    with torch.no_grad():
        rows = {f"{prefix}{name}": tensor.detach() for name, tensor in named.items() if tensor.numel()}
        if rows:
            kv.broadcast(rows)
            kv.delete(list(rows))
