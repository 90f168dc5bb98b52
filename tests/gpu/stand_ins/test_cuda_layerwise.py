"""LARS and LAMB on a GPU, without one: the kernels run on the host, where their bits are those of numpy."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulation import OnDevice, launched
from support.rules import LAYERWISE, bits, in_numpy, numbers, run, sum_of, training

from mpikv import optimizers
from mpikv.compute.cuda import loading
from mpikv.compute.cuda.kernels import CudaKernels
from mpikv.optimizers import BLOCK
from mpikv.protocols import Whole
from mpikv.testing.updater import available, wide, zeros

FLOATS = available()

# The first of them compiles the kernels.
pytestmark = pytest.mark.deadline(120)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    with launched("layerwise.cu", tmp_path_factory.mktemp("layerwise")) as listed:
        yield listed


def whole_of(total, value, state):
    there = [array.view(OnDevice) for array in (total, value, *state.values())]
    return Whole(there[0], there[1], dict(zip(state, there[2:], strict=True)))


def on_emulated_gpu(optimizer, left, right, weight, state, step):
    CudaKernels().bind(optimizer, *whole_of(sum_of(left, right), weight, state))(step)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rule", LAYERWISE)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_same_bits_as_numpy(launches, rule, dtype, data):
    optimizer, arrays, state, updates = data.draw(training(rule, dtype))
    found = run(on_emulated_gpu, optimizer, arrays, state, updates)
    assert found == run(in_numpy, optimizer, arrays, state, updates)


LAYERS = st.lists(
    st.tuples(
        st.sampled_from(["conv/weight", "norm/gamma", "bias"]),
        st.one_of(st.integers(0, 300), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 9, 3 * BLOCK + 130])),
        st.sampled_from(FLOATS),
        st.integers(1, 5),
    ),
    max_size=6,
)


@pytest.mark.parametrize("rule", ["lars", "lars-momentum", "lamb"])
@settings(max_examples=60, deadline=None)
@given(LAYERS, st.integers(0, 2**32))
def test_many_layers_at_once(launches, rule, layers, seed):
    """Each with its own rate, decay and count, and of its own dtype."""
    name, _, kind = rule.partition("-")
    options = {"momentum": 0.9} if kind else {}
    optimizer = optimizers.create(
        name,
        wd=0.01,
        rescale_grad=-0.5,
        clip_gradient=1.5,
        multi_precision=seed % 2 == 0,
        lr_mult={"k0": 0.5, "k1": 3.0},
        wd_mult={"k2": 0.0},
        **options,
    )
    random = np.random.default_rng(seed)
    values = [numbers(random, size, dtype, 0) for _, size, dtype, _ in layers]
    if values and layers[0][1]:
        values[0][...] = 0  # a norm of zero
    found = [(value.copy(), zeros(optimizer, value)) for value in values]
    expected = [(value.copy(), zeros(optimizer, value)) for value in values]
    totals = [np.empty(value.size, wide(value.dtype)) for value in values]
    update = CudaKernels().bind_whole(
        optimizer, [whole_of(total, *each) for total, each in zip(totals, found, strict=True)]
    )
    for later in range(3):
        gradients = [numbers(random, total.size, total.dtype, 0) for total in totals]
        steps = [optimizer.step(f"k{place}/{key}", count + later) for place, (key, _, _, count) in enumerate(layers)]
        for total, gradient in zip(totals, gradients, strict=True):
            total[...] = gradient
        update(steps)
        for step, gradient, (value, state) in zip(steps, gradients, expected, strict=True):
            optimizer.update(step, gradient, value, state)
    for (mine, my_state), (value, state) in zip(found, expected, strict=True):
        assert bits(mine) == bits(value)
        assert {name: bits(array) for name, array in my_state.items()} == {
            name: bits(array) for name, array in state.items()
        }


def layers_of(optimizer, count, dtype=np.float32):
    values = [np.ones(1 + number % 5, dtype) for number in range(count)]
    return [whole_of(np.ones(value.size, wide(value.dtype)), value, zeros(optimizer, value)) for value in values]


@pytest.mark.parametrize(("count", "expected"), [(1, 3), (44, 3), (45, 6), (160, 12)])
def test_many_layers_take_few_launches(launches, count, expected):
    optimizer = optimizers.LAMB()
    update = CudaKernels().bind_whole(optimizer, layers_of(optimizer, count))
    launches.clear()
    update([optimizer.step("key", 1)] * count)
    assert len(launches) == expected
    assert [launch.expression.partition("<")[0] for launch in launches[:3]] == ["norms", "rates", "descent"]


def test_more_different_steps_than_a_launch_has_room_for(launches):
    optimizer = optimizers.LARS(wd=0.5, lr_mult={number: number for number in range(30)})
    wholes = layers_of(optimizer, 40)
    expected, steps = layers_of(optimizer, 40), [optimizer.step(number, 1) for number in range(40)]
    for step, (total, value, _) in zip(steps, expected, strict=True):
        optimizer.update(step, total, value, {})
    launches.clear()
    CudaKernels().bind_whole(optimizer, wholes)(steps)
    assert len(launches) == 9
    assert [bits(whole.value) for whole in wholes] == [bits(whole.value) for whole in expected]


def test_a_push_loads_nothing(launches):
    for optimizer in (optimizers.LARS(), optimizers.LARS(momentum=0.9), optimizers.LAMB()):
        for dtype in FLOATS:
            CudaKernels().prepare(optimizer, dtype, False)
            loaded = loading.loaded.cache_info().misses
            CudaKernels().bind_whole(optimizer, layers_of(optimizer, 3, dtype))([optimizer.step("key", 1)] * 3)
            assert loading.loaded.cache_info().misses == loaded


def test_nothing_to_update(launches):
    optimizer = optimizers.LARS()
    launches.clear()
    value = np.zeros(0, np.float32)
    CudaKernels().bind(optimizer, *whole_of(value.copy(), value, {}))(optimizer.step("key", 1))
    CudaKernels().bind_whole(optimizer, [])([])
    assert launches == []


def test_options_may_change_at_any_time(launches):
    optimizer, value = optimizers.LAMB(learning_rate=0.5), np.ones(3)
    expected, state = value.copy(), zeros(optimizers.LAMB(), value)
    there = zeros(optimizer, value)
    total = np.ones(3)
    update = CudaKernels().bind(optimizer, *whole_of(total, value, there))
    for count in (1, 2):
        total[...] = [1.0, 2.0, 3.0]
        update(optimizer.step("key", count))
        optimizer.update(optimizer.step("key", count), np.array([1.0, 2.0, 3.0]), expected, state)
        optimizer.upper_bound, optimizer.beta1, optimizer.wd = 0.25, 0.5, 0.1
    assert bits(value) == bits(expected)


def test_an_update_keeps_its_arrays(launches):
    optimizer = optimizers.LAMB()
    wholes = layers_of(optimizer, 2)
    alive = [weakref.ref(array) for whole in wholes for array in (whole.total, whole.value, *whole.state.values())]
    update = CudaKernels().bind_whole(optimizer, wholes)
    del wholes
    gc.collect()
    assert all(array() is not None for array in alive)
    del update
    gc.collect()
    assert all(array() is None for array in alive)


def test_a_subclass_has_an_update_of_its_own():
    class Sideways(optimizers.LAMB):
        def update(self, step, total, value, state):
            value += total

    value = np.zeros(3)
    CudaKernels().bind(Sideways(), np.ones(3), value, {})(None)
    assert value.tolist() == [1, 1, 1]
