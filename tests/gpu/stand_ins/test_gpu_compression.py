"""Compressed pushes of stores on GPUs give the bits of those on hosts. The GPU is none, and the order of its work is
checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.test_compression import QUANTISERS, gradients
from support.gpus import entry_of, store_on

import mpikv
from mpikv import codecs
from mpikv.errors import CheckpointError, Closed, NotFinite, PeerFailed, Unsupported
from mpikv.protocols import Gather, Sum
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.store import on_host

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

F32 = np.float32
NAMES = tuple(QUANTISERS)
PLACEMENTS = ("root", "sharded", "replicated")
BARE = tuple({"type": name, "error_feedback": False} for name in NAMES)
# Codecs of whole values, which work on the host; a rank of 2 shrinks most of the matrices below.
WHOLE = (
    {"type": "topk", "ratio": 0.1},
    {"type": "topk", "count": 20},
    {"type": "topk", "ratio": 0.1, "error_feedback": False},
    {"type": "lowrank", "rank": 2},
    {"type": "lowrank", "rank": 2, "error_feedback": False},
)


@dataclass(frozen=True)
class Halved:
    """A codec of whole values of one's own: sends the first half of a value by a sum, the second by its bytes."""

    elementwise: ClassVar[Literal[False]] = False
    feedback: ClassVar[Literal[False]] = False

    def settings(self) -> str:
        return "halved()"

    def state(self, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"pushes": np.zeros(1, np.int64)}

    def exchange(self, gradient: Any, shape: Any, state: Any, residual: Any = None) -> Any:
        assert type(gradient) is np.ndarray
        state["pushes"] += 1
        middle = gradient.size // 2
        total = np.zeros_like(gradient)
        total[:middle] = yield Sum(gradient[:middle].copy())
        for part in (yield Gather(gradient[middle:].view(np.uint8).copy())):
            total[middle:] += part.view(F32)
        return total, gradient


OWN = (Halved(), codecs.ErrorFeedback(Halved()))
HOSTED = (*WHOLE, *OWN)
EVERY = (*NAMES, *BARE, *HOSTED)


def pair(gpu: FakeGpu, comm: Any, compression: Any, **options: Any) -> list[KVStore]:
    """Return a store on the GPU and one on the host, which compress alike."""
    stores = [store_on(gpu, comm, **options), mpikv.create("dist_sync", comm=comm, **options)]
    for kv in stores:
        kv.set_gradient_compression(compression)
    return stores


def close(*stores: KVStore) -> None:
    for kv in stores:
        kv.close()


def there(gpu: FakeGpu, arrays: Any) -> Any:
    """Return arrays, or lists of them, on the GPU."""
    return [there(gpu, each) for each in arrays] if isinstance(arrays, list) else gpu.upload(arrays)


def assert_alike(stores: list[KVStore], keys: list[Any]) -> None:
    """Compare values, what is left out of them and what codecs keep, bit by bit."""
    for found, expected in zip(*(kv.pull(keys) for kv in stores), strict=True):
        assert on_host(found).tobytes() == expected.tobytes()
    for key in keys:
        found, expected = (entry_of(kv, key).residuals() for kv in stores)
        left, wanted = [on_host(each).tobytes() for each in found], [each.tobytes() for each in expected]
        # Keys of longer lists may share its block on one of them.
        assert left[: len(wanted)] == wanted
        assert not any(map(any, left[len(wanted) :]))
        found, expected = (entry_of(kv, key).codec_state for kv in stores)
        assert {name: each.tobytes() for name, each in found.items()} == {
            name: each.tobytes() for name, each in expected.items()
        }


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.deadline(120)
@pytest.mark.feature("compression-everywhere")
def test_any_calls(comm, data):
    """Random calls with arrays of the GPU and of the host, from several streams, by optimizers and without."""
    gpu = FakeGpu(comm.rank if comm else 0)
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=5), label="sizes")
    options = {
        "placement": data.draw(st.sampled_from(PLACEMENTS), label="placement"),
        "bucket_bytes": data.draw(st.sampled_from([4096, 1 << 14]), label="bucket_bytes"),
        "deterministic": data.draw(st.booleans(), label="deterministic"),
    }
    stores = pair(gpu, comm, data.draw(st.sampled_from(EVERY), label="codec"), **options)
    streams = [gpu.current(), gpu.stream(), gpu.stream()]
    keys = list(range(len(sizes)))
    optimizer = data.draw(st.sampled_from([None, "sgd", "adam", "lamb", "function"]), label="updater")
    for kv in stores:
        kv.init(keys, [np.ones(size, F32) for size in sizes])
        if optimizer == "function" and options["placement"] == "root":
            kv.set_updater(add_twice)
        elif optimizer not in (None, "function"):
            kv.set_optimizer(optimizer, learning_rate=0.25)
    own = np.random.default_rng(comm.rank if comm else 0)
    for step in range(data.draw(st.integers(1, 5), label="steps")):
        some = data.draw(st.lists(st.sampled_from(keys), min_size=1, unique=True), label="keys")
        positions = data.draw(st.integers(1, 3), label="positions")
        # Ranks may bring lists of different lengths.
        mine = own.integers(1, positions + 1)
        arrays = [list(gradients(sizes[key], step, stores[0].size, positions)[stores[0].rank][:mine]) for key in some]
        with streams[own.integers(3)]:
            if data.draw(st.booleans(), label="pushpull"):
                outs = [gpu.empty((sizes[key],), np.dtype(F32)) for key in some]
                stores[0].pushpull(some, there(gpu, arrays), out=outs)
                stores[1].pushpull(some, arrays, out=[np.empty(sizes[key], F32) for key in some])
            else:
                stores[0].push(some, there(gpu, arrays) if own.random() < 0.7 else arrays)
                stores[1].push(some, arrays)
        assert_alike(stores, keys)
    close(*stores)
    gpu.checker.assert_clean()


def add_twice(key: Any, given: Any, stored: Any) -> None:
    stored += 2 * given


@pytest.mark.parametrize("name", [*NAMES, *HOSTED], ids=str)
def test_buffers_are_compressed(gpu, comm, name):
    stores = pair(gpu, comm, name, bucket_bytes=4096)
    for kv in stores:
        kv.init(["a", "b"], [np.zeros((30, 40), F32), np.zeros(3, F32)])
    for step in range(3):
        for kv in stores:
            for buffer, shape in zip(kv.buffer(["a", "b"]), ((30, 40), (3,)), strict=True):
                array = gradients(shape, step, kv.size)[kv.rank, 0]
                buffer[...] = gpu.upload(array) if kv is stores[0] else array
            kv.push(["a", "b"])
            kv.pushpull(["a", "b"])
        assert_alike(stores, ["a", "b"])
    stores[0].buffer("b")[...] = np.nan
    with pytest.raises(NotFinite, match="key 'b' has 3 NaN"):
        stores[0].push(["a", "b"])
    close(*stores)


# --- Bad input


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("name", ["2bit", "topk", "lowrank"])
def test_numbers_that_are_not_finite_raise(gpu, comm, name, bad, dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    stored = np.dtype(F32) if dtype == np.float64 else dtype
    good = (np.arange(300) % 7).reshape(20, 15).astype(dtype)
    with np.errstate(over="ignore"):
        spoilt = np.where(np.arange(300).reshape(20, 15) == 250, bad, good.astype(np.float64)).astype(dtype)
    stores = pair(gpu, comm, name)
    last = stores[0].rank == stores[0].size - 1
    for kv in stores:
        kv.init(["v", "w"], [np.zeros((20, 15), stored)] * 2)
    for push in ("push", "pushpull"):
        texts = []
        for kv in stores:
            arrays = [good.copy(), (spoilt if last else good).copy()]
            given = there(gpu, arrays) if kv is stores[0] else arrays
            with pytest.raises(NotFinite if last else PeerFailed, match=r"key 'w' has . NaN, . infinite") as caught:
                getattr(kv, push)(["v", "w"], given)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    for kv in stores:
        kv.push("w", there(gpu, good) if kv is stores[0] else good)
    assert_alike(stores, ["v", "w"])
    close(*stores)


# --- Codecs that work on the host


class OfOnesOwn(codecs.TwoBit):
    """An elementwise codec for which there is no kernel: its rule may differ."""


def test_an_elementwise_codec_needs_a_kernel(gpu, comm):
    for codec in (OfOnesOwn(0.5), codecs.ErrorFeedback(OfOnesOwn(0.5))):
        with store_on(gpu, comm) as kv, pytest.raises(Unsupported, match="has no kernel for GPUs; make it a Tensor"):
            kv.set_gradient_compression(codec)


def test_that_a_codec_works_on_the_host_is_said_once(gpu, comm, caplog):
    with store_on(gpu, comm) as kv, caplog.at_level("WARNING", "mpikv"):
        kv.init("w", gpu.upload(np.zeros((20, 20), F32)))
        kv.set_gradient_compression("topk")
        for _ in range(3):
            kv.push("w", gpu.upload(np.ones((20, 20), F32)))
        kv.set_gradient_compression("2bit")
        kv.push("w", gpu.upload(np.ones((20, 20), F32)))
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "compression topk(ratio=0.01) with error feedback runs on the host"
    ]


@pytest.mark.parametrize("name", WHOLE, ids=str)
def test_what_codecs_of_values_keep_lies_on_the_host(gpu, comm, name):
    """Residuals cost no memory of the GPU, whichever rank owns the value; other codecs start anew, on the GPU."""
    with store_on(gpu, comm, placement="root") as kv:
        kv.init("w", np.zeros((20, 20), F32))
        kv.set_gradient_compression(name)
        kv.push("w", gpu.upload(np.ones((20, 20), F32)))
        entry = entry_of(kv, "w")
        assert all(type(each) is np.ndarray for each in (*entry.residuals(), *entry.codec_state.values()))
        kv.set_gradient_compression("2bit")
        kv.push("w", gpu.upload(np.ones((20, 20), F32)))
        assert [gpu.owns(each) for each in entry.residuals()] == [True]


# --- With the rest of the store


@pytest.mark.parametrize("name", [None, *NAMES, *HOSTED], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_checkpoints_have_states_and_residuals(gpu, comm, folder, name, placement):
    """From a GPU to the host, from the host to a GPU, and back to the store that goes on."""
    shapes = {"m": (40, 30), "v": (7,), "e": (0,)}
    stores, others = (pair(gpu, comm, name, placement=placement, bucket_bytes=size) for size in (4096, 1 << 14))

    def push(kv: KVStore, step: int) -> None:
        kv.push(list(shapes), [list(gradients(shape, step, kv.size, 2)[kv.rank]) for shape in shapes.values()])

    for kv, file in zip(stores, ("gpu", "host"), strict=True):
        kv.init({key: np.zeros(shape, F32) for key, shape in shapes.items()})
        kv.set_optimizer("adam", learning_rate=0.25)
        for step in range(2):
            push(kv, step)
        kv.save(folder / file)
    work, before = stores[0].save(folder / "meanwhile", wait=False), stores[0].pull("m")
    stores[0].set("m", before * 2)
    work.wait()
    assert (folder / "meanwhile").read_bytes() == (folder / "gpu").read_bytes()
    stores[0].save_optimizer_states(folder / "states")
    others[0].load(folder / "host")
    others[1].load(folder / "gpu")
    stores[0].load(folder / "gpu")
    stores[0].load_optimizer_states(folder / "states")
    for kv in (*stores, *others):
        push(kv, 2)
    for kv in (stores[0], others[0]):
        assert_alike([kv, stores[1]], list(shapes))
    assert_alike([others[0], others[1]], list(shapes))
    close(*stores, *others)


def test_a_load_takes_no_memory_but_what_it_keeps(gpu, comm, folder, monkeypatch):
    """Arrays of the host go where they belong, one after the other."""
    shapes = {f"w{number}": (1000 + number,) for number in range(5)}
    with store_on(gpu, comm) as kv:
        kv.init({name: gpu.upload(np.ones(shape, F32)) for name, shape in shapes.items()})
        kv.set_optimizer("adam")
        kv.set_gradient_compression("2bit")
        kv.push({name: gpu.upload(np.full(shape, 0.25, F32)) for name, shape in shapes.items()})
        before = {name: on_host(kv.pull(name)) for name in shapes}
        kv.save(folder / "checkpoint", residuals=True)
        upload, made = gpu.upload, []
        monkeypatch.setattr(gpu, "upload", lambda array, out=None: (made.append(out is None), upload(array, out))[1])
        kv.load(folder / "checkpoint")
        assert made
        assert not any(made)
        for name, value in before.items():
            np.testing.assert_array_equal(on_host(kv.pull(name)), value)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("known", [False, True])
def test_a_load_that_fails_on_one_rank(gpu, comm, folder, known, monkeypatch):
    """Every rank is told at once, wherever it failed."""
    with store_on(gpu, comm, placement="sharded") as kv:
        kv.init("w", gpu.upload(np.ones(1000, F32)))
        kv.save(folder / "checkpoint")
    with store_on(gpu, comm, placement="sharded", timeout=30) as kv:
        if known:
            kv.init("w", np.zeros(1000, F32))

        def bad(array, out=None):
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            if kv.rank == 0:  # which has the first elements of a block
                patch.setattr(gpu, "upload", bad)
            culprit = MemoryError if kv.rank == 0 else PeerFailed
            with pytest.raises(CheckpointError if known else culprit, match="out of memory"):
                kv.load(folder / "checkpoint")
        if known:
            with pytest.raises(Closed):
                kv.pull("w")
        else:
            assert kv.keys() == ()
            kv.load(folder / "checkpoint")
            np.testing.assert_array_equal(on_host(kv.pull("w")), np.ones(1000))
