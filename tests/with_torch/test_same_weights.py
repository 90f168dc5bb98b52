"""A rank that loads, changes or leaves out something by itself is found, and no rank goes on with other weights."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

import mpikv
from mpikv import RankMismatch

from .training import (
    adam,
    assert_close,
    assert_equal_over_ranks,
    attached_pair,
    is_last,
    loss_of,
    network,
    nn,
    optim,
    sgd,
    torch,
    train,
)

Weights = pytest.importorskip("mpikv.torch.weights").Weights

pytestmark = pytest.mark.ranks(2, 3)

INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture
def kv(comm):
    kv = mpikv.create(comm=comm, timeout=10)
    yield kv
    kv.before_close.clear()  # what they would find was found
    kv.close()


def differ(call: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(RankMismatch) as caught:
        call()
    assert re.search(pattern, str(caught.value)), str(caught.value)


def load_others(model: Any) -> None:
    model.load_state_dict(network(5).state_dict())


def swap_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        model[2].bias.add_(1)


# --- Weights that one rank has loaded or changed


@pytest.mark.parametrize("change", [load_others, swap_data, add_in_place])
@pytest.mark.parametrize("passes", [0, 5])
def test_one_rank_changes_its_weights(kv, update, change, passes):
    model, optimizer, _ = attached_pair(kv, adam, update=update, steps=passes)
    if is_last(kv):
        change(model)
    differ(lambda: train(model, optimizer, range(1), kv), r"load_state_dict.*broadcast\(model\): .*other than ")
    mpikv.torch.broadcast(model, kv=kv)
    optimizer.zero_grad()
    train(model, optimizer, range(3), kv)
    assert_equal_over_ranks(kv, *model.parameters())


@pytest.mark.parametrize("change", [load_others, swap_data, add_in_place])
def test_the_root_changes_weights_between_backward_and_step(kv, change):
    """With update="store" every rank then gets the root's part of them."""
    model, optimizer, attached = attached_pair(kv, adam, update="local", steps=4)
    loss_of(model, 4, kv).backward()
    if kv.is_root:
        change(model)
    optimizer.step()
    differ(attached.detach, "other than on the root")


def test_a_frozen_layer_that_one_rank_loads(kv, update):
    model = network()
    model[0].requires_grad_(False)
    _, optimizer, _ = attached_pair(kv, lambda model: sgd(model[2]), steps=3, model=model, update=update)
    if kv.is_root:
        model[0].load_state_dict(network(5)[0].state_dict())
    differ(lambda: train(model, optimizer, range(1), kv), "other than on the root: 0.weight, 0.bias")


def test_a_change_that_leaves_no_mark_is_found_in_a_later_pass(kv):
    model, optimizer, _ = attached_pair(kv, adam, update="local", steps=4)
    if kv.is_root:
        model[0].weight.data.add_(1)
    differ(lambda: train(model, optimizer, range(4, 8), kv), "other than on the root: 0.weight")
    assert int(next(iter(optimizer.state.values()))["step"]) == 7


def test_the_state_that_one_rank_loads(kv, update):
    model, optimizer, _ = attached_pair(kv, adam, update=update, steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 5), kv)
    if kv.is_root:
        optimizer.load_state_dict(state)
    differ(lambda: train(model, optimizer, range(1), kv), "the state that Adam has loaded")


@pytest.mark.parametrize("frequent", [False, True])
def test_all_ranks_change_their_weights(kv, update, frequent):
    """In each pass, too, where most passes compare nothing."""
    model, optimizer, attached = attached_pair(kv, adam, update=update)
    alone = network()
    own = adam(alone)
    compared = []
    attached._sync.weights.compare = compared.append
    for step in range(10):
        train(model, optimizer, [step], kv)
        train(alone, own, [step])
        if frequent or step == 4:
            for one in (model, alone):
                with torch.no_grad():
                    one[0].weight.clamp_(-0.2, 0.2)
    assert compared == ["backward"] * (4 if frequent else 5)  # in passes 1, 2, 4, 8, and in that after the change
    assert_close(model, alone)


def test_all_ranks_load_a_state(kv, update):
    model, optimizer, attached = attached_pair(kv, adam, update=update, steps=2)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(2, 4), kv)
    expected = copy.deepcopy(model.state_dict())
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    train(model, optimizer, range(2, 4), kv)
    assert_close(model.state_dict(), expected)
    attached.detach()


def test_weights_that_rounding_has_made_others(kv):
    """As where ranks have processors of other kinds, or other numbers of threads."""
    model, optimizer, attached = attached_pair(kv, adam, update="local")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + kv.rank * 1e-13
    train(model, optimizer, range(5), kv)
    attached.detach()


@pytest.mark.parametrize(
    ("roots", "own", "same"),
    [
        ([INFINITY, 1.0], [INFINITY, 1.0], True),
        ([INFINITY, 1.0], [INFINITY, 2.0], False),
        ([INFINITY, 1.0], [-INFINITY, 1.0], False),
        ([INFINITY, 1.0], [2.0, 1.0], False),
        ([2.0, 1.0], [INFINITY, 1.0], False),
        ([NAN, 1.0], [NAN, 1.0], True),
        ([NAN, 1.0], [NAN, 2.0], False),
        ([NAN, 1.0], [2.0, 1.0], False),
        ([2.0, 1.0], [NAN, 1.0], False),
        ([], [], True),
    ],
    ids=str,
)
def test_weights_that_are_infinite_or_none(kv, roots, own, same):
    """Beside one that differs in its last bits, so that ranks compare all numbers."""
    model = network()
    model[1].register_parameter("table", nn.Parameter(torch.tensor(roots, dtype=torch.float64), requires_grad=False))
    _, optimizer, _ = attached_pair(kv, adam, model=model)
    with torch.no_grad():
        model[0].weight *= 1 + kv.rank * 1e-13
        if is_last(kv):
            model[1].table.copy_(torch.tensor(own))
    if same:
        train(model, optimizer, range(1), kv)
    else:
        differ(lambda: train(model, optimizer, range(1), kv), r"other than on the root: 1.table\)")


def test_a_loaded_state_with_an_infinity(kv):
    """As of a squared gradient that was too large."""
    model, optimizer, _ = attached_pair(kv, adam, update="local", steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_sq"][0, 0] = INFINITY
    if is_last(kv):
        state["state"][1]["exp_avg"] += 1
    optimizer.load_state_dict(state)
    differ(lambda: train(model, optimizer, range(1), kv), "the state that Adam has loaded")


def test_what_came_from_one_rank_is_no_change(kv):
    tensor = torch.zeros(3)
    weights = Weights(kv, "", [])
    weights.watch([("w", tensor)])
    tensor.add_(1)
    assert weights.is_touched()
    weights.forget()
    assert not weights.is_touched()


def test_a_model_that_is_copied_while_it_is_attached(kv, update):
    model, optimizer, _ = attached_pair(kv, adam, update=update, steps=1)
    twin = copy.deepcopy(model)
    train(model, optimizer, range(1, 3), kv)
    assert not torch.equal(twin[0].weight, model[0].weight)


# --- Steps of one rank


@pytest.fixture(params=["detach", "close"])
def end(request, kv):
    """Return what ends a training."""
    return lambda attached: attached.detach() if request.param == "detach" else kv.close()


def test_the_last_step_is_left_out_on_one_rank(kv, end):
    model, optimizer, attached = attached_pair(kv, adam, update="local", steps=2)
    optimizer.zero_grad()
    loss_of(model, 2, kv).backward()
    if not is_last(kv):
        optimizer.step()
    differ(lambda: end(attached), r"left out a backward or a step.*pass 3, 3 steps.*pass 3, 2 steps")
    end(attached)  # all the same


@pytest.mark.parametrize("change", ["clip", "zero", "None"])
def test_a_gradient_that_one_rank_changes_after_backward(kv, end, change):
    model, optimizer, attached = attached_pair(kv, lambda model: sgd(model, momentum=0), update="local", steps=4)
    optimizer.zero_grad()
    loss_of(model, 4, kv).backward()
    if kv.is_root and change == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif kv.is_root and change == "zero":
        model[0].weight.grad.zero_()
    elif kv.is_root:
        model[0].weight.grad = None
    optimizer.step()
    differ(lambda: end(attached), "other than on the root: 0.weight")


def test_a_step_of_an_optimizer_that_is_not_attached(kv):
    model, optimizer, _ = attached_pair(kv, adam, update="local", steps=2)
    other = optim.SGD(model.parameters(), lr=1.0)
    optimizer.zero_grad()
    loss_of(model, 2, kv).backward()
    if kv.is_root:
        other.step()
    optimizer.step()
    differ(lambda: train(model, optimizer, range(1), kv), "other than on the root")


@pytest.mark.parametrize("change", [load_others, swap_data, add_in_place, lambda model: model.half()])
def test_weights_that_one_rank_changes_for_an_export(kv, update, end, change):
    model, _, attached = attached_pair(kv, adam, update=update, steps=3)
    if kv.is_root:
        change(model)
    end(attached)
