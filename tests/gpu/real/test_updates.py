"""The optimizers on a GPU beside those in numpy, and copies with casts beside numpy's."""

import numpy as np
import pytest
from support.rules import bits, numbers

import mpikv
from mpikv import optimizers
from mpikv.compute.cuda import kernels
from mpikv.compute.cuda.copies import copy
from mpikv.protocols import Whole
from mpikv.testing.updater import available, zeros

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]


class Lion(optimizers.Optimizer):
    """Of sign(0.9 m + 0.1 g), in numpy's functions: its kernel is made of its record."""

    states = ("mean",)

    def rule(self, step, block):
        (mean,) = block.state
        np.multiply(mean, 0.9, out=block.spare[0])
        np.multiply(block.gradient, 0.1, out=mean)
        np.add(mean, block.spare[0], out=mean)
        np.sign(mean, out=block.gradient)
        np.multiply(block.gradient, step.rate, out=block.gradient)
        np.subtract(block.weight, block.gradient, out=block.weight)


@pytest.mark.ranks(1, 2)
def test_an_optimizer_of_ones_own_on_a_store(cupy):
    with mpikv.create("nccl") as kv, mpikv.create("dist_sync") as host:
        for each, place in ((kv, cupy.asarray), (host, np.copy)):
            each.init(["a", "b"], [place(np.ones(shape, np.float32)) for shape in (3, 1000)])
            each.set_optimizer(Lion(learning_rate=0.5, wd=0.25, lr_mult={"b": 0.5}))
        step = kv.capture(["a", "b"], [cupy.full(size, 0.25, "f4") for size in (3, 1000)])
        for _ in range(3):
            found = step()
            expected = host.pushpull(["a", "b"], [np.full(size, 0.25, np.float32) for size in (3, 1000)])
            assert [one.get().tolist() for one in found] == [one.tolist() for one in expected]
        assert step.captured


@pytest.mark.parametrize("kind", [optimizers.LARS, optimizers.LAMB])
def test_many_layers_have_the_bits_of_numpy(cupy, kind):
    random, optimizer = np.random.default_rng(1), kind(learning_rate=0.5, wd=0.01)
    sizes = [*random.integers(1, 5000, 100), 65535, 65536, 65537, 1_000_003]
    values = [random.standard_normal(size).astype(np.float32) for size in sizes]
    states = [zeros(optimizer, value) for value in values]
    wholes = [
        Whole(cupy.empty(value.size, np.float32), cupy.asarray(value), {k: cupy.asarray(v) for k, v in state.items()})
        for value, state in zip(values, states, strict=True)
    ]
    update = kernels.CudaKernels().bind_whole(optimizer, wholes)
    for count in range(1, 4):
        steps = [optimizer.step("layer_bias" if number % 3 == 0 else "layer", count) for number in range(len(sizes))]
        for whole, value, state, step in zip(wholes, values, states, steps, strict=True):
            gradient = random.standard_normal(value.size).astype(np.float32)
            whole.total.set(gradient)
            optimizer.update(step, gradient, value, state)
        update(steps)
        for whole, value in zip(wholes, values, strict=True):
            assert whole.value.get().tobytes() == value.tobytes()


CAST = [*map(np.dtype, ("bool", "int8", "int64", "uint64", "complex64")), *available()]


@pytest.mark.parametrize("wanted", CAST, ids=str)
def test_many_copies_with_casts(cupy, wanted):
    random = np.random.default_rng(3)
    arrays = [drawn(random, 1 + 37 * number, CAST[number % len(CAST)], wanted) for number in range(300)]
    targets = [cupy.empty(array.size, wanted) for array in arrays]
    copy(targets, [cupy.asarray(array) for array in arrays])
    for target, array in zip(targets, arrays, strict=True):
        with np.errstate(all="ignore"):
            expected = (array.real if array.dtype.kind == "c" != wanted.kind else array).astype(wanted)
        found = target.get()
        if wanted.kind == "c":
            found, expected = found.view("f4"), expected.view("f4")
        assert (found == expected).all() if wanted.kind in "biu" else bits(found) == bits(expected)


def drawn(random, size, dtype, wanted):
    """Return numbers, those at the edges among them. What is out of an integer's range is left out."""
    if dtype.kind in "biu" or wanted.kind in "biu":
        return random.integers(0, 100, size).astype(dtype)
    if dtype.kind == "c":
        return numbers(random, 2 * size, np.dtype("f4"), 0.3).view(dtype)
    return numbers(random, size, dtype, 0.3)
