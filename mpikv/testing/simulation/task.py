"""A task: a thread of a simulated rank, and its runtime."""

from __future__ import annotations

import math
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from ...cluster import runtime
from ...cluster.runtime import OfMessages
from .errors import Ended
from .locks import Condition, Event, Lock
from .warned import Warned

if TYPE_CHECKING:
    from .scheduler import Scheduler

__all__ = ["Process", "Task"]

_FOLDER = str(Path(__file__).parent)
# Scheduling points of a task shown after a failure.
_SHOWN = 8
# Fruitless tests of a task before it yields its turn.
_LOOKS = 16
# Modules whose frames do not show what a task was doing.
_INNER = (
    "mpikv.testing.simulation.",
    "mpikv.cluster.waiting",
    "mpikv.cluster.runtime",
    "mpikv.transports.requests",
    "contextlib",
)


@dataclass
class Process:
    """The common state of one rank's tasks."""

    rank: int
    world: Any
    owned: dict[str, list[Any]] = field(default_factory=dict)
    warned: Warned = field(default_factory=Warned)
    busy: float = 0.0
    """Seconds of its main thread on a core."""
    signs: list[int] = field(default_factory=lambda: [0] * 4)


class Task(runtime.Runtime):
    """A thread of a simulated rank, and the runtime of that thread."""

    # No polling before a nap: the scheduler tests the condition without giving a turn.
    polls = 0

    def __init__(
        self, scheduler: Scheduler, of: Process, run: Callable[[], None], name: str, leads: bool = False
    ) -> None:
        """``leads`` marks the rank's program, as opposed to a thread it has started."""
        self.scheduler, self.of, self.name, self.leads = scheduler, of, name, leads
        self.rank, self.world, self.owned = of.rank, of.world, of.owned
        self.site = of.world.library.hosts[of.rank]
        self.host = self.machine = f"node{self.site}"
        self._waiting, self._expecting = scheduler.waiting[self.site], scheduler.expecting[self.rank]
        self.alive = True
        self.ending = False
        self._points: deque[tuple[float, CodeType, int]] = deque(maxlen=_SHOWN)
        self._run = run
        # Held while another task has the turn.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread = threading.Thread(target=self._begin, name=name, daemon=True)
        # The task waits for this condition, tested when its queue is woken, or for the moment ``due``.
        self._ready: Callable[[], bool] | None = None
        self._found = False
        self.queue: list[Task] = []
        self.due = 0.0
        # Number and begin of fruitless tests in a row.
        self._looks, self._looks_since = 0, 0.0

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # --- As threading.Thread

    def start(self) -> None:
        """Add this task to the scheduler."""
        self.scheduler.add(self)
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the task has not ended."""
        return self.alive

    @property
    def ident(self) -> int | None:
        """The number of its thread, as Python has it."""
        return self._thread.ident

    @property
    def number(self) -> int | None:
        """The system's number of the same thread."""
        return self._thread.native_id

    def _begin(self) -> None:
        self._turn.acquire()
        runtime.here.runtime = self
        self.scheduler.enter(self)
        try:
            if not self.ending:
                self._run()
        except Ended:
            pass
        finally:
            self.alive = False
            self.scheduler.leave(self)

    def abandon(self) -> None:
        """End the task, in its thread, and never return."""
        self.alive = False
        self.scheduler.leave(self)
        threading.Event().wait()

    # --- As mpikv.cluster.runtime.Runtime

    @property
    def process(self) -> int:
        return _process_of(self.rank)

    def peer(self, process: int) -> _Peer | None:
        return _Peer(self.scheduler, -process - 1) if process < 0 else None

    def now(self) -> float:
        return self.scheduler.now

    def give_way(self) -> None:
        self.changed()
        self._pass(self.scheduler.candidates, None, self.scheduler.now)

    def busy(self) -> int:
        return int(1e9 * self.of.busy)

    def signs(self) -> list[int]:
        return list(self.of.signs)

    def sleep(self, seconds: float) -> None:
        self.changed()
        self._pass(self.scheduler.asleep, None, self.scheduler.now + seconds)

    def nap(self, seconds: float, until: float = math.inf, ready: Callable[[], bool] | None = None) -> bool:
        # A task that polls without a condition has changed nothing; two of them would wake each other for ever.
        if ready is not None:
            self.changed()
        of_messages = type(ready) is OfMessages
        return self._pass(self._expecting if of_messages else self._waiting, ready, until)

    def wait_in(self, queue: list[Task], until: float, ready: Callable[[], bool]) -> None:
        """Return when ``ready()`` may be true, after the queue was woken, or at the time ``until``."""
        self.changed()
        self._pass(queue, ready, until)

    def thread(self, run: Callable[[], None], name: str) -> Any:
        return Task(self.scheduler, self.of, run, f"{self.name} {name}")

    def lock(self) -> Lock:
        return Lock()

    def condition(self) -> Condition:
        return Condition()

    def event(self) -> Event:
        return Event()

    def poll(self) -> None:
        """Count a fruitless test. A task that does nothing else waits for a message, or for a while: the longer, the
        longer it has tested.
        """
        if self.scheduler.choosing:
            return
        now, looks = self.scheduler.now, self._looks + 1
        if looks == 1:
            self._looks_since = now
        elif looks > _LOOKS:
            self.changed()
            self._pass(self._expecting, None, now + max(1e-6, 0.01 * (now - self._looks_since)))
        self._looks = looks

    # --- Turns

    def _pass(self, queue: list[Task], ready: Callable[[], bool] | None, until: float) -> bool:
        """Yield the turn, and wait in a queue; return, at the next turn, whether the condition is true."""
        scheduler = self.scheduler
        if scheduler.choosing:
            raise RuntimeError("a condition that is looked at for another task would wait")
        if self.ending:
            raise Ended
        self._ready, self._found, self.due, self._looks = ready, False, until, 0
        self._note_point()
        chosen = scheduler.choose_after(self, queue)
        if chosen is not self:
            chosen.take_turn()
            self._turn.acquire()
            scheduler.enter(self)
        if self.ending:
            raise self._ended()
        return self._found

    def _ended(self) -> Ended:
        runtime.here.runtime = cast(Any, _Gone(self))
        return Ended()

    def take_turn(self) -> None:
        """Let this task run; called in another task's thread."""
        self._turn.release()

    def changed(self) -> None:
        """Wake tasks that wait for a change on this host."""
        self.scheduler.recall(self._waiting)

    def is_ready(self) -> bool:
        """Return whether the task needs a turn after a change."""
        # Tested in another task's thread, so that fruitless waits cost no turn.
        try:
            self._found = self._ready is not None and self._ready()
        except Exception:
            return True  # the task itself must see the exception
        return self._found or self._ready is None

    # --- What it did last

    def _note_point(self) -> None:
        frame = sys._getframe(2)
        while _is_inner[frame.f_globals.get("__name__", "")] and frame.f_back is not None:
            frame = frame.f_back
        # Not the line number: finding it would take longer than the rest of this method.
        points, code, instruction = self._points, frame.f_code, frame.f_lasti
        # A wait comes to the same point again and again: keep it once.
        if not points or points[-1][1] is not code or points[-1][2] != instruction:
            points.append((self.scheduler.now, code, instruction))

    def story(self) -> str:
        """Return its last scheduling points, a line each."""
        lines = [
            f"  {moment:.6f} s  {Path(code.co_filename).name}:{_line_of(code, instruction)} in {code.co_name}"
            for moment, code, instruction in self._points
        ]
        return "\n".join([f"{self.name}:", *lines])

    def stack(self) -> traceback.StackSummary:
        """Return its current stack, the innermost frame last."""
        frame = sys._current_frames().get(self.ident or 0)
        return traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()


class _Gone:
    """The runtime of a task that must end: every use of its system raises Ended again."""

    # After so many raised in vain, the program catches Ended for ever.
    _most = 1000

    def __init__(self, task: Task) -> None:
        self._task, self._asked = task, 0
        self.process = task.process

    def __getattr__(self, name: str) -> Any:
        self._asked += 1
        if self._asked == self._most:
            self._task.abandon()
        raise Ended


class _Peer:
    """Other ranks' view of a rank."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler, self._rank = scheduler, rank

    def state(self) -> str:
        """Return ``running`` or ``gone``."""
        return "running" if self._scheduler.tasks_of(self._rank) else "gone"

    def frames(self, thread: int) -> list[tuple[str, str, str]]:
        """Return file, line and function of each frame of a thread, the innermost first."""
        tasks = self._scheduler.tasks_of(self._rank)
        task = next((task for task in tasks if task.number == thread), tasks[0] if tasks else None)
        stack: Iterator[traceback.FrameSummary] = reversed(task.stack() if task is not None else [])
        # Show a sleeping rank in its own code, not in the simulation's.
        called = dropwhile(lambda each: each.filename.startswith(_FOLDER), stack)
        return [(each.filename, str(each.lineno), each.name) for each in called]


def _process_of(rank: int) -> int:
    # Negative: no process has this number, so no signal can reach one.
    return -rank - 1


def _line_of(code: CodeType, instruction: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= instruction < end), None)


class _IsInner(dict[str, bool]):
    """For each module, whether it is an inner one."""

    def __missing__(self, module: str) -> bool:
        inner = self[module] = module.startswith(_INNER)
        return inner


_is_inner = _IsInner()
