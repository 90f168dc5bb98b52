"""The Trainer: what it decides, that it trains as push and pull do, and what becomes of its user's mistakes."""

import re
from contextlib import ExitStack
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import mpikv
from mpikv import (
    ConfigError,
    KeyAlreadyInitialized,
    Parameter,
    PeerFailed,
    RankMismatch,
    StaleGradient,
    Unsupported,
    ValueMismatch,
)

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

BOTH = pytest.mark.parametrize("on_store", [True, False])


@pytest.fixture
def start(comm):
    """Return a function that makes a trainer on a store of its own, which is closed after the test, and its weights."""
    with ExitStack() as stores:

        def make(on_store=None, params=None, optimizer="sgd", options=None, **more):
            params = {"w": np.ones(3), "b": np.zeros(2)} if params is None else params
            kv = stores.enter_context(mpikv.create(comm=comm, timeout=5))
            options = {"learning_rate": 0.5} if options is None and isinstance(optimizer, str) else options
            trainer = mpikv.Trainer(params, optimizer, options, kvstore=kv, update_on_kvstore=on_store, **more)
            return kv, trainer, params

        yield make


def step(trainer, batch_size=None):
    """Make a step with gradients of ones; without a batch size the weights change by one rank's."""
    for parameter in trainer.params.values():
        if parameter.grad_req != "null":
            parameter.grad = np.ones_like(parameter.data)
    trainer.step(trainer.kvstore.num_workers if batch_size is None else batch_size)


class Model:
    """What PyTorch's modules have of what a Trainer looks at."""

    def named_parameters(self):
        return iter([("w", np.zeros(1))])


def of_rank(rank, shape, step=0):
    """Return the gradient that a rank brings, in quarters, whose sums are exact."""
    return np.asarray(np.random.default_rng([rank, step, *shape]).integers(-8, 9, shape) / 4)


def raised_by(kv, culprit, error, call, peers=PeerFailed):
    """Make a call that is wrong on one rank only; check what each raises."""
    with pytest.raises(error if kv.rank == culprit else peers) as caught:
        call()
    return str(caught.value)


# --- Steps


@BOTH
@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
@pytest.mark.feature("trainer-both-ways-equal")
def test_both_ways_are_push_and_pull_bit_for_bit(comm, on_store, transport, optimizer):
    """The oracle is a store that is called by hand."""
    shapes = {"a": (300,), "b": (), "c": (20, 30)}
    options = {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": 1.5}
    params = {name: of_rank(7, shape) for name, shape in shapes.items()}
    expected = {name: value.copy() for name, value in params.items()}
    make = {"comm": comm, "transport": transport, "deterministic": True}
    with mpikv.create(**make) as by_hand, mpikv.create(**make) as kv:
        trainer = mpikv.Trainer(params, optimizer, options, kvstore=kv, update_on_kvstore=on_store)
        by_hand.init(expected)
        by_hand.set_optimizer(optimizer, **options)
        for step in range(1, 6):
            random = np.random.default_rng([kv.rank, step])
            grads = {name: np.asarray(random.standard_normal(shape)) for name, shape in shapes.items()}
            by_hand.optimizer.rescale_grad = 0.5 / (8 * step)
            by_hand.pushpull(grads, out=expected)
            trainer.set_grads(grads)
            trainer.step(8 * step)
            for name in params:
                np.testing.assert_array_equal(params[name], expected[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.feature("optimizer-masters")
def test_half_precision_with_masters(start, dtype):
    """Where the sums are exact, both ways round once per update and keep the same masters."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    results = []
    for on_store in (True, False):
        params = {"w": np.linspace(-1, 1, 9).astype(dtype)}
        options = {"learning_rate": 0.01, "momentum": 0.5, "multi_precision": True}
        kv, trainer, _ = start(on_store, params, options=options)
        for step in range(4):
            trainer.params["w"].grad = of_rank(kv.rank, (9,), step).astype(dtype)
            trainer.step(3)
            if step == 1:
                trainer.set_data({"w": np.full(9, 0.3).astype(dtype)})
        results.append(params["w"].astype(np.float64))
    np.testing.assert_array_equal(*results)


@BOTH
def test_every_layout_of_weights_is_updated_in_place(start, on_store):
    whole = np.ones((4, 6))
    params = {"odd": whole[::2, ::3], "t": np.ones((2, 3)).T, "f": np.ones((3, 2), order="F"), "none": np.ones(0)}
    kv, trainer, _ = start(on_store, params)
    trainer.set_grads({name: np.full(value.shape, 2.0) for name, value in params.items()})
    trainer.step(kv.size)
    for value in params.values():
        np.testing.assert_array_equal(value, np.zeros(value.shape))
    assert whole.sum() == 24 - 4


@BOTH
@pytest.mark.feature("trainer-setup-order")
def test_all_ranks_start_from_the_roots_weights(comm, start, on_store):
    rank = comm.rank if comm else 0
    params = {"w": np.full(3, rank + 1.0), "frozen": Parameter(np.full(2, float(rank)), grad_req="null")}
    _, trainer, _ = start(on_store, params)
    for _ in range(2):
        trainer.start()
        np.testing.assert_array_equal(params["w"], np.ones(3))
        np.testing.assert_array_equal(params["frozen"].data, np.zeros(2))


@BOTH
@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=15)
@pytest.mark.feature("trainer-step", "trainer-batch-size-changes", "trainer-stale-ignored", "trainer-learning-rate")
def test_any_sequence_of_steps(start, on_store, data):
    """SGD with momentum, weight decay, factors that change and stale gradients, beside numpy in one process."""
    shapes = data.draw(
        strategies.dictionaries(
            strategies.sampled_from("abcdef"), strategies.sampled_from([(), (1,), (3,), (2, 3), (0,)]), min_size=1
        )
    )
    momentum = data.draw(strategies.sampled_from([0.0, 0.5]))
    weights = {name: of_rank(9, shape) for name, shape in shapes.items()}
    params = {name: Parameter(np.array(value)) for name, value in weights.items()}
    options = {"learning_rate": 0.25, "momentum": momentum, "wd": 0.5, "lr_mult": {"a": 4.0, "z": 3.0}}
    kv, trainer, _ = start(on_store, params, options=options)
    velocity = {name: np.zeros(shape) for name, shape in shapes.items()}
    for step in range(data.draw(strategies.integers(1, 4))):
        given = data.draw(strategies.sets(strategies.sampled_from(sorted(shapes))))
        batch_size = data.draw(strategies.sampled_from([1, 2.0, np.int64(8)]))
        for name in given:
            trainer.params[name].grad = of_rank(kv.rank, shapes[name], step)
            params[name].lr_mult = data.draw(strategies.sampled_from([None, 0.0, 2.0]))
        trainer.step(batch_size, ignore_stale_grad=True)
        for name in given:
            factor = params[name].lr_mult
            factor = {"a": 4.0}.get(name, 1.0) if factor is None else factor
            total = sum(of_rank(rank, shapes[name], step) for rank in range(kv.size))
            gradient = total / batch_size + 0.5 * weights[name]
            velocity[name] = momentum * velocity[name] - 0.25 * factor * gradient
            weights[name] = weights[name] + velocity[name]
        for name, value in weights.items():
            np.testing.assert_allclose(params[name].data, value, rtol=1e-13, atol=1e-13)


# --- The decisions of Gluon's


@BOTH
def test_the_order_of_a_dict_does_not_matter(comm, start, on_store):
    names = ["a", "b", "c"][:: -1 if comm and comm.rank else 1]
    params = {name: np.full(2, float(ord(name))) for name in names}
    kv, trainer, _ = start(on_store, params, options={"learning_rate": 1.0})
    trainer.set_grads({name: np.full(2, float(ord(name))) for name in reversed(names)})
    trainer.step(kv.size)
    for value in params.values():
        np.testing.assert_array_equal(value, np.zeros(2))


@BOTH
@pytest.mark.feature("trainer-shared-parameters")
def test_a_shared_parameter_is_updated_once_by_the_sum(start, on_store):
    """Also where it is another array over the same memory."""
    shared = np.zeros(2)
    kv, trainer, _ = start(on_store, {"out": shared, "embedding": shared, "view": shared[:], "b": np.zeros(1)})
    assert trainer.params["out"] is trainer.params["embedding"] is trainer.params["view"]
    trainer.set_grads({"out": np.ones(2), "embedding": np.full(2, 3.0), "view": np.full(2, 2.0), "b": np.ones(1)})
    trainer.step(1)
    assert kv.keys() == ("b", "embedding")
    np.testing.assert_array_equal(shared, np.full(2, -0.5 * 6 * kv.size))
    trainer.set_data({"out": np.ones(2)})
    np.testing.assert_array_equal(shared, np.ones(2))


@pytest.mark.parametrize(
    ("wanted", "variable", "expected"),
    [(None, None, True), (None, "1", True), (None, "0", False), (True, "0", True), (False, "1", False)],
)
@pytest.mark.feature("trainer-where", "variables-update-on-kvstore")
def test_where_updates_are_made(start, monkeypatch, wanted, variable, expected):
    monkeypatch.delenv("MXNET_UPDATE_ON_KVSTORE", raising=False)
    if variable is not None:
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", variable)
    kv, trainer, _ = start(wanted)
    assert trainer.update_on_kvstore is wanted
    trainer.start()
    assert trainer.update_on_kvstore is expected
    assert (kv.optimizer is trainer.optimizer) is expected


@pytest.mark.processes
@pytest.mark.feature("variables-update-on-kvstore")
def test_a_bad_variable_on_one_rank(start, monkeypatch):
    kv, trainer, _ = start()
    if kv.rank == kv.size - 1:
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "maybe")
    assert "MXNET_UPDATE_ON_KVSTORE='maybe'" in raised_by(kv, kv.size - 1, ConfigError, trainer.start)
    monkeypatch.delenv("MXNET_UPDATE_ON_KVSTORE", raising=False)
    trainer.start()


@pytest.mark.ranks(2, 3)
def test_ranks_that_decide_otherwise(comm, start):
    _, trainer, _ = start(comm.rank == 0)
    with pytest.raises(RankMismatch, match=r"update_on_kvstore=True.*update_on_kvstore=False"):
        trainer.start()


class Summing(mpikv.KVStoreBase):
    """A store without values on top of one that has them."""

    def __init__(self, kv):
        self._kv = kv

    def broadcast(self, key, value=None, out=None, priority=0):
        return self._kv.broadcast(key, value, out)

    def pushpull(self, key, value=None, out=None, priority=0):
        return self._kv.pushpull(key, value, out)


@pytest.mark.feature("trainer-not-capable", "trainer-where")
def test_a_store_without_an_optimizer(comm):
    with mpikv.create(comm=comm) as kv:
        params = {"w": np.ones(2)}
        with pytest.raises(ConfigError, match="update_on_kvstore=True, and the store 'summing' has no optimizer"):
            mpikv.Trainer(params, "sgd", kvstore=Summing(kv), update_on_kvstore=True).start()
        trainer = mpikv.Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore=Summing(kv))
        trainer.set_grads({"w": np.ones(2)})
        trainer.step(kv.size)
        assert trainer.update_on_kvstore is False
        np.testing.assert_array_equal(params["w"], np.full(2, 0.5))


class Told(mpikv.KVStoreBase):
    """Notes what it is asked, and does as one rank would."""

    def __init__(self):
        self.calls = []

    def is_capable(self, capability):
        return capability == self.OPTIMIZER

    def set_gradient_compression(self, compression):
        self.calls.append(("compress", compression))

    def set_optimizer(self, optimizer):
        self.calls.append(("set_optimizer", optimizer))

    def broadcast(self, key, value=None, out=None, priority=0):
        self.calls.append(("broadcast", key))

    def pushpull(self, key, value=None, out=None, priority=0):
        self.calls.append(("pushpull", key))


@pytest.mark.ranks(1)
@pytest.mark.feature("trainer-setup-order", "trainer-sorted-names")
def test_the_order_in_which_a_store_is_set_up():
    told = Told()
    params = {"z": np.ones(1), "a": np.ones(1), "frozen": Parameter(np.ones(1), grad_req="null")}
    trainer = mpikv.Trainer(params, "sgd", kvstore=told, compression_params={"type": "2bit"})
    trainer.set_grads({"a": np.ones(1), "z": np.ones(1), "frozen": np.ones(1)})
    assert told.calls == []
    trainer.step(1)
    assert told.calls == [
        ("compress", {"type": "2bit"}),
        ("set_optimizer", trainer.optimizer),
        ("broadcast", ["a", "frozen", "z"]),
        ("pushpull", ["a", "z"]),
    ]


def test_a_compression_that_the_store_has_not(comm):
    with mpikv.create(comm=comm) as kv:
        trainer = mpikv.Trainer({"w": np.ones(2)}, "sgd", kvstore=Summing(kv), compression_params={"type": "2bit"})
        with pytest.raises(Unsupported, match="'summing' has no such call"):
            trainer.start()


@pytest.mark.feature("trainer-store-lazily")
def test_the_store_is_made_in_the_first_step(comm):
    with mpikv.Trainer({"w": np.ones(2)}, "sgd", {"learning_rate": 0.5}, kvstore="dist_sync") as trainer:
        assert trainer.kvstore is None
        trainer.set_grads({"w": np.ones(2)})
        trainer.step(1)
        assert trainer.kvstore.type == "dist_sync"
        assert trainer.kvstore.size == (1 if comm is None else comm.size)
    with pytest.raises(mpikv.Closed):
        trainer.kvstore.barrier()


def test_a_store_of_the_callers_stays_open(start):
    kv, trainer, _ = start()
    with trainer:
        trainer.start()
    kv.barrier()


@pytest.mark.feature("trainer-halves-on-store")
def test_the_two_halves_belong_to_ranks_that_update(start):
    kv, trainer, params = start(True)
    trainer.set_grads({name: np.ones_like(value) for name, value in params.items()})
    for half in (trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(Unsupported, match="pass update_on_kvstore=False"):
            half()
    trainer.step(1)
    np.testing.assert_array_equal(params["w"], np.full(3, 1 - 0.5 * kv.size))


@pytest.mark.feature("trainer-halves")
def test_clipping_between_the_halves(start):
    kv, trainer, params = start(False)
    trainer.set_grads({"w": np.array([3.0, 0, 0]), "b": np.array([0, 4.0])})
    trainer.allreduce_grads()
    sums = [trainer.params[name].grad for name in ("w", "b")]
    np.testing.assert_array_equal(sums[0], [3.0 * kv.size, 0, 0])
    assert mpikv.clip_global_norm(sums, 1.0) == 5.0 * kv.size
    trainer.update(1)
    np.testing.assert_allclose(params["w"], [1 - 0.3, 1, 1], rtol=1e-15)
    np.testing.assert_allclose(params["b"], [0, -0.4], rtol=1e-15)


@BOTH
@pytest.mark.feature("trainer-accumulation")
def test_gradients_are_accumulated(start, on_store):
    params = {"w": Parameter(np.zeros(2), grad_req="add")}
    kv, trainer, _ = start(on_store, params)
    for step in range(3):
        for _ in range(4):
            trainer.params["w"].grad = np.full(2, step + 1.0)
        trainer.step(4 * kv.size)
        with pytest.raises(ConfigError, match=r"call zero_grad\(\) after the update"):
            trainer.params["w"].grad = np.ones(2)
        trainer.zero_grad()
    np.testing.assert_array_equal(params["w"].data, np.full(2, -0.5 * (1 + 2 + 3)))


def test_integers_are_not_added_where_they_would_wrap(comm):
    weight = Parameter(np.zeros(2, np.int8), grad_req="add")
    for _ in range(2):  # the first is refused, too: it would be kept, and all of the weight's dtype refused
        with pytest.raises(ValueMismatch, match=r"of int64 cannot be added up in int8 for a parameter; .* astype"):
            weight.grad = np.full(2, 300)
        weight.grad = np.ones(2, np.int8)


@BOTH
def test_gradients_of_a_step_stay_the_callers(start, on_store):
    """On the store they are not changed; else they become the sums, and are not rescaled."""
    kv, trainer, params = start(on_store, {"w": np.zeros(2)})
    gradient = np.ones(2)
    trainer.params["w"].grad = gradient
    trainer.step(4)
    np.testing.assert_array_equal(gradient, np.full(2, 1.0 if on_store else kv.size))
    np.copyto(trainer.params["w"].grad, 2.0)  # written in place, as by out=
    trainer.params["w"].fresh = True
    trainer.step(4)
    np.testing.assert_array_equal(params["w"], np.full(2, -0.125 * 3 * kv.size))


@BOTH
@pytest.mark.feature("trainer-frozen")
def test_frozen_parameters_need_no_gradient(start, on_store):
    kv, trainer, params = start(on_store)
    trainer.params["b"].grad_req = "null"
    trainer.set_grads({"w": np.ones(3)})
    trainer.step(kv.size)
    np.testing.assert_array_equal(params["b"], np.zeros(2))
    trainer.params["b"].grad_req = "write"
    trainer.set_grads({"w": np.zeros(3), "b": np.ones(2)})
    trainer.step(kv.size)
    np.testing.assert_array_equal(params["b"], np.full(2, -0.5))


@BOTH
@pytest.mark.feature("trainer-learning-rate")
def test_learning_rates(start, on_store):
    _, trainer, params = start(on_store, {"w": np.zeros(1)})
    assert trainer.learning_rate == 0.5
    for rate in (0.5, 0.25, 0.0):
        trainer.set_learning_rate(rate)
        assert trainer.learning_rate == rate
        step(trainer)
    assert params["w"] == -0.75


@BOTH
@pytest.mark.feature("optimizer-rate-beside-schedule")
def test_a_rate_beside_a_schedule(start, on_store):
    """As MXNet's own test of the Trainer has it: every second step a tenth of the rate."""
    rate = 1.0
    options = {"learning_rate": rate, "lr_scheduler": mpikv.schedules.Factor(2, factor=0.1, base_lr=rate)}
    _, trainer, params = start(on_store, {"w": np.zeros(1)}, options=options)
    for number in range(1, 8):
        step(trainer)
        expected = rate * 0.1 ** (number // 2)  # of the next update
        np.testing.assert_allclose(trainer.learning_rate, expected, rtol=1e-12)
    total = sum(rate * 0.1 ** (number // 2) for number in range(7))
    np.testing.assert_allclose(params["w"], -total, rtol=1e-12)
    with pytest.raises(ConfigError, match="lr_scheduler gives the rate"):
        trainer.set_learning_rate(0.1)


@BOTH
@pytest.mark.feature("trainer-set-data")
def test_weights_set_by_hand(start, on_store):
    kv, trainer, params = start(on_store, options={"learning_rate": 0.5, "momentum": 0.5})
    values = {"w": np.full(3, 8.0 + kv.rank), "b": np.full(2, 1.0 + kv.rank)}
    trainer.set_data(values if kv.is_root else dict(reversed(values.items())))
    np.testing.assert_array_equal(params["w"], np.full(3, 8.0))
    np.testing.assert_array_equal(params["b"], np.ones(2))
    step(trainer)
    np.testing.assert_array_equal(params["w"], np.full(3, 7.5))
    message = raised_by(kv, 0, ConfigError, lambda: trainer.set_data({"v" if kv.rank == 0 else "w": np.zeros(3)}))
    assert "unknown parameter 'v'" in message


@BOTH
@pytest.mark.feature("trainer-overflow-vote")
def test_an_overflow_on_one_rank_skips_the_update_on_all(start, on_store):
    scaler = mpikv.LossScaler(4.0, window=2)
    kv, trainer, params = start(on_store, {"w": np.zeros(2)}, loss_scaler=scaler)
    weight, scales = trainer.params["w"], []
    for step in range(4):
        weight.grad = np.full(2, np.inf if step == 1 and kv.rank == kv.size - 1 else scaler.loss_scale)
        scales.append(scaler.loss_scale)
        trainer.step(kv.size)
        assert not weight.fresh
    np.testing.assert_array_equal(params["w"], np.full(2, -1.5))
    assert (scales, scaler.loss_scale) == ([4, 4, 2, 2], 4)


# --- Mistakes


@BOTH
@pytest.mark.feature("trainer-stale")
def test_a_stale_gradient_on_one_rank(start, on_store):
    kv, trainer, params = start(on_store)
    for step in range(2):  # reset in both modes
        grads = {name: np.ones_like(value) for name, value in params.items()}
        if kv.rank == kv.size - 1:
            del grads["b"]
        trainer.set_grads(grads)
        told = raised_by(kv, kv.size - 1, StaleGradient, lambda: trainer.step(1))
        assert "parameter 'b' was given no gradient since" in told
        np.testing.assert_array_equal(params["w"], np.full(3, 1 - 0.5 * kv.size * step))
        trainer.params["b"].grad = np.ones(2)
        trainer.step(1)
    np.testing.assert_array_equal(params["w"], np.full(3, 1 - kv.size))
    with pytest.raises(UserWarning, match=f"parameters 'b' and {len(params) - 1} more were given no gradient"):
        trainer.step(1)


@BOTH
@pytest.mark.ranks(2, 3)
def test_ranks_that_leave_out_others(start, on_store):
    kv, trainer, params = start(on_store)
    trainer.params["w"].grad = np.ones(3)
    if kv.is_root:
        trainer.params["b"].grad = np.ones(2)
    with pytest.raises(RankMismatch, match="ranks disagree"):
        trainer.step(1, ignore_stale_grad=True)
    np.testing.assert_array_equal(params["w"], np.ones(3))
    if not kv.is_root:
        trainer.params["b"].grad = np.zeros(2)
    trainer.step(1)
    np.testing.assert_array_equal(params["b"], np.full(2, -0.5))


@BOTH
@pytest.mark.parametrize("batch_size", [0, -1, float("nan"), float("inf"), "8", None, True])
def test_a_bad_batch_size_on_one_rank(start, on_store, batch_size):
    kv, trainer, params = start(on_store)
    trainer.set_grads({name: np.ones_like(value) for name, value in params.items()})
    mine = batch_size if kv.rank == kv.size - 1 else 1
    assert "batch_size=" in raised_by(kv, kv.size - 1, ConfigError, lambda: trainer.step(mine))
    trainer.step(1)
    np.testing.assert_array_equal(params["w"], np.full(3, 1 - 0.5 * kv.size))


@BOTH
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("option", ["batch_size", "learning_rate", "lr_mult"])
def test_ranks_with_other_settings(start, on_store, option):
    kv, trainer, params = start(on_store)
    grads = {name: np.ones_like(value) for name, value in params.items()}
    trainer.set_grads(grads)
    batch_size = 2 if option == "batch_size" and not kv.is_root else 1
    if option == "learning_rate" and kv.is_root:
        trainer.set_learning_rate(1.0)
    if option == "lr_mult" and kv.is_root:
        trainer.params["w"].lr_mult = 3.0
    with pytest.raises(RankMismatch, match="ranks disagree"):
        trainer.step(batch_size)
    np.testing.assert_array_equal(params["w"], np.ones(3))
    for gradient in grads.values():
        np.testing.assert_array_equal(gradient, np.ones_like(gradient))
    trainer.set_learning_rate(0.5)
    trainer.params["w"].lr_mult = 1.0
    trainer.step(1)
    np.testing.assert_array_equal(params["w"], np.full(3, 1 - 0.5 * kv.size))


@BOTH
@pytest.mark.ranks(2, 3)
def test_ranks_with_other_parameters(comm, start, on_store):
    _, trainer, _ = start(on_store, {"w": np.zeros(2), "b" if comm.rank == 0 else "c": np.zeros(2)})
    with pytest.raises(RankMismatch, match="'b'"):
        trainer.start()


@BOTH
def test_a_gradient_that_does_not_fit_on_one_rank(start, on_store):
    kv, trainer, params = start(on_store)
    with pytest.raises(ValueMismatch, match=r"a gradient of shape \(2,\) does not fit parameter 'w' of shape \(3,\)"):
        trainer.params["w"].grad = np.ones(2)
    with pytest.raises(TypeError, match="expected an array"):
        trainer.params["w"].grad = [1.0, 2.0, 3.0]
    trainer.set_grads({"w": np.ones(3), "b": np.ones(2)})
    if kv.is_root:
        trainer.params["b"].grad = np.ones(2, int)
    assert "int64" in raised_by(kv, 0, ValueMismatch, lambda: trainer.step(kv.size))
    trainer.params["b"].grad = np.ones(2)
    trainer.step(kv.size)
    np.testing.assert_array_equal(params["w"], np.full(3, 0.5))


def test_what_cannot_hold_a_sum_on_one_rank(start):
    kv, trainer, _ = start(False, {"v": np.zeros(2), "w": np.zeros(2)})
    one = np.ones(2)
    trainer.set_grads({"v": one, "w": one if kv.is_root else one.copy()})
    assert "'v' and 'w' share one array" in raised_by(kv, 0, ValueMismatch, lambda: trainer.step(1))
    trainer.set_grads({"v": np.ones(2), "w": np.broadcast_to(1.0, 2) if kv.is_root else np.ones(2)})
    assert "read-only" in raised_by(kv, 0, TypeError, lambda: trainer.step(1))


@pytest.mark.feature("trainer-halves")
def test_halves_out_of_order(start):
    kv, trainer, params = start(False, {"w": np.zeros(2)})
    weight = trainer.params["w"]
    weight.grad = np.ones(2)
    with pytest.raises(ConfigError, match=r"call allreduce_grads\(\) first"):
        trainer.update(1)
    trainer.allreduce_grads()
    with pytest.raises(ConfigError, match="sum over ranks already"):
        trainer.allreduce_grads()
    with pytest.raises(ConfigError, match="sum over ranks already"):
        trainer.step(1)
    weight.grad[...] /= 2
    trainer.update(1)
    np.testing.assert_array_equal(params["w"], np.full(2, -0.25 * kv.size))
    with pytest.raises(StaleGradient):
        trainer.update(1)
    weight.grad = np.ones(2)
    trainer.allreduce_grads()
    if kv.is_root:
        weight.grad = weight.grad / 2
    assert "not the sum" in raised_by(kv, 0, ConfigError, lambda: trainer.update(1))
    np.testing.assert_array_equal(params["w"], np.full(2, -0.25 * kv.size))


@pytest.mark.ranks(2, 3)
def test_halves_with_other_parameters(start):
    kv, trainer, params = start(False)
    trainer.set_grads({name: np.ones_like(value) for name, value in params.items()})
    trainer.allreduce_grads()
    trainer.params["b"].fresh = kv.is_root
    with pytest.raises(RankMismatch, match=r"update \['b', 'w'\].*update \['w'\]"):
        trainer.update(1, ignore_stale_grad=True)
    np.testing.assert_array_equal(params["w"], np.ones(3))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([np.zeros(1)], "sgd"), TypeError, "params is a dict of names and arrays, not a list$"),
        ((Model(), "sgd"), TypeError, r"params is .*, not a Model; pass dict\(model.named_parameters\(\)\)"),
        (({"w": np.zeros(1)}, "sgd", {"lr": 1}), ConfigError, "unknown option of SGD 'lr'.* 'learning_rate'"),
        (({}, "sgd"), ConfigError, "nothing to train"),
        (({3: np.zeros(1)}, "sgd"), TypeError, "is a str"),
        (({"w": [1.0]}, "sgd"), TypeError, "not a list"),
        (({"w": np.float64(1)}, "sgd"), TypeError, "not a float64"),
        (({"w": np.broadcast_to(1.0, 3)}, "sgd"), TypeError, "read-only"),
        (({"w": np.zeros(1, ">f8")}, "sgd"), TypeError, "byte order"),
        (({"w": np.zeros(1)}, "sdg"), ConfigError, "did you mean 'sgd'"),
        (({"w": np.zeros(1)}, mpikv.optimizers.SGD(), {"momentum": 0.5}), ConfigError, "not with an object"),
        (({"w": np.zeros(1)}, print), TypeError, "expected an optimizer"),
        (({"w": np.zeros(1)}, "sgd", None, None), TypeError, "kvstore is a store or the name of one"),
        (({"w": np.zeros(1)}, "sgd", None, "typo"), ConfigError, "unknown store 'typo'"),
        *(
            (({"w": np.zeros(1)}, "sgd", None, "device", None, wrong), ConfigError, "neither True, False nor None")
            for wrong in ("yes", 0, 1, np.True_)
        ),
    ],
)
@pytest.mark.feature("trainer-bad-arguments")
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        mpikv.Trainer(*arguments)


def test_integers_cannot_be_trained(start):
    _, trainer, _ = start(True, {"w": np.zeros(2, int)})
    with pytest.raises(Unsupported, match="cannot update values of int64"):
        trainer.start()


# --- Checkpoints


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.feature("recovery")
def test_training_goes_on_from_a_checkpoint(comm, start, folder, by_hand):
    """Beside one that was not interrupted, bit for bit; optimizer, counts and multipliers included."""
    path = folder / "x.mpikv"
    options = {"learning_rate": 0.5, "momentum": 0.5, "lr_mult": {"b": 2.0}}

    def steps(trainer, params, first, last):
        for step in range(first, last):
            trainer.set_grads({name: of_rank(trainer.kvstore.rank, a.shape, step) for name, a in params.items()})
            trainer.step(4 + step)

    def weights():
        return {"w": Parameter(np.ones(3), lr_mult=0.25), "b": Parameter(np.zeros(2))}

    kv, trainer, params = start(True, weights(), options=options)
    arrays = {name: parameter.data for name, parameter in params.items()}
    steps(trainer, arrays, 0, 2)
    kv.save(path)
    assert kv.optimizer.rescale_grad == 1
    assert kv.optimizer.lr_mult == {"b": 2.0}
    steps(trainer, arrays, 2, 4)
    kv = mpikv.create(comm=comm, timeout=5)
    kv.load(path)
    again = {name: Parameter(np.full_like(array, 9.0)) for name, array in arrays.items()}
    again["w"].lr_mult = 0.25
    optimizer = (kv.optimizer,) if by_hand else ("sgd", options)
    with pytest.raises(KeyAlreadyInitialized, match="pass resume=True"):
        mpikv.Trainer(again, *optimizer, kvstore=kv).start()
    trainer = mpikv.Trainer(again, *optimizer, kvstore=kv, resume=True)
    trainer.start()
    assert trainer.optimizer is kv.optimizer
    steps(trainer, arrays, 2, 4)
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name].data, array)


def test_the_optimizer_of_a_store_that_was_loaded_meanwhile(start, folder):
    path = folder / "x.mpikv"
    kv, trainer, params = start(True, {"w": np.zeros(1)}, options={"learning_rate": 1.0})
    trainer.start()
    kv.save(path)
    kv.load(path)
    trainer.set_learning_rate(0.25)
    step(trainer, 2 * kv.size)
    np.testing.assert_array_equal(params["w"], [-0.125])
    kv.set_updater(lambda key, received, stored: None)
    trainer.set_grads({"w": np.ones(1)})
    with pytest.raises(ConfigError, match="the store was given an updater"):
        trainer.step(1)


def test_resume_that_cannot_be(start, monkeypatch):
    kv, _, _ = start()
    with pytest.raises(ConfigError, match="resume='no' is neither True nor False"):
        mpikv.Trainer({"w": np.zeros(3)}, "sgd", kvstore=kv, resume="no")
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    with pytest.raises(ConfigError, match="MXNET_UPDATE_ON_KVSTORE=0 is set; use another store, or unset"):
        mpikv.Trainer({"w": np.zeros(3)}, "sgd", kvstore=kv, resume=True).start()


def test_a_loaded_store_of_others(start):
    kv, _, _ = start()
    kv.init("w", np.zeros(3))
    kv.set_optimizer("sgd")
    with pytest.raises(ConfigError, match="has an updater already; give each Trainer a store"):
        mpikv.Trainer({"v": np.zeros(3)}, "sgd", kvstore=kv).start()
    for names, optimizer, text in [
        ("wb", "sgd", "only some of the parameters: 'b' is missing"),
        ("w", "adam", "is not of the kind of Adam()"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(text)):
            mpikv.Trainer({name: np.zeros(3) for name in names}, optimizer, kvstore=kv, resume=True).start()
    mpikv.Trainer({"w": np.zeros(3)}, "sgd", kvstore=kv, resume=True).start()
    with pytest.raises(ConfigError, match="or another Trainer's"):
        mpikv.Trainer({"w": np.zeros(3)}, "sgd", kvstore=kv, resume=True).start()
    for wrong in ({"kvstore": "local"}, {"kvstore": kv, "update_on_kvstore": False}):
        with pytest.raises(ConfigError, match="without update_on_kvstore"):
            mpikv.Trainer({"w": np.zeros(3)}, "sgd", resume=True, **wrong)


# --- One optimizer, several Trainers


@BOTH
def test_an_optimizer_is_left_as_it_was(start, on_store):
    optimizer = mpikv.optimizers.SGD(learning_rate=1.0, lr_mult={"v": 3.0})
    for _ in range(2):
        kv, trainer, params = start(on_store, {"w": np.zeros(1)}, optimizer=optimizer)
        trainer.params["w"].lr_mult = 0.5
        step(trainer, 32 * kv.size)
        assert (optimizer.rescale_grad, optimizer.lr_mult) == (1, {"v": 3.0})
        np.testing.assert_array_equal(params["w"], [-1 / 64])


# --- Failures of one rank


class Failing(mpikv.optimizers.SGD):
    fails = False

    def rule(self, step, block):
        if Failing.fails:
            raise MemoryError("too little")
        super().rule(step, block)


@pytest.mark.processes
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("halves", [False, True])
def test_an_update_that_fails_on_one_rank_is_told_in_the_next_call(start, halves):
    kv, trainer, _ = start(False, {"w": np.zeros(1)}, optimizer=Failing(learning_rate=1.0))
    Failing.fails = kv.is_root
    trainer.set_grads({"w": np.ones(1)})
    if kv.is_root:
        with pytest.raises(MemoryError):
            trainer.step(1)
    else:
        trainer.step(1)
    Failing.fails = False
    trainer.set_grads({"w": np.ones(1)})
    text = raised_by(kv, 0, mpikv.Closed, trainer.allreduce_grads if halves else lambda: trainer.step(1))
    assert "an earlier step failed here alone (MemoryError('too little'))" in text


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("on_store", "scaled"), [(False, False), (True, True)])
def test_steps_in_join_that_would_not_be_made_by_all(start, on_store, scaled):
    scaler = mpikv.LossScaler() if scaled else None
    kv, trainer, _ = start(on_store, {"w": np.zeros(1)}, loss_scaler=scaler)
    trainer.start()
    trainer.set_grads({"w": np.ones(1)})

    def join():
        with kv.join():
            if kv.is_root:
                trainer.step(1)

    assert "a Trainer needs a store" in raised_by(kv, 0, Unsupported, join)
    trainer.step(1)


def test_steps_in_join(start):
    kv, trainer, params = start(True, {"w": np.zeros(1)}, options={"learning_rate": 1.0})
    trainer.start()
    with kv.join():
        for _ in range(1 + kv.rank):
            step(trainer, 1)
    kv.pull("w", out=params["w"])
    np.testing.assert_array_equal(params["w"], [-kv.size * (kv.size + 1) / 2])


# --- Gradients that overflow


@pytest.mark.parametrize(("on_store", "halves"), [(True, False), (False, False), (False, True)])
def test_overflows_of_gradients_that_are_compressed(start, on_store, halves):
    weights = {"w": np.zeros(4, np.float32)}
    kv, trainer, params = start(on_store, weights, loss_scaler=mpikv.LossScaler(2.0), compression_params="fp16")
    for number in range(2):
        trainer.set_grads({"w": np.full(4, np.inf if number == 0 and kv.is_root else 2.0, np.float32)})
        if halves:
            trainer.allreduce_grads()
            mpikv.clip_global_norm([trainer.params["w"].grad], 1e9)
            trainer.update(kv.size)
        else:
            trainer.step(kv.size)
        np.testing.assert_array_equal(params["w"], np.full(4, -1.0 * number, np.float32))


@BOTH
def test_overflows_in_the_dtype_of_the_weight(start, on_store):
    scaler = mpikv.LossScaler(1024.0)
    _, trainer, params = start(on_store, {"w": np.zeros(2, np.float16)}, loss_scaler=scaler)
    trainer.set_grads({"w": np.full(2, 1e5, np.float32)})
    trainer.step(100)
    assert scaler.loss_scale == 512
    np.testing.assert_array_equal(params["w"], np.zeros(2))


# --- Parameters over shared memory, and those that are not trained


@pytest.mark.ranks(1)
def test_parameters_that_overlap():
    whole = np.zeros((4, 6))
    for one, other in [(whole[:3], whole[2:]), (whole[::-1], whole), (whole[:, 1:3], whole[:, 2:4])]:
        with pytest.raises(ValueMismatch, match="'a' and 'b' overlap in memory"):
            mpikv.Trainer({"a": one, "b": other}, "sgd")
    with pytest.raises(ValueMismatch, match="'a' and 'b' overlap in memory, in part or as two objects"):
        mpikv.Trainer({"a": Parameter(whole), "b": Parameter(whole)}, "sgd")
    columns = mpikv.Trainer({str(column): whole[:, column] for column in range(6)}, "sgd")
    assert len(columns.params) == 6
    mpikv.Trainer({"a": whole[:, :0], "b": whole[:, :0], "c": whole}, "sgd")


@BOTH
@pytest.mark.feature("trainer-frozen-integers")
def test_frozen_integers(comm, start, on_store):
    count = Parameter(np.array(comm.rank + 5 if comm else 5), grad_req="null")
    kv, trainer, params = start(on_store, {"w": np.zeros(2), "count": count})
    trainer.set_grads({"w": np.ones(2)})
    trainer.step(kv.size)
    assert count.data == 5
    np.testing.assert_array_equal(params["w"], [-0.5, -0.5])
    if on_store:
        with pytest.raises(Unsupported, match="does not keep 'count'"):
            trainer.set_data({"count": np.array(7)})
    else:
        trainer.set_data({"count": np.array(7)})
        assert count.data == 7


@pytest.mark.ranks(1)
def test_gradients_of_a_shared_parameter_are_added_in_float32():
    weight = np.zeros(1, np.float16)
    trainer = mpikv.Trainer({"a": weight, "b": weight}, "sgd")
    trainer.set_grads({"a": np.full(1, 60000, np.float16), "b": np.full(1, 60000, np.float16)})
    np.testing.assert_array_equal(trainer.params["a"].grad, [120000 // 64 * 64])
    for bad in (np.ones(2, np.float16), np.ones(1, int)):
        with pytest.raises(ValueMismatch, match=r"a gradient of shape .* does not fit parameter 'a' of shape \(1,\)"):
            trainer.set_grads({"a": np.ones(1, np.float16), "b": bad})


def test_an_array_that_held_a_sum_is_given_as_a_gradient(start):
    kv, trainer, params = start(False, {"w": np.zeros(1)})
    gradient = np.ones(1)
    trainer.params["w"].grad = gradient
    trainer.allreduce_grads()
    gradient[:] = kv.rank + 10
    trainer.params["w"].grad = gradient
    with pytest.raises(ConfigError, match="is not the sum over ranks"):
        trainer.update(1)
    np.testing.assert_array_equal(params["w"], [0])


@BOTH
@pytest.mark.feature("sparse-trainer")
def test_sparse_gradients_and_weights_are_refused(comm: Any, on_store: bool) -> None:
    """By name, with what to do; a gradient that is whole comes to its end."""
    rows = mpikv.RowSparse([2], np.ones((1, 2)), (4, 2))
    with pytest.raises(TypeError, match=r"not a RowSparse; pass numpy\.array"):
        mpikv.Trainer({"w": rows}, "sgd")
    with mpikv.create(comm=comm) as kv:
        trainer = mpikv.Trainer({"w": np.ones((4, 2))}, "sgd", {"learning_rate": 1.0}, kv, update_on_kvstore=on_store)
        with pytest.raises(TypeError, match=r"got RowSparse; value\.to_dense\(\) makes one"):
            trainer.set_grads({"w": rows})
        with pytest.raises(TypeError, match=r"got RowSparse; value\.to_dense\(\) makes one"):
            trainer.params["w"].grad = rows
        trainer.set_grads({"w": np.asarray(rows)})
        trainer.step(kv.size)
        np.testing.assert_array_equal(trainer.params["w"].data, [[1, 1], [1, 1], [0, 0], [1, 1]])
