"""Compiled rules give the bits of the rules in numpy, for all numbers there are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rules import RULES, bits, in_numpy, run, training

import mpikv
from mpikv import optimizers
from mpikv.optimizers.recording import rule_of
from mpikv.testing import KernelsContract

WHY = "numba is not installed: pip install 'mpikv[numba]'"
numba = pytest.importorskip("numba", reason=WHY)
compiled, codecs = (pytest.importorskip(f"mpikv.compute.numba.{name}", reason=WHY) for name in ("rules", "codecs"))

FLOATS = ("float32", "float64")


def in_a_loop(optimizer, left, right, weight, state, step):
    compiled.bind(optimizer, left + right, weight, state)(step)


def with_the_sum_in_a_loop(optimizer, left, right, weight, state, step):
    compiled.bind_adding(optimizer, weight, state)(left, right, step)


@pytest.mark.deadline(120)  # it compiles a loop for each choice of options
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60)
@given(st.data())
def test_same_bits_as_numpy(rule, dtype, data):
    optimizer, arrays, state, updates = data.draw(training(rule, np.dtype(dtype)))
    found = run(data.draw(st.sampled_from([in_a_loop, with_the_sum_in_a_loop])), optimizer, arrays, state, updates)
    assert found == run(in_numpy, optimizer, arrays, state, updates)


class TestKernels(KernelsContract):
    binds_lists = True

    def make(self):
        return compiled


@pytest.mark.parametrize("field", ["_TYPE", "_DATA", "_NDIM", "_BASE", "_DTYPE", "_FLAGS"])
def test_lists_are_left_to_numpy_where_headers_are_others(field, monkeypatch):
    lists = pytest.importorskip("mpikv.compute.numba.lists")
    arrays = [np.zeros((2, 3)) for _ in range(20)]
    monkeypatch.setattr(lists, "_reads_headers", lists._reads_headers.__wrapped__)  # as in a process of its own
    assert lists.bind_list(arrays) is not None
    monkeypatch.setattr(lists, field, getattr(lists, field) + 4)
    assert lists.bind_list(arrays) is None


def is_compiled(optimizer, total, value, state):
    """Return whether the bound function leaves the sum alone, as no rule in numpy does."""
    before = total.copy()
    with np.errstate(all="ignore"):
        compiled.bind(optimizer, total, value, state)(optimizer.step("key", 1))
    return bits(total) == bits(before)


class TestWhatIsCompiled:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_plain_arrays(self, dtype):
        total, value = np.ones((2, 5), dtype)
        assert is_compiled(optimizers.SGD(), total, value, {})
        assert compiled.bind_adding(optimizers.SGD(), value, {}) is not None

    def test_a_subclass_with_a_rule_of_its_own(self):
        class Upwards(optimizers.SGD):
            def rule(self, step, block):
                block.weight += step.rate * block.gradient

        total, value = np.ones((2, 5))
        assert is_compiled(Upwards(learning_rate=0.5), total, value, {})
        np.testing.assert_array_equal(value, np.full(5, 1.5))

    def test_half_precision_is_left_to_numpy(self):
        value = np.ones(5, np.float16)
        assert not is_compiled(optimizers.SGD(), np.ones(5, np.float32), value, {})
        np.testing.assert_array_equal(value, np.full(5, 0.9, np.float16))

    def test_unaligned_arrays_are_left_to_numpy(self):
        total, value = (np.zeros(41, np.uint8)[1:].view(np.float64) for _ in range(2))
        value[:] = total[:] = 1
        assert not is_compiled(optimizers.SGD(), total, value, {})
        np.testing.assert_array_equal(value, np.full(5, 0.9))


def signatures(optimizer, dtype):
    return compiled.loop_of(rule_of(optimizer), np.dtype(dtype), False).signatures


def test_a_push_finds_everything_compiled():
    compiled.loop_of.cache_clear()  # as in a process of its own
    optimizer = optimizers.Adam()
    with mpikv.create(kernels="numba") as kv:
        kv.init("a", np.zeros(3, np.float32))
        assert signatures(optimizer, "float32") == []
        kv.set_optimizer(optimizer)
        assert (len(signatures(optimizer, "float32")), len(signatures(optimizer, "float64"))) == (1, 0)
        kv.init("b", np.zeros(300_000))
        assert (len(signatures(optimizer, "float32")), len(signatures(optimizer, "float64"))) == (1, 1)
        for _ in range(2):
            kv.push(["a", "b"], [np.ones(3, np.float32), np.ones(300_000)])
        # An array that differs in anything would have been compiled for.
        assert (len(signatures(optimizer, "float32")), len(signatures(optimizer, "float64"))) == (1, 1)


def test_a_codec_without_a_loop_stays():
    assert codecs.codec(given := mpikv.codecs.TopK(ratio=0.5)) is given


def test_without_a_directory_for_what_was_compiled(monkeypatch):
    njit = numba.njit

    def refuse(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function, **options)

    monkeypatch.setattr(numba, "njit", refuse)
    compiled.loop_of.cache_clear()
    compiled.prepare(optimizers.SGD(), np.dtype(np.float32), False)
    assert len(signatures(optimizers.SGD(), "float32")) == 1
