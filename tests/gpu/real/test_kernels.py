"""Kernels have the bits of numpy: with any options, numbers, sizes and alignments."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.published import BITS
from support.rules import LAYERWISE, RULES, bits, in_numpy, numbers, run, sum_of, training

import mpikv
from mpikv import codecs, optimizers
from mpikv.codecs import ErrorFeedback, OneBit, TwoBit
from mpikv.compute.cuda import norms, rows
from mpikv.compute.cuda.codes import CudaCodec
from mpikv.compute.cuda.copies import copy
from mpikv.compute.cuda.kernels import CudaKernels
from mpikv.testing import ElementwiseCodecContract, KernelsContract
from mpikv.testing.updater import available, wide, zeros

# Kernels are compiled first.
pytestmark = [pytest.mark.gpu, pytest.mark.deadline(300)]

F32 = np.float32
CELL = norms.CELL
HALVES = [dtype for dtype in available() if dtype.itemsize == 2]


def there(array: Any, offset: int = 0) -> Any:
    """Return a copy on the GPU that begins so many elements behind a good place."""
    import cupy

    array = np.asarray(array)
    made = cupy.empty(array.size + offset, array.dtype)[offset:].reshape(array.shape)
    made.set(array)
    return made


# --- Updates


class OnGpu(CudaKernels):
    """Takes arrays of the host, which are on the GPU during each update."""

    def bind(self, updater: Any, total: Any, value: Any, state: Any) -> Any:
        here = [total, value, *state.values()]
        arrays = list(map(there, here))
        update = super().bind(updater, arrays[0], arrays[1], dict(zip(state, arrays[2:], strict=True)))

        def run(step: Any) -> None:
            for array, mine in zip(arrays, here, strict=True):
                array.set(mine)
            update(step)
            for array, mine in zip(arrays[1:], here[1:], strict=True):
                mine[...] = array.get()

        return run


class TestKernels(KernelsContract):
    def make(self) -> Any:
        return OnGpu()


@pytest.mark.parametrize("rule", [*RULES, *LAYERWISE])
@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(available()), st.booleans())
def test_updates(rule: str, data: Any, dtype: np.dtype[Any], late: bool) -> None:
    """Also ``late``: with numbers that are read when the update runs."""
    optimizer, arrays, state, updates = data.draw(training(rule, dtype))

    def on_gpu(optimizer: Any, left: Any, right: Any, weight: Any, state: Any, step: Any) -> None:
        update = OnGpu().bind(optimizer, sum_of(left, right), weight, state)
        if late and rule in RULES:
            memory: Any = SimpleNamespace(zeros=lambda nbytes: there(np.zeros(nbytes, np.uint8)))
            table = CudaKernels().step_table(optimizer, memory, 3, [dtype])
            table.write([optimizers.optimizer.Step(0.0, 0.0, (1.0,) * len(step.correction)), step])
            step = table.rows[1]
        update(step)

    assert run(on_gpu, optimizer, arrays, state, updates) == run(in_numpy, optimizer, arrays, state, updates)


@pytest.mark.parametrize("dtype", available(), ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_ranges_with_steps_of_their_own(dtype: np.dtype[Any], late: bool) -> None:
    random = np.random.default_rng(late)
    for sizes, different in ((random.integers(1, 9000, 6), 3), (random.integers(1, 6, 450), 40)):
        ends, keys = np.cumsum(sizes).tolist(), random.integers(0, different, sizes.size).tolist()
        factors = {key: 1.0 + key / 8 for key in range(different)}
        optimizer = optimizers.Adam(wd=0.5, lr_mult=factors, wd_mult=factors, multi_precision=late)
        value, total = (random.standard_normal(ends[-1]).astype(kind) for kind in (dtype, wide(dtype)))
        state = zeros(optimizer, value)
        found, states = there(value), {name: there(array) for name, array in state.items()}
        update = CudaKernels().bind_ranges(optimizer, there(total), found, states, ends)
        memory: Any = SimpleNamespace(zeros=lambda nbytes: there(np.zeros(nbytes, np.uint8)))
        table = CudaKernels().step_table(optimizer, memory, len(keys), [dtype])
        for count in (1, 2):
            steps = [optimizer.step(key, count) for key in keys]
            if late:
                table.write(steps)
            update(table.rows if late else steps)
            for low, high, step in zip((0, *ends), ends, steps, strict=False):
                part = {name: array[low:high] for name, array in state.items()}
                optimizer.update(step, total[low:high].copy(), value[low:high], part)
        for name, array in {"value": value, **state}.items():
            assert {"value": found, **states}[name].get().tobytes() == array.tobytes()


def test_options_may_change_at_any_time() -> None:
    for optimizer, changes in (
        (optimizers.SGD(momentum=0.9), {"nesterov": True, "learning_rate": 0.5}),
        (optimizers.LAMB(learning_rate=0.5), {"upper_bound": 0.25, "beta1": 0.5, "wd": 0.1}),
    ):
        value, found, total = np.ones(3), np.ones(3), np.array([1.0, 2.0, 3.0])
        state, states = (zeros(optimizer, value) for _ in range(2))
        update = OnGpu().bind(optimizer, total, found, states)
        for count in (1, 2):
            update(optimizer.step("key", count))
            optimizer.update(optimizer.step("key", count), total.copy(), value, state)
            for name, option in changes.items():
                setattr(optimizer, name, option)
        assert found.tobytes() == value.tobytes()


def test_a_master_that_does_not_move_is_rounded() -> None:
    """FTRL with a rate of 0 changes nothing, but what is stored is what its master says, as in numpy."""
    optimizer = optimizers.FTRL(learning_rate=0.0, multi_precision=True)
    value, master = np.zeros(3, np.float16), np.array([1.0, 0.1, 1e-9], F32)
    state = {"z": np.ones(3, F32), "n": np.ones(3, F32), "master": master}
    OnGpu().bind(optimizer, np.ones(3, F32), value, state)(optimizer.step("key", 1))
    np.testing.assert_array_equal(value, master.astype(np.float16))


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.LAMB])
def test_an_update_keeps_its_arrays(kind: Any) -> None:
    optimizer = kind()
    value, total = there(np.zeros(5, F32)), there(np.zeros(5, F32))
    state = {name: there(np.zeros(5, F32)) for name in optimizer.slots(np.dtype(F32))}
    alive = [weakref.ref(array) for array in (total, value, *state.values())]
    update = CudaKernels().bind(optimizer, total, value, state)
    del total, value, state
    gc.collect()
    assert all(array() is not None for array in alive)
    del update
    gc.collect()
    assert all(array() is None for array in alive)


@pytest.mark.parametrize("which", ["total", "value", "momentum"])
@pytest.mark.parametrize("wrong", [np.zeros(6), np.zeros(5, F32), None])
def test_arrays_that_do_not_fit(which: str, wrong: Any) -> None:
    arrays = {name: there(np.zeros(6, F32)) for name in ("total", "value", "momentum")}
    arrays[which] = there(np.zeros((6, 2), F32))[:, 0] if wrong is None else there(wrong)
    with pytest.raises(mpikv.ValueMismatch, match=r"must be contiguous, \d elements of float"):
        CudaKernels().bind(optimizers.SGD(momentum=0.9), arrays.pop("total"), arrays.pop("value"), arrays)
    with pytest.raises(mpikv.ValueMismatch, match="must be contiguous"):
        rows.take(there(np.ones((3, 4)))[:, ::2], there(np.zeros(1, np.int64)), there(np.ones((1, 2))))


# --- Copies


@pytest.mark.parametrize("wanted", [F32, np.float64, np.complex64])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_is_widened(dtype: np.dtype[Any], wanted: Any) -> None:
    source, into = np.arange(1 << 16, dtype=np.uint16).view(dtype), there(np.zeros(1 << 16, wanted))
    copy([into], [there(source)])
    with np.errstate(all="ignore"):
        assert bits(into.get().real) == bits(source.astype(wanted).real)


@pytest.mark.parametrize("dtype", [F32, np.float64])
@pytest.mark.parametrize("wanted", HALVES, ids=str)
def test_every_tie_is_rounded(dtype: Any, wanted: np.dtype[Any]) -> None:
    """What lies between two halves, and its neighbours."""
    words = np.arange(1 << 15, dtype=np.uint16)
    halves = words[np.isfinite(words.view(wanted).astype(F32))].view(wanted).astype(np.float64)
    # Behind the largest lies what would be next, were there more exponents.
    ties = (halves + np.append(halves[1:], 2 * halves[-1] - halves[-2])) / 2
    with np.errstate(all="ignore"):
        ties = np.concatenate([ties, -ties]).astype(dtype)
        around = [ties, np.nextafter(ties, dtype(np.inf)), np.nextafter(ties, dtype(-np.inf)), -halves, halves]
        nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(F32)
        source = np.concatenate([*around, nans.astype(dtype)], dtype=dtype, casting="unsafe")
        expected = source.astype(wanted)
    into = there(np.zeros(source.size, wanted))
    copy([into], [there(source)])
    assert bits(into.get()) == bits(expected)


def test_bytes_of_any_alignment() -> None:
    random = np.random.default_rng(1)
    sizes = [*random.integers(0, 70, 200), 32767, 32768, 32769, 100_000]
    sources = [random.integers(0, 256, size, np.uint8) for size in sizes]
    around = [there(np.full(size + 40, 7, np.uint8)) for size in sizes]
    begins = random.integers(0, 17, len(sizes)).tolist()
    targets = [array[begin : begin + size] for array, begin, size in zip(around, begins, sizes, strict=True)]
    copy(targets, [there(source, int(offset)) for source, offset in zip(sources, begins[::-1], strict=True)])
    for array, begin, source in zip(around, begins, sources, strict=True):
        expected = np.full(array.size, 7, np.uint8)
        expected[begin : begin + source.size] = source
        assert (array.get() == expected).all()


def test_other_arrays_are_left_to_cupy() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    given = there(whole)
    targets = [there(np.zeros((4, 3))), there(np.zeros((3, 8)))[:, ::2], there(np.zeros((3, 4), "f2"))]
    sources = [given.T, given, there(np.zeros((4, 3))).T]
    copy(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(target.get(), source.get())
    copy([], [])
    copy([there(np.zeros(0))], [there(np.zeros(0))])


# --- Codes


class HostsCodec(CudaCodec):
    """Takes arrays of the host, which are on the GPU during each call."""

    offsets = 0, 0, 0

    def encode(self, gradient: Any, payload: Any, residual: Any = None) -> None:
        given = [gradient] if residual is None else [gradient, residual]
        arrays, sent = list(map(there, given, self.offsets)), there(payload)
        super().encode(arrays[0], sent, *arrays[1:])
        payload[...] = sent.get()
        if residual is not None:
            residual[...] = arrays[1].get()

    def decode_add(self, payload: Any, total: Any) -> None:
        into = there(total, self.offsets[2])
        super().decode_add(there(payload), into)
        total[...] = into.get()


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (TwoBit(0.5), TwoBit(0.25)),
        (codecs.create("2bit"), codecs.create("1bit")),
        (codecs.create("1bit"), OneBit(0.5)),
        (codecs.Float16(), codecs.Bfloat16()),
        (codecs.create("bf16"), codecs.create("fp16")),
    ],
    ids=repr,
)
class TestCodecs(ElementwiseCodecContract):
    @pytest.fixture(autouse=True)
    def settle(self, one: Any, another: Any) -> None:
        self.one, self.another = one, another

    def codec(self) -> Any:
        return HostsCodec(self.one)

    def other(self) -> Any:
        return HostsCodec(self.another)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("kind", [TwoBit, OneBit, codecs.Float16, codecs.Bfloat16])
@pytest.mark.parametrize("size", [0, 1, 33, 130, 65535, 65536, 65537, (1 << 20) + 7])
def test_codes(kind: Any, size: int, feedback: bool) -> None:
    random = np.random.default_rng(size)
    for threshold in (0.5, 0.1, 1e-30, 1e30)[: 1 if size > 70_000 else 4]:
        codec = kind(threshold) if kind in (TwoBit, OneBit) else kind()
        codec = ErrorFeedback(codec) if feedback else codec
        on_gpu = HostsCodec(codec)
        on_gpu.offsets = tuple(random.integers(0, 5, 3).tolist())
        total, residual = gradients(random, size, threshold), np.zeros(size, F32) if feedback else None
        states = [(total, residual), (total.copy(), None if residual is None else residual.copy())]
        for _ in range(3):
            gradient, payloads = gradients(random, size, threshold), []
            for each, (sum_, left) in zip((codec, on_gpu), states, strict=True):
                payloads.append(random.integers(0, 256, codec.nbytes(size), np.uint8))
                with np.errstate(all="ignore"):
                    each.encode(gradient, payloads[-1], left)
                    each.decode_add(payloads[-1], sum_)
            assert payloads[0].tobytes() == payloads[1].tobytes()
            for expected, found in zip(*states, strict=True):
                assert expected is found is None or expected.tobytes() == found.tobytes()


def gradients(random: np.random.Generator, size: int, threshold: float) -> Any:
    """Return numbers that may be compressed: of all sizes, at their edges, at the threshold, and of either zero."""
    finite = numbers(random, size, np.dtype(F32), 0.3)
    finite[~(np.abs(finite) <= codecs.LARGEST)] = codecs.LARGEST
    edges = [threshold, -threshold, 0.0, -0.0, 65504, 65519.99, 65520, -1e6, 2**-14, 2**-25, 3 * 2**-25, 1e-45]
    edges = np.concatenate([np.array(edges, F32), np.nextafter(F32(threshold), F32([-1e38, 1e38]))])
    return np.where(random.random(size) < 0.3, random.choice(edges, size), finite)


@pytest.mark.parametrize(("codec", "gradient", "payload", "values", "left"), BITS)
@pytest.mark.feature("compression-2bit-bits", "compression-1bit-bits")
def test_published_bits(codec: Any, gradient: Any, payload: str, values: Any, left: Any) -> None:
    on_gpu = HostsCodec(ErrorFeedback(codec))
    residual, sent = np.zeros(len(gradient), F32), np.full(on_gpu.nbytes(len(gradient)), 0xAA, np.uint8)
    on_gpu.encode(np.array(gradient, F32), sent, residual)
    assert sent.tobytes().hex() == payload
    np.testing.assert_array_equal(residual, np.array(left, F32))
    total = np.zeros(len(gradient), F32)
    on_gpu.decode_add(sent, total)
    np.testing.assert_array_equal(total, np.array(values, F32))


def test_a_code_that_nobody_sends_says_nothing() -> None:
    """Of two bits, 01 stands for nothing."""
    total = np.ones(16, F32)
    HostsCodec(ErrorFeedback(TwoBit(0.5))).decode_add(np.full(4, 0b01_11_10_00, np.uint8), total)
    np.testing.assert_array_equal(total, [1.0, 1.5, 0.5, 1.0] * 4)


# --- Norms


def sums_of(arrays: Any, dtypes: Any) -> Any:
    sums, counts = norms.measure([there(array) for array in arrays], dtypes)
    assert counts == [norms.cells_of(array.size) for array in arrays]
    return norms.join_pieces(sums.get())


def test_every_way_of_halving() -> None:
    """Numbers of which each order of addition makes another sum."""
    for size in (*range(1, 1100, 7), *range(CELL - 40, CELL + 1, 3)):
        array = np.random.default_rng(size).standard_normal(size)
        array *= 10.0 ** np.random.default_rng(1).uniform(-8, 8, size)
        assert sums_of([array], [array.dtype])[0, 0] == np.add.reduce(array * array)


@pytest.mark.parametrize("wanted", available(), ids=str)
def test_arrays_of_all_kinds_are_measured_and_scaled(wanted: np.dtype[Any]) -> None:
    """Each array's cells are in its place, whichever launch has filled them; many need more than one launch."""
    random, expected = np.random.default_rng(3), []
    sizes = [0, 1, 129, 1000, CELL - 1, CELL, CELL + 1, 3 * CELL + 135, *[3] * 400]
    arrays = [
        numbers(random, size, available()[place % len(available())], (0, 1e-4)[place % 2])
        for place, size in enumerate(sizes)
    ]
    with np.errstate(all="ignore"):
        for array in arrays:
            kept = array.astype(wanted).astype(np.float64)
            cells = [kept[low : low + CELL] for low in range(0, kept.size, CELL)]
            expected += [(np.sum(np.square(cell)), np.count_nonzero(~np.isfinite(cell))) for cell in cells]
        assert bits(sums_of(arrays, [wanted] * len(arrays))) == bits(np.array(expected))
        scaled = list(map(there, arrays))
        norms.scale(scaled, 1 / 3)
        for array, found in zip(arrays, scaled, strict=True):
            np.multiply(array, 1 / 3, out=array, dtype=np.float64, casting="unsafe")
            assert bits(found.get()) == bits(array)
    with pytest.raises(mpikv.Unsupported, match="an array of int32 on a GPU cannot be measured or scaled"):
        norms.scale([there(np.ones(3, np.int32))], 2.0)
