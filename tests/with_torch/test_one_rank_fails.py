"""What one rank alone cannot do, of its own work in a collective call, every rank is told of; none waits for it, and
what was begun is undone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import PeerFailed, RankMismatch

from .training import (
    assert_equal_over_ranks,
    attach,
    attached_pair,
    check_attaches,
    is_last,
    last_fails,
    network,
    nn,
    sgd,
    torch,
    train,
)

pytestmark = pytest.mark.ranks(2, 3)


def planted(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("planted")


# --- attach


class Unreadable:
    """A setting that cannot be compared."""

    @property
    def __class__(self) -> Any:
        return planted()


def odd_buffers(model: Any, optimizer: Any) -> None:
    model.named_buffers = planted


def odd_setting(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["odd"] = Unreadable()


@pytest.mark.parametrize("spoil", [odd_buffers, odd_setting])
def test_attach_cannot_describe_the_model_of_one_rank(kv, update, spoil):
    model = network()
    optimizer = sgd(model)
    if is_last(kv):
        spoil(model, optimizer)
    last_fails(kv, ArithmeticError, "planted", lambda: attach(model, optimizer, kv=kv, update=update))
    assert not kv.keys()
    check_attaches(kv)


@pytest.mark.parametrize(
    "place", ["backward.BackwardSync.watch", "sharded.ShardedStep.divide", "weights.Weights.watch"]
)
def test_attach_is_undone_where_one_rank_fails_midway(kv, monkeypatch, place):
    model = network()
    optimizer = sgd(model)
    step = optimizer.step
    if is_last(kv):
        monkeypatch.setattr(f"mpikv.torch.{place}", planted)
    last_fails(kv, ArithmeticError, "planted", lambda: attach(model, optimizer, kv=kv, update="store"))
    monkeypatch.undo()
    assert not kv.keys()
    assert optimizer.step == step
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert not {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
    attach(model, optimizer, kv=kv, update="store").detach()
    check_attaches(kv)


def test_a_store_of_attach_ends_where_one_rank_fails_midway(comm, monkeypatch):
    made = []
    monkeypatch.setattr("mpikv.torch.attached.create", lambda: made.append(mpikv.create(comm=comm)) or made[-1])
    if comm.rank == comm.size - 1:
        monkeypatch.setattr("mpikv.torch.weights.Weights.watch", planted)
    with pytest.raises((ArithmeticError, PeerFailed), match="planted"):
        attach(network())
    with pytest.raises(mpikv.errors.Closed):
        made[0].barrier()


@dataclass(eq=False, repr=False)
class Halves:
    """A codec whose representation is that of an object, with its address."""

    times: float = 1.0
    elementwise = True
    feedback = False

    def settings(self) -> str:
        return f"halves(times={self.times})"

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, gradient: Any, payload: Any, residual: Any = None) -> None:
        payload.view(np.float16)[:] = gradient

    def decode_add(self, payload: Any, total: Any) -> None:
        total += self.times * payload.view(np.float16)


def test_a_codec_of_ones_own(kv):
    kept = [bytearray(100) for _ in range(kv.rank)]  # so that the codec lies elsewhere on each rank
    model, _, attached = attached_pair(kv, steps=3, model=network(dtype=torch.float32), compression=Halves())
    assert_equal_over_ranks(kv, *model.parameters())
    attached.detach()
    with pytest.raises(RankMismatch, match=r"compression.*halves\(times=1.0\).*halves\(times=2.0\)"):
        attach(model, kv=kv, compression=Halves(1.0 + is_last(kv)))
    del kept


# --- add, detach


def test_add_is_given_no_parameter_on_one_rank(kv, update):
    model, optimizer, attached = attached_pair(kv, update=update)
    new = "no parameter" if is_last(kv) else nn.Parameter(torch.ones(2))
    last_fails(kv, AttributeError, "requires_grad", lambda: attached.add("new", new))
    train(model, optimizer, range(3), kv)
    attached.add("new", nn.Parameter(torch.ones(2)))
    attached.detach()


def test_detach_ends_all_of_it_where_one_step_raises(kv, monkeypatch):
    model, _, attached = attached_pair(kv, update="store", steps=2)
    if is_last(kv):
        monkeypatch.setattr("mpikv.torch.sharded._join_state", planted)
        with pytest.raises(ArithmeticError, match="planted"):
            attached.detach()
        monkeypatch.undo()
    else:
        attached.detach()
    assert not kv.keys()
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    attach(model, sgd(model), kv=kv).detach()
    check_attaches(kv)


# --- A step in shards


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_of_a_step_in_shards_fails_on_one_rank(kv, when):
    model, optimizer, _ = attached_pair(kv, update="store", steps=2)
    if is_last(kv):
        handle = getattr(optimizer, f"register_step_{when}_hook")(planted)
    last_fails(kv, ArithmeticError, "planted", lambda: train(model, optimizer, range(2, 3), kv))
    if is_last(kv):
        handle.remove()
    mpikv.torch.broadcast(model, kv=kv)  # as ranks have updated their parts, and told nobody
    train(model, optimizer, range(3, 6), kv)
    assert_equal_over_ranks(kv, *model.parameters())


# --- join


def uneven(kv: Any, model: Any, optimizer: Any, attached: Any) -> None:
    """Train with most batches on the last rank."""
    with attached.join():
        train(model, optimizer, range(2 + 2 * is_last(kv)), kv)


def lose_the_state(kv: Any, optimizer: Any) -> None:
    if is_last(kv):
        optimizer.state_dict = planted


def keep_what_cannot_be_sent(kv: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["rule"] = lambda: None


@pytest.mark.parametrize(
    ("spoil", "kind", "text"),
    [(lose_the_state, ArithmeticError, "planted"), (keep_what_cannot_be_sent, AttributeError, "pickle|local object")],
)
def test_a_rank_cannot_send_its_state_at_the_end_of_join(kv, spoil, kind, text):
    model, optimizer, attached = attached_pair(kv)
    spoil(kv, optimizer)
    last_fails(kv, kind, text, lambda: uneven(kv, model, optimizer, attached))
    check_attaches(kv)
    kv.before_close.clear()


def test_a_rank_cannot_load_the_state_at_the_end_of_join(kv):
    model, optimizer, attached = attached_pair(kv)
    if kv.rank == 0:
        optimizer.load_state_dict = planted
    with pytest.raises(PeerFailed if kv.rank else ArithmeticError, match="planted"):
        uneven(kv, model, optimizer, attached)
    check_attaches(kv)
    kv.before_close.clear()


@pytest.mark.usefixtures("overlapping")
def test_a_join_in_a_join(kv):
    """In the outer one gradients are exchanged without overlap all along."""
    model, optimizer, attached = attached_pair(kv, bucket_bytes=1)
    with attached.join():
        with attached.join():
            train(model, optimizer, range(kv.rank), kv)
        train(model, optimizer, range(3 - kv.rank), kv)
    train(model, optimizer, range(2), kv)
    assert_equal_over_ranks(kv, *model.parameters())


@pytest.mark.parametrize(
    ("wrong", "kind", "pattern"), [(None, TypeError, "not iterable"), ([1.0], AttributeError, "float")], ids=repr
)
def test_broadcast_is_given_no_tensors_on_one_rank(kv, wrong, kind, pattern):
    tensors = wrong if is_last(kv) else [torch.ones(2, 2)]
    last_fails(kv, kind, pattern, lambda: mpikv.torch.broadcast(tensors, kv=kv))
    check_attaches(kv)
