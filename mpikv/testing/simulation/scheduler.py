"""Tasks of which exactly one runs: who goes on is drawn from a seed, and time passes only when all of them wait.

A task is a thread that gives up its turn at *scheduling points* alone: a nap, a sleep, a lock that another task has, an
operation of the message-passing library. There the scheduler draws the next task from those that can go on. A task that
naps can go on when another has changed what it waits for, or when its deadline has come; when no task can, the clock
jumps to the earliest deadline or event. So a stall of a minute takes no time, and the same seed gives the same order of
everything.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from ... import runtime
from .locks import Condition, Event, Lock

__all__ = ["Deadlock", "Ended", "Hung", "Scheduler", "Task"]

# The last scheduling points of a task that a failure shows.
_SHOWN = 8
# Seconds of the real clock in which a task may compute without a scheduling point.
_PATIENCE = 20.0
# Added to a moment that all wait for, so that what was to happen then is due.
_INSTANT = 1e-9
# Modules whose frames say nothing of what a task was about.
_INNER = ("mpikv.testing.simulation.", "mpikv.waiting", "mpikv.runtime", "mpikv.transports.requests")


class Ended(BaseException):
    """Raised in a task that has to end. Programs must let it pass."""


class Deadlock(RuntimeError):
    """All tasks wait for each other, and none of them has a deadline."""


class Hung(RuntimeError):
    """A task computes for long without a scheduling point, so that no other can go on."""


class Task:
    """A thread of a simulated rank, and the :class:`~mpikv.runtime.Runtime` of that thread."""

    polls = 1

    @property
    def process(self) -> int:
        return _process_of(self.rank)

    def peer(self, process: int) -> _Peer | None:
        return _Peer(self.scheduler, -process - 1) if process < 0 else None

    def __init__(
        self,
        scheduler: Scheduler,
        rank: int,
        run: Callable[[], None],
        name: str,
        world: Any,
        owned: dict[str, list[Any]],
    ) -> None:
        """``owned`` is what belongs to the rank."""
        self.scheduler, self.rank, self.name, self.world, self.owned = scheduler, rank, name, world, owned
        self.host = f"host {world.library.hosts[rank]}"
        self.alive = True
        self.ending = False
        self.points: deque[tuple[float, CodeType, int]] = deque(maxlen=_SHOWN)
        self._run = run
        # Held while another task has the turn.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread = threading.Thread(target=self._begin, name=name, daemon=True)
        # What it waits for: a change after the number that it has seen, by which this is true; or this moment.
        self._seen, self._ready, self._until = -1, None, 0.0  # type: int, Callable[[], bool] | None, float

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # --- As threading.Thread

    def start(self) -> None:
        """Let the scheduler choose this task, too."""
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
        """The same as the system has it."""
        return self._thread.native_id

    def _begin(self) -> None:
        self.await_turn()
        runtime.enter(self)
        try:
            self._check()
            self._run()
        except Ended:
            pass
        finally:
            self.alive = False
            self.scheduler.leave(self)

    # --- As mpikv.runtime.Runtime

    def now(self) -> float:
        return self.scheduler.now

    def give_way(self) -> None:
        self.scheduler.changed()
        self._pass(-1, None, self.scheduler.now)

    def sleep(self, seconds: float) -> None:
        self._pass(sys.maxsize, None, self.scheduler.now + seconds)

    def nap(self, seconds: float, until: float = math.inf, ready: Callable[[], bool] | None = None) -> None:
        self._pass(self.scheduler.changes, ready, until)

    def thread(self, run: Callable[[], None], name: str) -> Any:
        return Task(self.scheduler, self.rank, run, f"{self.name} {name}", self.world, self.owned)

    def lock(self) -> Lock:
        return Lock()

    def condition(self) -> Condition:
        return Condition()

    def event(self) -> Event:
        return Event()

    # --- Turns

    def _pass(self, seen: int, ready: Callable[[], bool] | None, until: float) -> None:
        """Pass the turn on; return when it comes back."""
        if self.scheduler.choosing:
            raise RuntimeError("a condition that is looked at for another task would wait")
        self._check()
        self._seen, self._ready, self._until = seen, ready, until
        self._note_point()
        self.scheduler.pass_on(self)
        self._seen, self._ready = -1, None
        self._check()

    def _check(self) -> None:
        if self.ending:
            raise Ended

    def take_turn(self) -> None:
        """Let it run, from another task."""
        self._turn.release()

    def await_turn(self) -> None:
        """Wait until it may run."""
        self._turn.acquire()

    def can_go_on(self, changes: int, now: float) -> bool:
        """Return whether it has something to do at a turn."""
        if self._until <= now or self.ending:
            return True
        if self._seen >= changes:
            return False
        # Asked in the thread of another task, so that those who wait in vain need no turn.
        if self._ready is not None and not _may_be_true(self._ready):
            self._seen = changes
            return False
        return True

    @property
    def due(self) -> float:
        """When it goes on at the latest."""
        return self._until

    def delay(self, until: float) -> None:
        """Let it do nothing before that moment."""
        self._seen, self._ready, self._until = sys.maxsize, None, until

    # --- What it did last

    def _note_point(self) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INNER):
            frame = frame.f_back
        place = frame.f_code, frame.f_lineno
        if not self.points or self.points[-1][1:] != place:  # a wait comes here again and again
            self.points.append((self.scheduler.now, *place))

    def story(self) -> str:
        """Return its last scheduling points, a line each."""
        lines = [
            f"  {moment:.6f} s  {Path(code.co_filename).name}:{line} in {code.co_name}"
            for moment, code, line in self.points
        ]
        return "\n".join([f"{self.name}:", *lines])


class _Peer:
    """What ranks see of another one. A :class:`~mpikv.runtime.Peer`."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler, self._rank = scheduler, rank

    def state(self) -> str:
        return "running" if self._scheduler.tasks_of(self._rank) else "gone"

    def frames(self, thread: int) -> list[tuple[str, str, str]]:
        tasks = self._scheduler.tasks_of(self._rank)
        task = next((task for task in tasks if task.number == thread), tasks[0] if tasks else None)
        frame = sys._current_frames().get(task.ident or 0) if task is not None else None
        return [(each.filename, str(each.lineno), each.name) for each in reversed(traceback.extract_stack(frame))]


def _process_of(rank: int) -> int:
    # No process has such a number, so that no signal can reach one.
    return -rank - 1


def _may_be_true(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except Exception:
        return True  # the task itself is to meet the error


class Scheduler:
    """Gives tasks their turns."""

    def __init__(self, seed: int, at_point: Callable[[Task], None] = lambda task: None) -> None:
        """``at_point`` is called at each scheduling point, by the task that has come to it."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.changes = 0
        """How often anything has changed for which a task may wait."""
        self.choosing = False
        """Whether conditions of waiting tasks are looked at, which must not wait themselves."""
        self.stories: dict[str, str] = {}
        """What tasks that have ended did last, by their names."""
        self._at_point = at_point
        self._tasks: list[Task] = []
        self._parked: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._turns = 0
        self._failure: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Run all tasks to their ends.

        Raises:
            Deadlock: those that are left wait for each other for ever.
            Hung: one computes for long without a scheduling point.
        """
        if self._tasks:
            self._choose().take_turn()
            self._watch()
        if self._failure is not None:
            raise self._failure

    def changed(self) -> None:
        """Say that something has changed for which a task may wait."""
        self.changes += 1

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Have something done at a moment."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, act))

    def add(self, task: Task) -> None:
        """Let a task have turns."""
        self._tasks.append(task)
        self.changed()

    def pass_on(self, task: Task) -> None:
        """Give the turn of a task to one that can go on, and return when it comes back."""
        self._turns += 1
        if not task.ending:
            self._at_point(task)
        chosen = self._choose()
        if chosen is not task:
            chosen.take_turn()
            task.await_turn()

    def leave(self, task: Task) -> None:
        """End a task, from its thread."""
        self._turns += 1
        self.stories[task.name] = task.story()
        if task in self._tasks:
            self._tasks.remove(task)
        self.changed()
        if not self._tasks:
            self._unpark()
        if self._tasks:
            self._choose().take_turn()
        else:
            self._over.set()

    def park(self, rank: int) -> None:
        """Take the turns of a rank away, as if its process were killed: none of its code runs any more, but to unwind
        when all others have ended.
        """
        dead = [task for task in self._tasks if task.rank == rank]
        self._tasks = [task for task in self._tasks if task.rank != rank]
        self._parked += dead
        if not self._tasks:
            self._unpark()

    def delay(self, rank: int, seconds: float) -> None:
        """Let a rank do nothing for so long."""
        for task in self._tasks:
            if task.rank == rank:
                task.delay(self.now + seconds)

    def tasks_of(self, rank: int) -> list[Task]:
        """Return the tasks of a rank that have not ended, its program's first."""
        tasks = [task for task in self._tasks if task.rank == rank]
        return sorted(tasks, key=lambda task: task.name != f"rank {rank}")

    def _unpark(self) -> None:
        self._tasks, self._parked = self._parked, []
        for task in self._tasks:
            task.ending = True

    def _choose(self) -> Task:
        self.choosing = True
        try:
            while (chosen := self._draw()) is None:
                self._forward()
            return chosen
        finally:
            self.choosing = False

    def _draw(self) -> Task | None:
        """Return one of the tasks that can go on, each as likely as the others; None if there is none."""
        tasks, draw = self._tasks, self.random.random
        # Those that cannot are moved to the front as they are drawn.
        for front in range(len(tasks)):
            place = front + int(draw() * (len(tasks) - front))
            task = tasks[place]
            if task.can_go_on(self.changes, self.now):
                return task
            tasks[place], tasks[front] = tasks[front], task
        return None

    def _forward(self) -> None:
        """Move the clock to where something happens next."""
        moment = min((task.due for task in self._tasks), default=math.inf)
        if self._events and self._events[0][0] <= moment:
            self.now, _, act = heapq.heappop(self._events)
            act()
        elif math.isinf(moment):
            who = ", ".join(sorted(task.name for task in self._tasks))
            self._failure = Deadlock(f"all tasks wait for each other, without a deadline: {who}")
            for task in self._tasks:
                task.ending = True
        else:
            self.now = moment + _INSTANT

    def _watch(self) -> None:
        """Wait until all tasks have ended, or one does not come to a scheduling point."""
        turns = -1
        while not self._over.wait(_PATIENCE):
            if turns == self._turns:
                self._failure = Hung(self._describe_running())
                return
            turns = self._turns

    def _describe_running(self) -> str:
        frames = sys._current_frames()
        text = f"a rank computes for {_PATIENCE:g} s without a scheduling point, and no other can go on"
        for task in self._tasks:
            stack = traceback.format_stack(frames[task.ident]) if task.ident in frames else []
            if stack and "in await_turn" not in stack[-1]:
                text += f"\n{task.name} is in\n{''.join(stack[-4:])}"
        return text
