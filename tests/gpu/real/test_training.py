"""A Trainer, clipping and overflows over arrays of a real GPU, beside numpy's."""

import math
from functools import partial
from itertools import product, takewhile

import numpy as np
import pytest

import mpikv
from mpikv import LossScaler, Parameter, PeerFailed, Trainer, Unsupported, ValueMismatch, clip_global_norm
from mpikv.compute.cuda.gpu import CupyGpu
from mpikv.compute.cuda.norms import CELL
from mpikv.testing.updater import available
from mpikv.train.array_location import locate_target

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]
SHAPES = {"b": ((5,), np.float32), "h": ((7, 3), np.float16), "w": ((30, 40), np.float32), "x": ((2, 3), np.float64)}
BOTH = pytest.mark.parametrize("on_store", [True, False])


@pytest.mark.parametrize("dtype", available(), ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping(cupy, dtype, max_norm):
    """The norm has numpy's bits, and so have the arrays."""
    random = np.random.default_rng(3)
    sizes = [1, 7, 129, 1000, CELL - 1, CELL, CELL + 1, 5 * CELL + 135, *[3] * 400]
    arrays = [random.standard_normal(size).astype(dtype) for size in sizes]
    there = [cupy.asarray(array) for array in arrays]
    # With gaps, on the host, none, and one twice.
    wide, mixed = cupy.asarray(np.repeat(arrays[3], 2)), arrays[4].copy()
    given = [*there[:3], wide[::2], mixed, None, *there[5:], there[0]]
    assert clip_global_norm(given, max_norm) == clip_global_norm(arrays, max_norm)
    for mine, expected in zip((*there[:3], wide[::2], mixed, *there[5:]), arrays, strict=True):
        assert cupy.asnumpy(mine).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", available(), ids=str)
def test_gradients_are_added_up(cupy, dtype):
    first, more = np.random.default_rng(1).standard_normal((2, 1000)).astype(dtype)
    found, expected = Parameter(cupy.asarray(first), grad_req="add"), Parameter(first.copy(), grad_req="add")
    for gradient in (first, more, more):
        found.grad, expected.grad = cupy.asarray(gradient), gradient
    assert found.grad.get().tobytes() == expected.grad.tobytes()


@pytest.mark.parametrize("place", [0, 7, CELL, 3 * CELL + 5])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_number_is_found(cupy, place, bad):
    array = cupy.ones(4 * CELL, np.float64) * 1e200  # whose squares are inf
    parameter = Parameter(cupy.zeros_like(array))
    parameter.grad = array
    assert not LossScaler().has_overflow([parameter])
    array[place] = bad
    assert LossScaler().has_overflow([parameter])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("store", "on_store"), [*product(["nccl", "dist_sync"], [True, False]), ("horovod", False)])
def test_training_is_that_of_the_host(cupy, store, on_store):
    shapes = {"a": (300, 400), "b": (7,), "c": (CELL + 3,)}
    results = []
    for name in (store, "dist_sync"):
        with mpikv.create(name) as kv:
            cupy.cuda.Device(kv.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
            there = cupy.asarray if not results else np.copy
            params = {key: there(np.ones(shape, np.float32)) for key, shape in shapes.items()}
            options = {"learning_rate": 0.5, "momentum": 0.5}
            trainer = Trainer(
                params, "sgd", options, kvstore=kv, update_on_kvstore=on_store, loss_scaler=LossScaler(4.0)
            )
            for step in range(3):
                random = np.random.default_rng([kv.rank, step])
                trainer.set_grads(
                    {k: there(random.integers(-8, 9, s).astype(np.float32) / 4) for k, s in shapes.items()}
                )
                if on_store:
                    trainer.step(4)
                else:
                    trainer.allreduce_grads()
                    clip_global_norm([one.grad for one in trainer.params.values()], 100.0)
                    trainer.update(4)
            results.append({key: cupy.asnumpy(array) for key, array in params.items()})
    for key, expected in results[1].items():
        assert results[0][key].tobytes() == expected.tobytes()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("placement", "compression"), [("auto", None), ("root", None), ("replicated", None), ("auto", "fp16")]
)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("lars", {"learning_rate": 0.5, "wd": 0.01}),
        ("lars", {"learning_rate": 0.5, "momentum": 0.9, "multi_precision": True, "skip": ("a_bias",)}),
        ("lamb", {"learning_rate": 0.5, "wd": 0.01, "lr_mult": {"a": 0.5}}),
    ],
)
def test_optimizers_of_whole_values(cupy, placement, compression, optimizer, options):
    """Of gradients whose sums are exact; another updater makes other plans."""
    shapes = {"a": (300, 400), "a_bias": (400,), "c": (CELL + 3,), "h": (7, 3), "none": (0, 2)}
    with mpikv.create("nccl", placement=placement) as there, mpikv.create("dist_sync", placement=placement) as here:
        keys = {key: np.float16 if key == "h" and compression is None else np.float32 for key in shapes}
        for kv, place in ((there, cupy.asarray), (here, np.copy)):
            kv.init({key: place(np.ones(shapes[key], dtype)) for key, dtype in keys.items()})
            kv.set_gradient_compression(compression)
            kv.set_optimizer(optimizer, **options)
        for step in range(4):
            random = np.random.default_rng([there.rank, step])
            gradients = {key: (random.integers(-8, 9, shapes[key]) / 4).astype(dtype) for key, dtype in keys.items()}
            found = there.pushpull({key: cupy.asarray(array) for key, array in gradients.items()})
            expected = here.pushpull(gradients)
            for key in shapes:
                assert found[key].get().tobytes() == expected[key].tobytes()
            for kv in (there, here) if step == 2 else ():
                kv.set_optimizer("lamb")


# --- Overflows, states and mistakes


@pytest.fixture(params=["nccl", "dist_sync"])
def store(request, cupy, comm):
    """Return what makes a store, on GPUs or on the host, beside which this rank's GPU is the present one."""
    cupy.cuda.Device((comm.rank if comm else 0) % cupy.cuda.runtime.getDeviceCount()).use()
    return partial(mpikv.create, request.param, timeout=20)


def of_rank(rank, step, name):
    """Return the gradient that a rank brings, in quarters, whose sums are exact."""
    shape, dtype = SHAPES[name]
    return (np.random.default_rng([rank, step, len(name), *shape]).integers(-8, 9, shape) / 4).astype(dtype)


def train(trainer, rank, place, first, end):
    for step in range(first, end):
        trainer.set_grads({name: place(of_rank(rank, step, name)) for name in SHAPES})
        trainer.step(2)


@pytest.mark.ranks(1, 2, 3)
@BOTH
def test_an_overflow_on_one_rank_skips_the_update_on_all(cupy, store, on_store):
    params, scaler = {name: cupy.asarray(of_rank(99, 0, name)) for name in SHAPES}, LossScaler(8.0)
    before = {name: cupy.asnumpy(array) for name, array in params.items()}
    with store() as kv:
        trainer = Trainer(params, "sgd", kvstore=kv, update_on_kvstore=on_store, loss_scaler=scaler)
        trainer.start()
        for step, bad in enumerate((np.inf, np.nan, 70000.0)):
            gradients = {name: of_rank(kv.rank, step, name) for name in SHAPES}
            if kv.rank == kv.size - 1:
                # The last one is an inf in the dtype of its weight only.
                gradients["h"] = gradients["h"].astype(np.float32)
                gradients["h"][3, 1] = bad
            trainer.set_grads({name: cupy.asarray(array) for name, array in gradients.items()})
            trainer.step(1)
            assert scaler.loss_scale == 8.0 / 2 ** (step + 1)
    for name, array in params.items():
        np.testing.assert_array_equal(cupy.asnumpy(array), before[name])


def test_arrays_without_elements_lie_nowhere(cupy, monkeypatch):
    """CuPy says 0, of which numpy before 2.4 makes no array."""
    empty, address = cupy.empty((2, 0), np.float16), CupyGpu.address
    monkeypatch.setattr(
        CupyGpu, "address", lambda gpu, array: address(gpu, array) if array.size else pytest.fail("it was asked for")
    )
    there = cupy.array([3.0, 4.0])
    assert clip_global_norm([empty, there, empty.astype(np.int32)], 1.0) == 5
    np.testing.assert_allclose(cupy.asnumpy(there), [0.6, 0.8])
    outline = locate_target(empty).outline
    assert (outline.shape, outline.itemsize) == ((2, 0), 2)


def test_what_cannot_be_clipped(cupy):
    for bad in (np.inf, np.nan):
        array = cupy.asarray(np.array([1.0, bad]))
        assert not np.isfinite(clip_global_norm([array], 1.0))
        assert array.get()[0] == 1
    with pytest.raises(Unsupported, match="cannot be measured"):
        clip_global_norm([cupy.ones(3, np.int32)], 1.0)


@pytest.mark.ranks(1, 2, 3)
@BOTH
def test_states_go_on(cupy, comm, store, on_store, folder):
    """From a Trainer over a GPU to one over the host, to another over a GPU, and in a kept one that starts again."""
    options = {"learning_rate": 0.1, "momentum": 0.5, "multi_precision": True}
    rank, results = comm.rank if comm else 0, []
    first = {name: cupy.asarray(of_rank(99, 0, name)) for name in SHAPES}
    with store() as kv:
        trainer = Trainer(first, "sgd", options, kvstore=kv, update_on_kvstore=on_store)
        train(trainer, rank, cupy.asarray, 0, 2)
        trainer.save_states(folder / "states")
        saved = {name: cupy.asnumpy(array) for name, array in first.items()}
        train(trainer, rank, cupy.asarray, 2, 4)
        results.append(first)
    for make, upload in ((store, cupy.asarray), (mpikv.create, np.copy)):
        params = {name: upload(array) for name, array in saved.items()}
        with make() as kv:
            trainer = Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=on_store)
            trainer.load_states(folder / "states")
            train(trainer, rank, upload, 2, 4)
            results.append(params)
    for last in (1, 3):
        params = {name: cupy.asarray(of_rank(99, 0, name)) for name in SHAPES}
        with store() as kv:
            trainer = Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=on_store)
            for step in takewhile(last.__ge__, trainer.steps(4, path=folder / "kept", save_every=1e-9)):
                train(trainer, rank, cupy.asarray, step, step + 1)
    results.append(params)
    params = {name: cupy.zeros((9, *shape), dtype) for name, (shape, dtype) in SHAPES.items()}
    with store() as kv, pytest.raises(ValueMismatch, match=r"kept weight 'b' was float32\[5\]|in the checkpoint"):
        Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=on_store).steps(4, path=folder / "kept")
    for name in SHAPES:
        for result in results[1:]:
            np.testing.assert_array_equal(cupy.asnumpy(result[name]), cupy.asnumpy(first[name]), err_msg=name)


@pytest.mark.ranks(1, 2, 3)
def test_too_little_memory_for_states_on_one_rank(cupy, comm, store, folder, monkeypatch):
    """No rank takes them, however much there was, and each goes on with what it had."""
    options = {"learning_rate": 0.1, "momentum": 0.5, "multi_precision": True}
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    results, upload = [], CupyGpu.upload
    for fails in (True, False):
        params = {name: cupy.asarray(of_rank(99, 0, name)) for name in SHAPES}
        with store() as kv:
            trainer = Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=False)
            train(trainer, rank, cupy.asarray, 0, 1)
            trainer.save_states(folder / "states")
            train(trainer, rank, cupy.asarray, 1, 2)
            for allowed in range(3) if fails else ():
                left = iter(range(allowed))

                def scarce(gpu, array, out=None, left=left):
                    if rank == size - 1 and next(left, None) is None:
                        raise MemoryError("out of memory")
                    return upload(gpu, array, out)

                with monkeypatch.context() as patch:
                    patch.setattr(CupyGpu, "upload", scarce)
                    with pytest.raises(MemoryError if rank == size - 1 else PeerFailed, match="out of memory"):
                        trainer.load_states(folder / "states")
            train(trainer, rank, cupy.asarray, 2, 4)
            results.append({name: cupy.asnumpy(array) for name, array in params.items()})
    for name in SHAPES:
        np.testing.assert_array_equal(*(result[name] for result in results), err_msg=name)


@pytest.mark.ranks(1, 2, 3)
@BOTH
def test_weights_and_gradients_of_all_kinds(cupy, store, on_store):
    """Shared, strided, added up, set by hand, and on the host beside those on a GPU."""
    wide = cupy.ones((4, 6), np.float32)
    tied = cupy.ones(3)
    params = {"even": wide[:, ::2], "odd": wide[:, 1::2], "one": tied, "other": tied, "host": np.ones(2)}
    added = Parameter(cupy.zeros(2), grad_req="add")
    with store() as kv:
        trainer = Trainer(
            {**params, "added": added}, "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=on_store
        )
        trainer.start()
        trainer.set_data({"odd": np.full((4, 3), 5, np.float32)})
        gradients = {name: np.ones_like(cupy.asnumpy(array)) for name, array in params.items()}
        trainer.set_grads({name: array if name == "host" else cupy.asarray(array) for name, array in gradients.items()})
        for _ in range(2):
            added.grad = cupy.ones(2)
        trainer.step(kv.size)
    np.testing.assert_array_equal(wide.get(), np.tile([0.0, 4.0], (4, 3)))
    np.testing.assert_array_equal(tied.get(), np.full(3, -1.0))
    np.testing.assert_array_equal(params["host"], np.zeros(2))
    np.testing.assert_array_equal(added.data.get(), np.full(2, -2.0))


def test_mistakes(cupy):
    weight = Parameter(cupy.ones(3))
    mpikv.Trainer({"w": weight}, "sgd")
    with pytest.raises(ValueMismatch, match="host and parameter 'w' on cuda:0; copy the gradient there first"):
        weight.grad = np.ones(3)
    with pytest.raises(ValueMismatch, match=r"of shape \(2,\) does not fit parameter 'w' of shape \(3,\)"):
        weight.grad = cupy.ones(2)
    with pytest.raises(ValueMismatch, match="the gradient is on cuda:0 and a parameter on the host; copy"):
        Parameter(np.ones(3)).grad = cupy.ones(3)
    whole = cupy.ones(6)
    with pytest.raises(ValueMismatch, match="'a' and 'b' overlap in memory"):
        Trainer({"a": whole[:4], "b": whole[3:]}, "sgd")
    added = Parameter(cupy.ones(3, np.float32), grad_req="add")
    added.grad = cupy.ones(3, np.float32)
    with pytest.raises(ValueMismatch, match="a gradient of int32 cannot be added up in float32"):
        added.grad = cupy.ones(3, np.int32)
    assert weight.gpu.name == "cuda:0"
    assert Parameter(np.ones(3)).gpu is None
