"""The faults that ``scripts/faults`` plants, one line each in the tables at the end, and the ranks' side of a trial.

``mpikv run -n 3 scripts/fault_cases.py FOLDER shm 1 NAME ...`` runs it: rank 1 is the culprit. Every rank writes to the
folder who it is, what it raised and how long that took; ``scripts/faults`` judges.

There are two kinds of trials. Of a *mistake*, every rank gets an error, catches it, and goes on with the same store, so
many mistakes fit into one job. An *end* takes the whole job with it: ranks push in a loop, whose sums they check, until
the culprit does not take part any more.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import mpikv
from mpikv.errors import Closed, KeyNotInitialized, MPIKVError, PeerFailed, RankMismatch, ValueMismatch

TIMEOUT = 2.0
STEPS = 600
PLANTED_AT = 5
_OURS = re.compile(r"/(?:dev/shm|tmp/ompi[^/\s]*)/\S+")


class Trial:
    """What a fault is given: the rank that it runs on, and the store."""

    def __init__(self, folder: Path, transport: str, culprit: int) -> None:
        """Collective. Loads MPI."""
        self.folder, self.transport, self.culprit = folder, transport, culprit
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.odd = self.rank == culprit
        self.kv: Any = None

    def open(self, **options: Any) -> Any:
        """Make a store. Collective."""
        options = {"transport": self.transport, "timeout": TIMEOUT, "warn_after": 100.0, **options}
        return mpikv.create("dist_sync", **options)

    def pick(self, usual: Any, odd: Any) -> Any:
        """Return what this rank does: ``odd`` for the culprit."""
        return odd if self.odd else usual

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Leave a record for the judge, whole or not at all."""
        path = self.folder / f"{name}.{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps({"at": time.monotonic(), **record}))
        path.with_suffix(".part").replace(path)

    def wait_for_errors(self, number: int) -> None:
        """Wait until so many ranks have raised, but not long: the first that ends takes the others with it."""
        limit = time.monotonic() + 2.0
        while len(list(self.folder.glob("end.*.json"))) < number and time.monotonic() < limit:
            time.sleep(0.01)

    def introduce(self) -> None:
        """Write this process and the files that it shares with other ranks."""
        files = sorted(set(_OURS.findall(Path("/proc/self/maps").read_text())))
        self.write("rank", {"pid": os.getpid(), "files": [file for file in files if os.path.exists(file)]})


# --- Mistakes: every rank raises, and goes on


@dataclass(frozen=True)
class Mistake:
    """A call that fails on every rank because of one of them."""

    name: str
    call: Callable[[Trial], Any]
    words: str
    """What every message has: the call and the key."""
    mine: type[Exception] = RankMismatch
    """What the culprit raises."""
    others: type[Exception] | None = RankMismatch
    """What the other ranks raise; None: they do not take part."""
    prepare: Callable[[Trial], Any] = field(default=lambda trial: None)
    repair: Callable[[Trial], Any] = field(default=lambda trial: None)
    promise = "mistake"


def run_mistake(mistake: Mistake, trial: Trial) -> None:
    """Make the mistake in a store of its own and record what came of it."""
    kv = trial.kv = trial.open(root=trial.culprit)
    kv.init(["a", "b"], [np.arange(4.0), np.ones(4)])
    mistake.prepare(trial)
    before = kv.pull(["a", "b"])
    kv.barrier()
    started, error = time.monotonic(), None
    try:
        mistake.call(trial)
    except Exception as caught:
        error = caught
    seconds = time.monotonic() - started
    mistake.repair(trial)
    problems = [*_judge(mistake, trial, error), *_unusable(kv, before)]
    kv.close()
    kind = type(error).__name__ if error else None
    trial.write(mistake.name, {"seconds": seconds, "kind": kind, "text": str(error or ""), "problems": problems})


def _judge(mistake: Mistake, trial: Trial, error: Exception | None) -> list[str]:
    expected = mistake.mine if trial.odd else mistake.others
    if error is None or expected is None:
        return [] if error is expected else [f"raised {error!r}, not {expected}"]
    problems = [] if type(error) is expected else [f"raised {type(error).__name__}, not {expected.__name__}"]
    if not re.search(mistake.words, str(error)):
        problems.append(f"does not say {mistake.words!r}")
    alone = trial.odd and not isinstance(error, (RankMismatch, PeerFailed))
    if not alone and not names(trial.culprit, str(error)):
        problems.append("does not name the culprit")
    if isinstance(error, PeerFailed) and error.rank != trial.culprit:
        problems.append(f"error.rank is {error.rank}")
    return problems


def names(rank: int, text: str) -> bool:
    """Return whether a message is about a rank. Where a message was raised does not count."""
    text = re.sub(r"\[rank \d+/\d+\]", "", text)
    listed = [number for group in re.findall(r"\branks? \[?([\d, ]+)", text) for number in re.findall(r"\d+", group)]
    return str(rank) in listed


def _unusable(kv: Any, before: list[Any]) -> list[str]:
    """Return what is wrong with the store after a mistake: values changed, or a good push gives a wrong sum."""
    problems = []
    if any((value != old).any() for value, old in zip(kv.pull(["a", "b"]), before, strict=True)):
        problems.append("a value was changed")
    kv.set_updater(None)
    kv.push(["a", "b"], [np.full(4, kv.rank + 1.0), np.ones(4)])
    sums = [value.tolist() for value in kv.pull(["a", "b"])]
    if sums != [[kv.size * (kv.size + 1) / 2] * 4, [kv.size] * 4]:
        problems.append(f"the next push is wrong: {sums}")
    return problems


def _rise(error: BaseException) -> NoReturn:
    raise error


def _schedule(trial: Trial) -> Callable[[int], float]:
    return lambda count: _rise(LookupError("no rate")) if trial.odd else 0.5


def _use_closed(trial: Trial) -> None:
    second = trial.open()
    second.close()
    if trial.odd:
        second.push("a", np.ones(4))


def _use_in_a_child(trial: Trial) -> None:
    if not trial.odd:
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trial.kv.push("a", np.ones(4))
        except Closed as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        raise Closed(pipe.read())


def _init(trial: Trial, usual: Any, odd: Any) -> None:
    trial.kv.init("new", trial.pick(usual, odd))


def _push(trial: Trial, key: Any, value: Any) -> None:
    trial.kv.push(key, value)


ONES = np.ones(4)

MISTAKES = (
    Mistake(
        "a call skipped",
        lambda t: [t.kv.push(key, ONES) for key in t.pick(["a", "b"], ["b"])],
        r"push\('a'\).*push\('b'\)|push\('b'\).*push\('a'\)",
    ),
    Mistake(
        "keys swapped",
        lambda t: t.kv.push(t.pick(["a", "b"], ["b", "a"]), [ONES, ONES]),
        r"push\(\['a', 'b'\]\).*push\(\['b', 'a'\]\)|push\(\['b', 'a'\]\).*push\(\['a', 'b'\]\)",
    ),
    Mistake(
        "verbs swapped",
        lambda t: t.pick(lambda: t.kv.push("a", ONES), lambda: t.kv.pull("a"))(),
        r"(push|pull)\('a'\).*(push|pull)\('a'\)",
    ),
    Mistake(
        "broadcast against push",
        lambda t: t.pick(lambda: t.kv.push("a", ONES), lambda: t.kv.broadcast("a", ONES))(),
        r"(push|broadcast)\('a'\).*(push|broadcast)\('a'\)",
    ),
    Mistake(
        "barrier against push",
        lambda t: t.pick(lambda: t.kv.push("a", ONES), t.kv.barrier)(),
        r"push\('a'\).*barrier\(\)|barrier\(\).*push\('a'\)",
    ),
    Mistake(
        "another list length",
        lambda t: t.kv.push(t.pick(["a", "b"], ["a"]), [ONES] * t.pick(2, 1)),
        r"push\(\['a', 'b'\]\).*push\('a'\)|push\('a'\).*push\(\['a', 'b'\]\)",
    ),
    Mistake(
        "fewer values than keys",
        lambda t: t.kv.push(["a", "b"], [ONES] * t.pick(2, 1)),
        r"push.*2 keys and 1 values",
        ValueMismatch,
        PeerFailed,
    ),
    Mistake(
        "one element more in push",
        lambda t: t.kv.push("a", np.ones(t.pick(4, 5))),
        r"push.*key 'a' has shape \(5,\).*\(4,\)",
        ValueMismatch,
        PeerFailed,
    ),
    Mistake(
        "one element more in init",
        lambda t: t.kv.init("new", np.ones(t.pick(4, 5))),
        r"init\('new'\).*'new' float64\[[45]\], 'new' float64\[[45]\]",
    ),
    Mistake(
        "same bytes, another dtype, in push",
        lambda t: t.kv.push("a", t.pick(ONES, ONES.view(np.int64))),
        r"push.*key 'a' has dtype int64.*float64.*astype",
        ValueMismatch,
        PeerFailed,
    ),
    Mistake(
        "same bytes, another dtype, in init",
        lambda t: t.kv.init("new", t.pick(ONES, ONES.view(np.int64))),
        r"init\('new'\).*'new' (float64|int64)\[4\], 'new' (float64|int64)\[4\]",
    ),
    Mistake(
        "key unknown on one rank",
        lambda t: t.kv.push(t.pick("a", "A"), ONES),
        r"push.*key 'A' was never initialized",
        KeyNotInitialized,
        PeerFailed,
    ),
    Mistake(
        "another root in create",
        lambda t: t.open(root=t.pick(0, 1)),
        r"create.*disagree: root [01] on rank \d, [01] on rank",
    ),
    Mistake(
        "another placement in create",
        lambda t: t.open(placement=t.pick("sharded", "root")),
        r"create.*disagree: placement '(sharded|root)' on rank \d, '(sharded|root)' on rank",
    ),
    Mistake(
        "unknown option in create",
        lambda t: t.open(placement=t.pick("sharded", "shard")),
        r"create.*unknown placement 'shard'",
        mpikv.ConfigError,
        PeerFailed,
    ),
    Mistake(
        "other settings in set_optimizer",
        lambda t: t.kv.set_optimizer("sgd", momentum=t.pick(0.5, 0.25)),
        r"set_optimizer.*momentum=0.(5|25).*momentum=0.(5|25)",
    ),
    Mistake(
        "another learning rate on one rank",
        lambda t: [t.kv.set_learning_rate(t.pick(0.5, 0.25)), t.kv.push("a", ONES)],
        r"push\('a'\).*learning_rate=0.(5|25).*learning_rate=0.(5|25)",
        prepare=lambda t: t.kv.set_optimizer("sgd", learning_rate=0.5),
    ),
    Mistake(
        "updater raises",
        lambda t: t.kv.push("a", ONES),
        r"an updater's mistake",
        ArithmeticError,
        PeerFailed,
        prepare=lambda t: t.kv.set_updater(lambda key, given, stored: _rise(ArithmeticError("an updater's mistake"))),
    ),
    Mistake(
        "schedule raises",
        lambda t: t.kv.push("a", ONES),
        r"no rate",
        LookupError,
        PeerFailed,
        prepare=lambda t: t.kv.set_optimizer("sgd", lr_scheduler=_schedule(t)),
    ),
    Mistake(
        "one rank waits, the others do not",
        lambda t: t.pick(lambda: t.kv.push("a", ONES, wait=False).wait(), lambda: t.kv.push("a", ONES))(),
        r"next\(wait=False\).*push\('a'\)|push\('a'\).*next\(wait=False\)",
    ),
    Mistake(
        "one element more in push, with wait=False",
        lambda t: t.kv.push("a", np.ones(t.pick(4, 5)), wait=False).wait(),
        r"push.*key 'a' has shape \(5,\).*\(4,\)",
        ValueMismatch,
        PeerFailed,
    ),
    Mistake(
        "an error for which nobody waits",
        lambda t: [t.kv.push("a", np.ones(t.pick(4, 5)), wait=False), t.kv.push("b", ONES)],
        r"push.*key 'a' has shape \(5,\).*\(4,\)",
        ValueMismatch,
        PeerFailed,
    ),
    Mistake("use after close", _use_closed, r"push.*the store was closed; create a new store", Closed, None),
    Mistake("use in a forked child", _use_in_a_child, r"push.*before a fork.*use it in the parent", Closed, None),
)


# --- Ends: the job is over


@dataclass(frozen=True)
class End:
    """What the culprit does instead of a push, after which no rank can go on."""

    name: str
    act: Callable[[Trial], Any]
    promise: str
    """``death``, seen at once, or ``stall``, seen at the deadline."""
    words: str = ""
    """What the job's messages have."""
    in_updater: bool = False
    """Whether the culprit, as the root, does it in the middle of a push."""
    before_create: bool = False
    aside: bool = False
    """Whether the ranks push by the threads of their stores."""
    comes: bool = False
    """Whether the culprit makes its call after all, and is to raise too."""
    in_peace: bool = False
    """Whether the other ranks do as if the error were no reason to fail; by default they leave it uncaught."""


def run_end(end: End, trial: Trial) -> None:
    """Push until the culprit ends it, and record what the other ranks raise."""
    trial.introduce()
    try:
        if end.before_create:
            _plant(end, trial)
        kv = trial.kv = trial.open(root=trial.culprit)
        trial.introduce()
        _train(end, trial, kv)
    except MPIKVError as error:
        trial.write("end", {"kind": type(error).__name__, "text": str(error)})
        trial.wait_for_errors(trial.size if end.comes else trial.size - 1)
        if not end.in_peace:
            raise
    else:
        # A culprit that comes here has left in peace; its store is closed at exit.
        trial.write("end", {"kind": None, "text": "" if trial.odd else "no error: all steps were made"})


def _train(end: End, trial: Trial, kv: Any) -> None:
    kv.init("a", np.zeros(1000))
    step = 0

    def update(key: Any, given: Any, stored: Any) -> None:
        if step == PLANTED_AT:
            _plant(end, trial)
        stored[:] = given

    if end.in_updater:
        kv.set_updater(update)
    for step in range(STEPS):
        if step == PLANTED_AT and not end.in_updater and not end.before_create:
            if trial.odd and _plant(end, trial) is LEAVE:
                return
            trial.write("ready", {})
        kv.push("a", np.full(1000, step + kv.rank + 1.0), wait=not end.aside)
        value = kv.pull("a")
        if (value != kv.size * step + kv.size * (kv.size + 1) / 2).any():
            trial.write("wrong", {"text": f"step {step}: {value[:3]}"})
            os._exit(99)
        if step > PLANTED_AT:
            time.sleep(0.01)


def _plant(end: End, trial: Trial) -> Any:
    if not trial.odd:
        return None
    trial.write("fault", {})
    return end.act(trial)


LEAVE = "the culprit returns from the loop"


def _kill(number: int) -> Callable[[Trial], None]:
    return lambda trial: os.kill(os.getpid(), number)


def _exhaust_memory(trial: Trial) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    np.ones(1 << 30)


def _loop(trial: Trial) -> None:
    while True:
        pass


def _hold_the_lock(trial: Trial) -> None:
    # One call into C that never lets another thread, or a Python signal handler, run.
    pow(3, 1 << 30)


def _numpy(trial: Trial) -> None:
    with np.errstate(all="ignore"):
        np.convolve(np.ones(1 << 21), np.ones(1 << 21))


def _come_late(trial: Trial) -> None:
    time.sleep(TIMEOUT + 0.7)


ENDS = (
    End("exception", lambda t: _rise(ValueError("planted")), "death", r"ValueError: planted"),
    End("exception before create", lambda t: _rise(ValueError("planted")), "death", "planted", before_create=True),
    End("sys.exit(0) early", lambda t: sys.exit(0), "death", r"close\(\).*push\('a'\)|push\('a'\).*close\(\)"),
    End("sys.exit(3) early", lambda t: sys.exit(3), "death", "status 3"),
    End("os._exit(0) early", lambda t: os._exit(0), "death"),
    End("os._exit(3) early", lambda t: os._exit(3), "death", "status 3"),
    End("normal end early", lambda t: LEAVE, "death", r"close\(\).*push\('a'\)|push\('a'\).*close\(\)"),
    End("SIGTERM to a rank", _kill(signal.SIGTERM), "death", "SIGTERM"),
    End("SIGINT to a rank", _kill(signal.SIGINT), "death", "interrupted"),
    End("SIGKILL, as from the OOM killer", _kill(signal.SIGKILL), "death", "SIGKILL"),
    End("SIGSEGV", _kill(signal.SIGSEGV), "death", "SIGSEGV"),
    End("SIGKILL before create", _kill(signal.SIGKILL), "death", "SIGKILL", before_create=True),
    End("out of memory", _exhaust_memory, "death", "MemoryError"),
    End("SIGKILL in the updater", _kill(signal.SIGKILL), "death", "SIGKILL", in_updater=True),
    End("sys.exit(0) in the updater", lambda t: sys.exit(0), "death", in_updater=True),
    End("sys.exit(0) in an updater aside", lambda t: sys.exit(0), "death", in_updater=True, aside=True),
    End("SIGKILL while others wait aside", _kill(signal.SIGKILL), "death", "SIGKILL", aside=True),
    End("sys.exit(0) while others wait aside", lambda t: sys.exit(0), "death", "next", aside=True),
    End("SIGINT to mpikv run", lambda t: None, "signal", "stopped by SIGINT"),
    End("SIGTERM to mpikv run", lambda t: None, "signal", "stopped by SIGTERM"),
    End("SIGSTOP", _kill(signal.SIGSTOP), "stall", "stopped"),
    End("endless Python loop", _loop, "stall", "_loop"),
    End("endless call that holds the GIL", _hold_the_lock, "stall", "_hold_the_lock"),
    End("endless numpy call", _numpy, "stall", "_numpy|convolve"),
    End("too late", _come_late, "stall", "_come_late", comes=True),
    End("endless loop in the updater", _loop, "stall", "_loop", in_updater=True),
    End("SIGSTOP in the updater", _kill(signal.SIGSTOP), "stall", "stopped", in_updater=True),
    End("endless loop in an updater aside", _loop, "stall", "_loop", in_updater=True, aside=True),
    End("endless loop while others wait aside", _loop, "stall", "_loop", aside=True),
    End("endless loop before create", _loop, "stall", "create", before_create=True),
    End("SIGSTOP, and the others end in peace", _kill(signal.SIGSTOP), "stall", "stopped", in_peace=True),
)

# What must be found out: trials that do not end as faults should.
FAILURES = (
    Mistake("control: no error", lambda t: None, ""),
    Mistake(
        "control: another value",
        lambda t: t.kv.push("a", np.ones(t.pick(4, 5))),
        "",
        ValueMismatch,
        PeerFailed,
        repair=lambda t: t.kv.set("a", ONES),
    ),
    Mistake("control: another rank named", lambda t: _rise(RankMismatch(f"rank {t.size} calls")), ""),
    End("control: nothing happens", lambda t: None, "stall"),
)

FAULTS: dict[str, Mistake | End] = {fault.name: fault for fault in (*MISTAKES, *ENDS)}
CONTROLS: dict[str, Mistake | End] = {fault.name: fault for fault in FAILURES}
ALL = {**FAULTS, **CONTROLS}


def main() -> None:
    """Run the faults of the command line on this rank."""
    folder, transport, culprit, *chosen = sys.argv[1:]
    trial = Trial(Path(folder), transport, int(culprit))
    for name in chosen:
        fault = ALL[name]
        if isinstance(fault, End):
            run_end(fault, trial)
        else:
            run_mistake(fault, trial)
            trial.introduce()


if __name__ == "__main__":
    main()
