"""The mean over ranks, which an optimizer takes where it is asked to, and which follows their number."""

import copy

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, RankMismatch, RowSparse, Unsupported, optimizers, schedules

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

NAMES = ["sgd", "signum", "adagrad", "rmsprop", "adadelta", "adam", "adamw", "nadam", "adamax", "ftrl", "lars", "lamb"]
STORES = [
    {"name": "local", "placement": placement, "transport": transport}
    for placement, transport in [("root", "auto"), ("root", "mpi"), ("sharded", "mpi"), ("replicated", "mpi")]
] + [{"name": "p3"}, {"deterministic": True}]


def of_rank(rank, shape, step=0):
    """Return the gradient that a rank brings, in quarters, whose sums are exact."""
    return np.asarray(np.random.default_rng([rank, step, *shape]).integers(-8, 9, shape) / 4)


def made(comm, transport="auto", **options):
    if transport == "mpi" and comm is not None:
        options["transport"] = transport
    return mpikv.create(comm=comm, timeout=5, **options)


@pytest.fixture
def kv(comm):
    with made(comm) as store:
        yield store


def check_mean(kv, name, **options):
    """Train by ``average``, and by the factor that has the same meaning: it comes to the same bits."""
    factor = options.get("rescale_grad", 1.0) / kv.size
    for key, more in (("mean", {"average": True}), ("scaled", {"rescale_grad": factor})):
        kv.init(key, np.full((5, 3), 0.5), overwrite=True)
        kv.set_optimizer(name, **{**options, **more})
        for number in range(3):
            kv.push(key, of_rank(kv.rank, (5, 3), number))
    assert kv.pull("mean").tobytes() == kv.pull("scaled").tobytes() != np.full((5, 3), 0.5).tobytes()


def on_some(comm, ranks):
    """Yield a store of the first rank, of the first two, and so on to all; ranks that it has not go on."""
    for size in range(1, ranks + 1):
        part = comm and comm.Split(comm.rank >= size, comm.rank)
        if comm is None or comm.rank < size:
            with made(part) as kv:
                yield kv


@pytest.mark.feature("optimizer-average")
def test_every_optimizer_divides_before_rescale_grad(kv):
    for name in NAMES:
        check_mean(kv, name, rescale_grad=0.5, clip_gradient=0.25, wd=0.125)


@pytest.mark.parametrize("store", STORES, ids=str)
def test_every_store(comm, store):
    with made(comm, **store) as kv:
        check_mean(kv, "adam", learning_rate=0.125)


def test_steps_are_as_large_on_any_number_of_ranks(kv):
    kv.init("w", np.zeros(3))
    kv.set_optimizer("sgd", learning_rate=0.5, average=True)
    kv.push("w", [np.ones(3), np.ones(3)])  # two arrays of each rank, which it adds up
    assert (kv.pull("w") == -1).all()
    kv.optimizer.average = False
    kv.push("w", np.ones(3))
    assert (kv.pull("w") == -1 - kv.size / 2).all()
    kv.optimizer.average = True
    kv.optimizer.rescale_grad = 0.5
    kv.push("w", np.full(3, 4.0), wait=False).wait()
    assert (kv.pull("w") == -2 - kv.size / 2).all()
    assert "average=True" in repr(kv)
    assert repr(kv.optimizer) == "SGD(learning_rate=0.5, rescale_grad=0.5, average=True)"


def test_halves_rows_and_codes(kv):
    kv.init("half", np.ones(4, np.float16))
    kv.init("rows", RowSparse([0, 1], np.ones((2, 2)), (3, 2)))
    kv.set_optimizer("sgd", learning_rate=1.0, average=True, multi_precision=True)
    kv.push("half", np.full(4, 0.5, np.float16))
    assert (kv.pull("half") == 0.5).all()
    kv.push("rows", RowSparse([1], np.full((1, 2), 0.25), (3, 2)))
    assert kv.row_sparse_pull("rows", row_ids=[0, 1]).values.tolist() == [[1, 1], [0.75, 0.75]]
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.push("half", np.full(4, 0.5, np.float16))
    assert (kv.pull("half") == 0.0).all()


def test_an_object(kv):
    optimizer = optimizers.SGD(learning_rate=1.0)
    kv.init("w", np.zeros(2))
    kv.set_optimizer(optimizer, average=True)
    assert kv.optimizer is optimizer
    assert optimizer.average
    kv.push("w", np.ones(2))
    assert (kv.pull("w") == -1).all()
    with pytest.raises(ConfigError, match=r"arguments \['wd'\] go with an optimizer's name"):
        kv.set_optimizer(optimizer, average=True, wd=0.1)
    with pytest.raises(ConfigError, match="average=3 is neither True nor False"):
        kv.set_optimizer(optimizer, average=3)


def test_ranks_compare_it(kv):
    kv.init("w", np.zeros(2))
    if kv.size > 1:
        with pytest.raises(RankMismatch, match="average=True"):
            kv.set_optimizer("sgd", learning_rate=1.0, average=kv.rank == 1)
    kv.set_optimizer("sgd", learning_rate=1.0)
    if kv.size > 1:
        kv.optimizer.average = kv.is_root
        with pytest.raises(RankMismatch, match="average=True"):
            kv.push("w", np.ones(2))
    kv.optimizer.average = True
    kv.push("w", np.ones(2))
    assert (kv.pull("w") == -1).all()


def test_one_object_in_stores_of_other_sizes(kv):
    optimizer = optimizers.SGD(learning_rate=1.0, average=True)
    kv.init("w", np.zeros(2))
    kv.set_optimizer(optimizer)
    alone = kv.group([0])
    if alone is not None:
        alone.init("w", np.zeros(2))
        if kv.size > 1:
            with pytest.raises(
                ConfigError, match=f"divides by the {kv.size} ranks of an earlier store, and this store has 1;"
            ):
                alone.set_optimizer(optimizer)
        alone.set_optimizer(copy.copy(optimizer))
        alone.push("w", np.ones(2))
        assert (alone.pull("w") == -1).all()
        alone.close()
    kv.push("w", np.ones(2))
    assert (kv.pull("w") == -1).all()


def test_ranks_that_have_left_count(kv):
    kv.init("w", np.zeros(2))
    kv.set_optimizer("sgd", learning_rate=1.0, average=True)
    with kv.join():
        for _ in range(1 + kv.rank):
            kv.push("w", np.ones(2))
    expected = -sum((kv.size - step) / kv.size for step in range(kv.size))
    np.testing.assert_allclose(kv.pull("w"), expected, rtol=1e-15)


# --- Stores that do not sum


def test_pushes_that_nobody_sums(comm):
    with made(comm, name="dist_async") as kv:
        kv.init("w", np.zeros(2))
        with pytest.raises(Unsupported, match="average=True: a push to dist_async is one rank's gradient"):
            kv.set_optimizer("sgd", average=True)
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.optimizer.average = True
        with pytest.raises(Unsupported, match="or use 'dist_sync', which sums"):
            kv.barrier()
        kv.optimizer.average = False
        kv.barrier()
        kv.push("w", np.ones(2))
        kv.barrier()
        assert (kv.pull("w") == -kv.size).all()


# --- The Trainer


def step(trainer, kv, batch_size, gradient=1.0):
    trainer.set_grads({"w": np.full(2, gradient)})
    trainer.step(batch_size)


@pytest.mark.parametrize(
    ("kind", "on_store", "how"),
    [
        ("dist_sync", True, "keyword"),
        ("dist_sync", True, "object"),
        ("dist_sync", False, "keyword"),
        ("dist_sync", False, "option"),
        ("horovod", None, "option"),
    ],
)
def test_a_trainer(comm, on_store, how, kind):
    params, optimizer, options = {"w": np.zeros(2)}, "sgd", {"learning_rate": 0.5}
    more = {"average": True} if how == "keyword" else {}
    if how == "option":
        options["average"] = True
    if how == "object":
        optimizer, options = optimizers.SGD(learning_rate=0.5, average=True), None
    with made(comm, name=kind) as kv:
        trainer = mpikv.Trainer(params, optimizer, options, kvstore=kv, update_on_kvstore=on_store, **more)
        step(trainer, kv, batch_size=2, gradient=1.0 + kv.rank)
        assert (params["w"] == -0.5 * (1 + kv.size) / 2 / 2).all()
        assert "average=True" in repr(trainer)


@pytest.mark.parametrize("on_store", [True, False])
def test_a_loss_scaler_and_halves_of_a_step(kv, on_store):
    params, scaler = {"w": np.zeros(2)}, mpikv.LossScaler(8.0)
    options = {"learning_rate": 1.0, "rescale_grad": 0.5}
    trainer = mpikv.Trainer(
        params, "sgd", options, kvstore=kv, update_on_kvstore=on_store, loss_scaler=scaler, average=True
    )
    step(trainer, kv, 2, gradient=8.0)
    assert (params["w"] == -0.25).all()
    step(trainer, kv, 1, gradient=np.inf if kv.is_root else 1.0)
    assert (params["w"] == -0.25).all()
    if not on_store:
        trainer.set_grads({"w": np.ones(2)})
        trainer.allreduce_grads()
        assert (trainer.params["w"].grad == kv.size).all()
        trainer.update(batch_size=1)
        assert (params["w"] == -0.25 - 0.5 / 4).all()


def test_a_trainer_says_no_more_than_yes_and_no(comm):
    with pytest.raises(ConfigError, match="average='mean'"):
        mpikv.Trainer({"w": np.zeros(2)}, "sgd", average="mean")


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("average", [None, True])
def test_a_trainer_that_loads_the_states_of_sums(comm, folder, average, on_store):
    def trained(**more):
        params = {"w": np.zeros(2)}
        with made(comm) as kv:
            options = {"learning_rate": 1.0}
            trainer = mpikv.Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=on_store, **more)
            if more:
                trainer.load_states(folder / "sums")
            step(trainer, kv, 1)
            if not more:
                trainer.save_states(folder / "sums")
        return params["w"], -kv.size

    trained()
    weight, sums = trained(average=average)
    assert (weight == (-1 if average else sums)).all()


# --- Checkpoints


@pytest.mark.feature("optimizer-average")
def test_a_restart_on_other_numbers_of_ranks(comm, ranks, folder, caplog):
    with made(comm) as kv:
        kv.init("w", np.zeros(2))
        kv.set_optimizer("sgd", average=True, learning_rate=1.0, lr_scheduler=schedules.Factor(10))
        kv.push("w", np.ones(2))
        kv.save(folder / "all")
        kv.save_optimizer_states(folder / "states", dump_optimizer=True)
    for kv in on_some(comm, ranks):
        kv.load(folder / "all")
        assert kv.optimizer.average
        kv.push("w", np.full(2, 3.0))
        assert (kv.pull("w") == -4).all()
        kv.load_optimizer_states(folder / "states")
        kv.push("w", np.ones(2))
        assert (kv.pull("w") == -5).all()
    assert "rescale_grad" not in caplog.text


@pytest.mark.feature("checkpoint-other-mean")
@pytest.mark.parametrize("states", [False, True])
def test_a_factor_that_has_become_another(comm, ranks, folder, states, caplog):
    def optimizer(kv):
        kv.set_optimizer("sgd", learning_rate=1.0, rescale_grad=1 / ranks)

    with made(comm) as kv:
        kv.init("w", np.zeros(2))
        optimizer(kv)
        kv.save(folder / "all")
        kv.save_optimizer_states(folder / "states", dump_optimizer=True)
    for kv in on_some(comm, ranks):
        caplog.clear()
        if states:
            kv.init("w", np.zeros(2))
            optimizer(kv)
            kv.load_optimizer_states(folder / "states")
        else:
            kv.load(folder / "all")
        said = (
            f"divides by the {ranks} ranks of the job that saved it, and this store has {kv.size}: on every rank, set"
        )
        assert (said in caplog.text) is (kv.size != ranks and kv.is_root)
