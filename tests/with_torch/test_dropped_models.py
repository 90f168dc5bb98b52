"""A model that a program drops without ``detach`` goes, and so does what it has left in the store."""

import gc
import pickle
import weakref
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

import mpikv

from .training import assert_close, assert_equal_over_ranks, attach, loss_of, network, nn, optim, torch, train

pytestmark = pytest.mark.ranks(1, 2, 3)


def train_and_drop(kv: Any, **options: Any) -> tuple[mpikv.KVStore, list[Any]]:
    """Return the store, and weak references to what has to go."""
    model = network(dtype=torch.float32)
    optimizer = optim.Adam(model.parameters())
    attached = attach(model, optimizer, kv=kv, **options)
    train(model, optimizer, range(2), attached.kv)
    state = optimizer.state_dict()["state"]
    held = [model, optimizer, attached, model[0].weight, model[0].weight.grad, state[0]["exp_avg"]]
    return attached.kv, [weakref.ref(one) for one in held]


@pytest.mark.parametrize("options", [{}, {"update": "store"}, {"compression": "bf16"}], ids=str)
def test_models_that_are_dropped_on_a_store(kv, options):
    kept = []
    for _ in range(4):
        _, references = train_and_drop(kv, **options)
        gc.collect()
        assert not [one() for one in references if one() is not None]
        kept.append(len(kv.keys()))
    assert kept == kept[:1] * 4


def test_stores_of_models_that_are_dropped(comm, monkeypatch):
    monkeypatch.setattr("mpikv.torch.attached.create", partial(mpikv.create, comm=comm, timeout=5))
    stores = []
    for _ in range(4):
        store, references = train_and_drop(None)
        gc.collect()
        assert not [one() for one in references if one() is not None]
        stores.append(store)
    for store in stores[:-1]:
        with pytest.raises(mpikv.errors.Closed):
            store.barrier()
    stores[-1].close()


@pytest.mark.ranks(2, 3)
def test_a_model_that_one_rank_has_dropped(kv):
    """Its memory stays until all have, and the end of the store compares nothing."""
    models = [network(), network(1)]
    for one in models:
        attach(one, kv=kv)
        loss_of(one, 0, kv).backward()
    keys = kv.keys()
    del one
    if kv.is_root:
        del models[0]
    gc.collect()
    attach(network(2), kv=kv).detach()
    assert kv.keys() == keys
    models = models[-1:]
    gc.collect()
    attach(network(2), kv=kv).detach()
    assert 0 < len(kv.keys()) < len(keys)
    if kv.is_root:
        models.clear()
    gc.collect()
    kv.close()


def test_what_keeps_an_attachment(kv):
    """A part of the model, where nothing else of it is left."""
    model = network()
    attach(nn.ModuleList([model]), kv=kv)
    gc.collect()
    loss_of(model, 0, kv).backward()
    alone = network()
    loss_of(alone, 0).backward()
    assert_close([one.grad for one in model.parameters()], [one.grad for one in alone.parameters()])


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "file"])
def test_a_copy_is_not_attached(kv, copied):
    model = network()
    attach(model, kv=kv)
    copy = copied(model)
    attached = attach(copy, kv=kv)
    loss_of(copy, 0, kv).backward()
    assert model[0].weight.grad is None
    assert_equal_over_ranks(kv, copy[0].weight.grad)
    attached.detach()


@pytest.mark.ranks(2, 3)
def test_an_attach_that_fails_early_leaves_the_first_model_its_memory(kv):
    model = network()
    attach(model, kv=kv)
    loss_of(model, 0, kv).backward()
    keys = kv.keys()
    fail = partial(attach, network(1), kv=kv) if kv.is_root else partial(kv.init, "w", torch.zeros(1))
    with pytest.raises(mpikv.RankMismatch):
        fail()
    kv.barrier()  # which no rank misses for a call that deletes
    assert kv.keys() == keys
