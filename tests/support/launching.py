"""Runs tests on several ranks.

A session of pytest is one of three, and each is a plug-in below:

- `Here`, started by hand: it runs ordinary tests itself, launches one job per number of ranks for the others, and turns
  what the ranks wrote into reports. With ``--simulate`` the ranks of tests that can do with it are simulated, all of a
  job in one process: see `simulated`.
- `Launched`, a rank of such a job: it runs the listed tests and appends one JSON line per event to its own file. `Here`
  decides what a test's outcome is, when it is overdue and when the job has to end.
- `Together`, a rank of `mpiexec -n 4 python -m pytest`: it runs the tests for that number of ranks in place.
"""

import contextlib
import faulthandler
import fnmatch
import functools
import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mpikv.cli.gpus import survey
from mpikv.cli.job import NOT_LISTENING
from mpikv.cli.launchers import Launcher, Library, clean, find_launcher, find_library, plan
from mpikv.cli.watch import unused
from mpikv.cluster.environment import visible_gpus
from mpikv.cluster.runtime import present
from mpikv.cluster.waiting import Waiting
from mpikv.errors import MPIKVError
from mpikv.testing.simulation.errors import Ended

from .processes import find_processes

DEADLINE = 45.0  # seconds that one test may take; a busy machine needs ten times those of an idle one
GRACE = 0.5  # seconds that other ranks get to tell their outcome once one rank failed
START = 120.0  # seconds until a job's first test must have started
FINISH = 15.0  # seconds that a job may take to end after its last test

# The signal that asks a rank for its stack. Another than mpikv's own, SIGURG.
STACKS = signal.SIGUSR1

# What MPICH and Open MPI call their shared memory. A killed job leaves it behind.
SHARED_MEMORY = ("mpich_*", "sm_segment.*", "vader_segment.*", "ucx_shm_*")

# Notes how each rank ended, in order: launchers end the other ranks too, and MPICH names any of them as the cause. Each
# has a folder for temporary files of its own: pytest removes old ones of a common folder while others do the same.
WATCH = """RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-?}}}
"$@" "--basetemp=$0/tmp.$RANK"; code=$?; echo "$RANK $code" >>"$0/ended"; exit $code"""


def ranks_of(item: pytest.Item) -> int:
    """Return the number of ranks of a test, 0 when it is not marked."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("ranks", 0) if callspec else 0


def is_simulated(item: pytest.Item) -> bool:
    """Return whether the ranks of a test are simulated ones in this session."""
    folders = item.path.relative_to(item.config.rootpath).parts
    return bool(item.config.option.simulate and ranks_of(item) > 1 and "store" in folders)


def is_skipped(item: pytest.Item) -> bool:
    """Return whether it is known here that a test is not to be run on any rank."""
    return item.get_closest_marker("skip") is not None


def deadline_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("deadline")
    return float(marker.args[0]) if marker else DEADLINE


class Deadline:
    """Fails a test of this process that takes too long; ends the process soon after, since C code ignores alarms."""

    def __init__(self, margin: float, alarm: bool = True, all_items: bool = True) -> None:
        self.margin = margin
        self.alarm = alarm
        self.all_items = all_items
        # pytest redirects stderr during a test.
        self.stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self.all_items and ranks_of(item) > 1:
            return (yield)
        seconds = deadline_of(item)

        def overdue(*_: object) -> None:
            pytest.fail(f"did not finish in {seconds:g} s")

        faulthandler.dump_traceback_later(seconds + self.margin, exit=True, file=self.stderr)
        before = signal.signal(signal.SIGALRM, overdue)
        signal.setitimer(signal.ITIMER_REAL, seconds if self.alarm else 0)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()


def write_terminal_to(config: pytest.Config, path: str) -> None:
    """Send pytest's own lines elsewhere."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    config.pluginmanager.unregister(reporter)
    file = open(path, "w", buffering=1)  # noqa: SIM115 - it stays open to the end of the process
    config.pluginmanager.register(type(reporter)(config, file), "terminalreporter")


class Frozen:
    """Keeps the collector of garbage away from all that was imported: a store that is closed may have to call it."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        gc.collect()
        gc.freeze()


def world_of_this_rank() -> Any:
    """Return the communicator of all ranks, simulated or not."""
    if present().world is not None:
        return present().world
    from mpi4py import MPI

    return MPI.COMM_WORLD


def show_stacks(path: Path) -> None:
    """Have the stacks of this process written to a file when it is asked for them."""
    faulthandler.register(STACKS, file=os.open(path, os.O_WRONLY | os.O_CREAT), all_threads=True)


class Launched:
    """A rank of a job of `Here`."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        world = world_of_this_rank()
        self.config = config
        self.folder = folder
        self.world = world.Dup()
        write_terminal_to(config, f"{folder}/{world.rank}.out")
        if present().world is None:
            show_stacks(folder / f"{world.rank}.stack")
        else:
            # All sessions of the process see every record.
            logs = config.pluginmanager.get_plugin("logging-plugin")
            logs.caplog_handler.addFilter(lambda record: present().world is world)
        # Each event goes to the file at once: this process may be killed at any moment.
        self.file = os.open(folder / f"{world.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write("rank", "", os.getpid())

    def write(self, event: str, test: str, content: Any = None) -> None:
        os.write(self.file, json.dumps([event, test, time.monotonic(), content]).encode() + b"\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        if session.testsfailed:
            return  # a module cannot be imported here; pytest will say so and end
        known = {item.nodeid: item for item in items}
        items[:] = [known[test] for test in json.loads((self.folder / "tests.json").read_text())]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # No rank begins a test before all have ended the one before, so that a crash is charged to the right test.
        # Not by Barrier, which keeps a core busy.
        Waiting(math.inf).until(self.world.Ibarrier().Test, tuple)
        self.write("start", item.nodeid)
        result = yield
        self.write("finish", item.nodeid)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.write("report", report.nodeid, content)
        if report.failed:
            # The other ranks may wait for this one for ever. Here ends the job; the exit is for a job without one.
            time.sleep(10 * GRACE)
            os._exit(1)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Let a rank go that its simulation ends: what all of them wait for is in what the job prints."""
        if call.excinfo is not None and isinstance(call.excinfo.value, Ended):
            raise call.excinfo.value

    def pytest_sessionfinish(self) -> None:
        self.write("done", "")


class Together:
    """A rank of a job that the user launched."""

    def __init__(self, config: pytest.Config, size: int) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        if size not in (0, self.world.size):
            raise pytest.UsageError(f"the launcher, of another MPI, started {size} ranks; MPI knows {self.world.size}")
        self.barrier = self.world.Dup().Barrier
        self.stderr = os.dup(2)
        self.spmd: set[str] = set()
        if self.world.rank > 0:
            write_terminal_to(config, os.devnull)

    def pytest_report_header(self) -> str:
        from mpi4py import MPI

        library = " ".join(MPI.Get_library_version().splitlines()[0].split())
        return f"MPI: {library}, {self.world.size} ranks in place"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        size, rank = self.world.size, self.world.rank
        for item in items:
            if ranks_of(item) == size:
                self.spmd.add(item.nodeid)
            elif ranks_of(item):
                item.add_marker(pytest.mark.skip(reason=f"needs {ranks_of(item)} ranks, this job has {size}"))
            elif rank > 0:
                item.add_marker(pytest.mark.skip(reason="runs on rank 0 only"))
        # Rank 0 runs the ordinary tests after the common ones; the others would wait for it past their deadline.
        items.sort(key=lambda item: item.nodeid not in self.spmd)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.nodeid in self.spmd:
            self.barrier()
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid in self.spmd and self.world.size > 1:
            text = f"\nrank {self.world.rank} of {self.world.size}: {report.nodeid}\n{report.longreprtext}\n"
            os.write(self.stderr, text.encode())
            # The other ranks may wait for this one for ever. First they may print, as one of them may know the cause.
            time.sleep(GRACE)
            self.world.Abort(1)


@dataclass
class Rank:
    """What one rank has told so far."""

    path: Path
    pid: int = 0
    started: str = ""
    finished: set[str] = field(default_factory=set)
    failed: dict[str, float] = field(default_factory=dict)
    reports: dict[str, list[Any]] = field(default_factory=dict)
    done: bool = False
    offset: int = 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            lines = file.read()
        # The last line may be half written.
        complete = lines[: lines.rfind(b"\n") + 1]
        self.offset += len(complete)
        for line in complete.splitlines():
            self.take(*json.loads(line))

    def take(self, event: str, test: str, moment: float, content: Any) -> None:
        if event == "rank":
            self.pid = content
        elif event == "start":
            self.started = test
        elif event == "report":
            self.reports.setdefault(test, []).append(content)
            if content["outcome"] == "failed":
                self.failed[test] = moment
        elif event == "finish":
            self.finished.add(test)
        elif event == "done":
            self.done = True

    def fate(self, test: str) -> str:
        """Tell in one line what this rank made of a test."""
        if test in self.failed:
            return f"failed: {crash_line(self.reports[test][-1])}"
        if test in self.finished:
            return "finished"
        return f"did not finish; last started {self.started}" if self.started else "started no test"


def crash_line(content: Any) -> str:
    longrepr = content["longrepr"]
    # What is no exception in a test's code, such as a missing fixture, comes as text.
    text = longrepr["reprcrash"]["message"] if isinstance(longrepr, dict) else str(longrepr)
    return text.partition("\n")[0]


class Job:
    """One launch: some tests on some ranks."""

    def __init__(self, config: pytest.Config, size: int, items: list[pytest.Item]) -> None:
        self.size = size
        self.shared_before = shared_memory()
        # What the job leaves behind is in here, for it is also its TMPDIR, and this tells the job's processes.
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        (self.folder / "tests.json").write_text(json.dumps([item.nodeid for item in items]))
        self.ranks = [Rank(self.folder / f"{rank}.jsonl") for rank in range(size)]
        self.begun = False
        self.python = ["-m", "pytest", *self.arguments(config, items)]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command, environment = self.command(self.python)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment | {"TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, python: list[str]) -> tuple[Sequence[str], dict[str, str]]:
        """Return the command line that runs Python on the ranks, and its environment."""
        return launch(self.size, ["sh", "-c", WATCH, str(self.folder), sys.executable, *python])

    def arguments(self, config: pytest.Config, items: Iterable[pytest.Item]) -> list[str]:
        arguments = ["-p", "no:cacheprovider", "--no-header"]
        arguments += [f"--rank-records={self.folder}", f"--ranks={self.size}", f"--rootdir={config.rootpath}"]
        if config.inipath:
            arguments += ["-c", str(config.inipath)]
        arguments += [f"--tb={config.option.tbstyle}", *["-v"] * config.option.verbose]
        arguments += ["--showlocals"] * config.option.showlocals
        return arguments + sorted({str(item.path) for item in items})

    def read(self) -> None:
        for rank in self.ranks:
            rank.read()

    def wait(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds, the job ended or time is up; return whether the condition holds."""
        limit = time.monotonic() + seconds
        while True:
            ended = self.has_ended()
            self.read()
            if condition() or ended or time.monotonic() > limit:
                return condition()
            time.sleep(0.02)

    def has_ended(self) -> bool:
        """Return whether the launcher ended or a rank failed: MPICH's launcher overlooks one dead rank in a hundred."""
        return self.process.poll() is not None or bool(self.casualty())

    def follow(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Wait for the outcome of a test and return its reports. A test that fails ends the job."""
        test, config = item.nodeid, item.config
        if not self.begun and not self.begin():
            state = "ended" if self.has_ended() else f"did not start a test in {START:g} s"
            message = f"the job {state}\n{self.output()}\n{self.stacks(test)}"
            self.end()
            return failure(item, message)
        self.begun = True
        self.wait(deadline_of(item), lambda: any(test in r.failed for r in self.ranks) or self.all_finished(test))
        if any(test in rank.failed for rank in self.ranks):
            self.wait(GRACE, lambda: all(test in rank.failed or test in rank.finished for rank in self.ranks))
            self.end()
            return self.failure_of_ranks(item)
        if self.all_finished(test):
            return self.success_of_ranks(config, test)
        if self.has_ended():
            self.wait_for_launcher()
            message = f"{self.cause()}\n{self.fates(test)}\n{self.output()}"
        else:
            message = f"did not finish in {deadline_of(item):g} s\n{self.fates(test)}\n{self.stacks(test)}"
        self.end()
        return failure(item, message)

    def begin(self) -> bool:
        """Wait for the first test and return whether it came. A launcher that started no rank has a second chance."""
        if self.wait(START, self.has_begun):
            return True
        if self.process.poll() != NOT_LISTENING or (self.folder / "ended").exists() or processes_in(self.folder):
            return False
        self.process = self.start()
        return self.wait(START, self.has_begun)

    def has_begun(self) -> bool:
        return any(rank.started for rank in self.ranks)

    def all_finished(self, test: str) -> bool:
        return all(test in rank.finished for rank in self.ranks)

    def success_of_ranks(self, config: pytest.Config, test: str) -> list[pytest.TestReport]:
        """Return the reports of rank 0, or of the first rank that skipped."""
        skipped = [rank for rank in self.ranks if any(report["outcome"] == "skipped" for report in rank.reports[test])]
        return [revive(config, content) for content in (skipped or self.ranks)[0].reports[test]]

    def failure_of_ranks(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Return the reports of the rank that failed first."""
        test = item.nodeid
        number, rank = min(enumerate(self.ranks), key=lambda pair: pair[1].failed.get(test, float("inf")))
        reports = [revive(item.config, content) for content in rank.reports[test]]
        title = f"rank {number} of {self.size}"
        crash = getattr(reports[-1].longrepr, "reprcrash", None)
        if crash:
            crash.message = f"{title}: {crash.message}"
        reports[-1].sections.insert(0, (f"traceback of {title}; all ranks", self.fates(test)))
        return reports if reports[-1].when == "teardown" else [*reports, teardown(item)]

    def fates(self, test: str) -> str:
        return "\n".join(f"rank {number}: {rank.fate(test)}" for number, rank in enumerate(self.ranks))

    def output(self) -> str:
        """Return the last lines that the job printed and, when no test began, those of pytest on its ranks."""
        paths = [self.folder / "log", *(() if self.begun else sorted(self.folder.glob("*.out")))]
        texts = [path.read_text(errors="replace") for path in paths]
        return "\n".join(line for text in texts for line in text.splitlines()[-40:] if line.strip())

    def wait_for_launcher(self) -> None:
        """Let the launcher of a job that failed pass on what the ranks have printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)

    def cause(self) -> str:
        """Tell what ended the job."""
        return self.casualty() or f"the launcher ended with exit status {self.process.returncode}"

    def casualty(self) -> str:
        """Tell which rank failed first, and how; nothing when none did."""
        ended = self.folder / "ended"
        text = ended.read_text() if ended.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():  # the last may be half written
            rank, code = line.split()
            if code != "0":
                return f"rank {rank}: {f'signal {int(code) - 128}' if int(code) > 128 else f'exit status {code}'}"
        return ""

    def stacks(self, test: str) -> str:
        """Return where each rank is that has not finished."""
        stuck = [(number, rank) for number, rank in enumerate(self.ranks) if rank.pid and test not in rank.finished]
        for _, rank in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACKS)
        time.sleep(GRACE)
        texts = []
        for number, _ in stuck:
            lines = (self.folder / f"{number}.stack").read_text().splitlines()
            inner = next((index for index, line in enumerate(lines) if "/_pytest/" in line), len(lines))
            texts += [f"rank {number}:", *lines[:inner]]
        return "\n".join(texts)

    def finish(self) -> str:
        """Wait until the job ends by itself, after its last test; return what went wrong, or nothing."""
        ended = self.wait(FINISH, self.has_ended)
        self.wait_for_launcher()
        problem = ""
        if not ended:
            problem = f"the job did not end within {FINISH:g} s of its last test"
        elif self.process.poll() != 0 or not all(rank.done for rank in self.ranks):
            problem = f"all tests ended, but then {self.cause()}\n{self.output()}"
        self.end()
        return problem

    def end(self) -> None:
        """End all processes of the job and remove what it left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
        kill_processes_in(self.folder)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_abandoned(shared_memory() - self.shared_before)


class SimulatedJob(Job):
    """A job whose ranks are simulated, in one process."""

    def command(self, python: list[str]) -> tuple[Sequence[str], dict[str, str]]:
        script = str(Path(__file__).with_name("simulated.py"))
        return [sys.executable, script, str(self.size), *python[2:]], clean(os.environ)

    def cause(self) -> str:
        return f"the simulation ended with exit status {self.process.returncode}"

    def stacks(self, test: str) -> str:
        """Return where each thread is. One rank runs, and the others wait for their turns."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACKS)
        time.sleep(GRACE)
        path = self.folder / "stacks"
        return path.read_text() if path.exists() else ""


class Here:
    """The session that the user started."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[int, bool], Job] = {}
        self.broken: dict[tuple[int, bool], str] = {}
        self.left: dict[tuple[int, bool], list[pytest.Item]] = {}
        """What jobs of this kind have still to run, in order."""
        self.counts: dict[int, list[int]] = {}
        self.shared_before = shared_memory()

    def pytest_sessionstart(self) -> None:
        # Else a session that is terminated would leave its job, and what that has in shared memory.
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 128 + signal.SIGTERM))

    def pytest_unconfigure(self) -> None:
        """Remove what no job of a test removed: Open MPI leaves the file of a process without a launcher."""
        # This process ends: it needs no name for the files that it alone still has.
        remove_abandoned(shared_memory() - self.shared_before, ending=os.getpid())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        # After all other plug-ins, since a job takes all tests of its number of ranks, in this order.
        items.sort(key=lambda item: (max(1, ranks_of(item)), is_simulated(item)))

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Start the jobs of simulated ranks, which need no launcher: they run beside everything else."""
        if session.config.option.collectonly or session.testsfailed:
            return
        for item in session.items:
            if ranks_of(item) > 1 and not is_skipped(item):
                self.left.setdefault((ranks_of(item), is_simulated(item)), []).append(item)
        for size in [size for size, simulated in self.left if simulated]:
            self.jobs[size, True] = SimulatedJob(session.config, size, self.left[size, True])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if ranks_of(item) <= 1 or is_skipped(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.follow(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def follow(self, item: pytest.Item) -> list[pytest.TestReport]:
        size, simulated = kind = ranks_of(item), is_simulated(item)
        if not simulated and why_no_mpi():
            self.broken[kind] = why_no_mpi()
        if kind in self.broken:
            return failure(item, self.broken[kind])
        if kind not in self.jobs:
            self.jobs[kind] = (SimulatedJob if simulated else Job)(item.config, size, self.left[kind])
        job = self.jobs[kind]
        reports = job.follow(item)
        self.left[kind].pop(0)
        if not job.begun:
            self.broken[kind] = f"not run: a job of {size} ranks does not start"
        if any(report.failed for report in reports):
            del self.jobs[kind]
        elif not self.left[kind]:
            problem = self.jobs.pop(kind).finish()
            if problem:
                reports[-1] = failure(item, problem, "teardown")[0]
        return reports

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        size = re.search(r"ranks=(\d+)", report.nodeid)
        if size and (report.failed or (report.when == "call" and report.passed)):
            counts = self.counts.setdefault(int(size[1]), [0, 0])
            counts[report.failed] += 1

    def pytest_sessionfinish(self) -> None:
        for job in self.jobs.values():
            job.end()

    def pytest_report_header(self) -> str:
        if why_no_mpi():
            return f"MPI: {why_no_mpi()}"
        library, launcher = mpi()
        return f"MPI: {library.version} ({library.path}), launched by {launcher.path}"

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str | None:
        counts = Counter(filter(None, map(ranks_of, items)))
        return "ranks: " + " ".join(f"{size}×{count}" for size, count in sorted(counts.items())) if counts else None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.counts:
            return
        texts = []
        for index, word in enumerate(("passed", "failed")):
            counts = [f"{size}×{pair[index]}" for size, pair in sorted(self.counts.items()) if pair[index]]
            texts += [" ".join([*counts, word])] * bool(counts)
        library = "no MPI library" if why_no_mpi() else mpi()[0].version
        terminalreporter.write_line(f"ranks: {', '.join(texts)} on {library}")


def revive(config: pytest.Config, content: Any) -> pytest.TestReport:
    # A copy, as pytest turns parts of what it is given into objects.
    report = config.hook.pytest_report_from_serializable(config=config, data=dict(content))
    # JSON makes lists of tuples; pytest insists on a tuple here.
    report.longrepr = tuple(report.longrepr) if isinstance(report.longrepr, list) else report.longrepr
    return report


def failure(item: pytest.Item, message: str, when: str = "call") -> list[pytest.TestReport]:
    call = pytest.CallInfo.from_call(lambda: pytest.fail(message, pytrace=False), when)
    report = pytest.TestReport.from_item_and_call(item, call)
    return [report] if when == "teardown" else [report, teardown(item)]


def teardown(item: pytest.Item) -> pytest.TestReport:
    return pytest.TestReport.from_item_and_call(item, pytest.CallInfo.from_call(lambda: None, "teardown"))


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose TMPDIR is a folder. The ranks of MPICH are in sessions of their own."""
    return find_processes(f"TMPDIR={folder}\0")


def kill_processes_in(folder: Path) -> None:
    for pid in processes_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait(lambda: not processes_in(folder), 5)  # until they have no files


@contextlib.contextmanager
def cleaned(folder: Path) -> Iterator[None]:
    """End the processes whose TMPDIR is a folder afterwards, and remove the shared memory that they leave."""
    before = shared_memory()
    yield
    kill_processes_in(folder)
    remove_abandoned(shared_memory() - before)


def shared_memory() -> set[Path]:
    """Return this user's files of MPI libraries in shared memory."""
    found = set()
    for path in Path("/dev/shm").glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and any(fnmatch.fnmatch(path.name, name) for name in SHARED_MEMORY):
                found.add(path)
    return found


def remove_abandoned(files: Iterable[Path], ending: int = 0) -> None:
    """Remove files that no process has, but for one that is ending: another job may have made the others."""
    for path in unused(files, without=ending):
        Path(path).unlink(missing_ok=True)


@functools.cache
def mpi() -> tuple[Library, Launcher]:
    library = find_library(clean(os.environ))
    return library, find_launcher(library, clean(os.environ))


@functools.cache
def why_no_gpu() -> str:
    """Return what a store on GPUs lacks here."""
    return "; ".join(survey(visible_gpus()).problems)


@functools.cache
def why_no_mpi() -> str:
    try:
        mpi()
    except MPIKVError as error:
        return str(error)
    return ""


def launch(size: int, command: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
    """Return the command line that runs a command on several ranks, and its environment."""
    library, launcher = mpi()
    environ = clean(os.environ)
    # One core, so that ranks are not bound to cores and yield while they wait: the machine may do other things too.
    job = plan(library, launcher, command, size=size, cores=1, uid=os.getuid(), environ=environ)
    return job.command, environ | dict(job.variables)


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it came true in time."""
    limit = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < limit:
        time.sleep(0.02)
    return true
