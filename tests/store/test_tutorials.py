"""The numbers of MXNet's KVStore tutorials, on any number of ranks.

Upstream, one process sums the arrays of its devices. Here every rank brings one array, so the sums grow with the number
of ranks; on one rank they are the tutorials' own. Lists of arrays are summed on their rank first, so that the tutorials
run as they stand, too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpikv

# On one rank, each is the transport of one rank.
pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])]
SHAPE = (2, 3)
PLACEMENTS = pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
KEYS = pytest.mark.parametrize("name", [int, str], ids=["int", "str"])


@pytest.fixture
def kv(comm: Any, transport: str, placement: str) -> Iterator[mpikv.KVStore]:
    with mpikv.create(comm=comm, transport=transport, placement=placement) as store:
        yield store


def ones(dtype: str = "float32") -> Any:
    return np.ones(SHAPE, dtype)


def filled(value: float, *found: Any) -> bool:
    return all(like.shape == SHAPE and np.allclose(like, value, rtol=1e-6, atol=0) for like in found)


@PLACEMENTS
@KEYS
@pytest.mark.feature("tutorial-python", "tutorial-ranks", "push-sum-not-mean")
def test_the_python_tutorial_without_updater(kv: mpikv.KVStore, name: Callable[[int], Any]) -> None:
    """The list of four arrays may be four ranks, too."""
    a = np.zeros(SHAPE, "float32")
    kv.init(name(3), ones() * 2)
    assert filled(2, kv.pull(name(3), out=a))
    for pushed, number in ((ones() * 8, 8), ([ones()] * 4, 4), (ones(), 1)):
        kv.push(name(3), pushed)
        assert filled(number * kv.size, kv.pull(name(3), out=a))


@pytest.mark.parametrize(
    ("placement", "is_function"),
    [("root", True), ("auto", True), ("root", False), ("sharded", False), ("replicated", False)],
)
@KEYS
@pytest.mark.feature("tutorial-python", "updater-no-change-before-push", "values-call-order", "optimizer-test")
def test_the_python_tutorial_with_an_updater(kv: mpikv.KVStore, name: Callable[[int], Any], is_function: bool) -> None:
    n, said = kv.size, list[str]()

    def update(key: Any, received: Any, stored: Any) -> None:
        said.append(f"update on key: {key}")
        stored += received * 2

    kv.init(name(3), ones() * 4)
    if is_function:
        kv.set_updater(update)
    else:
        kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-2.0)
    assert filled(4, kv.pull(name(3)))
    assert said == []
    kv.push(name(3), ones())
    outs = [np.zeros(SHAPE, "float32") for _ in range(4)]
    kv.pull(name(3), out=outs)
    assert filled(4 + 2 * n, *outs)

    keys = [name(5), name(7), name(9)]
    kv.init(keys, [ones()] * 3)
    kv.push(keys, [ones()] * 3)
    assert filled(1 + 2 * n, *kv.pull(keys))
    kv.push(keys, [[ones()] * 4] * 3)
    nested = [[np.zeros(SHAPE, "float32") for _ in range(4)] for _ in keys]
    kv.pull(keys, out=nested)
    assert filled(1 + 2 * n + 2 * 4 * n, *(out for outs in nested for out in outs))
    assert n > 1 or filled(11, nested[2][3])
    assert said == [f"update on key: {key}" for key in (3, 5, 7, 9, 5, 7, 9)] * (is_function and kv.is_root)


@PLACEMENTS
@pytest.mark.feature("tutorial-numpy")
def test_the_numpy_tutorial(kv: mpikv.KVStore) -> None:
    kv.init(3, ones("float64") * -2)
    assert filled(-2, kv.pull(3))
    kv.push(3, ones("float64") * -7)
    assert filled(-7 * kv.size, kv.pull(3))
    keys = [7, 11, 13, 17]
    kv.init(keys, [ones("float64") * -3] * 4)
    assert filled(-3, *kv.pull(keys))
    kv.push(keys, [[ones("float64") * -0.1] * 3] * 4)
    assert filled(-0.3 * kv.size, *kv.pull(keys))


@PLACEMENTS
@pytest.mark.feature("tutorial-clojure", "values-repeated-keys")
def test_the_clojure_tutorial_repeats_keys(kv: mpikv.KVStore) -> None:
    kv.init("3", ones() * 2)
    kv.push(["3", "3", "3"], [ones(), ones(), ones()])
    outs = [np.zeros(SHAPE, "float32") for _ in range(2)]
    kv.pull(["3", "3"], out=outs)
    assert filled(3 * kv.size, *outs)
