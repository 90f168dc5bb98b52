"""A scheduler of tasks. Exactly one task runs; a seed draws the next one, and time passes only when all wait.

A task is a thread that yields its turn at *scheduling points* alone: a nap, a sleep, a taken lock, an operation of the
message-passing library. There the scheduler draws the next task from those that can run. A napping task can run after
another task has changed the awaited state, or at its deadline. If no task can run, the clock jumps to the earliest
deadline or event. So a stall of a minute takes no time, and equal seeds give equal orders of all events.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

from .calls import PlannedCalls
from .errors import Deadlock, Hung
from .task import Task
from .warned import Warned

__all__ = ["Scheduler"]

# Added to the next moment, so that its events are due.
_INSTANT = 1e-9


class Scheduler:
    """Gives tasks their turns."""

    patience = 20.0
    """Seconds of the real clock that a task may compute without a scheduling point."""
    longest = 1e6
    """Seconds of the simulated clock for a run: polling ranks would poll for ever."""

    def __init__(self, seed: int, ranks: int, hosts: int, at_point: Callable[[Task], None] | None = None) -> None:
        """The task at a scheduling point calls ``at_point`` each time."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.candidates: list[Task] = []
        """Tasks that may be able to run; the next one is drawn from them."""
        self.waiting = _queues(hosts)
        """For each host, tasks that wait for a change on it. Changes on other hosts reach it by messages alone."""
        self.expecting = _queues(ranks)
        """For each rank, tasks that wait for a message or the end of an operation."""
        self.asleep: list[Task] = []
        """Tasks that wait for a moment."""
        self.choosing = False
        """Whether the scheduler tests conditions of waiting tasks; a condition must not wait."""
        self.ended: dict[str, Task] = {}
        """Ended tasks, the last of each name."""
        self.full: set[str] = set()
        """The hosts whose disk is full."""
        self.planned: PlannedCalls | None = None
        """The planned calls of stores."""
        self._at_point = at_point
        self._tasks: list[Task] = []
        self._parked: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._turns = 0
        self._failure: BaseException | None = None
        self._over = threading.Event()
        # The installed state of warnings, and the caller's, restored at the end.
        self._inside = self._outside = Warned()
        self._given_up = False

    def run(self) -> None:
        """Run all tasks to their ends.

        Raises:
            Deadlock: the remaining tasks wait for each other for ever.
            Hung: a task computes for long without a scheduling point.
        """
        if self._tasks:
            self._choose().take_turn()
            try:
                self._watch()
            except BaseException:  # Ctrl-C
                self._given_up = True
                raise
            finally:
                self._put_back()
        if self._failure is not None:
            raise self._failure

    def changed(self, *hosts: int) -> None:
        """Wake tasks that wait for a change on some hosts."""
        for host in hosts:
            self.recall(self.waiting[host])

    def informed(self, ranks: Iterable[int]) -> None:
        """Wake tasks that wait for the message-passing library on some ranks."""
        for rank in ranks:
            self.recall(self.expecting[rank])

    def recall(self, queue: list[Task]) -> None:
        """Let the tasks of a queue test whether they can run."""
        if queue:
            self.candidates += queue
            queue.clear()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Call ``act`` at a moment."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, act))

    def add(self, task: Task) -> None:
        """Add a task to the candidates for turns."""
        self._tasks.append(task)
        self.candidates.append(task)

    def choose_after(self, task: Task, queue: list[Task]) -> Task:
        """Return the next task to run, after one at a scheduling point; that one waits in ``queue`` from now on.

        A task planned to raise at this point gets the turn again.
        """
        if self._given_up:
            threading.Event().wait()  # for ever: a rank's code must not run beside the process's next work
        self._turns += 1
        task.queue = queue
        queue.append(task)
        if self._at_point is not None and not task.ending:
            try:
                self._at_point(task)
            except BaseException:
                self._remove([task])
                raise
        return self._choose()

    def enter(self, task: Task) -> None:
        """Install the state of a task's process at the begin of its turn."""
        inside = task.of.warned
        if inside is not self._inside and not self._given_up:
            self._inside.pass_to(inside)
            self._inside = inside

    def _put_back(self) -> None:
        if self._inside is not self._outside:
            self._inside.pass_to(self._outside)
            self._inside = self._outside

    def leave(self, task: Task) -> None:
        """End a task; called in its thread."""
        if self._given_up:
            return
        self._turns += 1
        self.ended[task.name] = task
        if task in self._tasks:
            self._tasks.remove(task)
        self.changed(task.site)
        self._end_rest()
        if self._tasks:
            self._choose().take_turn()
        else:
            self._over.set()

    def _end_rest(self) -> None:
        """End the threads of ended ranks first, then the killed ranks: no program is left for them."""
        if not self._tasks:
            self._tasks, self._parked = self._parked, []
            self._end(self._tasks)
        elif not any(task.leads for task in self._tasks):
            self._end(self._tasks)  # like daemon threads at the end of a process

    def _end(self, tasks: Sequence[Task]) -> None:
        """Make tasks without the turn unwind, one after the other."""
        self._remove(tasks)
        for task in tasks:
            task.ending = True
        self.candidates += tasks

    def _remove(self, tasks: Sequence[Task]) -> None:
        """Remove tasks from the queues of waiting tasks."""
        for task in tasks:
            for queue in (self.candidates, task.queue):
                if task in queue:
                    queue.remove(task)

    def park(self, rank: int) -> None:
        """Take a rank's turns away, as if its process were killed. Its code runs no more; its threads unwind when all
        others have ended.
        """
        dead = [task for task in self._tasks if task.rank == rank]
        self._tasks = [task for task in self._tasks if task.rank != rank]
        self._remove(dead)
        self._parked += dead
        self._end_rest()

    def delay(self, rank: int, seconds: float) -> None:
        """Let a rank do nothing for some seconds."""
        late = [task for task in self._tasks if task.rank == rank]
        self._remove(late)
        for task in late:
            # A longer sleep keeps its end.
            task.due = max(self.now + seconds, task.due if task.queue is self.asleep else 0.0)
            task.queue = self.asleep
        self.asleep += late

    def tasks_of(self, rank: int) -> list[Task]:
        """Return the tasks of a rank that have not ended, its program first."""
        tasks = [task for task in self._tasks if task.rank == rank]
        return sorted(tasks, key=lambda task: not task.leads)

    def _choose(self) -> Task:
        self.choosing = True
        try:
            while (chosen := self._draw()) is None:
                self._forward()
            return chosen
        finally:
            self.choosing = False

    def _draw(self) -> Task | None:
        """Draw one of the runnable tasks, with equal chances; None if there is none."""
        candidates, draw, now = self.candidates, self.random.random, self.now
        while candidates:
            place = int(draw() * len(candidates))
            task, last = candidates[place], candidates.pop()
            if task is not last:
                candidates[place] = last
            if task.due <= now or task.ending or task.is_ready():
                return task
            task.queue.append(task)
        return None

    def _forward(self) -> None:
        """Move the clock to the next event."""
        moment = min([task.due for task in self._tasks], default=math.inf)
        if self._events and self._events[0][0] <= moment:
            self.now, _, act = heapq.heappop(self._events)
            act()
        elif moment > self.longest:
            who = ", ".join(sorted(task.name for task in self._tasks))
            do = "wait for each other, without a deadline" if math.isinf(moment) else "look and sleep in turn, for ever"
            self._failure = Deadlock(f"all tasks {do}: {who}")
            self._end(self._tasks)
        else:
            self.now = moment + _INSTANT
            due = [task for task in self._tasks if task.due <= self.now]
            self._remove(due)
            self.candidates += due

    def _watch(self) -> None:
        """Wait until all tasks have ended, or one takes too long to reach a scheduling point."""
        turns = -1
        while not self._over.wait(self.patience):
            if turns == self._turns:
                self._failure = Hung(self._describe_running())
                self._given_up = True
                return
            turns = self._turns

    def _describe_running(self) -> str:
        text = f"a rank computes for {self.patience:g} s without a scheduling point, and no other can go on"
        for task in self._tasks:
            stack = task.stack()
            if stack and stack[-1].name not in ("_pass", "_begin"):
                text += f"\n{task.name} is in\n{''.join(traceback.format_list(stack[-4:]))}"
        return text


def _queues(count: int) -> list[list[Task]]:
    return [[] for _ in range(count)]
