"""States of a Trainer in a file: training goes on as if it had never stopped, wherever the weights are updated."""

from contextlib import ExitStack

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import mpikv
from mpikv import CheckpointError, ConfigError, Parameter, PeerFailed, RankMismatch, Unsupported, ValueMismatch
from mpikv.cluster.mpi_library import library_of

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

BOTH = pytest.mark.parametrize("on_store", [True, False])
SHAPES = {"b": (), "empty": (0, 3), "late": (5,), "w": (7, 3)}
PARTS = 12


def weights(dtype=np.float64):
    """Return parameters: one is frozen, one of integers, one a view with gaps."""
    params = {name: Parameter(np.full(shape, 0.5, dtype)) for name, shape in SHAPES.items()}
    params["strided"] = Parameter(np.ones((4, 6), dtype)[::2, ::3], lr_mult=0.5)
    params["frozen"] = Parameter(np.full(2, 3.0, dtype), grad_req="null")
    params["count"] = Parameter(np.array(7), grad_req="null")
    return params


@pytest.fixture
def trainer_on(comm):
    """Return a function that makes a trainer on a store of its own, which is closed after the test."""
    with ExitStack() as stores:

        def make(on_store, params, optimizer="adam", options=None, comm=comm):
            options = {"learning_rate": 0.25} if options is None else options
            kv = stores.enter_context(mpikv.create(comm=comm, timeout=5, deterministic=True))
            return kv, mpikv.Trainer(params, optimizer, options, kvstore=kv, update_on_kvstore=on_store)

        yield make


def train(trainer, first, last, skipped=("frozen", "count")):
    """Make steps with gradients in quarters, whose sums are exact, so that any number of ranks has the same ones."""
    kv = trainer.kvstore
    mine = range(kv.rank * PARTS // kv.size, (kv.rank + 1) * PARTS // kv.size)
    for step in range(first, last):
        for name, parameter in trainer.params.items():
            if name in skipped or (name == "late" and step < 4):
                continue
            shape = parameter.data.shape
            drawn = [np.random.default_rng([part, step, len(name)]).integers(-8, 9, shape) / 4 for part in mine]
            parameter.grad = np.asarray(sum(drawn)).astype(parameter.data.dtype)
        trainer.step(PARTS, ignore_stale_grad=True)


def bits(trainer):
    return {name: parameter.data.tobytes() for name, parameter in trainer.params.items()}


def copied(trainer):
    params = weights(trainer.params["w"].data.dtype)
    for name, parameter in params.items():
        parameter.data[...] = trainer.params[name].data
    return params


def stop(trainer, path, at, end):
    """Train until a save and on; return the weights of the save, and what the weights become."""
    trainer.start()
    train(trainer, 0, at)
    stopped = copied(trainer)
    trainer.save_states(path)
    train(trainer, at, end)
    return stopped, bits(trainer)


def go_on(trainer, path, at, end):
    """Train from a save on; return what the weights become."""
    trainer.load_states(path)
    train(trainer, at, end)
    return bits(trainer)


OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.25, "momentum": 0.5}),
    ("adam", {"learning_rate": 0.25, "wd": 0.125}),
    ("adamw", {"lr_scheduler": mpikv.schedules.Cosine(10, base_lr=0.1)}),
    ("rmsprop", {"centered": True}),
    ("ftrl", {}),
    ("lamb", {"learning_rate": 0.1}),
    ("nadam", {}),
    ("sgd", {"lr_scheduler": lambda count: 0.5 / count, "momentum": 0.5}),
]


@BOTH
@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=15)
@pytest.mark.feature("trainer-states", "trainer-states-masters")
def test_whatever_was_saved_is_loaded(trainer_on, folder, on_store, data):
    """Any parameters, some of them stale at times, and any optimizer: the steps after a load are those without one.

    The optimizer that goes on is the file's, unless no file can hold it.
    """
    shapes = strategies.sampled_from([(), (0,), (1,), (3,), (2, 5), (4, 1, 3)])
    drawn = data.draw(strategies.dictionaries(strategies.text("abé/_", min_size=1, max_size=4), shapes, min_size=1))
    dtypes = {name: data.draw(strategies.sampled_from(["float16", "float32", "float64"])) for name in drawn}
    optimizer, options = data.draw(strategies.sampled_from(OPTIMIZERS))
    options = {**options, "multi_precision": data.draw(strategies.booleans())}
    plan = data.draw(strategies.lists(strategies.sets(strategies.sampled_from(sorted(drawn))), max_size=5))
    at = data.draw(strategies.integers(0, len(plan)))

    def go_on(trainer, first, last):
        for step in range(first, last):
            for name in plan[step]:
                random = np.random.default_rng([trainer.kvstore.rank, step])
                trainer.params[name].grad = np.asarray(random.integers(-4, 5, drawn[name]) / 2).astype(dtypes[name])
            trainer.step(2, ignore_stale_grad=True)
        return bits(trainer)

    params = {name: Parameter(np.full(shape, 0.5, dtypes[name])) for name, shape in drawn.items()}
    kv, trainer = trainer_on(on_store, params, optimizer, options)
    with kv:
        trainer.start()
        go_on(trainer, 0, at)
        stopped = {name: Parameter(one.data.copy()) for name, one in params.items()}
        trainer.save_states(folder / "states")
        through = go_on(trainer, at, len(plan))
    kv, trainer = trainer_on(on_store, stopped, optimizer, options)
    with kv:
        trainer.start()
        before = trainer.optimizer
        trainer.load_states(folder / "states")
        assert (trainer.optimizer is before) is before.opaque
        assert go_on(trainer, at, len(plan)) == through


@pytest.mark.ranks(4)
@pytest.mark.parametrize("later", [True, False])
@BOTH
@pytest.mark.feature("trainer-states-any-size")
def test_other_numbers_of_ranks_go_on(comm, trainer_on, folder, on_store, later):
    """Saved on 4 ranks; loaded on 1, 2 and 3, by a Trainer that updates in the same place or in the other."""
    _, trainer = trainer_on(on_store, weights())
    stopped, through = stop(trainer, folder / "states", 5, 8)
    for size in (1, 2, 3, 4):
        some = comm.Split(0 if comm.rank < size else library_of(comm).UNDEFINED, comm.rank)
        if comm.rank >= size:
            continue
        params = {name: Parameter(np.array(one.data), one.grad_req, one.lr_mult) for name, one in stopped.items()}
        kv, trainer = trainer_on(later, params, comm=some)
        with kv:
            assert go_on(trainer, folder / "states", 5, 8) == through
        some.Free()


@pytest.mark.feature("trainer-states-one-form")
def test_both_ways_write_the_same_file(trainer_on, folder):
    """After every parameter has been updated: the store keeps state for it from the start, a rank from the first."""
    for on_store in (True, False):
        params = {name: one for name, one in weights(np.float32).items() if name != "count"}
        _, trainer = trainer_on(on_store, params)
        trainer.start()
        train(trainer, 0, 6)
        trainer.save_states(folder / f"states-{on_store}")
    assert (folder / "states-True").read_bytes() == (folder / "states-False").read_bytes()


@BOTH
@pytest.mark.parametrize("saves", [True, False])
def test_saving_changes_nothing_that_follows(trainer_on, folder, on_store, saves):
    """A weight that is written by hand before its first update is what its master begins with, where it is made then.

    A store makes the master when it is given the weight.
    """
    params = {"w": np.zeros(2, np.float16)}
    options = {"learning_rate": 1.0, "multi_precision": True}
    kv, trainer = trainer_on(on_store, params, "sgd", options)
    trainer.start()
    if saves:
        trainer.save_states(folder / "states")
    params["w"][:] = 100
    trainer.set_grads({"w": np.ones(2, np.float16)})
    trainer.step(kv.size)
    np.testing.assert_array_equal(params["w"], np.full(2, -1.0 if on_store else 99.0))


@BOTH
def test_a_closed_store_is_named_with_the_call(trainer_on, folder, on_store):
    kv, trainer = trainer_on(on_store, weights())
    trainer.start()
    kv.close()
    for verb in ("save", "load"):
        with pytest.raises(
            mpikv.Closed, match=rf"^{verb}_{'optimizer_' if on_store else ''}states: the store was closed"
        ):
            getattr(trainer, f"{verb}_states")(folder / "states")


def test_a_store_that_one_rank_gave_another_updater(trainer_on, folder):
    kv, trainer = trainer_on(True, weights())
    trainer.start()
    kv.set_updater(lambda key, received, stored: None)
    with pytest.raises(ConfigError, match="save_states: the store was given an updater"):
        trainer.save_states(folder / "states")
    kv.barrier()


@BOTH
def test_settings_of_the_optimizer_are_the_files(trainer_on, folder, on_store):
    _, trainer = trainer_on(on_store, weights())
    trainer.start()
    train(trainer, 0, 1)
    trainer.set_learning_rate(0.125)
    trainer.save_states(folder / "states")
    before = trainer.optimizer
    trainer.set_learning_rate(0.5)
    trainer.load_states(folder / "states")
    assert trainer.optimizer is not before
    assert trainer.learning_rate == 0.125
    assert trainer.optimizer.rescale_grad == 1
    train(trainer, 1, 2)


# --- What the store holds meanwhile


@pytest.mark.feature("trainer-sums-are-no-checkpoint")
def test_a_store_that_only_sums_is_no_checkpoint(trainer_on, folder):
    kv, trainer = trainer_on(False, weights())
    trainer.start()
    train(trainer, 0, 2)
    kv.init("mine", np.ones(2))
    for call in (kv.save, kv.load):
        with pytest.raises(
            Unsupported, match="is a sum of gradients, not a weight: a Trainer with update_on_kvstore=False"
        ):
            call(folder / "checkpoint")
    assert list(folder.iterdir()) == []
    train(trainer, 2, 3)
    kv.delete(["b", "empty", "late", "w", "strided", "frozen", "count"])
    kv.save(folder / "checkpoint")


def test_a_store_with_values_and_sums(comm, folder):
    kv = mpikv.create(comm=comm, timeout=5)
    with kv:
        params = {"critic": {"w": np.ones(2)}}
        trainer = mpikv.Trainer(params, "sgd", {"momentum": 0.5}, kvstore=kv, update_on_kvstore=False)
        kv.init("critics", np.ones(1))
        kv.save(folder / "before")
        trainer.start()
        with pytest.raises(Unsupported, match="the value of 'critic/w' is a sum"):
            kv.save(folder / "after")
        trainer.save_states(folder / "states")
        trainer.load_states(folder / "states")


def test_a_store_without_values(folder):
    check_states_on("horovod", folder)


@pytest.mark.ranks(1)
def test_a_store_of_one_process(folder):
    check_states_on("teststore", folder)


def check_states_on(name, folder):
    params = {"w": np.ones(2)}
    options = {"learning_rate": 1.0, "momentum": 0.5}
    with mpikv.Trainer(params, "sgd", options, kvstore=name) as trainer:
        trainer.start()
        trainer.set_grads({"w": np.ones(2)})
        trainer.step(trainer.kvstore.num_workers)
        trainer.save_states(folder / "states")
    with mpikv.Trainer(params, "sgd", options, kvstore=name) as trainer:
        trainer.load_states(folder / "states")
        trainer.set_grads({"w": np.zeros(2)})
        trainer.step(1)
        np.testing.assert_array_equal(params["w"], [-0.5, -0.5])


# --- Mistakes and faults


def raised(kv, culprit, error, call):
    """Make a call that fails on one rank; check what each raises, and return the text."""
    with pytest.raises(error if kv.rank == culprit else PeerFailed) as caught:
        call()
    return str(caught.value)


def test_a_file_that_rank_0_cannot_write(trainer_on, folder):
    kv, trainer = trainer_on(False, weights())
    text = raised(kv, 0, OSError, lambda: trainer.save_states(folder / "missing" / "states"))
    assert "No such file" in text
    train(trainer, 0, 1)
    trainer.save_states(folder / "states")


@BOTH
def test_a_damaged_file_changes_nothing(trainer_on, folder, on_store):
    kv, trainer = trainer_on(on_store, weights())
    trainer.start()
    train(trainer, 0, 2)
    trainer.save_states(folder / "states")
    kv.barrier()
    if kv.rank == 0:
        content = bytearray((folder / "states").read_bytes())
        content[-3] ^= 1
        (folder / "damaged").write_bytes(content)
    kv.barrier()
    with pytest.raises((CheckpointError, PeerFailed), match="damaged"):
        trainer.load_states(folder / "damaged")
    stopped = copied(trainer)
    train(trainer, 2, 4)
    through = bits(trainer)
    kv, trainer = trainer_on(on_store, stopped)
    assert go_on(trainer, folder / "states", 2, 4) == through


@pytest.mark.ranks(2, 3)
def test_ranks_with_other_paths(trainer_on, folder):
    kv, trainer = trainer_on(False, weights())
    trainer.start()
    with pytest.raises(RankMismatch, match="save_states"):
        trainer.save_states(folder / f"{kv.rank}")
    assert list(folder.iterdir()) == []
    trainer.save_states(folder / "states")
    with pytest.raises(RankMismatch, match="load_states"):
        trainer.load_states(folder / ("states" if kv.is_root else f"../{folder.name}/states"))


@BOTH
def test_states_of_others(trainer_on, folder, on_store):
    sgd = "sgd", {"momentum": 0.5}
    renamed, reshaped = weights(), weights()
    renamed["more"], reshaped["w"] = renamed.pop("w"), Parameter(np.zeros(2))
    trainer_on(on_store, weights(), *sgd)[1].save_states(folder / "states")
    for params, optimizer, error, text in [
        (weights(), ("adam",), CheckpointError, r"holds the state of SGD and the (store|Trainer) has Adam"),
        (renamed, sgd, ValueMismatch, "'w' is not in the"),
        (reshaped, sgd, ValueMismatch, r"key 'w' is float64\[7, 3\] in the checkpoint"),
    ]:
        with pytest.raises(error, match=text):
            trainer_on(on_store, params, *optimizer)[1].load_states(folder / "states")


def test_state_that_does_not_fit_the_settings(trainer_on, folder):
    _, trainer = trainer_on(False, weights(), "sgd", {"momentum": 0.5})
    train(trainer, 0, 1)
    trainer.optimizer.momentum = 0.0
    with pytest.raises(ConfigError, match="changed to keep"):
        trainer.save_states(folder / "states")
    trainer.optimizer.momentum = 0.5
    trainer.save_states(folder / "states")
