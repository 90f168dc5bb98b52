"""Parameters, clipping by the common norm, and the scale of a loss: all of one process."""

import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays_of

import mpikv
from mpikv import ConfigError, LossScaler, Parameter, ValueMismatch, clip_global_norm

FLOATS = strategies.sampled_from(["float32", "float64"])
ARRAYS = strategies.lists(
    FLOATS.flatmap(
        lambda dtype: arrays_of.arrays(
            dtype, arrays_of.array_shapes(min_dims=0, min_side=0), elements=strategies.floats(-1e3, 1e3, width=32)
        )
    ),
    max_size=5,
)


@given(ARRAYS, strategies.floats(1e-3, 1e3))
def test_clipping_is_the_textbooks(arrays, max_norm):
    before = [array.copy() for array in arrays]
    flat = np.concatenate([array.ravel().astype(np.float64) for array in arrays] or [np.zeros(0)])
    expected = float(np.linalg.norm(flat))
    norm = clip_global_norm(arrays, max_norm)
    assert norm == pytest.approx(expected, rel=1e-12)
    factor = min(1.0, max_norm / expected) if expected else 1.0
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_allclose(array, old * factor, rtol=1e-5 if array.dtype == np.float32 else 1e-12, atol=1e-30)


def test_clipping_of_large_and_strided_arrays():
    large = np.ones((300, 1000), np.float32)
    part = large[::2, ::2]
    assert clip_global_norm([part], 1.0) == np.sqrt(part.size)
    np.testing.assert_allclose(part, 1 / np.sqrt(part.size), rtol=1e-6)
    assert (large[1::2] == 1).all()


def test_clipping_of_half_precision():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        array = np.full(4, 300, dtype)  # the square of its norm is above the largest float16
        assert clip_global_norm([array], 1.0) == 600
        np.testing.assert_array_equal(array.astype(np.float64), np.full(4, 0.5))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_not_scaled(bad):
    arrays = [np.array([bad, 5.0]), np.ones(2)]
    assert not np.isfinite(clip_global_norm(arrays, 1.0))
    np.testing.assert_array_equal(arrays[1], np.ones(2))


@pytest.mark.parametrize("max_norm", [0, -1, np.nan, np.inf])
def test_a_bad_norm(max_norm):
    with pytest.raises(ConfigError, match="max_norm="):
        clip_global_norm([np.ones(1)], max_norm)


def test_what_cannot_be_scaled():
    with pytest.raises(TypeError, match="read-only"):
        clip_global_norm([np.broadcast_to(1.0, 3)], 1.0)


def test_the_scale_follows_the_overflows():
    scaler = LossScaler(16.0, window=3)
    seen = []
    for overflow in [False, False, False, True, False, False, False, True, True]:
        scaler.record(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [16, 16, 32, 16, 16, 16, 32, 16, 8]
    parameters = [Parameter(np.zeros(2)) for _ in range(2)]
    assert scaler.has_overflow(parameters) is False
    parameters[1].grad = np.array([0, np.inf])
    assert scaler.has_overflow(parameters) is True
    for arguments in [(0,), (-1.0,), (np.inf,), (np.nan,), (1.0, 0)]:
        with pytest.raises(ConfigError, match=r"is not a (whole )?number in"):
            LossScaler(*arguments)


def test_a_parameter_takes_gradients():
    weight = Parameter(np.zeros(2))
    assert (weight.grad, weight.fresh) == (None, False)
    gradient = np.ones(2)
    weight.grad = gradient
    assert weight.grad is gradient
    assert weight.fresh
    weight.grad *= 2
    np.testing.assert_array_equal(gradient, [2, 2])
    weight.grad = None
    assert (weight.grad, weight.fresh) == (None, False)
    assert repr(weight) == "<mpikv.Parameter (2,) float64 grad_req=write gradient none>"
    with pytest.raises(ConfigError, match=r"unknown grad_req 'wirte' .*did you mean 'write'"):
        weight.grad_req = "wirte"


def test_gradients_are_added_to_a_copy():
    weight = Parameter(np.zeros(2, np.float32), grad_req="add")
    first = np.ones(2, np.float32)
    weight.grad = first
    weight.grad = np.ones(2)
    weight.grad += 1  # as it says
    np.testing.assert_array_equal(weight.grad, [3, 3])
    np.testing.assert_array_equal(first, [1, 1])
    with pytest.raises(ValueMismatch, match=r"of shape \(1,\)"):
        weight.grad = np.ones(1)
    weight.zero_grad()
    assert weight.grad is None


def test_a_parameter_is_the_array_that_was_given():
    memory = np.zeros((3, 4))
    assert np.shares_memory(Parameter(memory[:, ::2]).data, memory)


def test_names_of_several_parameters():
    trainer = mpikv.Trainer({"w": np.zeros(1), "layer": {"b": np.zeros(1)}}, "sgd")
    assert list(trainer.params) == ["layer/b", "w"]
    with pytest.raises(ConfigError, match="did you mean 'layer/b'"):
        trainer.set_grads({"layer/a": np.zeros(1)})
    assert repr(trainer) == "<mpikv.Trainer 2 parameters SGD() not started>"


def test_clipping_counts_each_array_once():
    gradient = np.full(2, 5.0)
    assert clip_global_norm([gradient, None, gradient, gradient[:]], 1.0) == pytest.approx(50**0.5)
    np.testing.assert_allclose(np.linalg.norm(gradient), 1)


def test_clipping_of_half_precision_by_a_small_factor():
    array = np.full(3000, 60000, np.float16)
    clip_global_norm([array], 0.1)
    np.testing.assert_allclose(np.linalg.norm(array.astype(float)), 0.1, rtol=1e-3)


def test_the_scale_has_bounds():
    scaler = LossScaler(1.0, window=1)
    for overflow, bound in ((True, 2.0**-64), (False, 2.0**64)):
        for _ in range(1100):
            scaler.record(overflow)
        assert scaler.loss_scale == bound
    with pytest.raises(ConfigError, match="is not a number in"):
        LossScaler(2.0**65)
