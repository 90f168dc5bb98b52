"""Runs tests on simulated ranks. In a ``conftest.py``: ``pytest_plugins = ["mpikv.testing.pytest_plugin"]``.

``@pytest.mark.cluster(4, hosts=2, seeds=range(10))`` on a test runs it on four ranks, once for each seed; its argument
``comm`` is each rank's communicator, and other fixtures are the same objects on all ranks. A fixture ``cluster`` makes
clusters for a test to run programs on. ``--cluster-seed N`` runs all of them under one seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from . import simulation
from .simulation.cluster import check_program

_MARKER = (
    "cluster(size, *, hosts=1, seeds=(0,), faults=()): the test runs on size simulated ranks, once for each seed; "
    "its argument comm is a rank's communicator"
)
_SEED = "_cluster_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cluster-seed", type=int, metavar="N", help="run simulated ranks under this seed only")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each seed."""
    marker = metafunc.definition.get_closest_marker("cluster")
    if marker is not None:
        given = metafunc.config.getoption("cluster_seed")
        try:
            _, seeds = _asked(*marker.args, **marker.kwargs)
        except (TypeError, ValueError) as error:
            pytest.fail(f"{metafunc.definition.nodeid}: {error}. The marker is {_MARKER}", pytrace=False)
        metafunc.fixturenames.append(_SEED)
        metafunc.parametrize(_SEED, seeds if given is None else [given], ids=lambda seed: f"seed={seed}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked test that would run on no rank."""
    if item.get_closest_marker("cluster") is not None and not hasattr(item, "callspec"):
        pytest.fail("a test of unittest.TestCase cannot run on simulated ranks: mark a plain function", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test on every simulated rank."""
    marker = pyfuncitem.get_closest_marker("cluster")
    if marker is None:
        return None
    make, _ = _asked(*marker.args, **marker.kwargs)
    check_program(pyfuncitem.obj)
    function, names = pyfuncitem.obj, set(inspect.signature(pyfuncitem.obj).parameters)
    given = {name: value for name, value in pyfuncitem.funcargs.items() if name in names and name != "comm"}

    def program(comm: simulation.Communicator) -> None:
        function(**given, **({"comm": comm} if "comm" in names else {}))

    seed: Any = pyfuncitem.callspec.params[_SEED]
    make(seed).run(program)
    return True


def _asked(
    size: int, *, hosts: int = 1, seeds: Iterable[int] = (0,), faults: Sequence[simulation.Fault] = ()
) -> tuple[Callable[[int], simulation.Cluster], list[int]]:
    """Return a marker's request: a function from a seed to its cluster, and the seeds."""
    chosen = list(seeds)
    if not chosen:
        raise ValueError("there are no seeds, so that the test would not run")

    def make(seed: int) -> simulation.Cluster:
        return simulation.cluster(size, hosts=hosts, seed=seed, faults=faults)

    make(chosen[0])  # refuse impossible clusters when tests are collected
    return make, chosen


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> None:
    """Stand in for each rank's communicator; a marked test receives that one."""
    if request.node.get_closest_marker("cluster") is None:
        pytest.fail("comm is the communicator of a simulated rank: mark the test with cluster(size)", pytrace=False)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Callable[..., simulation.Cluster]:
    """Return :func:`mpikv.testing.cluster` with the seed of the option ``--cluster-seed``."""
    return partial(simulation.cluster, seed=request.config.getoption("cluster_seed") or 0)
