"""Compressed pushes on GPUs: stores have the bits of those on hosts, and so have their checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.test_compression import gradients

import mpikv
from mpikv import codecs
from mpikv.compute.cuda.gpu import CupyGpu
from mpikv.errors import CheckpointError, Closed, NotFinite, PeerFailed, Unsupported
from mpikv.protocols import Gather, Sum
from mpikv.testing.store import on_host

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]

F32 = np.float32
NAMES = ("2bit", "1bit", "fp16", "bf16")
PLACEMENTS = ("root", "sharded", "replicated")
BARE = tuple({"type": name, "error_feedback": False} for name in NAMES)
# Codecs of whole values, which work on the host; a rank of 2 shrinks most of the matrices below.
WHOLE = (
    {"type": "topk", "ratio": 0.1},
    {"type": "topk", "ratio": 0.2, "error_feedback": False},
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


HOSTED = (*WHOLE, Halved(), codecs.ErrorFeedback(Halved()))

Pair = Callable[..., "list[Any]"]


@pytest.fixture
def pair(gpu: CupyGpu) -> Iterator[Pair]:
    """Return what makes a store on the GPU and one on the host, which compress alike; the test closes none."""
    every = list[Any]()

    def make(compression: Any, **options: Any) -> list[Any]:
        stores = [mpikv.create(name, **{"bucket_bytes": 1 << 14, **options}) for name in ("nccl", "dist_sync")]
        gpu.use()
        for kv in stores:
            kv.set_gradient_compression(compression)
        every.extend(stores)
        return stores

    yield make
    for kv in every:
        kv.close()


def there(gpu: CupyGpu, arrays: Any) -> Any:
    """Return arrays, or lists of them, on the GPU."""
    return [there(gpu, each) for each in arrays] if isinstance(arrays, list) else gpu.upload(arrays)


def assert_alike(stores: list[Any], keys: list[Any]) -> None:
    """Compare values, what is left out of them and what codecs keep, bit by bit."""
    for found, expected in zip(*(kv.pull(keys) for kv in stores), strict=True):
        assert on_host(found).tobytes() == expected.tobytes()
    for key in keys:
        here, host = (kv._exchange.values.table[key] for kv in stores)
        left, wanted = ([on_host(each).tobytes() for each in entry.residuals()] for entry in (here, host))
        # Keys of longer lists may share its block on one of them.
        assert left[: len(wanted)] == wanted
        assert not any(map(any, left[len(wanted) :]))
        found, expected = ({name: each.tobytes() for name, each in e.codec_state.items()} for e in (here, host))
        assert found == expected


def add_twice(key: Any, given: Any, stored: Any) -> None:
    stored += 2 * given


EXAMPLES = {1: 30, 2: 20, 3: 10}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.feature("compression-everywhere")
def test_any_calls(cupy: Any, gpu: CupyGpu, comm: Any, ranks: int) -> None:
    """Random calls with arrays of the GPU and of the host, from several streams, by optimizers and without."""
    every = (*NAMES, *BARE, *HOSTED)

    @settings(max_examples=EXAMPLES[ranks])
    @given(st.data())
    def run(data: Any) -> None:
        sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=5), label="sizes")
        options = {
            "placement": data.draw(st.sampled_from(PLACEMENTS), label="placement"),
            "bucket_bytes": data.draw(st.sampled_from([4096, 1 << 14]), label="bucket_bytes"),
            "deterministic": data.draw(st.booleans(), label="deterministic"),
            "compression": data.draw(st.sampled_from(every), label="codec"),
        }
        optimizer = data.draw(st.sampled_from([None, "sgd", "adam", "lamb", "function"]), label="updater")
        own, keys = np.random.default_rng(comm.rank if comm else 0), list(range(len(sizes)))
        streams = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
        with mpikv.create("nccl", **options) as one, mpikv.create("dist_sync", **options) as other:
            gpu.use()
            for kv in (one, other):
                kv.init(keys, [np.ones(size, F32) for size in sizes])
                if optimizer == "function" and options["placement"] == "root":
                    kv.set_updater(add_twice)
                elif optimizer not in (None, "function"):
                    kv.set_optimizer(optimizer, learning_rate=0.25)
            for step in range(data.draw(st.integers(1, 5), label="steps")):
                some = data.draw(st.lists(st.sampled_from(keys), min_size=1, unique=True), label="keys")
                positions = data.draw(st.integers(1, 3), label="positions")
                # Ranks may bring lists of different lengths.
                mine = own.integers(1, positions + 1)
                arrays = [list(gradients(sizes[key], step, one.size, positions)[one.rank][:mine]) for key in some]
                with streams[own.integers(3)]:
                    if data.draw(st.booleans(), label="pushpull"):
                        one.pushpull(some, there(gpu, arrays), out=[cupy.empty(sizes[key], F32) for key in some])
                        other.pushpull(some, arrays, out=[np.empty(sizes[key], F32) for key in some])
                    else:
                        one.push(some, there(gpu, arrays) if own.random() < 0.7 else arrays)
                        other.push(some, arrays)
                assert_alike([one, other], keys)

    run()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", [*NAMES, *HOSTED], ids=str)
def test_buffers_are_compressed(gpu: CupyGpu, pair: Pair, name: Any) -> None:
    stores = pair(name, bucket_bytes=4096)
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


# --- Bad input


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["2bit", "topk", "lowrank"])
def test_numbers_that_are_not_finite_raise(gpu: CupyGpu, pair: Pair, name: str, dtype: Any) -> None:
    """A store goes on, and says what one on the host says."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    good = (np.arange(300) % 7).reshape(20, 15).astype(dtype)
    stores = pair(name)
    last = stores[0].rank == stores[0].size - 1
    for kv in stores:
        kv.init(["v", "w"], [np.zeros((20, 15), F32 if dtype == np.float64 else dtype)] * 2)
    for bad, push in ((np.nan, "push"), (np.inf, "pushpull"), (-np.inf, "push"), (1e38, "push")):
        texts, spoilt = [], good.copy()
        with np.errstate(over="ignore"):
            spoilt[16, 10] = np.float64(bad).astype(dtype)
        for kv in stores:
            arrays = [good.copy(), (spoilt if last else good).copy()]
            with pytest.raises(NotFinite if last else PeerFailed, match=r"key 'w' has . NaN, . infinite") as caught:
                getattr(kv, push)(["v", "w"], there(gpu, arrays) if kv is stores[0] else arrays)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    for kv in stores:
        kv.push("w", there(gpu, good) if kv is stores[0] else good)
    assert_alike(stores, ["v", "w"])


class OfOnesOwn(codecs.TwoBit):
    """An elementwise codec for which there is no kernel: its rule may differ."""


@pytest.mark.ranks(1, 2)
def test_what_runs_on_the_host(cupy: Any, gpu: CupyGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Codecs of values, which say so once: residuals then cost no memory of the GPU. No elementwise one does."""
    ones = cupy.ones((20, 20), F32)
    with mpikv.create("nccl", placement="root") as kv, caplog.at_level("WARNING", "mpikv"):
        for codec in (OfOnesOwn(0.5), codecs.ErrorFeedback(OfOnesOwn(0.5))):
            with pytest.raises(Unsupported, match="has no kernel for GPUs; make it a Tensor"):
                kv.set_gradient_compression(codec)
        kv.init("w", cupy.zeros((20, 20), F32))
        entry = kv._exchange.values.table["w"]
        for whole in WHOLE:
            caplog.clear()
            kv.set_gradient_compression(whole)
            for _ in range(3):
                kv.push("w", ones)
            assert all(type(each) is np.ndarray for each in (*entry.residuals(), *entry.codec_state.values()))
            kv.set_gradient_compression("2bit")
            kv.push("w", ones)
            assert [gpu.owns(each) for each in entry.residuals()] == [True]
            (said,) = caplog.messages
            assert said.startswith(f"compression {whole['type']}(")
            assert " runs on the host" in said


# --- Checkpoints


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", [None, *NAMES, *WHOLE[::2], Halved()], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_checkpoints_have_states_and_residuals(pair: Pair, folder: Any, name: Any, placement: str) -> None:
    """From a GPU to the host, from the host to a GPU, and back to the store that goes on."""
    shapes = {"m": (40, 30), "v": (7,), "e": (0,)}
    stores, others = (pair(name, placement=placement, bucket_bytes=size) for size in (4096, 1 << 14))

    def push(kv: Any, step: int) -> None:
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


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("known", [False, True])
def test_a_load(cupy: Any, scarce: Any, folder: Any, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no memory but what it keeps; where it fails on one rank, every rank is told at once."""
    shapes = {f"w{number}": (1000 + number,) for number in range(5)}
    with mpikv.create("nccl", placement="sharded", bucket_bytes=1 << 14) as kv:
        kv.init({name: cupy.ones(shape, F32) for name, shape in shapes.items()})
        kv.set_optimizer("adam")
        kv.set_gradient_compression("2bit")
        kv.push({name: cupy.full(shape, 0.25, F32) for name, shape in shapes.items()})
        before = kv.pull("w3").get()
        kv.save(folder / "checkpoint", residuals=True)
        scarce.taken.clear()
        kv.load(folder / "checkpoint")
        assert scarce.taken == []
        assert (kv.pull("w3").get() == before).all()
    with mpikv.create("nccl", placement="sharded", bucket_bytes=1 << 14, timeout=30) as kv:
        kv.set_optimizer("adam")
        kv.set_gradient_compression("2bit")
        if known:
            kv.init({name: np.zeros(shape, F32) for name, shape in shapes.items()})

        def bad(*_: Any) -> None:
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            if kv.rank == 0:  # which has the first elements of a block
                patch.setattr(CupyGpu, "upload", bad)
            culprit = MemoryError if kv.rank == 0 else PeerFailed
            with pytest.raises(CheckpointError if known else culprit, match="out of memory"):
                kv.load(folder / "checkpoint")
        if known:
            with pytest.raises(Closed):
                kv.pull("w3")
        else:
            assert kv.keys() == ()
            kv.load(folder / "checkpoint")
            assert (kv.pull("w3").get() == before).all()
