"""What training scripts do with a model, one by one: on all ranks together as in one process with the whole batch."""

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import RankMismatch

from .training import (
    adam,
    assert_close,
    assert_equal_over_ranks,
    attach,
    attached_pair,
    batch,
    is_last,
    loss_of,
    network,
    nn,
    optim,
    sgd,
    share,
    torch,
    train,
)

pytestmark = pytest.mark.ranks(1, 2, 3)


def pair(kv: Any, make: Any = network, optimizer: Any = sgd, **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return a model and an optimizer of one process, those of the ranks, and their attachment."""
    alone = make()
    model = make()
    if not kv.is_root:
        for tensor in model.state_dict().values():
            tensor.zero_()  # the root's come
    own, shared = optimizer(alone), optimizer(model)
    return alone, own, model, shared, attach(model, shared, kv=kv, **options)


def train_both(alone: Any, own: Any, model: Any, shared: Any, steps: Any, kv: Any) -> None:
    train(alone, own, steps)
    train(model, shared, steps, kv)


# --- Parameters without a gradient


class Branches(nn.Module):
    """Three layers, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)).double()

    def forward(self, inputs: Any, used: Any) -> Any:
        return sum(self.layers[index](inputs) for index in used)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_parameter_that_some_ranks_use(kv, update, bucket_bytes):
    alone, own, model, shared, _ = pair(kv, Branches, update=update, bucket_bytes=bucket_bytes)
    for step in range(4):
        inputs, targets = batch(step)
        used = [[0, (rank + step) % 2 + 1] if rank or step != 3 else [0] for rank in range(kv.size)]
        own.zero_grad()
        losses = [
            (alone(inputs[rank :: kv.size], used[rank]) - targets[rank :: kv.size]).square().mean()
            for rank in range(kv.size)
        ]
        (sum(losses) / kv.size).backward()
        own.step()
        shared.zero_grad()
        (model(inputs[kv.rank :: kv.size], used[kv.rank]) - targets[kv.rank :: kv.size]).square().mean().backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
        shared.step()
        assert_close(model, alone)


def frozen() -> Any:
    model = network()
    model[0].requires_grad_(False)
    return model


def not_in_a_row() -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.Flatten()
    )
    return model.double().to(memory_format=torch.channels_last)


class WithEmpty(nn.Module):
    """Parameters of no elements beside others, as of a list of layers of which one has no outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double()
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.rows = nn.Parameter(torch.zeros(3, 0, dtype=torch.float64))

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs) + self.empty.sum() + self.rows.sum()


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("make", [not_in_a_row, WithEmpty])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_models(kv, update, make, optimizer):
    alone, own, model, shared, attached = pair(kv, make, optimizer, update=update, bucket_bytes=100)
    train_both(alone, own, model, shared, range(4), kv)
    assert_close(model, alone)
    assert attached.statistics()["passes"] == 4
    assert len(attached.statistics()["bucket_bytes"]) > 1


# --- Several backward passes, and what is done to gradients


def test_several_passes_make_a_step(kv, update):
    alone, own, model, shared, attached = pair(kv, update=update)
    for step in range(0, 9, 3):
        own.zero_grad()
        shared.zero_grad()
        for part in range(3):
            loss_of(alone, step + part).backward()
        with attached.no_sync():
            loss_of(model, step, kv).backward()
            loss_of(model, step + 1, kv).backward()
        loss_of(model, step + 2, kv).backward()
        own.step()
        shared.step()
    assert_close(model, alone)
    assert attached.statistics()["passes"] == 3


def test_a_scaler_skips_a_step_on_all_ranks(kv, update):
    alone, own, model, shared, _ = pair(kv, update=update)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(4):
        overflows = step == 1
        if not overflows:
            own.zero_grad()
            loss_of(alone, step).backward()
            own.step()
        shared.zero_grad()
        loss = scaler.scale(loss_of(model, step, kv))
        (loss * float("inf") if overflows and kv.rank == kv.size - 1 else loss).backward()
        scaler.step(shared)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step < 1 else 4.0)
    assert_close(model, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_weights(kv, update, dtype):
    alone, own, model, shared, _ = pair(
        kv, partial(network, 0, dtype), lambda model: sgd(model, lr=0.05), update=update
    )
    train_both(alone, own, model, shared, range(6), kv)
    assert model[0].weight.dtype == dtype
    assert_equal_over_ranks(kv, *model.parameters())
    # Each step rounds the mean of rounded gradients.
    assert_close(model, alone, 1e-6 if dtype == torch.float32 else 0.02)


# --- Buffers


def with_buffers() -> Any:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def test_buffers_are_the_roots(kv, update):
    model = with_buffers()
    shared = sgd(model)
    attach(model, shared, kv=kv, update=update)
    alone = with_buffers()  # that sees the root's share alone
    alone.load_state_dict(model.state_dict())
    for step in range(3):
        alone.load_state_dict({**alone.state_dict(), **dict(model.named_parameters())})
        alone(batch(step)[0][:: kv.size])
        train(model, shared, [step], kv)
        for mine, theirs in zip(model.buffers(), alone.buffers(), strict=True):
            assert_close(mine, theirs)
    assert model[1].num_batches_tracked == 3
    assert_equal_over_ranks(kv, *model.buffers(), *model.parameters())


def test_buffers_of_each_rank(kv, update):
    model = with_buffers()
    shared = sgd(model)
    attach(model, shared, kv=kv, update=update, buffers="each")
    alone = deepcopy(model)
    for step in range(3):
        alone.load_state_dict({**alone.state_dict(), **dict(model.named_parameters())})
        alone(batch(step)[0][kv.rank :: kv.size])
        train(model, shared, [step], kv)
        assert_close(model[1].running_mean, alone[1].running_mean)
    assert_equal_over_ranks(kv, *model.parameters())
    if kv.size > 1:
        means = kv.comm.allgather(model[1].running_mean.tolist())
        assert means[0] != means[1]


def test_a_buffer_that_no_checkpoint_has(kv):
    model = network()
    model.register_buffer("noise", torch.full((3,), float(kv.rank + 1)), persistent=False)
    model.register_buffer("empty", torch.zeros(0))
    attach(model, kv=kv)
    assert model.noise.tolist() == [1.0] * 3
    model.noise += kv.rank
    loss_of(model, 0, kv).backward()
    assert model.noise.tolist() == [1.0] * 3


# --- Unequal amounts of data


@pytest.mark.parametrize("make", [network, with_buffers])
@pytest.mark.parametrize("before", [0, 2])
def test_unequal_numbers_of_batches(kv, make, before):
    model = make()
    shared = adam(model)
    attached = attach(model, shared, kv=kv)
    train(model, shared, range(before), kv)
    with attached.join():
        train(model, shared, range(10, 12 + 2 * kv.rank), kv)
    state = shared.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))
    assert {int(one["step"]) for one in state.values()} == {before + 2 * kv.size}
    assert_equal_over_ranks(kv, *model.state_dict().values(), *(one["exp_avg"] for one in state.values()))
    train(model, shared, range(20, 22), kv)
    assert_equal_over_ranks(kv, *model.state_dict().values())


# --- Changes of the model


def test_a_parameter_that_is_added(kv, update):
    alone, own, model, shared, attached = pair(kv, update=update)
    train_both(alone, own, model, shared, range(2), kv)
    for one, optimizer in ((alone, own), (model, shared)):
        torch.manual_seed(9)
        one.append(nn.Linear(3, 3).double())
        optimizer.add_param_group({"params": one[3].parameters(), "lr": 0.02})
    with torch.no_grad():
        model[3].weight.add_(kv.rank)  # the root's comes
    for name, parameter in model[3].named_parameters():
        attached.add(f"3.{name}", parameter)
    train_both(alone, own, model, shared, range(2, 5), kv)
    assert_close(model, alone)


def test_a_layer_that_is_made_trainable(kv, update):
    def optimizer(model: Any) -> Any:
        return sgd(model[2])

    alone, own, model, shared, attached = pair(kv, frozen, optimizer, update=update)
    train_both(alone, own, model, shared, range(2), kv)
    for one, of_one in ((alone, own), (model, shared)):
        one[0].requires_grad_(True)
        of_one.add_param_group({"params": one[0].parameters()})
    for name, parameter in model[0].named_parameters():
        attached.add(f"0.{name}", parameter)
    train_both(alone, own, model, shared, range(2, 5), kv)
    assert_close(model, alone)


# --- States


def resumed(optimizer: Any, states: Any) -> tuple[Any, Any]:
    model = network(5)
    own = optimizer(model)
    model.load_state_dict(deepcopy(states[0]))
    own.load_state_dict(deepcopy(states[1]))
    return model, own


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_states_are_those_of_one_process(kv, update, optimizer):
    alone, own, model, shared, _ = pair(kv, network, optimizer, update=update)
    train_both(alone, own, model, shared, range(3), kv)
    state = shared.state_dict()
    assert_close(state["state"], own.state_dict()["state"])
    assert state["param_groups"] == own.state_dict()["param_groups"]
    plain, plain_optimizer = resumed(optimizer, [model.state_dict(), state])
    train(plain, plain_optimizer, range(3, 6))
    train(alone, own, range(3, 6))
    train(model, shared, range(3, 6), kv)  # a state that was read changed nothing
    assert_close(plain, alone)
    assert_close(model, alone)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("after", ["local", "store"])
def test_a_state_is_resumed_on_other_ranks(comm, kv, update, optimizer, after):
    alone, own, model, shared, _ = pair(kv, network, optimizer, update=update)
    train_both(alone, own, model, shared, range(3), kv)
    states = deepcopy([model.state_dict(), shared.state_dict()])
    train(alone, own, range(3, 6))
    fewer = kv.group(range(max(1, kv.size - 1)))
    if fewer is not None:
        with fewer:
            again = network(6)
            of_again = optimizer(again)
            attach(again, of_again, kv=fewer, update=after)
            again.load_state_dict(states[0])
            of_again.load_state_dict(states[1])
            train(again, of_again, range(3, 6), fewer)
            assert_close(again, alone)


def test_a_state_that_was_loaded_stays_with_its_owner(kv):
    states = [network().state_dict(), None]
    model = network()
    own = adam(model)
    train(model, own, range(2))
    states = [model.state_dict(), own.state_dict()]
    again = network(3)
    shared = adam(again)
    attach(again, shared, kv=kv, update="store")
    again.load_state_dict(states[0])
    shared.load_state_dict(states[1])
    held = sum(value.numel() for one in shared.state.values() for value in one.values() if value.dim())
    assert held <= 2 * (sum(one.numel() for one in model.parameters()) // kv.size + 1)


def test_a_state_that_cannot_be_read_is_not_lost(kv):
    alone, own, model, shared, _ = pair(kv, network, adam, update="store")
    train_both(alone, own, model, shared, range(2), kv)
    hook = shared.register_state_dict_pre_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shared.state_dict()
    hook.remove()
    train_both(alone, own, model, shared, range(2, 5), kv)
    assert_close(model, alone)
    assert_close(shared.state_dict()["state"], own.state_dict()["state"])


def test_memory_of_a_state(kv):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    shared = optim.Adam(model.parameters())
    attach(model, shared, kv=kv, update="store")
    model(torch.ones(2, 32)).sum().backward()
    shared.step()
    whole = 2 * sum(one.nbytes for one in model.parameters())
    held = sum(value.nbytes for one in shared.state.values() for value in one.values())
    assert held <= whole / kv.size + 0.05 * whole


def test_detach(kv, update):
    alone, own, model, shared, attached = pair(kv, network, adam, update=update)
    train_both(alone, own, model, shared, range(3), kv)
    loss_of(alone, 3).backward()
    loss_of(model, 3, kv).backward()
    attached.detach()
    assert_close([one.grad for one in model.parameters()], [one.grad for one in alone.parameters()])
    assert_close(shared.state_dict()["state"], own.state_dict()["state"])
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    kv.close()
    train(alone, own, range(4, 6))
    train(model, shared, range(4, 6))  # the whole batch, on each rank for itself
    assert_close(model, alone)


def test_a_model_is_attached_again(kv, update):
    alone, own, model, _, attached = pair(kv, update=update)
    attached.detach()
    for _ in range(2):
        shared, own = sgd(model), sgd(alone)
        attached = attach(model, shared, kv=kv, update=update)
        train(alone, own, range(2))
        train(model, shared, range(2), kv)
        attached.detach()
        assert kv.keys() == ()
    assert_close(model, alone)


# --- Compiled functions


@pytest.fixture
def compiled():
    """Return torch's compiler, with a backend that needs no compiler of C++."""
    torch.compiler.reset()
    yield partial(torch.compile, backend="aot_eager")
    torch.compiler.reset()


@pytest.mark.deadline(100)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about torch
@pytest.mark.parametrize("what", ["model", "backward", "step", "all"])
def test_compiled_functions(kv, update, compiled, what):
    alone, own, model, shared, attached = pair(kv, update=update, bucket_bytes=64)
    forward, step = model, shared.step
    if what == "model":
        forward = compiled(model)
    if what == "step":
        step = compiled(lambda: shared.step())

    def backward(inputs: Any, targets: Any) -> Any:
        loss = (forward(inputs) - targets).square().mean()
        loss.backward()
        if what == "all":
            shared.step()

    run = compiled(backward) if what in ("backward", "all") else backward
    for number in range(4):
        train(alone, own, [number])
        shared.zero_grad()
        run(*share(batch(number), kv))
        if what != "all":
            step()
    assert attached.statistics()["passes"] == 4
    assert_close(model, alone)


# --- Errors of the script


def test_an_evaluation_on_the_root_alone(kv, update):
    _, _, model, shared, _ = pair(kv, with_buffers, update=update)
    for step in range(3):
        train(model, shared, [step], kv)
        if kv.is_root:
            model.eval()
            with torch.no_grad():
                assert model(batch(step)[0]).isfinite().all()
            model.train()
    assert_equal_over_ranks(kv, *model.parameters())


def test_gradients_that_are_asked_for_alone(kv):
    alone, _, model, _, attached = pair(kv)
    loss = loss_of(model, 0, kv)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    if kv.is_root:
        torch.autograd.grad(loss, model[0].weight, retain_graph=True)
    loss.backward()
    loss_of(alone, 0).backward()
    assert_close(model[0].weight.grad, alone[0].weight.grad)
    assert attached.statistics()["passes"] == 1


# --- Optimizers


@pytest.mark.parametrize("form", [lambda loss: loss, torch.Tensor.item, np.float32, torch.Tensor.numpy])
def test_a_closure(kv, update, form):
    alone, own, model, shared, _ = pair(kv, update=update)
    for step in range(3):

        def closure(one: Any, optimizer: Any, store: Any, step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(one, step, store)
            loss.backward()
            return form(loss.detach())

        expected = own.step(lambda: closure(alone, own, None))
        found = shared.step(closure=lambda: closure(model, shared, kv))
        assert isinstance(found, torch.Tensor) == isinstance(expected, torch.Tensor)
        tolerance = 1e-6 if form is np.float32 else 1e-12
        assert float(found) == pytest.approx(float(expected), rel=tolerance)
    assert_close(model, alone)


@pytest.mark.parametrize("averages", [False, True], ids=["its-own", "mean"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(kv, search, averages):
    """It looks at the loss, which is the mean over ranks, also where the closure returns this already."""
    alone, own, model, shared, _ = pair(
        kv, network, lambda model: optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
    )
    counts = []
    for one, optimizer, store in ((alone, own, None), (model, shared, kv)):
        calls = 0

        def closure(one: Any = one, optimizer: Any = optimizer, store: Any = store) -> Any:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = loss_of(one, 0, store)
            loss.backward()
            if not averages or store is None or store.comm is None:
                return loss
            return kv.comm.allreduce(loss.detach()) / kv.size

        for _ in range(4):
            optimizer.step(closure)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert_close(model, alone, 1e-9)
    assert_equal_over_ranks(kv, *model.parameters())


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_of_whole_parameters(kv, update, name):
    if not hasattr(optim, name):
        pytest.skip(f"this torch has no {name}")

    def make() -> Any:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()

    def optimizer(model: Any) -> Any:
        return getattr(optim, name)(model.parameters(), lr=0.05)

    alone, own, model, shared, _ = pair(kv, make, optimizer, update=update)
    train_both(alone, own, model, shared, range(4), kv)
    # Muon iterates in bfloat16, which makes steps of rounding errors.
    assert_close(model, alone, 1e-3 if name == "Muon" else 1e-10)


class Rows(nn.Module):
    """Parameters of several dtypes, odd sizes and exact gradients, of more bytes than are in flight between hosts."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float64, 170_001), (torch.bfloat16, 333), (torch.float32, 1), (torch.float32, 90_001)
        self.rows = nn.ParameterList((torch.arange(size) % 16).to(dtype) for dtype, size in kinds)

    def forward(self, scale: int, used: slice) -> Any:
        return sum((scale * (torch.arange(row.numel()) % 3 - 1) * row).sum().double() for row in self.rows[used])


@pytest.mark.ranks(2, 3, 4)
def test_weights_travel_in_several_messages(comm, transport):
    """Bits are those that numpy computes, of weights that a step leaves out, too."""
    with mpikv.create(comm=comm, timeout=10, transport=transport, bucket_bytes=1 << 16) as kv:
        model = Rows()
        optimizer = sgd(model, lr=0.5, momentum=0)
        attached = attach(model, optimizer, kv=kv, update="store")
        steps = [0] * 4
        for used in slice(4), slice(1, 4), slice(2), slice(4):
            optimizer.zero_grad()
            model(kv.size * (kv.rank + 1), used).backward()
            optimizer.step()
            steps[used] = [count + 1 for count in steps[used]]
            for row, count in zip(model.rows, steps, strict=True):
                place = np.arange(row.numel())
                expected = place % 16 - 0.5 * count * kv.size * (kv.size + 1) / 2 * (place % 3 - 1)
                assert (row.detach().double().numpy() == expected).all()
        if is_last(kv):
            model.rows[1].grad = None
        before = deepcopy(model.state_dict())
        with pytest.raises(RankMismatch, match=r"optimizer\.step: .*rows\.1"):
            optimizer.step()
        assert_close(model.state_dict(), before, 0)
        attached.detach()


def test_several_optimizers_of_a_model(kv, update):
    alone, model = network(), network()
    own = [sgd(alone[0]), adam(alone[2])]
    shared = [sgd(model[0]), adam(model[2])]
    attach(model, shared, kv=kv, update=update)
    for step in range(4):
        for one, optimizers, store in ((alone, own, None), (model, shared, kv)):
            one.zero_grad()
            loss_of(one, step, store).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert_close(model, alone)


@pytest.mark.parametrize("update_of_second", ["local", "store"])
def test_two_models_on_a_store(kv, update, update_of_second):
    first, second = network(1), network(2)
    alone = deepcopy([first, second])
    shared, own = [sgd(first), adam(second)], [sgd(alone[0]), adam(alone[1])]
    attach(first, shared[0], kv=kv, update=update)
    attach(second, shared[1], kv=kv, update=update_of_second)
    for step in range(3):
        for models, optimizers, store in ((alone, own, None), ((first, second), shared, kv)):
            inputs, targets = share(batch(step), store)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (models[0](inputs) * models[1](inputs) - targets).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        train(first, shared[0], [10 + step], kv)
        train(alone[0], own[0], [10 + step])
    assert_close(first, alone[0])
    assert_close(second, alone[1])


def test_a_store_that_holds_something(kv):
    kv.init("0.weight", torch.zeros(2))
    alone, own, model, shared, _ = pair(kv, update="store")
    train_both(alone, own, model, shared, range(2), kv)
    kv.pushpull("0.weight", torch.ones(2), out := torch.zeros(2))
    assert out.tolist() == [kv.size] * 2
    assert_close(model, alone)


@pytest.mark.parametrize("compression", ["fp16", "bf16", {"type": "2bit", "threshold": 0.01}], ids=str)
def test_compression(kv, update, compression):
    alone, own, model, shared, attached = pair(
        kv, partial(network, 0, torch.float32), update=update, compression=compression
    )
    before = loss_of(model, 0).item()
    train_both(alone, own, model, shared, range(6), kv)
    assert_equal_over_ranks(kv, *model.parameters())
    if isinstance(compression, str):
        assert_close(model, alone, 0.02)
    else:
        assert loss_of(model, 0).item() < before
    attached.detach()


def test_gradients_that_were_moved_to_shared_memory(kv, update):
    alone, own, model, shared, _ = pair(kv, update=update)
    for step in range(4):
        train(alone, own, [step])
        train(model, shared, [step], kv)
        if step == 1:
            model.share_memory()
    assert_close(model, alone)


# --- What the store's memory must not change


def test_gradients_of_other_strides(kv):
    """As those that a script has put in place of what backward made."""

    def make() -> Any:
        torch.manual_seed(8)
        return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Flatten()).double().to(memory_format=torch.channels_last)

    alone, own, model, shared, _ = pair(kv, make, update="store")
    inputs = torch.arange(36, dtype=torch.float64).reshape(1, 4, 3, 3) / 36
    for _ in range(3):
        for one, optimizer in ((alone, own), (model, shared)):
            optimizer.zero_grad()
            one(inputs).square().sum().backward()
            one[0].weight.grad = one[0].weight.grad.contiguous()
            optimizer.step()
        assert_close(model, alone)


def test_a_graph_that_outlives_the_buffers_of_a_pass(kv):
    """Two backwards through one forward of a normalization, as a generator's and a discriminator's are."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    attached = attach(model, kv=kv)
    made = model(torch.ones(3, 4, dtype=torch.float64) * torch.arange(3).unsqueeze(1) * (kv.rank + 1))
    made.sum().backward(retain_graph=True)
    made.square().sum().backward()
    assert_equal_over_ranks(kv, *(one.grad for one in model.parameters()), *model.buffers())
    attached.detach()


def test_a_graph_of_weights_before_a_step_is_refused(kv, update):
    _, _, model, shared, _ = pair(kv, update=update)
    old = loss_of(model, 0, kv)
    loss_of(model, 1, kv).backward()
    shared.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_an_optimizer_that_is_given_more_of_the_model(kv, update):
    alone, model = network(), network()
    own, shared = (optim.SGD(one[2].parameters(), lr=0.1) for one in (alone, model))
    attach(model, shared, kv=kv, update=update)
    train_both(alone, own, model, shared, range(2), kv)
    for one, optimizer in ((alone, own), (model, shared)):
        optimizer.add_param_group({"params": one[0].parameters(), "lr": 0.05})
    for one, optimizer, store in ((alone, own, None), (model, shared, kv)):
        for parameter in one.parameters():
            parameter.grad = None
        train(one, optimizer, range(2, 5), store)
    assert_close(model, alone)


def test_settings_that_are_objects(kv, update):
    _, _, model, shared, _ = pair(kv, update=update)
    shared.param_groups[0]["note"] = object()
    train(model, shared, range(3), kv)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("kept", ["root", "each"])
def test_buffers_after_a_join(kv, kept, more):
    """Also where ranks have equal numbers of batches, and of buffers that no state has."""
    model = with_buffers()
    model.register_buffer("seen", torch.zeros(1), persistent=False)
    _, optimizer, attached = attached_pair(kv, model=model, buffers=kept)
    with attached.join():
        for step in range(2 + more * kv.rank):
            model.seen.fill_(kv.rank + 1)
            train(model, optimizer, [step], kv)
    assert_equal_over_ranks(kv, *model.parameters())
    if kept == "root":
        assert_equal_over_ranks(kv, *model.buffers())
    else:
        assert (model.seen, model[1].num_batches_tracked) == (kv.rank + 1, 2 + more * kv.rank)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("first", ["hook", "attach"])
def test_a_hook_that_changes_a_gradient_of_its_rank(kv, first):
    """The mean is that of what hooks return, whenever they were registered."""
    alone, own, model, shared, attached = pair(kv)
    attached.detach()
    for one in alone, model:
        weight = one[0].weight
        if one is alone or first == "hook":
            weight.register_hook(lambda gradient: 10 * gradient)
    attach(model, shared, kv=kv, bucket_bytes=1)
    if first == "attach":
        model[0].weight.register_hook(lambda gradient: 10 * gradient)
    train_both(alone, own, model, shared, range(3), kv)
    assert_close(model, alone)


def test_synchronized_batch_normalization_is_of_each_rank(kv):
    """As torch has it where torch.distributed was not started."""
    torch.manual_seed(0)
    plain, synchronized = nn.BatchNorm1d(4).double(), nn.SyncBatchNorm(4).double()
    attach(synchronized, kv=kv)
    inputs, _ = share(batch(0), kv)
    assert torch.equal(synchronized(inputs), plain(inputs))
