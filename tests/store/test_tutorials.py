"""The numbers of MXNet's KVStore tutorials, on any number of ranks.

Upstream, one process sums the arrays of its devices. Here every rank brings one array, so the sums grow with the number
of ranks; with zeros from all ranks but one they are the tutorials' own. Lists of arrays are summed on their rank first,
so that the tutorials run as they stand, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpikv

pytestmark = pytest.mark.ranks(1, 2, 4)

SHAPE = (2, 3)

# On one rank, each is the transport of one rank.
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
PLACEMENTS = pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
PLACEMENTS_OF_FUNCTIONS = pytest.mark.parametrize("placement", ["root", "auto"])
KEYS = pytest.mark.parametrize("name", [int, str], ids=["int", "str"])
GIVERS = pytest.mark.parametrize("everyone", [True, False], ids=["every rank pushes", "one rank pushes"])


def ones(dtype: str = "float32") -> Any:
    return np.ones(SHAPE, dtype)


def filled(value: float, like: Any) -> bool:
    return bool(like.shape == SHAPE and np.allclose(like, value, rtol=1e-6, atol=0))


class Givers:
    """The ranks whose arrays are not zeros."""

    def __init__(self, kv: mpikv.KVStore, everyone: bool) -> None:
        self.count = kv.size if everyone else 1
        self._gives = everyone or kv.rank == kv.size - 1

    def give(self, value: Any) -> Any:
        if self._gives:
            return value
        return [self.give(each) for each in value] if isinstance(value, list) else np.zeros_like(value)


def printing_updater(key: Any, received: Any, stored: Any) -> None:
    print(f"update on key: {key}")
    stored += received * 2


def printed(kv: mpikv.KVStore, capsys: Any) -> list[str]:
    """Return the lines since the last time, and check that only the root printed."""
    lines: list[str] = capsys.readouterr().out.splitlines()
    assert kv.is_root or not lines
    return lines


@TRANSPORTS
@PLACEMENTS
@KEYS
@GIVERS
@pytest.mark.feature("tutorial-python")
def test_the_python_tutorial_without_updater(
    comm: Any, transport: str, placement: str, name: Callable[[int], Any], everyone: bool
) -> None:
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        givers, a = Givers(kv, everyone), np.zeros(SHAPE, "float32")
        kv.init(name(3), ones() * 2)
        assert filled(2, kv.pull(name(3), out=a))
        kv.push(name(3), givers.give(ones() * 8))
        assert filled(8 * givers.count, kv.pull(name(3), out=a))
        kv.push(name(3), givers.give([ones(), ones(), ones(), ones()]))
        assert filled(4 * givers.count, kv.pull(name(3), out=a))


@pytest.mark.processes
@TRANSPORTS
@PLACEMENTS_OF_FUNCTIONS
@KEYS
@GIVERS
@pytest.mark.feature("tutorial-python", "updater-no-change-before-push", "values-call-order")
def test_the_python_tutorial_with_an_updater(
    comm: Any, transport: str, placement: str, name: Callable[[int], Any], everyone: bool, capsys: Any
) -> None:
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        givers, n = Givers(kv, everyone), kv.size if everyone else 1
        kv.init(name(3), ones() * 4)
        kv.set_updater(printing_updater)
        assert filled(4, kv.pull(name(3)))
        assert printed(kv, capsys) == []

        kv.push(name(3), givers.give(ones()))
        assert printed(kv, capsys) == ["update on key: 3"] * kv.is_root
        outs = [np.zeros(SHAPE, "float32") for _ in range(4)]
        kv.pull(name(3), out=outs)
        assert all(filled(4 + 2 * n, out) for out in outs)

        keys = [name(5), name(7), name(9)]
        updates = ["update on key: 5", "update on key: 7", "update on key: 9"] * kv.is_root
        kv.init(keys, [ones()] * 3)
        kv.push(keys, givers.give([ones()] * 3))
        assert printed(kv, capsys) == updates
        assert all(filled(1 + 2 * n, out) for out in kv.pull(keys))

        kv.push(keys, givers.give([[ones()] * 4] * 3))
        assert printed(kv, capsys) == updates
        nested = [[np.zeros(SHAPE, "float32") for _ in range(4)] for _ in keys]
        kv.pull(keys, out=nested)
        assert all(filled(1 + 2 * n + 2 * 4 * n, out) for outs in nested for out in outs)
        assert n > 1 or filled(11, nested[2][3])
        assert printed(kv, capsys) == []


@TRANSPORTS
@PLACEMENTS
@GIVERS
@pytest.mark.feature("optimizer-test")
def test_the_tutorial_with_an_optimizer_instead_of_a_function(
    comm: Any, transport: str, placement: str, everyone: bool
) -> None:
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        givers = Givers(kv, everyone)
        n = givers.count
        kv.init([5, 7, 9], [ones()] * 3)
        kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-2.0)
        kv.push([5, 7, 9], givers.give([ones()] * 3))
        assert all(filled(1 + 2 * n, out) for out in kv.pull([5, 7, 9]))
        kv.push([5, 7, 9], givers.give([[ones()] * 4] * 3))
        assert all(filled(1 + 2 * n + 2 * 4 * n, out) for out in kv.pull([5, 7, 9]))


@TRANSPORTS
@PLACEMENTS
@GIVERS
@pytest.mark.feature("tutorial-numpy")
def test_the_numpy_tutorial(comm: Any, transport: str, placement: str, everyone: bool) -> None:
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        givers = Givers(kv, everyone)
        n = givers.count
        kv.init(3, ones("float64") * -2)
        assert filled(-2, kv.pull(3))
        kv.push(3, givers.give(ones("float64") * -7))
        assert filled(-7 * n, kv.pull(3))
        kv.push(3, givers.give([ones("float64")] * 3))
        assert filled(3 * n, kv.pull(3))

        keys = [7, 11, 13, 17]
        kv.init(keys, [ones("float64") * -3] * 4)
        assert all(filled(-3, out) for out in kv.pull(keys))
        kv.push(keys, givers.give([[ones("float64") * -0.1] * 3] * 4))
        assert all(filled(-0.3 * n, out) for out in kv.pull(keys))


@TRANSPORTS
@PLACEMENTS
@GIVERS
@pytest.mark.feature("tutorial-clojure", "values-repeated-keys")
def test_the_clojure_tutorial_repeats_keys(comm: Any, transport: str, placement: str, everyone: bool) -> None:
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        givers = Givers(kv, everyone)
        kv.init("3", ones() * 2)
        kv.push(["3", "3", "3"], givers.give([ones(), ones(), ones()]))
        first, second = np.zeros(SHAPE, "float32"), np.zeros(SHAPE, "float32")
        kv.pull(["3", "3"], out=[first, second])
        assert filled(3 * givers.count, first)
        assert filled(3 * givers.count, second)


@TRANSPORTS
@PLACEMENTS
@pytest.mark.feature("tutorial-ranks", "push-sum-not-mean")
def test_one_array_per_rank_takes_the_place_of_the_list(comm: Any, transport: str, placement: str) -> None:
    """The list of four arrays becomes four ranks: on 4 ranks, the tutorial's 4, and then 4 + 2 * 4."""
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        kv.init(3, ones() * 2)
        kv.push(3, ones())
        assert filled(kv.size, kv.pull(3))
        if placement == "root":
            kv.set_updater(lambda key, received, stored: received * 2 + stored)
        else:
            kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-2.0)
        kv.push(3, ones())
        assert filled(3 * kv.size, kv.pull(3))
