"""What named options take, and what is said of anything else."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.codecs import LowRank
from mpikv.errors import ConfigError
from mpikv.options import (
    check_float32,
    check_number,
    check_switch,
    check_whole,
    choice,
    count,
    number,
    store_checked_fields,
)


@pytest.mark.parametrize("value", [True, 1.5, "2", None, np.float64(2), -1, 1 << 63])
def test_what_is_no_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^lowrank: rank=.* is not a whole number in \[1, 2\*\*63\)$"):
        LowRank(value)


def test_whole_numbers() -> None:
    assert LowRank(np.int64(2)).rank == 2
    assert type(LowRank(np.int64(2)).rank) is int
    assert LowRank(2, seed=0).seed == 0
    assert check_whole("n", (1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(ConfigError, match=r"rank=0 is not a whole number in \[1, "):
        LowRank(0)


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", [0, 0.5, np.float32(0.5), Fraction(1, 3)], [-1e-9, 1, True, "0", None, float("nan"), 10**400, [0]]),
        ("(0, 1]", [1, 1e-300], [0, 1.0000001, -(10**5000)]),
        ("(-inf, inf)", [-1e308, 0], [float("inf"), float("-inf"), float("nan")]),
    ],
)
def test_intervals(interval: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        assert check_number("x", value, interval) == float(value)
    for value in outside:
        with pytest.raises(ConfigError, match=r"^x=.* is not a number in [\[(].*[\])]$"):
            check_number("x", value, interval)


@pytest.mark.parametrize("value", [1e-50, 1e39, 0, float("inf")])
def test_numbers_that_float32_cannot_hold(value: float) -> None:
    assert check_float32("x", 0.5, "(0, inf)") == 0.5
    with pytest.raises(ConfigError, match=r"^x=.* is not a number in \(0, inf\) in float32$"):
        check_float32("x", value, "(0, inf)")


def test_switches() -> None:
    assert check_switch("on", np.True_) is True
    for value in (0, 1, "True", None):
        with pytest.raises(ConfigError, match=r"^on=.* is neither True nor False$"):
            check_switch("on", value)


def test_fields_are_checked_and_stored() -> None:
    @dataclass(frozen=True)
    class Options:
        size: int = count(low=2)
        rate: float | None = number(None, "[0, inf)")
        mode: str = choice("slow", ("fast", "slow"))

        def __post_init__(self) -> None:
            store_checked_fields(self, "Options: ")

    assert Options(np.int8(3), rate=1) == Options(3, rate=1.0)
    assert Options(2).rate is None
    with pytest.raises(ConfigError, match=r"^Options: size=1 is not a whole number in \[2, 2\*\*63\)$"):
        Options(1)
    with pytest.raises(ConfigError, match=r"^Options: rate='1' is not a number in \[0, inf\) or None$"):
        Options(2, rate="1")
    with pytest.raises(ConfigError, match=r"^unknown mode 'fats' \(known: fast, slow\); did you mean 'fast'\?$"):
        Options(2, mode="fats")


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (mpikv, "creat", "did you mean 'create'"),
        (mpikv, "FactorScheduler", "see mpikv.schedules"),
        (mpikv, "lr_scheduler", "see mpikv.schedules"),
        (mpikv.optimizers, "SGDD", "did you mean 'SGD'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(module: Any, name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=f"unknown name in {module.__name__} '{name}' .*{text}"):
        getattr(module, name)
    assert not hasattr(module, "__path_of_nothing__")


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_a_store_says_that_it_cannot_be_copied(make: Callable[[Any], Any], name: str) -> None:
    with mpikv.create(name) as kv, pytest.raises(TypeError, match=r"a store cannot be pickled .*kv\.save\(path\)"):
        make(kv)


def test_an_unknown_variable_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MPIKV_TIMOUT", "5")
    mpikv.create().close()
    mpikv.create().close()
    assert [text.partition(" (known: ")[0] for text in caplog.messages] == ["unknown variable 'MPIKV_TIMOUT'"]
