"""Marks tests that are true for several numbers of ranks, and runs each on all of them.

``@pytest.mark.ranks(1, 2, 3, 4)`` on a function, a class or a module: ordinary SPMD code, which every rank runs. A
plain ``pytest`` runs it on one rank here, without an MPI library, and launches a job for each other number;
``mpiexec -n 4 python -m pytest`` runs what is marked for 4 ranks in place. A test that takes longer than 20 s, or than
``@pytest.mark.deadline(seconds)``, fails.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.launching import Deadline, Frozen, Here, Launched, Together, ranks_of, why_no_gpu, world_of_this_rank
from support.simulated import shared_patches

import mpikv
from mpikv.__main__ import COMMANDS
from mpikv.cluster.environment import launch_of
from mpikv.cluster.runtime import present

# All ranks must draw the same examples; deadlines and a memory of failed examples would make them differ.
# The fixtures here, comm above all, may be shared by the examples of a test.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ranks")
# It also draws the constants of the modules that are loaded, and one rank alone may call a command, which loads it.
for command in COMMANDS:
    import_module(f"mpikv.cli.{command}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", help="run marked tests on these numbers of ranks only, such as 2,4")
    parser.addoption(
        "--simulate",
        action="store_true",
        help="simulate the ranks of tests in the folder store, and leave out those that need processes",
    )
    parser.addoption("--rank-records", metavar="DIR", help="set by the harness for the ranks that it launches")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # In the background of a script, and under nohup, signals are ignored, also by the jobs that tests start and end by
    # them.
    if present().world is None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if present().world is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line("markers", "ranks(*numbers): SPMD code, true for each of these numbers of ranks")
    config.addinivalue_line("markers", "deadline(seconds): how long the test may take, instead of 20 s")
    config.addinivalue_line("markers", "gpu: the test needs a GPU, CuPy and NCCL, and is skipped where one is missing")
    config.addinivalue_line("markers", "feature(*names): the test shows these rows of docs/reference/features.md")
    config.addinivalue_line(
        "markers", "one_library: what the test shows does not depend on the MPI library; it runs with one of them"
    )
    config.addinivalue_line("markers", "processes: it needs processes, threads that nobody simulates, or real time")
    launch = launch_of()
    if config.option.rank_records:
        plugins = [Launched(config, Path(config.option.rank_records))]
        if present().world is None:
            # The launching session decides about deadlines; this one is for a job whose session was killed.
            plugins.append(Deadline(margin=30, alarm=False))
    elif launch:
        plugins = [Together(config, launch.size), Deadline(margin=5)]
    else:
        plugins = [Here(), Deadline(margin=5, all_items=False)]
    for plugin in [*plugins, Frozen()]:
        config.pluginmanager.register(plugin)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker:
        # Where none is wanted all are made, and deselected below.
        numbers = [number for number in marker.args if is_wanted(number, metafunc.config)] or marker.args
        metafunc.fixturenames.append("ranks")
        metafunc.parametrize("ranks", numbers, ids=[f"ranks={number}" for number in numbers])


def is_wanted(number: int, config: pytest.Config) -> bool:
    return number == 0 or not config.option.ranks or str(number) in config.option.ranks.split(",")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if is_wanted(ranks_of(item), config)]
    if config.option.simulate:
        wanted = [item for item in wanted if not item.get_closest_marker("processes")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpus and why_no_gpu():
        for item in on_gpus:
            item.add_marker(pytest.mark.skip(reason=why_no_gpu()))


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Return a function that lets the import of a module fail, as where its package is not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def monkeypatch(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Return what takes all patches back after the test, in order: simulated ranks are in one process and share it."""
    with shared_patches(request.node.nodeid) if present().world else pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="session", autouse=True)
def told_of_the_host() -> None:
    """Have the first store of a launch say what is wrong with this host before a test that reads the log."""
    if (launch := launch_of()) is not None and launch.size > 1 and not present().world:
        mpikv.create().close()


@pytest.fixture
def ranks() -> int:
    """Return the number of ranks that run the test, 1 for an ordinary test."""
    return 1


@pytest.fixture
def comm(ranks: int) -> Any:
    """Return COMM_WORLD, or None on one rank, where no MPI library is loaded."""
    return None if ranks == 1 else world_of_this_rank()


@pytest.fixture
def simulate_ranks_per_host(ranks: int) -> int:
    """Return how many ranks the larger of two hosts has: both have as many, or the second has one less."""
    return -(-ranks // 2)


@pytest.fixture(autouse=True)
def two_hosts(request: pytest.FixtureRequest, simulate_ranks_per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores of a test with the parameter ``hosts`` find two hosts."""
    spec = getattr(request.node, "callspec", None)
    if spec and "ranks" in spec.params and any(names_hosts(parameter) for parameter in spec.params.values()):
        monkeypatch.setenv("MPIKV_SIMULATE_RANKS_PER_HOST", str(simulate_ranks_per_host))


@pytest.fixture(params=["shm", "mpi", "hierarchical"])
def transport(request: pytest.FixtureRequest, ranks: int) -> str:
    """Return each transport of several ranks, or the one of one rank."""
    if ranks == 1 and request.param != "shm":
        pytest.skip("one rank has one transport")
    return "auto" if ranks == 1 else request.param


@pytest.fixture
def over(transport: str, simulate_ranks_per_host: int) -> dict[str, Any]:
    """Return the transport of a test for :func:`mpikv.testing.faulty.store_over`, which reads no variables."""
    return {
        "transport": transport,
        "simulate_ranks_per_host": simulate_ranks_per_host if transport == "hierarchical" else 0,
    }


@pytest.fixture
def folder(comm: Any) -> Iterator[Path]:
    """Return a new folder that all ranks see, under one name."""
    made = tempfile.mkdtemp() if comm is None or comm.rank == 0 else None
    made = Path(made if comm is None else comm.bcast(made))
    yield made
    if comm is not None:
        comm.Barrier()
    if comm is None or comm.rank == 0:
        shutil.rmtree(made)


def names_hosts(parameter: Any) -> bool:
    values = parameter if isinstance(parameter, tuple) else (parameter,)
    return any(isinstance(value, str) and value == "hierarchical" for value in values)
