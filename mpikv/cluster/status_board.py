"""The present call of each rank of a host, in shared memory, and the question to a late rank for its line of code.

A rank writes the number and the text of each call that it begins to its own slot. Nobody else writes there, so there
are no locks. A rank that waits too long reads the slots, and asks a late one by a signal. Python's fault handler there
writes the current line of code to a file in memory. That works in a loop, in a sleep, and while an extension holds the
interpreter's lock. The signal goes to the thread that makes the calls, and its handler reads its own frames alone:
frames of a running thread may vanish during the read, and that has killed processes. A stopped or ended process cannot
answer; the kernel reports its state.

``mpikv top`` and ``mpikv run`` read the board, too: they find its file among the open files of a rank.

A rank of another host is asked by a message. Waiting ranks there answer from the board of their host. Only waiting
ranks receive these messages, beside the calls that they wait for.

The signal is SIGURG: the kernel drops it where nobody handles it. When a program sets its own handler, /dev/null
replaces the answer file and the program is asked no more, unless it keeps the result of ``signal.signal``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import re
import signal
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..protocols import Group
from .calls import NOTE_BYTES, text_of_note
from .lateness import LABELS, RECORD, RING, SIGNS, SUMS, Lateness, Recorder
from .printing import log
from .process_group import ANSWERS, ASKS, ProcessGroup
from .runtime import present, system_function
from .shared_memory import BOARD, allocate_shared

_QUESTION = signal.SIGURG
# The name of the answer file in /proc/<pid>/fd. An asker checks it before each signal.
_ANSWERS = "mpikv-answers"
# Seconds to repeat a question that got no answer.
_PATIENCE = 0.5
# The most ranks of a host to ask, so many ranks on many hosts do not flood the network.
_MOST_ASKED = 4
# Hosts in one message: of a thousand late ranks a few tell enough.
_MOST_TOLD = 8
# Seconds to wait for a host's answer, and seconds to repeat this host's last answer.
_HOST_PATIENCE, _FRESH = 1.0, 1.0
# What sets a rank or a host apart from a straggler.
_GONE, _SILENT = "its process is gone", "does not answer"
_PACKAGE = str(Path(__file__).parents[1])
_STARTED = str(Path(_PACKAGE, "cli", "rank.py"))
_LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})


_NUMBERS = ("call", "pid", "space", "thread", "updating", "answers", "over", "closed", "rank", "size", "layout")
SLOT = np.dtype(
    [
        *((name, "i8") for name in _NUMBERS),
        ("signs", "i8", len(SIGNS)),
        ("sums", SUMS),
        ("ring", RECORD, RING),
        ("labels", "u1", (LABELS, NOTE_BYTES)),
    ]
)
"""A rank's part of the board: its present call, and where its time goes."""
LAYOUT = zlib.crc32(repr(SLOT.descr).encode())
"""Tells the boards of this version from others."""


class Answer(NamedTuple):
    """A host's answer: its late ranks, and a text about them."""

    late: tuple[int, ...]
    text: str


class StatusBoard:
    """The slots of the ranks of this host. All methods but the constructor are local."""

    def __init__(self, group: Group, report: float = 0.0, about: str = "") -> None:
        """Make this host's slots in shared memory, register the answers to questions. Collective over the host.

        Answered are questions by SIGURG and, while this rank waits, by messages of other hosts. ``about`` ends the
        text of warnings. ``report``: see :class:`~mpikv.cluster.lateness.Lateness`.
        """
        self._rank, self._ranks, self._about = group.rank, group.host_ranks, about
        self._inquiry: Inquiry | None = None
        if isinstance(group, ProcessGroup) and not group.one_host:
            self._inquiry = Inquiry(group, lambda: self._find_late(()), lambda: self.record.calls)
        is_real = group.size > 1 and present().world is None
        allocate = partial(allocate_shared, group, ending=BOARD) if is_real else group.allocate
        self._slots = allocate(SLOT.itemsize * len(self._ranks)).view(SLOT)
        self._place = self._ranks.index(self._rank)
        self._own = mine = self._slots[self._place]
        # The main thread of a process has the number of the process.
        mine["pid"] = mine["thread"] = present().process
        mine["space"], mine["rank"], mine["size"] = _pid_space(), group.rank, group.size
        self.record = Recorder(self._slots[self._place :][:1], group.size > 1)
        self.lateness = Lateness(group, lambda: self._slots, report)
        if group.size > 1:
            mine["answers"] = _answer_questions() if is_real else -1  # simulated ranks get no signal
        mine["layout"] = LAYOUT  # last: whoever reads it finds the rest

    def warn(self, waited: float, missing: Sequence[int]) -> None:
        """Log that this rank has waited, and for whom; ask late ranks for their lines of code. Local; may wait."""
        log("rank %d has waited %.1f s in %s%s", self._rank, waited, self.report(missing).text, self._about)

    def report(self, missing: Sequence[int]) -> Answer:
        """Ask late ranks, on any host, for their lines of code; return the ranks, and a text on them. Local; may wait.

        These are the ranks ``missing``, and those that began fewer calls.

        Returns:
            The late ranks, as far as they are known; this rank's call, with their last calls and present lines.
        """
        if self._inquiry:
            self._inquiry.ask()
        answers = [self._find_late(missing), *(self._inquiry.collect() if self._inquiry else ())]
        late = tuple(sorted({rank for answer in answers for rank in answer.late}))
        told = [answer.text for answer in answers if answer.text]
        # A lost rank explains many late ones, so it must not be among those left out.
        told.sort(key=lambda text: not (_GONE in text or _SILENT in text))
        if rest := len(told[_MOST_TOLD:]):
            told[_MOST_TOLD:] = [f"{rest} more {'host has' if rest == 1 else 'hosts have'} late ranks"]
        call = call_of(self._own)
        return Answer(late, f"{call}: {'; '.join(told)}" if told else call)

    def _find_late(self, missing: Sequence[int]) -> Answer:
        """Ask this host's late ranks by a signal for their lines of code; return them, and a text. Local; may wait.

        It also asks up to four ranks that are in an updater. The text begins with the first that does not return.
        """
        fewer = [rank for rank, slot in zip(self._ranks, self._slots, strict=True) if slot["call"] < self.record.calls]
        late = tuple(sorted({*fewer, *missing}))
        # Without anybody behind, a rank that began the call too holds it up: it is stopped, or in an updater.
        late = late or self._find_away(lambda rank, slot: rank != self._rank and not slot["over"])
        # A late rank may wait for an owner whose thread is in an updater, and that owner may be the one that asks.
        updating = self._find_away(lambda _, slot: bool(slot["updating"]))
        who = [rank for rank in dict.fromkeys((*updating[:1], *late)) if rank in self._ranks]
        texts = self.describe(who)
        if rest := len(who[_MOST_ASKED:]):
            texts.append(f"{rest} more {'rank is' if rest == 1 else 'ranks are'} late")
        return Answer(late, "; ".join(texts))

    def describe(self, ranks: Sequence[int]) -> list[str]:
        """Ask the first four of these ranks on this host for their lines of code; return a text each. May wait."""
        return [self._describe(rank) for rank in list(filter(self._ranks.__contains__, ranks))[:_MOST_ASKED]]

    def give_up(self) -> None:
        """Show that this rank is in no call any more, and send other hosts the late ranks here. Local; may wait."""
        self._own["over"] = 1
        if self._inquiry:
            self._inquiry.give_up()

    @contextmanager
    def on_worker(self, updating: bool = False) -> Iterator[None]:
        """In a with block, show this thread on the board as that of the rank's calls, perhaps in an updater. Local."""
        # The question goes to one thread, and must find the one that is in the call.
        self._own["thread"] = threading.get_native_id()
        if updating:  # else untouched: another thread may be in an updater
            self._own["updating"] = 1
        try:
            yield
        finally:
            if updating:  # before "thread", so that a set flag is about that thread
                self._own["updating"] = 0
            self._own["thread"] = self._own["pid"]

    def _find_away(self, is_meant: Callable[[int, Any], bool]) -> tuple[int, ...]:
        """Ask the first four ranks here with ``is_meant(rank, slot)`` by a signal. Return those outside mpikv's code,
        stopped or ended. Local; may wait.
        """
        asked = [pair for pair in zip(self._ranks, self._slots, strict=True) if is_meant(*pair)][:_MOST_ASKED]
        # Again: a rank that has just given up, or left its updater, may be in the program's code by now.
        return tuple(rank for rank, slot in asked if not _ask_if_waiting(slot) and is_meant(rank, slot))

    def _describe(self, rank: int) -> str:
        """Ask a rank of this host for its line of code; return a text with its last call and that. Local; may wait."""
        slot = self._slots[self._ranks.index(rank)]
        last = f"began {call_of(slot)} last" if slot["call"] else "has begun no collective call yet"
        return f"rank {rank} {last} and {whereabouts(slot)}"

    def gone(self) -> tuple[int, ...]:
        """Return the ranks of this host whose processes have ended."""
        return tuple(rank for rank, slot in zip(self._ranks, self._slots, strict=True) if is_gone(slot))

    def close(self) -> None:
        """Note that this rank has closed, and use a private copy of the shared memory from now on. Local."""
        self._own["closed"] = 1
        self._slots = self._slots.copy()
        self._own = self._slots[self._place]
        # A memory view that is still exported would keep the window from being freed.
        self.record.use(self._slots[self._place :][:1])


def call_of(slot: Any) -> str:
    """Return a slot's last call as "call #3 push(w)", or "create" before the first. Local."""
    if not slot["call"]:
        return "create"
    number = int(slot["call"])
    return f"call #{number} {text_of_note(bytes(slot['labels'][number % LABELS]))}"


@cache
def _answer_questions() -> int:
    """Have SIGURG write the signalled thread's frames to a file, and return its descriptor; do nothing and return -1 if
    the program uses the signal or this is not the main thread. Local; once, later calls return the same.
    """
    # Python allows handlers from the main thread only, and the program's own handler comes first.
    if _is_in_use(_QUESTION) or threading.current_thread() is not threading.main_thread():
        return -1
    answers = os.memfd_create(_ANSWERS)

    def answer(*_: object) -> None:
        """Do nothing: the fault handler answers, unknown to Python."""

    # Python drops this function when the program sets another handler; the finalizer then replaces the answer file.
    weakref.finalize(answer, _answer_no_more, answers)
    signal.signal(_QUESTION, answer)
    # After signal.signal: the fault handler must be the outer one. Frames of other threads are not safe to read.
    faulthandler.register(_QUESTION, file=answers, all_threads=False)
    return answers


def _answer_no_more(answers: int) -> None:
    """Put /dev/null in the place of the answer file, so that ranks which ask notice. Local."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, answers, inheritable=False)
    os.close(nothing)


def _is_in_use(number: int) -> bool:
    """Return whether a signal is handled or ignored, also by code unknown to Python. Local."""
    status = Path("/proc/self/status").read_text()
    return any(int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"Sig(?:Cgt|Ign):\s*(\w+)", status))


def whereabouts(slot: Any) -> str:
    """Ask a slot's process by a signal for its line of code; return "is now at ..." or the like. Local; may wait."""
    pid = int(slot["pid"])
    if is_gone(slot):
        return _GONE
    # It could not answer: the question would wait as long as the process.
    if _state(slot) == "stopped":
        return f"its process {pid} is stopped (SIGSTOP); kill -CONT {pid} continues it"
    lines = _ask(slot)
    if not lines:
        return f"its process {pid} {_SILENT}"
    # The caller's own line says more than a line of a library below it.
    own = [line for line in lines if not line[0].startswith((_PACKAGE, *_LIBRARIES))]
    # The outermost frame is ours, or the line by which mpikv run starts us: no program runs any more.
    if lines[-1][0].startswith(_PACKAGE) or (own == lines[-1:] and lines[-2:-1] and lines[-2][0] == _STARTED):
        fails = any(name == "print_last" for _, _, name in lines)
        return "prints the error that ends it" if fails else "has reached the end of its program"
    outside = [line for line in lines if not line[0].startswith(_PACKAGE)]
    return "is now at {}:{} in {}".format(*(own or outside or lines)[0])


def is_gone(slot: Any) -> bool:
    """Return whether a rank's process has ended. Local."""
    return _state(slot) in ("gone", "dead")


def _ask_if_waiting(slot: Any) -> bool:
    """Ask a process by a signal; return whether it runs, in mpikv's code or without an answer. Local; may wait."""
    files = [file for file, _, _ in _ask(slot)]
    # The package may be installed among the libraries, and calls some itself, as here. So its own frames come first,
    # and then only frames outside of libraries count.
    telling = [file for file in files if file.startswith(_PACKAGE) or not file.startswith(_LIBRARIES)]
    return _state(slot) == "running" and (not telling or telling[0].startswith(_PACKAGE))


def _pid_space() -> int:
    """Return the number of this process's PID namespace: two containers that share memory may use one pid for two."""
    return os.stat("/proc/self/ns/pid").st_ino


def _state(slot: Any) -> str:
    """Return a process's state: ``running``, also if not seen from here, ``stopped``, ``dead`` or ``gone``. Local."""
    pid = int(slot["pid"])
    if (peer := present().peer(pid)) is not None:
        return str(peer.state())
    if slot["space"] != _pid_space():
        return "running"  # as far as this process can see
    with suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")
    return "gone"


def _ask(slot: Any) -> list[tuple[str, str, str]]:
    """Ask a process by a signal for the frames of the thread that makes its mpikv calls. Return (file, line, name) of
    each, innermost first; [] without an answer in half a second. Local; may wait.
    """
    pid, answers = int(slot["pid"]), int(slot["answers"])
    if (peer := present().peer(pid)) is not None:
        return list(peer.frames(int(slot["thread"])))
    if answers < 0 or slot["space"] != _pid_space():
        return []
    with suppress(OSError):
        path = f"/proc/{pid}/fd/{answers}"
        with open(path, errors="replace") as file:
            before = file.seek(0, os.SEEK_END)
            deadline = time.monotonic() + _PATIENCE
            # The fault handler ignores a question during its answer to another thread, so a question is repeated.
            while time.monotonic() < deadline and _ANSWERS in os.readlink(path):
                _signal(pid, int(slot["thread"]))
                time.sleep(0.01)
                file.seek(before)
                if frames := _frames(file.read()):
                    return frames
    return []


def _signal(pid: int, thread: int) -> None:
    """Send SIGURG to one thread of a process; raise OSError if the system cannot, as for one that is gone. Local."""
    try:
        ask = system_function("tgkill")
    except OSError:  # glibc before 2.30
        if thread != pid:
            raise
        os.kill(pid, _QUESTION)  # another thread may take it while this one still answers
        return
    if ask(pid, thread, _QUESTION):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _frames(answers: str) -> list[tuple[str, str, str]]:
    """Return the frames (file, line, name), innermost first, of the first complete answer in a text; [] without one.

    The process writes an answer in pieces, and a busy machine may pause for long between two of them. So only the
    beginning of the next answer shows that one is whole. Several ranks may ask at once: then the text begins in the
    middle of an answer to another rank.
    """
    for text in answers.split("(most recent call first):")[1:-1]:
        if frames := re.findall(r'File "(.*)", line (\d+) in (.*)\n', text):
            return frames
    return []


class Inquiry:
    """Asks the other hosts of a group, and answers for this one. All methods are local."""

    def __init__(self, group: ProcessGroup, report: Callable[[], Answer], call: Callable[[], int]) -> None:
        """Have this rank answer other hosts while it waits, by ``report()``; ``call()`` is its call's number. Local."""
        self._group, self._report, self._call = group, report, call
        hosts = zip(group.hosts, group.ranks_of_hosts, strict=True)
        self._others = [host for host in hosts if group.rank not in host[1]]
        self.number = 0
        self._known, self._found = (-1, float("-inf")), Answer((), "")
        self._heard: dict[int, tuple[float, Answer]] = {}  # of each rank, the last answer and its question's number
        group.witness = self.answer

    def ask(self) -> None:
        """Send each other host a question for its late ranks, to up to four of its ranks; without waiting. Local."""
        self.number += 1
        for _, ranks in self._others:
            self._group.send_notice(str(self.number).encode(), self._asked(ranks), ASKS)

    def _asked(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return up to four of a host's ranks to ask, beginning with another one for each asker."""
        # Each asker begins with another rank: a host is not asked through one late rank alone.
        begin = self._group.rank % len(ranks)
        return (*ranks[begin:], *ranks[:begin])[:_MOST_ASKED]

    def answer(self) -> None:
        """Receive other hosts' questions and send answers; may first ask ranks of this host by a signal. Local."""
        while notice := self._group.receive_notice(ASKS):
            source, number = notice
            self._group.send_notice(json.dumps([int(number), *self.look()]).encode(), [source], ANSWERS)

    def give_up(self) -> None:
        """Find this host's late ranks, and send them to all ranks of other hosts now, once, as an answer that stays
        valid for all later questions. Local; may wait.
        """
        answer = json.dumps([math.inf, *self.look()]).encode()
        for _, ranks in self._others:
            self._group.send_notice(answer, ranks, ANSWERS)

    def look(self) -> Answer:
        """Return this host's late ranks, asked by signals, and a text. Within a second in one call, ask nobody and
        return the same again. Local; may wait.
        """
        now, call, (before, when) = present().now, self._call(), self._known
        # An answer from an earlier call would say that nobody is late: a late question may have been answered there.
        if call != before or now() - when > _FRESH:
            self._found, self._known = self._report(), (call, now())
        return self._found

    def collect(self) -> list[Answer]:
        """After :meth:`ask`, wait a second at most for the answers, and answer other hosts' questions meanwhile. Return
        an answer for each other host; that of a silent one says so. Local.
        """
        here = present()
        limit = here.now() + _HOST_PATIENCE
        while True:
            # Two hosts may ask each other at the same time: without this, both would wait out the patience.
            self.answer()
            while notice := self._group.receive_notice(ANSWERS):
                number, late, text = json.loads(notice[1])
                self._heard[notice[0]] = number, Answer(tuple(late), text)
            heard = {rank: answer for rank, (number, answer) in self._heard.items() if number >= self.number}
            firsts = [(host, next((heard[rank] for rank in host[1] if rank in heard), None)) for host in self._others]
            if all(answer for _, answer in firsts) or here.now() >= limit:
                return [answer or _answer_for(name, sorted(self._asked(ranks))) for (name, ranks), answer in firsts]
            here.nap(0.005, limit)


def _answer_for(name: str, ranks: Sequence[int]) -> Answer:
    """Return the answer to put for a host that sent none: its asked ranks, and a text. Local."""
    who = f"ranks {list(ranks)} are" if len(ranks) > 1 else f"rank {ranks[0]} is"
    return Answer(tuple(ranks), f"host {name} {_SILENT}: its {who} late or gone, or the network is cut")
