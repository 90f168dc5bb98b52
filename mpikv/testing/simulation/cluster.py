"""A cluster of simulated ranks that run one program."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, SupportsIndex

from ...cluster import runtime
from ...errors import noted, text_of
from .calls import PlannedCalls
from .errors import Deadlock, Ended, Hung, Planted, SimulatedError
from .faults import Differ, Fault, Kill, Leave, Missed, Pause, Raise, Timed, check_fault
from .messages import make_world
from .scheduler import Scheduler
from .system import one_core, simulated_system
from .task import Process, Task

__all__ = ["Cluster", "check_program", "cluster", "spend"]

Program = Callable[..., Any]


class Cluster:
    """Simulated ranks. See :func:`cluster`."""

    def __init__(self, size: int, hosts: int, seed: int, faults: Sequence[Fault]) -> None:
        for name, given in (("size", size), ("hosts", hosts), ("seed", seed)):
            if not isinstance(given, SupportsIndex):
                raise TypeError(f"cluster: {name} is {given!r}; pass an integer")
        if size < 1 or not 1 <= hosts <= size:
            raise ValueError(f"{size} ranks on {hosts} hosts: every host has at least one rank")
        if isinstance(faults, Fault):
            raise TypeError(f"cluster: faults is {faults!r}; pass a list, [{faults!r}]")
        self.size, self.hosts, self.seed, self.faults = size, hosts, seed, tuple(faults)
        for fault in self.faults:
            check_fault(fault, size, hosts)

    def __repr__(self) -> str:
        faults = f", faults={list(self.faults)}" if self.faults else ""
        return f"cluster({self.size}, hosts={self.hosts}, seed={self.seed}{faults})"

    def run(self, program: Program) -> list[Any]:
        """Call ``program(comm)`` on every rank; return the results in rank order. The result is None for a rank that
        was killed, or has left by ``sys.exit()``. A parameter named ``seed`` receives the cluster's seed.

        Warns:
            Missed: the ranks have ended before a planned fault could strike; the run does not test it.

        Raises:
            TypeError: the program is not callable, or is ``async def`` or a generator.
            Deadlock, Hung: ranks wait for each other for ever, or one never reaches a scheduling point.
            SimulatedError: a simulated rank calls this.
            Exception: the exception of the first failing rank, with the others' last points as notes.
        """
        if (world := runtime.present().world) is not None:
            raise SimulatedError(f"{self!r}.run: {world!r} is simulated, and runs no cluster; run it in a real thread")
        check_program(program)
        if _takes_seed(program):
            program = partial(program, seed=self.seed)
        run = _Run(self, program)
        # Raise outside of the context managers: they set an exception's traceback, and some exceptions forbid that.
        with simulated_system(), one_core():
            run.carry_out()
        return run.results()


def check_program(program: Program) -> None:
    """Raise TypeError if a call of the program would run none of its code."""
    if not callable(program):
        raise TypeError(f"the program is {program!r}, which cannot be called; pass a function, program(comm)")
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    if any(is_kind(program) for is_kind in kinds):
        raise TypeError(f"{program!r} is async or a generator: a call runs none of its code; use a plain function")


def _takes_seed(program: Program) -> bool:
    if isinstance(program, partial) and "seed" in program.keywords:
        return False
    with suppress(ValueError):  # some built-in functions have no signature
        return "seed" in inspect.signature(program).parameters
    return False


class _Run:
    """One run of a program."""

    def __init__(self, cluster: Cluster, program: Program) -> None:
        self._cluster, self._program = cluster, program
        self._points = [0] * cluster.size
        self._planned: dict[tuple[int, int], list[Timed]] = {}
        for fault in cluster.faults:
            if isinstance(fault, Timed):
                self._planned.setdefault((fault.rank, fault.at), []).append(fault)
        self._struck: list[Fault] = []
        at_point = self._at_point if self._planned else None
        self._scheduler = Scheduler(cluster.seed, cluster.size, cluster.hosts, at_point)
        self._scheduler.planned = PlannedCalls(cluster.faults, self._struck)
        self._interrupts: dict[int, tuple[Fault, BaseException]] = {}
        self._results: list[Any] = [None] * cluster.size
        self._failures: list[tuple[int, BaseException]] = []
        self._ended: Exception | None = None
        hosts = [rank * cluster.hosts // cluster.size for rank in range(cluster.size)]
        self._comms = make_world(self._scheduler, hosts, cluster.faults)

    def carry_out(self) -> None:
        """Run the program on every rank."""
        for rank, comm in enumerate(self._comms):
            Task(self._scheduler, Process(rank, comm), partial(self._run, rank), f"rank {rank}", leads=True).start()
        try:
            self._scheduler.run()
        except (Deadlock, Hung) as error:
            self._ended = error

    def results(self) -> list[Any]:
        """Return the ranks' results, or raise the first failure."""
        first = self._failures[0][1] if self._failures else self._ended
        if first is not None:
            raise self._explained(first)
        if missed := self._missed():
            warnings.warn(missed, Missed, stacklevel=3)
        return self._results

    def _missed(self) -> str:
        """Return a text about faults that have not struck; empty if all have."""
        missed = [
            each for each in self._cluster.faults if isinstance(each, Timed | Differ) and each not in self._struck
        ]
        text = f"{missed} did not strike in {self._cluster!r}: ranks came to {self._points} scheduling points"
        return text if missed else ""

    def _run(self, rank: int) -> None:
        task: Any = runtime.present()
        result: Any = None
        failure: BaseException | None = None
        try:
            result = self._program(self._comms[rank])
        except (Ended, Planted):
            pass
        except SystemExit as error:
            failure = error if error.code else None
        except BaseException as error:  # also the exception of pytest.fail()
            failure = error
        if task.ending:
            return  # it was killed, whatever its program did with that
        self._results[rank] = result
        if failure is not None:
            self._failures.append((rank, failure))

    def _at_point(self, task: Task) -> None:
        rank = task.rank
        number = self._points[rank] = self._points[rank] + 1
        for fault in self._planned.get((rank, number), ()):
            self._strike(fault, task)
        if self._interrupts and task.leads and rank in self._interrupts:
            late, error = self._interrupts.pop(rank)
            self._struck.append(late)
            raise error

    def _strike(self, fault: Timed, task: Task) -> None:
        if isinstance(fault, Raise):
            planted = Planted(f"planted at scheduling point {fault.at} of rank {fault.rank}")
            self._interrupts[fault.rank] = fault, planted
            return
        if isinstance(fault, Leave):
            self._interrupts[fault.rank] = fault, SystemExit()
            return
        self._struck.append(fault)
        if isinstance(fault, Kill):
            self._scheduler.park(fault.rank)
        elif isinstance(fault, Pause):
            self._scheduler.delay(fault.rank, fault.seconds)
        else:
            self._scheduler.full.add(task.host)

    def _explained(self, error: BaseException) -> BaseException:
        """Add notes: how to repeat the run, the other failures, and the ranks' last points."""
        noted(error, f"in {self._cluster!r}")
        for rank, other in self._failures:
            if other is not error:
                noted(error, f"rank {rank} raised {type(other).__name__}: {text_of(other)}")
            else:
                noted(error, f"rank {rank} raised this")
        if self._ended is not None and self._ended is not error:
            noted(error, f"then {self._ended}")
        if missed := self._missed():
            noted(error, missed)
        for task in self._scheduler.ended.values():
            noted(error, task.story())
        return error


# What a real system counts meanwhile: whether the thread runs, a place among the signs, and so much there per second.
_SPENT = {
    "compute": (True, 0, 0),
    "collector": (True, 0, 10**9),
    "cores": (False, 1, 10**9),
    "input": (False, 0, 0),
    "swap": (False, 2, 10_000),
    "disk": (False, 3, 100_000),
}


def spend(seconds: float, on: str = "compute") -> None:
    """Let this simulated rank spend seconds of its clock on ``compute``, ``collector``, ``cores``, ``input``, ``swap``
    or ``disk``: the causes that :meth:`mpikv.KVStore.statistics` tells apart.
    """
    task: Any = runtime.present()
    runs, place, count = _SPENT[on]
    task.sleep(seconds)
    task.of.busy += seconds * runs
    task.of.signs[place] += int(seconds * count)


def cluster(size: int, *, hosts: int = 1, seed: int = 0, faults: Sequence[Fault] = ()) -> Cluster:
    """Return ``size`` simulated ranks on ``hosts`` hosts; the seed draws the order of events.

    Ranks are threads of this process, and one runs at a time. :func:`mpikv.create` takes a rank's communicator, or
    none. The store runs the same code as on real ranks: shared memory inside of a host, and messages between hosts.
    Time is simulated: a wait of a minute takes none.

    Args:
        size: the number of ranks.
        hosts: the number of hosts, over which ranks are spread evenly, neighbours together.
        seed: draws the next rank at each scheduling point, and the travel times of messages. Equal seeds give equal
            runs.
        faults: the plan of faults: :class:`Kill`, :class:`Pause`, :class:`Raise`, :class:`Leave`, :class:`Differ`,
            :class:`FullDisk`, :class:`Delay`, :class:`Cut`.

    Example:
        >>> import mpikv, numpy as np
        >>> from mpikv.testing import cluster
        >>> def program(comm):
        ...     with mpikv.create(comm=comm) as kv:
        ...         kv.init("w", np.zeros(2))
        ...         kv.push("w", np.ones(2))
        ...         return kv.pull("w")
        >>> cluster(4, hosts=2, seed=7).run(program)[3]
        array([4., 4.])
    """
    return Cluster(size, hosts, seed, faults)
