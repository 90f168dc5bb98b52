"""The one table of faults that ``scripts/chaos`` plants: mistakes, after which all go on, and ends of a whole job.

Of a *mistake*, every rank gets an error, catches it, and goes on with the same store. An *end* takes the job with it.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpikv.errors import (
    Closed,
    ConfigError,
    KeyAlreadyInitialized,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Unsupported,
    ValueMismatch,
)

TIMEOUT = 2.0
"""Seconds after which a store of the table gives up."""


class Wrong(Exception):
    """Something is not as it must be."""


@dataclass
class Scene:
    """What a mistake is given: the program with its store, two keys of it and one that is unknown."""

    program: Any
    culprit: int
    key: Any
    other: Any
    new: Any

    def __post_init__(self) -> None:
        self.kv, self.odd = self.program.kv, self.program.rank == self.culprit

    def good(self, key: Any = None) -> np.ndarray:
        return np.ones_like(self.program.model.values[self.key if key is None else key])

    def more(self) -> np.ndarray:
        """Return one element more than the key has."""
        return np.ones(self.good().size + 1, self.good().dtype)

    def alike(self) -> np.ndarray:
        """Return an array of a dtype that is not cast to the key's: for a float, one of the same bytes."""
        dtype = self.good().dtype
        if dtype.kind in "fV":
            return self.good().view(f"i{dtype.itemsize}")
        return np.ones(self.good().shape, np.float32 if dtype.kind == "c" else np.complex64)

    @property
    def buffered(self) -> Any:
        return next(iter(self.program.model.buffers))

    @property
    def unbuffered(self) -> Any:
        return next(key for key in self.program.model.values if key not in self.program.model.buffers)


Call = Callable[[Scene], Any]
Errors = type[Exception] | tuple[type[Exception], ...] | None


def _kinds(errors: Errors) -> tuple[type[Exception] | None, ...]:
    return errors if isinstance(errors, tuple) else (errors,)


@dataclass(frozen=True)
class Need:
    """What a program must be like for a mistake."""

    fits: Callable[[Any], bool]
    provide: Callable[[Any], Any] = lambda program: None
    """Makes it so, in a store of the table."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of that store."""


ALWAYS = Need(lambda p: True)
ALONE = Need(lambda p: False)
"""In a store that makes nothing else."""
FLOATS = Need(lambda p: p.model.floats_only)
INTEGERS = Need(lambda p: not p.model.floats_only, lambda p: p.enter({"integers": np.ones(3, np.int64)}))
OPTIMIZER = Need(lambda p: p.model.optimizes, lambda p: p.use_optimizer("sgd", learning_rate=0.5))
NO_OPTIMIZER = Need(lambda p: not p.model.optimizes)
FUNCTION = Need(lambda p: bool(p.functions), lambda p: p.use_function(returns=False))
NO_ROOT = Need(lambda p: p.wanted in ("sharded", "replicated"), options=(("placement", "sharded"),))
BUFFER = Need(lambda p: bool(p.model.buffers), lambda p: p.buffer())
NO_BUFFER = Need(lambda p: len(p.model.buffers) < len(p.model.values))


@dataclass(frozen=True)
class Mistake:
    """A call that fails on every rank because of one of them."""

    name: str
    usual: Call
    odd: Call
    """What the culprit does instead."""
    words: str
    """What every message has: the call and the key."""
    mine: Errors = RankMismatch
    """What the culprit raises."""
    others: Errors = RankMismatch
    """What the other ranks raise; None: they do not take part."""
    needs: Need = ALWAYS
    repair: Call = lambda scene: None
    anonymous: bool = False
    """Whether the ranks that find it cannot tell who it was."""
    promise = "mistake"

    def fits(self, program: Any) -> bool:
        """Return whether it can be made in a random program, as this is now."""
        disagrees = RankMismatch in _kinds(self.mine) + _kinds(self.others)
        return self.needs.fits(program) and (program.size > 1 or not disagrees)


def judge(mistake: Mistake, scene: Scene, error: Exception | None) -> list[str]:
    """Return what is wrong with the error of this rank."""
    expected = mistake.mine if scene.odd else mistake.others
    if error is None or expected is None:
        return [] if error is expected else [f"raised {error!r}, not {expected}"]
    problems = [] if type(error) in _kinds(expected) else [f"raised {error!r}, not {expected}"]
    named = {name: re.escape(repr(getattr(scene, name))) for name in ("key", "other", "new")}
    if not re.search(mistake.words.format(**named), str(error)):
        problems.append(f"{str(error)!r} does not say {mistake.words!r} of {named}")
    if mistake.anonymous:
        return problems
    if isinstance(error, (RankMismatch, PeerFailed)) and not names(scene.culprit, str(error)):
        problems.append(f"{str(error)!r} does not name the culprit {scene.culprit}")
    if isinstance(error, PeerFailed) and error.rank != scene.culprit:
        problems.append(f"error.rank is {error.rank}")
    return problems


def names(rank: int, text: str) -> bool:
    """Return whether a message is about a rank. Where a message was raised does not count."""
    text = re.sub(r"\[rank \d+/\d+\]", "", text)
    listed = [number for group in re.findall(r"\branks? \[?([\d, ]+)", text) for number in re.findall(r"\d+", group)]
    return str(rank) in listed


def either(one: str, other: str) -> str:
    """Return a pattern of two calls in any order."""
    return f"{one}.*{other}|{other}.*{one}"


def _rise(error: BaseException) -> NoReturn:
    raise error


def _raise_planted(trial: Any) -> NoReturn:
    raise ValueError("planted")


def _refused(name: str, usual: Call, odd: Call, words: str, **rest: Any) -> Mistake:
    """Return a mistake that the culprit's own rank finds in what it is given."""
    return Mistake(name, usual, odd, words, ValueMismatch, PeerFailed, **rest)


def _everywhere(name: str, call: Call, words: str, error: type[Exception], needs: Need = ALWAYS) -> Mistake:
    """Return a mistake that every rank makes."""
    return Mistake(name, call, call, words, error, error, needs)


def _push(s: Scene) -> None:
    s.kv.push(s.key, s.good())


def _push_both(s: Scene) -> None:
    s.kv.push([s.key, s.other], [s.good(), s.good(s.other)])


def _push_at_another_rate(s: Scene) -> None:
    s.kv.set_learning_rate(0.75)
    _push(s)


def _restore_rate(s: Scene) -> None:
    s.kv.set_learning_rate(s.program.model.updater.learning_rate)


def _raise_in_updater(s: Scene) -> None:
    for function in s.program.functions:
        function.before = lambda key: _rise(ArithmeticError("planned")) if key == s.key else None
    _push_both(s)


def _mend_updater(s: Scene) -> None:
    for function in s.program.functions:
        function.before = lambda key: None


def _use_schedule(s: Scene) -> None:
    s.program.use_optimizer("sgd", lr_scheduler=lambda count: _rise(LookupError("no rate")) if s.odd else 0.5)
    _push(s)


def _drop_schedule(s: Scene) -> None:
    s.program.use_optimizer("sgd")


def _set_function(s: Scene) -> None:
    s.kv.set_updater(lambda key, given, stored: None)


def _join(worker: Call) -> Call:
    """Return what the one rank does that has not left yet."""

    def work(s: Scene) -> None:
        with s.kv.join():
            worker(s)

    return work


_leave = _join(lambda s: None)


def _wait_and_meet(s: Scene) -> None:
    """Wait for a call aside that fails, and meet the culprit, which did not wait, at a barrier."""
    pending = s.kv.push(s.key, s.good(), wait=False)
    try:
        pending.wait()
    except PeerFailed:
        s.kv.barrier()


def _use_closed(s: Scene) -> None:
    second = s.program.open()
    second.close()
    if s.odd:
        second.push(s.key, s.good())


def _use_in_a_child(s: Scene) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _push(s)
        except Closed as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        raise Closed(pipe.read())


_PUSH, _PUSH_OTHER = r"push\({key}\)", r"push\({other}\)"
_PUSH_BOTH = r"push\(\[{key}, {other}\]\)"
_SHAPE = r"key {key} has shape \("

MISTAKES = (
    Mistake(
        "a call skipped",
        lambda s: [_push(s), s.kv.push(s.other, s.good(s.other))],
        lambda s: s.kv.push(s.other, s.good(s.other)),
        either(_PUSH, _PUSH_OTHER),
    ),
    Mistake(
        "keys swapped",
        _push_both,
        lambda s: s.kv.push([s.other, s.key], [s.good(s.other), s.good()]),
        either(_PUSH_BOTH, r"push\(\[{other}, {key}\]\)"),
    ),
    Mistake(
        "keys swapped in pull",
        lambda s: s.kv.pull([s.key, s.other]),
        lambda s: s.kv.pull([s.other, s.key]),
        either(r"pull\(\[{key}, {other}\]\)", r"pull\(\[{other}, {key}\]\)"),
    ),
    Mistake("verbs swapped", _push, lambda s: s.kv.pull(s.key), either(_PUSH, r"pull\({key}\)")),
    Mistake(
        "broadcast against push", _push, lambda s: s.kv.broadcast(s.key, s.good()), either(_PUSH, r"broadcast\({key}\)")
    ),
    Mistake("barrier against push", _push, lambda s: s.kv.barrier(), either(_PUSH, r"barrier\(\)")),
    Mistake("another list length", _push_both, _push, either(_PUSH_BOTH, _PUSH)),
    Mistake("another priority", lambda s: s.kv.pull(s.key), lambda s: s.kv.pull(s.key, priority=1), r"pull\({key}"),
    _refused(
        "fewer values than keys",
        _push_both,
        lambda s: s.kv.push([s.key, s.other], [s.good()]),
        r"push.*2 keys and 1 values",
    ),
    Mistake(
        "text for an array",
        _push,
        lambda s: s.kv.push(s.key, "text"),
        "push.*key {key} is a str",
        TypeError,
        PeerFailed,
    ),
    _refused("one element more in push", _push, lambda s: s.kv.push(s.key, s.more()), "push.*" + _SHAPE),
    _refused(
        "one element more in pushpull",
        lambda s: s.kv.pushpull(s.key, s.good()),
        lambda s: s.kv.pushpull(s.key, s.more()),
        "pushpull.*" + _SHAPE,
    ),
    _refused(
        "one element more in the out of pull",
        lambda s: s.kv.pull(s.key),
        lambda s: s.kv.pull(s.key, s.more()),
        r"pull.*{key}.*shape \(",
    ),
    Mistake(
        "one element more in init",
        lambda s: s.kv.init(s.new, np.ones(4)),
        lambda s: s.kv.init(s.new, np.ones(5)),
        r"init\({new}\).*{new} float64\[[45]\] against {new} float64\[[45]\]",
    ),
    _refused(
        "same bytes, another dtype, in push",
        _push,
        lambda s: s.kv.push(s.key, s.alike()),
        "push.*key {key} has dtype .*astype",
    ),
    Mistake(
        "same bytes, another dtype, in init",
        lambda s: s.kv.init(s.new, np.ones(4)),
        lambda s: s.kv.init(s.new, np.ones(4, np.int64)),
        r"init\({new}\).*{new} (float64|int64)\[4\] against {new} (float64|int64)\[4\]",
        needs=NO_OPTIMIZER,
    ),
    Mistake(
        "key unknown on one rank",
        _push,
        lambda s: s.kv.push(s.new, s.good()),
        "push.*key {new} was never initialized",
        KeyNotInitialized,
        PeerFailed,
    ),
    _everywhere(
        "key unknown on all ranks",
        lambda s: s.kv.pull(s.new),
        "pull.*key {new} was never initialized",
        KeyNotInitialized,
    ),
    _everywhere("init of a known key", lambda s: s.kv.init(s.key, s.good()), "init.*{key}", KeyAlreadyInitialized),
    Mistake(
        "a buffer against an array",
        lambda s: s.kv.push(s.buffered),
        lambda s: s.kv.push(s.buffered, s.good(s.buffered)),
        "push",
        needs=BUFFER,
    ),
    _everywhere("no buffer", lambda s: s.kv.push(s.unbuffered), "push.*buffer", ValueMismatch, NO_BUFFER),
    Mistake(
        "another root in create",
        lambda s: s.program.open(root=0),
        lambda s: s.program.open(root=1),
        r"create.*disagree: root [01] on rank \d, [01] on rank",
    ),
    Mistake(
        "another placement in create",
        lambda s: s.program.open(placement="sharded"),
        lambda s: s.program.open(placement="root"),
        r"create.*disagree: placement '(sharded|root)' on rank \d, '(sharded|root)' on rank",
    ),
    Mistake(
        "unknown option in create",
        lambda s: s.program.open(placement="sharded"),
        lambda s: s.program.open(placement="shard"),
        r"create.*unknown placement 'shard'",
        ConfigError,
        PeerFailed,
    ),
    Mistake(
        "other settings in set_optimizer",
        lambda s: s.kv.set_optimizer("sgd", momentum=0.5),
        lambda s: s.kv.set_optimizer("sgd", momentum=0.25),
        r"set_optimizer.*momentum=0.(5|25).*momentum=0.(5|25)",
        needs=FLOATS,
    ),
    _everywhere(
        "an optimizer of integers", lambda s: s.kv.set_optimizer("sgd"), "set_optimizer", Unsupported, needs=INTEGERS
    ),
    _everywhere("an updater without a root", _set_function, "set_updater", Unsupported, NO_ROOT),
    Mistake(
        "another learning rate on one rank",
        _push,
        _push_at_another_rate,
        _PUSH + ".*learning_rate=.*learning_rate=",
        needs=OPTIMIZER,
        repair=_restore_rate,
    ),
    Mistake(
        "updater raises",
        _push_both,
        _raise_in_updater,
        "planned",
        ArithmeticError,
        PeerFailed,
        needs=FUNCTION,
        repair=_mend_updater,
    ),
    Mistake("schedule raises", _use_schedule, _use_schedule, "no rate", LookupError, PeerFailed, ALONE, _drop_schedule),
    Mistake(
        "one rank waits, the others do not",
        lambda s: s.kv.push(s.key, s.good(), wait=False).wait(),
        _push,
        either(r"next\(wait=False\)", _PUSH),
    ),
    _refused(
        "one element more in push, with wait=False",
        lambda s: s.kv.push(s.key, s.good(), wait=False).wait(),
        lambda s: s.kv.push(s.key, s.more(), wait=False).wait(),
        "push.*" + _SHAPE,
    ),
    _refused(
        "an error for which nobody waits",
        lambda s: [s.kv.push(s.key, s.good(), wait=False), s.kv.push(s.other, s.good(s.other))],
        lambda s: [s.kv.push(s.key, s.more(), wait=False), s.kv.push(s.other, s.good(s.other))],
        "push.*" + _SHAPE,
    ),
    _refused(
        "an error for which all but one wait",
        _wait_and_meet,
        lambda s: [s.kv.push(s.key, s.more(), wait=False), s.kv.barrier()],
        "push.*" + _SHAPE,
    ),
    Mistake(
        "a call that cannot be joined", _leave, _join(lambda s: s.kv.set(s.key, s.good())), r"set\({key}\).*join\(\)"
    ),
    _refused("one element more in join()", _leave, _join(lambda s: s.kv.push(s.key, s.more())), _SHAPE),
    Mistake(
        # The ranks that have left find it, and do not know whose call it is.
        "another learning rate in join()",
        _leave,
        _join(_push_at_another_rate),
        "learning_rate",
        (RankMismatch, PeerFailed),
        (RankMismatch, PeerFailed),
        needs=OPTIMIZER,
        repair=_restore_rate,
        anonymous=True,
    ),
    Mistake(
        "use after close", _use_closed, _use_closed, r"push.*the store was closed; create a new store", Closed, None
    ),
    Mistake(
        "use in a forked child",
        lambda s: None,
        _use_in_a_child,
        r"push.*before a fork.*use it in the parent",
        Closed,
        None,
        ALONE,
    ),
)


# --- Ends: the job is over


@dataclass(frozen=True)
class End:
    """What the culprit does, after which no rank can go on."""

    name: str
    act: Callable[[Any], Any]
    """Is called with the trial, of ``scripts/chaos_ranks.py``."""
    promise: str
    """``death``, seen at once; ``stall``, seen at the deadline; or ``signal``, to the launcher."""
    words: str = ""
    """What the job's messages have."""
    moment: str = "call"
    """Between two calls; before ``create``; in the ``updater`` at the root; in an ``exchange`` of a random program; in
    a ``save``, of which a load must give the old state or the new one."""
    aside: bool = False
    """Whether the threads of the stores push, or write what is saved."""
    comes: bool = False
    """Whether the culprit makes its call after all, and is to raise too."""
    in_peace: bool = False
    """Whether the other ranks do as if the error were no reason to fail; by default they leave it uncaught."""


LEAVE = "the culprit returns from the loop"


def _signal(number: int) -> Callable[[Any], None]:
    return lambda trial: os.kill(os.getpid(), number)


def _exhaust_memory(trial: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    np.ones(1 << 30)


def _loop(trial: Any) -> None:
    while True:
        pass


def _hold_the_lock(trial: Any) -> None:
    # One call into C that never lets another thread, or a Python signal handler, run.
    pow(3, 1 << 30)


def _numpy(trial: Any) -> None:
    with np.errstate(all="ignore"):
        np.convolve(np.ones(1 << 21), np.ones(1 << 21))


def _come_late(trial: Any) -> None:
    time.sleep(TIMEOUT + 0.7)


_KILL, _STOP = _signal(signal.SIGKILL), _signal(signal.SIGSTOP)
_CLOSE = either(r"reached the end of its program", r"push\('a'\)")

ENDS = (
    End("exception", _raise_planted, "death", r"ValueError: planted"),
    End("exception before create", _raise_planted, "death", "planted", "create"),
    End("sys.exit(0) early", lambda t: sys.exit(0), "death", _CLOSE),
    End("sys.exit(3) early", lambda t: sys.exit(3), "death", "status 3"),
    End("os._exit(0) early", lambda t: os._exit(0), "death"),
    End("os._exit(3) early", lambda t: os._exit(3), "death", "status 3"),
    End("normal end early", lambda t: LEAVE, "death", _CLOSE),
    End("SIGTERM to a rank", _signal(signal.SIGTERM), "death", "SIGTERM"),
    End("SIGINT to a rank", _signal(signal.SIGINT), "death", "interrupted"),
    End("SIGKILL, as from the OOM killer", _KILL, "death", "SIGKILL"),
    End("SIGSEGV", _signal(signal.SIGSEGV), "death", "SIGSEGV"),
    End("SIGKILL before create", _KILL, "death", "SIGKILL", "create"),
    End("SIGKILL in the updater", _KILL, "death", "SIGKILL", "updater"),
    End("SIGKILL in an exchange", _KILL, "death", "SIGKILL", "exchange"),
    End("SIGKILL in a save", _KILL, "death", "SIGKILL", "save"),
    End("SIGKILL in a save with wait=False", _KILL, "death", "SIGKILL", "save", aside=True),
    End("SIGKILL while others wait aside", _KILL, "death", "SIGKILL", aside=True),
    End("out of memory", _exhaust_memory, "death", "MemoryError"),
    End("sys.exit(0) in the updater", lambda t: sys.exit(0), "death", "", "updater"),
    End("sys.exit(0) in an updater aside", lambda t: sys.exit(0), "death", "", "updater", aside=True),
    End("sys.exit(0) while others wait aside", lambda t: sys.exit(0), "death", "next", aside=True),
    End("SIGINT to mpikv run", lambda t: None, "signal", "stopped by SIGINT"),
    End("SIGTERM to mpikv run", lambda t: None, "signal", "stopped by SIGTERM"),
    End("SIGSTOP", _STOP, "stall", "stopped"),
    End("endless Python loop", _loop, "stall", "_loop"),
    End("endless call that holds the GIL", _hold_the_lock, "stall", "_hold_the_lock"),
    End("endless numpy call", _numpy, "stall", "_numpy|convolve"),
    End("too late", _come_late, "stall", "_come_late", comes=True),
    End("endless loop in the updater", _loop, "stall", "_loop", "updater"),
    End("SIGSTOP in the updater", _STOP, "stall", "stopped", "updater"),
    End("SIGSTOP in an exchange", _STOP, "stall", "stopped", "exchange"),
    End("endless loop in an updater aside", _loop, "stall", "_loop", "updater", aside=True),
    End("endless loop while others wait aside", _loop, "stall", "_loop", aside=True),
    End("endless loop before create", _loop, "stall", "create", "create"),
    End("SIGSTOP, and the others end in peace", _STOP, "stall", "stopped", in_peace=True),
)

# What must be found out: trials that do not end as faults should.
FAILURES = (
    Mistake("control: no error", lambda s: None, lambda s: None, ""),
    Mistake(
        "control: another value",
        _push,
        lambda s: s.kv.push(s.key, s.more()),
        "",
        ValueMismatch,
        PeerFailed,
        repair=lambda s: s.kv.set(s.key, s.good()),
    ),
    Mistake(
        "control: another rank named",
        lambda s: _rise(RankMismatch(f"rank {s.program.size} calls")),
        lambda s: _rise(RankMismatch(f"rank {s.program.size} calls")),
        "",
    ),
    End("control: nothing happens", lambda t: None, "stall"),
)

FAULTS: dict[str, Mistake | End] = {fault.name: fault for fault in (*MISTAKES, *ENDS)}
CONTROLS: dict[str, Mistake | End] = {fault.name: fault for fault in FAILURES}
ALL = {**FAULTS, **CONTROLS}
