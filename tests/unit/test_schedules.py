"""Schedules: their curves, their warm-up, their settings."""

import math
import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv import schedules
from mpikv.errors import ConfigError
from mpikv.schedules import Cosine, Factor, MultiFactor, Polynomial, Schedule

EVERY = [
    lambda **options: Factor(7, factor=0.5, **options),
    lambda **options: MultiFactor([15, 30], factor=0.1, **options),
    lambda **options: Polynomial(40, **options),
    lambda **options: Cosine(40, **options),
]


def by_repeated_multiplication(step, factor, stop, rate, number):
    """The rate as a loop over all updates makes it, which is how MXNet does."""
    count = 0
    while number > count + step:
        count += step
        rate = max(rate * factor, stop)
    return rate


@given(st.integers(1, 50), st.sampled_from([0.5, 0.9, 1.0]), st.integers(0, 500))
@pytest.mark.feature("optimizer-schedules")
def test_factor(step, factor, number):
    expected = by_repeated_multiplication(step, factor, 1e-3, 1.0, number)
    assert math.isclose(Factor(step, factor=factor, stop_factor_lr=1e-3, base_lr=1.0)(number), expected, rel_tol=1e-12)


def test_multi_factor():
    schedule = MultiFactor([2, 5, 6], factor=0.5, base_lr=8.0)
    assert [schedule(number) for number in range(1, 9)] == [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 1.0, 1.0]


@pytest.mark.feature("optimizer-schedules")
def test_polynomial_and_cosine_fall_from_base_to_final():
    for schedule in (
        Polynomial(50, pwr=1.5, base_lr=1.0, final_lr=0.25, warmup_steps=10),
        Cosine(50, base_lr=1.0, final_lr=0.25, warmup_steps=10),
    ):
        rates = [schedule(number) for number in range(10, 60)]
        assert rates[0] == 1.0
        assert all(left > right for left, right in pairwise(rates[:41]))
        assert set(rates[40:]) == {0.25}
    assert math.isclose(Polynomial(100, base_lr=2.0, pwr=2)(25), 2.0 * 0.75**2)
    assert math.isclose(Cosine(100, base_lr=2.0)(25), 1.0 + math.cos(math.pi / 4))


@pytest.mark.parametrize("make", EVERY)
def test_warm_up(make):
    linear = make(base_lr=1.0, warmup_steps=10, warmup_begin_lr=0.5)
    assert [linear(number) for number in (0, 1, 5, 9)] == pytest.approx([0.5, 0.55, 0.75, 0.95])
    constant = make(base_lr=1.0, warmup_steps=10, warmup_begin_lr=0.5, warmup_mode="constant")
    assert [constant(number) for number in (0, 9)] == [0.5, 0.5]
    assert [linear(number) for number in range(10, 50)] == [constant(number) for number in range(10, 50)]


@pytest.mark.parametrize("make", EVERY)
def test_a_schedule_is_its_repr(make):
    schedule = make(base_lr=1)
    assert repr(schedule) == repr(make(base_lr=1.0))
    assert eval(repr(schedule)) == schedule == pickle.loads(pickle.dumps(schedule))
    assert hash(schedule) == hash(make(base_lr=1))
    before = schedule(40)
    schedule(1)
    assert schedule(40) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Factor(0), r"Factor: step=0 is not a whole number in \[1, 2\*\*63\)"),
        (lambda: Factor(5, factor=1.5), r"Factor: factor=1.5 is not a number in \(0, 1\]"),
        (lambda: MultiFactor([5, 5]), "not rising"),
        (lambda: MultiFactor([]), "step="),
        (lambda: MultiFactor([0, 3]), "step="),
        (lambda: Polynomial(5, warmup_steps=5), "max_update=5 is not above warmup_steps=5"),
        (lambda: Cosine(5, warmup_steps=6), "max_update=5 is not above warmup_steps=6"),
        (lambda: Cosine(5, base_lr=-1), "base_lr=-1"),
        (lambda: Cosine(5, final_lr=float("nan")), "final_lr=nan"),
        (lambda: Schedule(base_lr=0.1, warmup_begin_lr=0.2), "warmup_begin_lr=0.2 is above base_lr=0.1"),
        (lambda: Schedule(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: Schedule(warmup_mode="liner"), "unknown warmup_mode 'liner'.*did you mean 'linear'"),
    ],
)
def test_bad_options_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_other_names_of_schedules_are_told() -> None:
    for name, own in (("FactorScheduler", "Factor"), ("PolyScheduler", "Polynomial"), ("Cosin", "Cosine")):
        with pytest.raises(AttributeError, match=f"unknown schedule '{name}' .*did you mean '{own}'"):
            getattr(schedules, name)
