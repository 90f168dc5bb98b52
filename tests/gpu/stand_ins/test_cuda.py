"""The CUDA sources, without a GPU: they are compiled to its machine code, and run on the host, where their bits are
those of numpy. What needs a GPU is marked so elsewhere.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulation import (
    CODES,
    DTYPES,
    STRUCTS,
    OnDevice,
    compiler,
    cupy_on_host,
    emulated,
    run_program,
    structure,
    texts,
)
from support.published import BITS
from support.rules import RULES, bits, in_numpy, numbers, plain, run, sum_of, training

import mpikv
from mpikv import codecs, optimizers
from mpikv.arrays.arrays import accumulator
from mpikv.codecs import ErrorFeedback, OneBit, TwoBit
from mpikv.compute.cuda import codes, copies, kernels, layerwise, loading, norms, rows, steps
from mpikv.compute.cuda.kernels import CudaKernels
from mpikv.errors import TransportError
from mpikv.optimizers.recording import call_of
from mpikv.optimizers.updaters import Assign
from mpikv.testing import ElementwiseCodecContract, KernelsContract
from mpikv.testing.updater import available, wide, zeros

FILES = ("rules.cu", "copies.cu", "codes.cu", "rows.cu", "steps.cu")
ALL_FILES = (*FILES, "norms.cu", "layerwise.cu")
FLOATS = available()
CAST = [np.dtype(name) for name in DTYPES if name != "bfloat16"]
CAST += [dtype for dtype in FLOATS if dtype.name == "bfloat16"]

# The first of them compiles the kernels.
pytestmark = pytest.mark.deadline(120)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """The kernels of all sources, compiled for the host."""
    compiler()
    folder = tmp_path_factory.mktemp("cuda")
    return {name: emulated(name, folder) for name in FILES}


@pytest.fixture
def nothing_loaded():
    loading.loaded.cache_clear()
    yield
    loading.loaded.cache_clear()


@pytest.fixture
def launches(on_host, nothing_loaded, monkeypatch):
    """Launches run on the host, and are listed."""
    listed = []
    monkeypatch.setitem(sys.modules, "cupy", cupy_on_host(on_host, listed))
    return listed


@pytest.fixture
def unrun(nothing_loaded, monkeypatch):
    """Launches are listed only."""
    listed = []
    monkeypatch.setitem(sys.modules, "cupy", cupy_on_host({name: {} for name in FILES}, listed))
    return listed


def device(array):
    return array.view(OnDevice)


class Emulated(CudaKernels):
    """Takes numpy's arrays."""

    def bind(self, updater, total, value, state):
        there = {name: device(array) for name, array in state.items()}
        return super().bind(updater, device(total), device(value), there)


class TestKernels(KernelsContract):
    @pytest.fixture(autouse=True)
    def settle(self, launches):
        self.launches = launches

    def make(self):
        return Emulated()


# --- Rules


def on_emulated_gpu(optimizer, left, right, weight, state, step):
    total = sum_of(left, right)
    before = total.tobytes()
    Emulated().bind(optimizer, total, weight, state)(step)
    assert total.tobytes() == before


@pytest.fixture(scope="class")
def launching(on_host):
    """As `launches`, for classes of tests that draw examples."""
    with pytest.MonkeyPatch.context() as patch:
        loading.loaded.cache_clear()
        patch.setitem(sys.modules, "cupy", cupy_on_host(on_host, []))
        yield
    loading.loaded.cache_clear()


@pytest.mark.usefixtures("launching")
class TestRules:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("rule", RULES)
    @settings(max_examples=40)
    @given(st.data())
    def test_same_bits_as_numpy(self, rule, dtype, data):
        optimizer, arrays, state, updates = data.draw(training(rule, dtype))
        found = run(on_emulated_gpu, optimizer, arrays, state, updates)
        assert found == run(in_numpy, optimizer, arrays, state, updates)


@pytest.mark.usefixtures("launches")
def test_a_master_that_does_not_move_is_rounded():
    """FTRL with a rate of 0 changes nothing, but what is stored is what its master says, as in numpy."""
    optimizer = optimizers.FTRL(learning_rate=0.0, multi_precision=True)
    value, master = np.zeros(3, np.float16), np.array([1.0, 0.1, 1e-9], np.float32)
    state = {"z": np.ones(3, np.float32), "n": np.ones(3, np.float32), "master": master}
    Emulated().bind(optimizer, np.ones(3, np.float32), value, state)(optimizer.step("key", 1))
    np.testing.assert_array_equal(value, master.astype(np.float16))


class TestLaunchesOfUpdates:
    def bound(self, optimizer, value, **state):
        return Emulated().bind(optimizer, np.ones_like(value, dtype=wide(value.dtype)), value, state)

    def test_arguments(self, unrun):
        optimizer = optimizers.Adam(wd=0.25, rescale_grad=0.5, clip_gradient=2.0, multi_precision=True)
        value = np.zeros(1000, np.float16)
        state = zeros(optimizer, value)
        total = np.ones(1000, np.float32)
        Emulated().bind(optimizer, total, value, state)(optimizer.step("key", 1))
        (launch,) = unrun
        assert launch.expression == "update<adam_rule, float16_kind, one>"
        assert (launch.grid, launch.block) == ((1,), (256,))
        (given,) = launch.arguments
        assert given["total"] == total.ctypes.data
        assert given["value"] == value.ctypes.data
        assert given["master"] == state["master"].ctypes.data
        assert list(given["state"]) == [state["mean"].ctypes.data, state["variance"].ctypes.data, *[0] * 6]
        assert (given["begin"], given["count"], given["end"].item(), given["row"].item()) == (0, 1, 1000, 0)
        assert given["table"] == 0
        _, sent = call_of(optimizer, optimizer.step("key", 1))
        assert tuple(given["numbers"][0, : len(sent)]) == sent
        assert sent[:4] == (3, 0.5, 2.0, 0.25)

    @pytest.mark.parametrize(("size", "blocks"), [(1, 1), (4096, 1), (4097, 2), (10_000_000, 2442)])
    def test_a_part_of_a_value_is_a_block(self, unrun, size, blocks):
        value = np.zeros(size, np.float32)
        optimizer = optimizers.SGD()
        self.bound(optimizer, value)(optimizer.step("key", 1))
        assert unrun[0].grid == (blocks,)

    def test_an_empty_value_takes_none(self, unrun):
        optimizer = optimizers.SGD()
        self.bound(optimizer, np.zeros(0, np.float32))(optimizer.step("key", 1))
        assert unrun == []

    def test_options_may_change_at_any_time(self, unrun):
        optimizer = optimizers.SGD(momentum=0.9)
        value = np.zeros(5)
        update = self.bound(optimizer, value, momentum=np.zeros(5))
        update(optimizer.step("key", 1))
        optimizer.nesterov = True
        optimizer.learning_rate = 0.5
        update(optimizer.step("key", 2))
        assert [launch.expression for launch in unrun] == [
            "update<sgd_rule, float64_kind, one>",
            "update<sgd_rule, float64_kind, one>",
        ]
        # Both have bits, and the numbers of scale and decay; then momentum and rate, or rate and momentum.
        assert [launch.arguments[0]["numbers"][0, 3:5].tolist() for launch in unrun] == [[0.9, 0.1], [0.5, 0.9]]

    def test_an_update_keeps_its_arrays(self, unrun):
        optimizer, value = optimizers.SGD(momentum=0.9), np.zeros(5)
        arrays = [device(np.zeros(5)) for _ in range(3)]
        alive = [weakref.ref(array) for array in arrays]
        total, value, velocity = arrays
        update = CudaKernels().bind(optimizer, total, value, {"momentum": velocity})
        del arrays, total, value, velocity
        gc.collect()
        assert all(array() is not None for array in alive)
        del update
        gc.collect()
        assert all(array() is None for array in alive)

    @pytest.mark.parametrize("which", ["total", "value", "momentum"])
    @pytest.mark.parametrize("wrong", ["dtype", "size", "layout"])
    def test_arrays_that_do_not_fit(self, which, wrong):
        arrays = {name: np.zeros(6, np.float32) for name in ("total", "value", "momentum")}
        arrays[which] = {
            "dtype": np.zeros(6, np.float64),
            "size": np.zeros(5, np.float32),
            "layout": np.zeros((6, 2), np.float32)[:, 0],
        }[wrong]
        with pytest.raises(mpikv.ValueMismatch, match=r"must be contiguous, \d elements of float"):
            Emulated().bind(optimizers.SGD(momentum=0.9), arrays.pop("total"), arrays.pop("value"), arrays)


def device_memory(arrays):
    """Return what has memory as a GPU's, and notes it."""

    def take(nbytes):
        arrays.append(device(np.full(nbytes, 0xFF, np.uint8)))
        return arrays[-1]

    return SimpleNamespace(zeros=take)


@pytest.mark.usefixtures("launching")
class TestRulesOfATable:
    """Updates whose numbers are read when they run."""

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("rule", RULES)
    @settings(max_examples=10)
    @given(st.data())
    def test_same_bits_as_numpy(self, rule, dtype, data):
        optimizer, arrays, state, updates = data.draw(training(rule, dtype))
        table = Emulated().table(optimizer, device_memory([]), 3, [dtype])

        def late(optimizer, left, right, weight, state, step):
            update = Emulated().bind(optimizer, sum_of(left, right), weight, state)
            other = optimizers.optimizer.Step(0.0, 0.0, (1.0,) * len(step.correction))
            assert table.fits(step)
            table.write([other, step])
            update(table.rows[1])

        found = run(late, optimizer, arrays, state, updates)
        assert found == run(in_numpy, optimizer, arrays, state, updates)


@pytest.mark.usefixtures("launching")
class TestRanges:
    """Many keys with numbers of their own, side by side, updated at once."""

    def arrays(self, optimizer, dtype, size, seed):
        random = np.random.default_rng(seed)
        value = random.standard_normal(size).astype(dtype)
        return random.standard_normal(size).astype(wide(dtype)), value, zeros(optimizer, value)

    def expect(self, optimizer, ends, given, total, value, state):
        """Update range by range, in numpy."""
        for low, high, step in zip((0, *ends), ends, given, strict=False):
            part = {name: array[low:high] for name, array in state.items()}
            optimizer.update(step, total[low:high].copy(), value[low:high], part)

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @settings(max_examples=30)
    @given(
        sizes=st.lists(st.integers(1, 3 * kernels.PART), min_size=1, max_size=6)
        | st.lists(st.integers(1, 5), min_size=190, max_size=450),
        different=st.integers(1, 40),
        seed=st.integers(0, 99),
    )
    def test_same_bits_as_numpy(self, dtype, late, sizes, different, seed):
        random, ends = np.random.default_rng(seed), np.cumsum(sizes).tolist()
        keys = random.integers(0, different, len(sizes)).tolist()
        factors = {key: 1.0 + key / 8 for key in range(different)}
        optimizer = optimizers.Adam(wd=0.5, lr_mult=factors, wd_mult=factors, multi_precision=seed % 2 == 0)
        found, expected = (self.arrays(optimizer, dtype, ends[-1], seed) for _ in range(2))
        total, value, state = map(device, found[:2]), found[1], found[2]
        there = {name: device(array) for name, array in state.items()}
        update = CudaKernels().bind_ranges(optimizer, *total, there, ends)
        table = CudaKernels().table(optimizer, device_memory([]), len(keys), [dtype])
        for count in (1, 2):
            given = [optimizer.step(key, count) for key in keys]
            if late:
                table.write(given)
            update(table.rows if late else given)
            self.expect(optimizer, ends, given, *expected)
        assert value.tobytes() == expected[1].tobytes()
        assert all(state[name].tobytes() == expected[2][name].tobytes() for name in state)


@pytest.mark.parametrize(
    ("keys", "launched"),
    [
        ([0] * 500, [200, 200, 100]),
        ([0, 1] * 100, [200]),
        ([*range(16)] * 12, [192]),
        ([*range(17)] * 2, [16, 16, 2]),
        ([0] * 10 + [*range(1, 20)], [25, 4]),
        ([7], [1]),
    ],
)
def test_as_few_launches_of_ranges_as_can_be(unrun, keys, launched):
    """Of 200 ranges at most, with 16 different steps."""
    optimizer = optimizers.SGD(lr_mult={key: 1.0 + key for key in range(20)})
    ends = [10 * (1 + number) for number in range(len(keys))]
    total, value = (device(np.zeros(ends[-1], np.float32)) for _ in range(2))
    CudaKernels().bind_ranges(optimizer, total, value, {}, ends)([optimizer.step(key, 1) for key in keys])
    assert [launch.arguments[0]["count"] for launch in unrun] == launched
    assert [launch.arguments[0]["begin"] for launch in unrun] == [0, *(10 * np.cumsum(launched[:-1])).tolist()]


class TestTables:
    @pytest.fixture
    def adam(self):
        return optimizers.Adam(learning_rate=0.5, lr_mult={"b": 0.25})

    @pytest.mark.parametrize(("count", "different", "launched"), [(1, 1, 1), (40, 8, 1), (40, 10, 3), (5000, 5, 3)])
    def test_rows_lie_where_they_say(self, launches, adam, count, different, launched):
        memory = []
        table = CudaKernels().table(adam, device_memory(memory), count, [np.dtype(np.float32)])
        given = [adam.step("b" if row % 3 else "a", 1 + row % different) for row in range(count)]
        table.write(given)
        assert len(launches) == launched
        (array,) = memory
        for row, step in zip(table.rows, given, strict=True):
            _, numbers = call_of(adam, step)
            at = row.table + row.row * steps.NUMBERS * 8 - array.ctypes.data
            assert array[at : at + len(numbers) * 8].view(np.float64).tolist() == list(numbers)

    def test_what_is_there_is_not_written_again(self, launches, adam):
        table = CudaKernels().table(adam, device_memory([]), 3, [np.dtype(np.float32)])
        for counts, written in (
            ([1], 1),
            ([1], 1),
            ([2], 2),
            ([2, 2, 3], 3),
            ([2, 2, 3], 3),
            ([2, 3, 3], 4),
            ([2], 5),
            ([2, 3, 3], 6),
            ([2], 7),
        ):
            table.write([adam.step("a", count) for count in counts])
            assert len(launches) == written
        adam.rescale_grad = 0.5
        table.write([adam.step("a", 2)])
        assert len(launches) == 8

    def test_another_form_does_not_fit(self, unrun):
        sgd = optimizers.SGD(momentum=0.5)
        table = CudaKernels().table(sgd, device_memory([]), 1, [np.dtype(np.float32)])
        assert table.fits(sgd.step("a", 1))
        sgd.learning_rate = 0.125
        assert table.fits(sgd.step("a", 2))
        sgd.nesterov = True
        assert not table.fits(sgd.step("a", 2))

    def test_all_is_compiled_with_the_table(self, unrun, adam):
        kinds = [np.dtype(np.float32), np.dtype(np.float16)]
        table = CudaKernels().table(adam, device_memory([]), 1, kinds)
        loaded = loading.loaded.cache_info().misses
        table.write([adam.step("a", 1)])
        for dtype in kinds:
            value = np.zeros(3, dtype)
            Emulated().bind(adam, np.zeros(3, np.float32), value, zeros(adam, value))(table.rows[0])
        assert loading.loaded.cache_info().misses == loaded
        assert [launch.expression for launch in unrun] == [
            "write_numbers",
            "update<adam_rule, float32_kind, one>",
            "update<adam_rule, float16_kind, one>",
        ]
        (given,) = unrun[1].arguments
        assert (given["table"], given["row"].item()) == (table.rows[0].table, 0)


class TestPreparation:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_a_push_loads_nothing(self, unrun, dtype):
        for rule in RULES:
            name, options = plain(rule)
            optimizer = optimizers.create(name, **options)
            CudaKernels().prepare(optimizer, dtype, False)
            loaded = loading.loaded.cache_info().misses
            value = np.zeros(3, dtype)
            Emulated().bind(optimizer, np.zeros(3, wide(dtype)), value, zeros(optimizer, value))(
                optimizer.step("key", 1)
            )
            assert loading.loaded.cache_info().misses == loaded
        assert len(unrun) == len(RULES)

    @pytest.mark.parametrize("dtype", CAST, ids=str)
    def test_nor_does_one_that_assigns(self, unrun, dtype):
        CudaKernels().prepare(Assign(), dtype, False)
        loaded = loading.loaded.cache_info().misses
        assert loaded == 1
        half = dtype.name in ("float16", "bfloat16")
        Emulated().bind(Assign(), np.zeros(3, np.float32 if half else dtype), np.zeros(3, dtype), {})(None)
        assert loading.loaded.cache_info().misses == loaded
        assert len(unrun) == 1

    def test_a_sum_in_its_place_is_not_copied(self, unrun):
        value = np.zeros(3)
        Emulated().bind(Assign(), value, value, {})(None)
        assert unrun == []

    def test_a_subclass_has_a_rule_of_its_own(self, launches):
        class Upwards(optimizers.SGD):
            def rule(self, step, block):
                np.add(block.weight, block.gradient, out=block.weight)

        upwards, value = Upwards(), np.ones(3, np.float32)
        CudaKernels().prepare(upwards, np.dtype(np.float32), False)
        Emulated().bind(upwards, np.ones(3, np.float32), value, {})(upwards.step("key", 1))
        assert value.tolist() == [2, 2, 2]

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_a_rule_that_cannot_be_compiled_is_refused_before_a_push(self, unrun, dtype):
        class Sorting(optimizers.SGD):
            def rule(self, step, block):
                block.weight[:] = np.sort(block.gradient)

        with pytest.raises(mpikv.Unsupported, match=r"^the rule of Sorting cannot be compiled: it uses sort; write"):
            CudaKernels().prepare(Sorting(multi_precision=True), dtype, False)

    def test_a_rule_with_too_many_numbers_or_states(self, unrun):
        class Long(optimizers.SGD):
            def rule(self, step, block):
                for number in range(20):
                    block.weight *= number

        last = {"states": tuple("abcdefghi"), "rule": lambda _, step, block: np.copyto(block.weight, block.state[-1])}
        for rule in (Long(), type("Wide", (optimizers.SGD,), last)()):
            with pytest.raises(mpikv.Unsupported, match=r"it has more than 11 different numbers or 8 states: compute"):
                CudaKernels().prepare(rule, np.dtype(np.float32), False)

    def test_dtypes_without_a_rule(self, unrun):
        with pytest.raises(mpikv.Unsupported, match="SGD cannot update values of int32"):
            CudaKernels().prepare(optimizers.SGD(), np.dtype(np.int32), False)

    def test_an_updater_function_is_left_to_itself(self, unrun):
        updater = mpikv.optimizers.updaters.CallableUpdater(lambda key, received, stored: stored.__iadd__(received))
        CudaKernels().prepare(updater, np.dtype(np.float32), False)
        value = np.zeros(3, np.float32)
        CudaKernels().bind(updater, np.ones(3, np.float32), value, {})("key")
        np.testing.assert_array_equal(value, np.ones(3))
        assert unrun == []

    def test_without_cupy(self, nothing_loaded, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(mpikv.TransportUnavailable, match=r"update<sgd_rule, float32_kind, one>.*pip install 'cupy"):
            CudaKernels().prepare(optimizers.SGD(), np.dtype(np.float32), False)


def test_cupy_is_loaded_late():
    code = "import sys, mpikv.compute.cuda.kernels, mpikv.compute.cuda.copies; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Copies


def similar(found, expected):
    """Compare all bits, with one NaN for all, part by part of complex numbers."""
    if expected.dtype.kind == "c":
        return similar(found.real, expected.real) and similar(found.imag, expected.imag)
    if expected.dtype.kind in "biu":
        return found.tobytes() == expected.tobytes()
    return bits(np.asarray(found)) == bits(expected)


def filled(random, size, dtype):
    """Return numbers of a dtype, those at its edges among them."""
    if dtype.kind in "biu":
        array = random.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype if dtype.kind != "b" else np.uint8)
        few = random.random(size) < 0.5
        return np.where(few, random.integers(0, 3, size).astype(array.dtype), array).astype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return (numbers(random, 2 * size, part, 0.3)).view(dtype)
    return numbers(random, size, dtype, 0.3)


def into_guards(size, dtype, offset):
    """Return an array to be written, and one that surrounds it."""
    around = np.full((size + 40) * dtype.itemsize, 7, np.uint8)
    begin = 16 * dtype.itemsize + offset * dtype.itemsize
    return around[begin : begin + size * dtype.itemsize].view(dtype), around


def is_ok(into, around):
    begin = into.ctypes.data - around.ctypes.data
    return (around[:begin] == 7).all() and (around[begin + into.nbytes :] == 7).all()


def cast(array, dtype):
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        return array.astype(dtype)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("wanted", CAST, ids=str)
@pytest.mark.parametrize("dtype", CAST, ids=str)
def test_casts(dtype, wanted):
    random = np.random.default_rng(DTYPES.index(dtype.name))
    pairs = []
    for size in (0, 1, 5, 4095, 4096, 4097, 10_000):
        source = filled(random, size, dtype)
        if wanted.kind in "iu" and dtype.kind not in "biu":
            # What is out of an integer's range becomes anything, in numpy too.
            few = np.iinfo(wanted)
            source = random.integers(max(few.min, -200), min(few.max, 200), size).astype(dtype)
        pairs.append((source, *into_guards(size, wanted, size % 3)))
    copies.copy([device(into) for _, into, _ in pairs], [device(source) for source, _, _ in pairs])
    for source, into, around in pairs:
        assert similar(into, cast(source, wanted)), (source, into)
        assert is_ok(into, around)


HALVES = [dtype for dtype in FLOATS if dtype.itemsize == 2]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("wanted", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_is_widened(dtype, wanted):
    source = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    into = np.zeros(source.size, wanted)
    copies.copy([device(into)], [device(source)])
    assert similar(into, cast(source, wanted))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wanted", HALVES, ids=str)
def test_every_tie_is_rounded(dtype, wanted):
    """What lies between two halves, and its neighbours."""
    words = np.arange(1 << 15, dtype=np.uint16)
    halves = words[np.isfinite(words.view(wanted).astype(np.float32))].view(wanted).astype(np.float64)
    # Behind the largest lies what would be next, were there more exponents.
    ties = (halves + np.append(halves[1:], 2 * halves[-1] - halves[-2])) / 2
    with np.errstate(all="ignore"):
        ties = np.concatenate([ties, -ties]).astype(dtype)
        around = [ties, np.nextafter(ties, dtype(np.inf)), np.nextafter(ties, dtype(-np.inf)), -halves, halves]
        nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
        source = np.concatenate([*around, nans.astype(dtype)], dtype=dtype, casting="unsafe")
    into = np.zeros(source.size, wanted)
    copies.copy([device(into)], [device(source)])
    assert similar(into, cast(source, wanted))


@pytest.mark.usefixtures("launching")
class TestBytes:
    @settings(max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 70), st.sampled_from([32767, 32768, 32769, 100_000])),
                st.integers(0, 17),
                st.integers(0, 17),
            ),
            max_size=12,
        ),
        st.integers(0, 2**32),
    )
    def test_of_any_alignment(self, pairs, seed):
        random = np.random.default_rng(seed)
        sources, targets, surroundings = [], [], []
        for size, begin, offset in pairs:
            sources.append(random.integers(0, 256, size + 20, np.uint8)[begin : begin + size])
            into, around = into_guards(size, np.dtype(np.uint8), offset)
            targets.append(into)
            surroundings.append(around)
        copies.copy([device(into) for into in targets], [device(source) for source in sources])
        for source, into, around in zip(sources, targets, surroundings, strict=True):
            assert into.tobytes() == source.tobytes()
            assert is_ok(into, around)


def test_many_pairs_take_few_launches(launches):
    random = np.random.default_rng(0)
    for dtype, wanted in [(np.float32, np.float32), (np.float32, np.float16)]:
        launches.clear()
        sources = [random.standard_normal(random.integers(0, 3000)).astype(dtype) for _ in range(300)]
        targets = [np.empty(source.size, wanted) for source in sources]
        copies.copy([device(target) for target in targets], [device(source) for source in sources])
        assert [launch.arguments["count"][0] for launch in launches] == [127, 127, 46]
        for source, target in zip(sources, targets, strict=True):
            assert target.tobytes() == source.astype(wanted).tobytes()


def test_what_is_alike_goes_together(launches):
    dtypes = [(np.float32, np.float32), (np.int64, np.int64), (np.float32, np.float64), (np.bool_, np.float64)] * 2
    sources = [np.arange(5).astype(dtype) for dtype, _ in dtypes]
    targets = [np.empty(5, wanted) for _, wanted in dtypes]
    copies.copy([device(target) for target in targets], [device(source) for source in sources])
    assert sorted((launch.expression, launch.arguments["count"][0]) for launch in launches) == [
        ("cast<bool_kind, float64_kind>", 2),
        ("cast<float32_kind, float64_kind>", 2),
        ("copy_bytes", 4),
    ]
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(target, source)


def test_parts_of_a_large_array(unrun):
    source = np.zeros(3 * copies.PART // 4 + 1, np.float32)
    copies.copy(
        [device(np.zeros(8, np.uint8)), device(np.empty_like(source))], [device(np.zeros(8, np.uint8)), device(source)]
    )
    (launch,) = unrun
    assert launch.grid == (1 + 4,)
    assert list(launch.arguments[0]["end"][:2]) == [1, 5]


def test_other_arrays_are_left_to_cupy(unrun):
    wide = np.arange(12.0).reshape(3, 4)
    targets = [np.zeros((4, 3)), np.zeros((3, 8))[:, ::2], np.zeros((3, 4), "f2"), np.zeros((3, 4), np.longdouble)]
    sources = [wide.T, wide, np.asfortranarray(wide), wide]
    copies.copy([device(target) for target in targets], [device(source) for source in sources])
    assert unrun == []
    for target, source in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(target, source)


def test_nothing_to_copy(unrun):
    copies.copy([], [])
    copies.copy([device(np.zeros(0))], [device(np.zeros(0))])
    assert unrun == []


# --- Rows


@st.composite
def tables(draw, dtypes):
    """A table, numbers of some of its rows, and as many rows, of any width."""
    dtype = draw(st.sampled_from(dtypes))
    length, width = draw(st.integers(1, 40)), draw(st.sampled_from([0, 1, 2, 3, 31, 64, 100, 256, 257, 700]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = random.permutation(length)[: draw(st.integers(0, length))].astype(np.int64)
    table, some = (filled(random, count * width, dtype).reshape(count, width) for count in (length, ids.size))
    return table, ids, some, random


def guarded(array):
    """Return a copy of an array that is to be written, and what surrounds it."""
    into, around = into_guards(array.size, array.dtype, 1)
    into[...] = array.reshape(-1)
    return into.reshape(array.shape), around


@pytest.mark.usefixtures("launching")
class TestRows:
    @settings(max_examples=150)
    @given(tables(CAST))
    def test_are_taken_and_put(self, given):
        table, ids, some, _ = given
        taken, around = guarded(some)
        rows.take(device(table), device(ids), device(taken))
        assert taken.tobytes() == table[ids].tobytes()
        assert is_ok(taken.reshape(-1), around)
        for put in (some, None):
            into, around = guarded(table)
            rows.put(device(into), device(ids), None if put is None else device(put))
            expected = table.copy()
            expected[ids] = 0 if put is None else put
            assert into.tobytes() == expected.tobytes()
            assert is_ok(into.reshape(-1), around)

    @settings(max_examples=150)
    @given(tables(CAST), st.booleans())
    def test_are_added(self, given, widely):
        table, ids, some, _ = given
        if widely:
            table = cast(table, accumulator(table.dtype))
        into, around = guarded(table)
        rows.add(device(into), device(ids), device(some))
        with np.errstate(all="ignore"):
            table[ids] += some
        if accumulator(some.dtype) == table.dtype:
            assert similar(into, table)
        assert is_ok(into.reshape(-1), around)

    @settings(max_examples=150)
    @given(tables(CAST), st.lists(st.integers(1, 9), max_size=12))
    def test_are_summed_from_the_first_to_the_last(self, given, lengths):
        table, _, _, random = given
        order = random.integers(0, len(table), sum(lengths))
        starts = np.cumsum([0, *lengths])
        into, around = guarded(np.zeros((len(lengths), table.shape[1]), table.dtype))
        rows.sum_runs(device(table), device(order), device(starts), device(into))
        wide = accumulator(table.dtype)
        with np.errstate(all="ignore"):
            for place, run in enumerate(np.split(order, starts[1:-1]) if lengths else ()):
                total = table[run[0]].astype(wide)
                for number in run[1:]:
                    total = total + table[number]
                assert similar(into[place], total.astype(table.dtype))
        assert is_ok(into.reshape(-1), around)


@pytest.mark.parametrize(
    ("shape", "blocks", "piece", "shift"),
    [
        ((1000, 64), 16, 16, 4),
        ((1000,), 1, 4, 0),
        ((1000, 3, 5), 16, 4, 4),
        ((7, 5000), 2, 16, 8),
        ((10**6, 2), 977, 8, 0),
    ],
)
def test_a_launch_of_rows(unrun, shape, blocks, piece, shift):
    table, ids = np.broadcast_to(np.float32(1), (3, *shape[1:])).copy(), np.zeros(shape[0], np.int64)
    out = np.empty(shape, np.float32)
    rows.take(device(table), device(ids), device(out))
    (launch,) = unrun
    (given,) = launch.arguments
    assert (launch.expression, launch.grid, launch.block) == ("take_rows", (blocks,), (256,))
    assert (given["count"], given["piece"], given["shift"]) == (shape[0], piece, shift)
    assert given["width"] * piece == 4 * int(np.prod(shape[1:]))
    pointers = (table, out, ids)
    assert [given[name] for name in ("source", "target", "ids")] == [each.ctypes.data for each in pointers]


def test_no_rows_and_rows_of_nothing_take_no_launch(unrun):
    none = np.zeros(0, np.int64)
    rows.take(device(np.ones((3, 2))), device(none), device(np.ones((0, 2))))
    rows.put(device(np.ones((3, 0))), device(none), None)
    rows.add(device(np.ones((3, 2))), device(none), device(np.ones((0, 2))))
    assert unrun == []


def test_rows_with_gaps_are_refused(unrun):
    with pytest.raises(mpikv.ValueMismatch, match="must be contiguous"):
        rows.take(device(np.ones((3, 4))[:, ::2]), device(np.zeros(1, np.int64)), device(np.ones((1, 2))))
    assert unrun == []


@pytest.mark.parametrize("dtype", CAST, ids=str)
def test_rows_load_nothing_after_they_are_prepared(unrun, dtype):
    wide = accumulator(dtype)
    rows.prepare(dtype, wide)
    loaded = loading.loaded.cache_info().misses
    ids = device(np.zeros(1, np.int64))
    for kind in (dtype, wide):
        some = device(np.zeros((1, 2), kind))
        rows.take(some, ids, some)
        rows.put(some, ids, some)
        rows.put(some, ids, None)
        rows.add(device(np.zeros((1, 2), wide)), ids, some)
    copies.copy([device(np.zeros(2, dtype))], [device(np.zeros(2, wide))])
    assert loading.loaded.cache_info().misses == loaded


# --- Arrays that are looked at


def test_numbers_that_are_too_large(launches):
    """In any place, of any dtype, contiguous or not, of many arrays; NaN and infinity are."""
    random = np.random.default_rng(1)
    for bound in (2.0**100, 65504.0):
        arrays, expected = [], []
        for number in range(300):
            dtype = FLOATS[number % len(FLOATS)]
            array = random.standard_normal(random.integers(0, 9000)).astype(dtype)
            wild = number % 3 == 0 and array.size > 0
            if wild:
                with np.errstate(over="ignore"):
                    spoilt = np.array(random.choice([np.nan, np.inf, -np.inf, 2 * bound, -2 * bound])).astype(dtype)
                array[random.integers(array.size)] = spoilt
            elif array.size:
                array[-1] = 61440
            arrays.append(device(array if number % 7 else array[::2]))
            with np.errstate(invalid="ignore"):
                expected.append(not (np.abs(arrays[-1].astype(np.float64)) <= bound).all())
        flags = np.zeros(len(arrays), np.uint8)
        launches.clear()
        copies.exceeding(arrays, device(flags), bound)
        assert flags.tolist() == expected
        assert len(launches) == len(FLOATS)
        assert 50 < sum(expected) < 110


# --- Codes


class OnEmulatedGpu(codes.CudaCodec):
    """Takes numpy's arrays."""

    def encode(self, gradient, payload, residual=None):
        super().encode(device(gradient), device(payload), None if residual is None else device(residual))

    def decode_add(self, payload, total):
        super().decode_add(device(payload), device(total))


CODECS = {
    "2bit": lambda threshold: TwoBit(threshold),
    "1bit": lambda threshold: OneBit(threshold),
    "fp16": lambda threshold: codecs.Float16(),
    "bf16": lambda threshold: codecs.Bfloat16(),
}


@pytest.mark.usefixtures("launching")
class TestCodes:
    @pytest.mark.parametrize("feedback", [False, True])
    @pytest.mark.parametrize("name", CODECS)
    @settings(max_examples=60)
    @given(
        st.one_of(st.integers(0, 130), st.sampled_from([65535, 65536, 65537])),
        st.sampled_from([0.5, 0.1, 3.0, 1e-30, 1e30]),
        st.tuples(*[st.integers(0, 4)] * 3),
        st.integers(0, 2**32),
    )
    def test_same_bits_as_numpy(self, name, feedback, size, threshold, offsets, seed):
        random, codec = np.random.default_rng(seed), CODECS[name](threshold)
        codec = ErrorFeedback(codec) if feedback else codec
        there = OnEmulatedGpu(codec)
        assert (there.settings(), there.feedback) == (codec.settings(), feedback)
        # Of any alignment.
        gradient, residual, added = (placed(size, offset) for offset in offsets)
        residuals = [np.zeros(size, np.float32), residual] if feedback else [None, None]
        added[:] = gradients(random, size, threshold)
        totals = [added.copy(), added]
        for _ in range(3):
            gradient[:] = gradients(random, size, threshold)
            payloads = [random.integers(0, 256, codec.nbytes(size), np.uint8) for _ in range(2)]
            for each, payload, residual, added in zip((codec, there), payloads, residuals, totals, strict=True):
                with np.errstate(all="ignore"):
                    each.encode(gradient, payload, residual)
                    each.decode_add(payload, added)
            assert payloads[0].tobytes() == payloads[1].tobytes()
            assert totals[0].tobytes() == totals[1].tobytes()
            if feedback:
                assert residuals[0].tobytes() == residuals[1].tobytes()


def placed(size, offset):
    """Return zeros that begin as many elements behind a multiple of 16 bytes."""
    memory = np.zeros(size + 8, np.float32)
    begin = -(memory.ctypes.data // 4) % 4 + offset
    return memory[begin : begin + size]


def gradients(random, size, threshold):
    """Return numbers that may be compressed: of all sizes, at their edges, at the threshold, and of either zero."""
    finite = numbers(random, size, np.dtype(np.float32), 0.3)
    finite[~(np.abs(finite) <= codecs.LARGEST)] = codecs.LARGEST
    edges = [threshold, -threshold, 0.0, -0.0, 65504, 65519.99, 65520, -1e6, 2**-14, 2**-25, 3 * 2**-25, 1e-45]
    edges = np.concatenate(
        [np.array(edges, np.float32), np.nextafter(np.float32(threshold), np.float32([-1e38, 1e38]))]
    )
    return np.where(random.random(size) < 0.3, random.choice(edges, size), finite)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("codec", "gradient", "payload", "values", "left"), BITS)
@pytest.mark.feature("compression-2bit-bits", "compression-1bit-bits")
def test_published_bits(codec, gradient, payload, values, left):
    there = OnEmulatedGpu(ErrorFeedback(codec))
    residual, sent = np.zeros(len(gradient), np.float32), np.full(there.nbytes(len(gradient)), 0xAA, np.uint8)
    there.encode(np.array(gradient, np.float32), sent, residual)
    assert sent.tobytes().hex() == payload
    np.testing.assert_array_equal(residual, np.array(left, np.float32))
    total = np.zeros(len(gradient), np.float32)
    there.decode_add(sent, total)
    np.testing.assert_array_equal(total, np.array(values, np.float32))


@pytest.mark.usefixtures("launches")
def test_a_code_that_nobody_sends_says_nothing():
    """Of two bits, 01 stands for nothing."""
    total = np.ones(16, np.float32)
    OnEmulatedGpu(ErrorFeedback(TwoBit(0.5))).decode_add(np.full(4, 0b01_11_10_00, np.uint8), total)
    np.testing.assert_array_equal(total, [1.0, 1.5, 0.5, 1.0] * 4)


def test_arguments_of_codes(unrun):
    gradient, residual, payload = np.zeros(1000, np.float32), np.zeros(1000, np.float32), np.zeros(252, np.uint8)
    codec = OnEmulatedGpu(ErrorFeedback(TwoBit(0.25)))
    codec.encode(gradient, payload, residual)
    codec.decode_add(payload, residual)
    codec.encode(gradient[:0], payload[:0], residual[:0])
    codec.decode_add(payload[:0], residual[:0])
    packing, adding = unrun
    assert (packing.expression, adding.expression) == ("encode<two_bits>", "decode_add<two_bits>")
    assert (packing.grid, adding.grid) == ((1,), (1,))
    places = residual.ctypes.data, payload.ctypes.data, 1000, 252, 0.25
    assert packing.arguments[0].tolist() == (gradient.ctypes.data, *places)
    assert adding.arguments[0].tolist() == (0, *places)


@pytest.mark.usefixtures("unrun")
def test_codecs_without_a_kernel():
    class OfOnesOwn(codecs.TwoBit):
        pass

    own = OfOnesOwn(), codecs.ErrorFeedback(OfOnesOwn())
    for codec in (*own, *map(codecs.create, ("topk", "lowrank", {"type": "topk", "error_feedback": False}))):
        assert CudaKernels().codec(codec) is codec  # it works on the host
    with pytest.raises(mpikv.Unsupported, match=r"has no CUDA kernel.*known: 1bit, 2bit, bf16, fp16"):
        codes.CudaCodec(own[0])
    assert repr(CudaKernels().codec(codecs.create("fp16"))) == "ErrorFeedback(Float16())"


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
    def settle(self, launches, one, another):
        self.one, self.another = one, another

    def codec(self):
        return OnEmulatedGpu(self.one)

    def other(self):
        return OnEmulatedGpu(self.another)


# --- Layout


def test_layouts(tmp_path):
    for name, kind, expression in [
        *(
            ("rules.cu", f"Update<{kind}_kind, {count}>", f"{count}>")
            for kind in ("float16", "float64")
            for count in ("one", "many")
        ),
        *((name, kind, "") for name, kind in STRUCTS.items()),
    ]:
        dtype = structure(name, expression)
        lines = [f'typedef {kind} Given; printf("%zu\\n", sizeof(Given));']
        lines += [f'printf("%zu %zu\\n", offsetof(Given, {each}), sizeof(Given::{each}));' for each in dtype.names]
        expected = [dtype.itemsize]
        for field in dtype.names:
            expected += [dtype.fields[field][1], dtype[field].itemsize]
        assert list(map(int, run_program(name, lines, tmp_path))) == expected


def test_constants(tmp_path):
    names = "STATES, NUMBERS, PART, THREADS, one::ranges, one::rows, many::ranges, many::rows"
    printed = run_program("rules.cu", [f'printf("%d %d %d %d %d %d %d %d\\n", {names});'], tmp_path)
    assert list(map(int, printed)) == [
        *(kernels.STATES, steps.NUMBERS, kernels.PART, kernels.THREADS),
        *(kernels.ONE.ranges, kernels.ONE.rows, kernels.MANY.ranges, kernels.MANY.rows),
    ]
    printed = run_program("copies.cu", ['printf("%d %d %d\\n", PAIRS, PART, CAST_PART);'], tmp_path)
    assert list(map(int, printed)) == [copies.MOST, copies.PART, copies.CAST_PART]
    printed = run_program(
        "norms.cu", ['printf("%d %d %d %d %d\\n", ARRAYS, CELL, PIECES, SCALED_PART, BLOCK_THREADS);'], tmp_path
    )
    assert list(map(int, printed)) == [norms.MOST, norms.CELL, norms.PIECES, norms.SCALED_PART, norms.THREADS]
    printed = run_program("rows.cu", ['printf("%d\\n", GROUP);'], tmp_path)
    assert list(map(int, printed)) == [rows.GROUP]
    bits = ", ".join(f"{code}::bits" for code in CODES)
    printed = run_program("codes.cu", [f'printf("%d %d %d %d %d\\n", PART, {bits});'], tmp_path)
    names = dict(codes._CODES.values())
    assert list(map(int, printed)) == [codes.PART, *(names[code] for code in CODES)]
    printed = run_program("layerwise.cu", ['printf("%d %d %d %d\\n", LAYERS, ROWS, LAYER_STATES, PART);'], tmp_path)
    assert list(map(int, printed)) == [layerwise.MOST, layerwise.ROWS, layerwise.STATES, layerwise.PART]
    assert norms.CELL == optimizers.BLOCK
    printed = run_program("steps.cu", ['printf("%d %d %d\\n", KEYS, ROWS, NUMBERS);'], tmp_path)
    assert list(map(int, printed)) == [steps.KEYS, steps.ROWS, steps.NUMBERS]


# --- NVRTC


@pytest.fixture(scope="module")
def nvrtc():
    pytest.importorskip("cupy", reason="CuPy is not installed: it brings what speaks to NVRTC")
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    return nvrtc


def compiled(nvrtc, text, names, architecture, form, *more):
    """Return what NVRTC makes of kernels, with the options that CuPy adds and others, and what it says of them."""
    program = nvrtc.createProgram(text, "kernels.cu", (), ())
    try:
        for each in names:
            nvrtc.addNameExpression(program, each)
        options = (*loading.OPTIONS, f"-arch={architecture}", "--device-as-default-execution-space", *more)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            pytest.fail(nvrtc.getProgramLog(program))
        lowered = [nvrtc.getLoweredName(program, each) for each in names]
        assert len(set(lowered)) == len(names)
        return form(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def test_cupy_passes_the_arguments_by_value():
    """It looks at them before it asks for a GPU; what it cannot pass is a TypeError. An address is what it would find
    itself.
    """
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy_backends.cuda.api.driver import CUDADriverError
    from cupy_backends.cuda.api.runtime import CUDARuntimeError

    function = cupy.cuda.function
    no_kernel = partial(cupy.cuda.Function.__new__(cupy.cuda.Function), stream=cupy.cuda.Stream.null)
    given = []

    def note(address):
        given.append(function.CPointer(address))
        return given[-1]

    updates = [structure("rules.cu", count) for count in ("one>", "many>")]
    others = [structure(name, "") for name in STRUCTS]
    for dtype in (*updates, *others):
        arguments = np.zeros(1, dtype)
        with pytest.raises(TransportError, match="the CUDA kernel its_name could not be launched: ") as failed:
            loading._by_address("its_name", no_kernel, note)((1,), (1,), (arguments,))
        assert isinstance(failed.value.__cause__, (CUDADriverError, CUDARuntimeError))
        assert given[-1].ptr == function.CNumpyArray(arguments).ptr == arguments.ctypes.data
        with pytest.raises((CUDADriverError, CUDARuntimeError)):
            no_kernel((1,), (1,), (arguments,))
    assert len(given) == len(updates) + len(others)
    with pytest.raises(TypeError, match="Unsupported type"):
        no_kernel((1,), (1,), (object(),))


def test_arguments_live_until_the_launch_has_copied_them():
    """Also those that nobody else refers to."""
    kept = []

    def function(grid, block, parameters):
        gc.collect()
        kept.append(alive())

    def launch():
        nonlocal alive
        given = np.zeros(1, structure("rows.cu", ""))
        alive = weakref.ref(given)
        return (given,)

    alive = None
    loading._by_address("name", function, int)((1,), (1,), launch())
    assert kept[0] is not None
    kept.clear()
    assert alive() is None


def test_nvrtc_is_told_no_other_rounding(nvrtc, nothing_loaded, monkeypatch):
    """Of what CuPy adds to the options, and of several that say the same the last one counts."""
    import cupy

    given, told = [], {name: getattr(nvrtc, name) for name in dir(nvrtc)}
    told["compileProgram"] = lambda program, options: given.append(options) or nvrtc.compileProgram(program, options)
    found = []
    module = SimpleNamespace(load=lambda image: None, get_function=found.append)
    compiler = cupy.cuda.compiler
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: ("-arch=compute_80", "ptx"))
    monkeypatch.setattr(compiler, "nvrtc", SimpleNamespace(**told))
    monkeypatch.setattr(cupy.cuda, "runtime", SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(cupy.cuda, "function", SimpleNamespace(Module=lambda: module, CPointer=int))
    monkeypatch.setattr(compiler, "_kernel_cache_backend", None)  # which keeps nothing
    loading.kernel("codes.cu", "encode<two_bits>")
    assert len(found) == 1
    assert "encode" in found[0]
    (options,) = given
    assert options[: len(loading.OPTIONS)] == loading.OPTIONS
    about = ("fmad", "ftz", "prec", "fast", "O0", "debug")
    assert not [option for option in options[len(loading.OPTIONS) :] if any(word in option for word in about)]


@pytest.mark.deadline(300)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ALL_FILES)
def test_machine_code(nvrtc, name, architecture):
    """A thread has registers for all that it has at a time; what it has not, it would keep in memory of the GPU."""
    for text, names in texts(name):
        binary, told = compiled(nvrtc, text, names, architecture, nvrtc.getCUBIN, "-Xptxas=-v")
        assert bytes(binary[:4]) == b"\x7fELF"
        kept = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told)
        assert kept == [("0", "0", "0")] * len(names)
        assert "warning" not in told


@pytest.mark.deadline(300)
@pytest.mark.parametrize("name", ALL_FILES)
def test_no_operation_is_fused_or_approximate(nvrtc, name):
    text = ""
    for source, names in texts(name):
        made, told = compiled(nvrtc, source, names, "compute_80", nvrtc.getPTX)
        assert told.strip() == ""
        text += made.decode() if isinstance(made, bytes) else made
    operations = set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.]*)", text, re.MULTILINE))
    assert not {each for each in operations if re.match(r"fma|mad\.r|.*\.(ftz|approx|full)", each)}
    floats = {each for each in operations if re.match(r"(add|sub|mul|div|sqrt)\..*f(32|64)$", each)}
    assert floats == {each for each in floats if ".rn." in each}
    if name == "steps.cu":
        assert not floats
    else:
        assert {"ld.global.v4.f32", "st.global.v4.f32"} <= operations
        assert name == "codes.cu" or {"ld.global.v2.f64", "st.global.v2.f64"} <= operations
    if name in ("rules.cu", "layerwise.cu"):
        assert {"sqrt.rn.f32", "sqrt.rn.f64", "div.rn.f32", "div.rn.f64"} <= floats
    if name in ("norms.cu", "layerwise.cu"):
        assert {"add.rn.f64", "mul.rn.f64"} <= floats
        assert "bar.sync" in operations
    if name == "rows.cu":
        assert {"add.rn.f32", "add.rn.f64"} <= floats
        assert not {each for each in operations if re.match(r"div|rem|atom|red", each)}
    # Local memory would be a copy of the arguments for each thread.
    assert ".local" not in text
