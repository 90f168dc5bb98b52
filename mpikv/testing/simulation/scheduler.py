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
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

from .calls import PlannedCalls
from .errors import Deadlock, Hung
from .task import Task
from .warned import Warned

__all__ = ["Scheduler"]

# Added to a moment that all wait for, so that what was to happen then is due.
_INSTANT = 1e-9


class Scheduler:
    """Gives tasks their turns."""

    patience = 20.0
    """Seconds of the real clock in which a task may compute without a scheduling point."""
    longest = 1e6
    """Seconds of the simulated clock in which a run must end: ranks that poll would poll for ever."""

    def __init__(self, seed: int, ranks: int, hosts: int, at_point: Callable[[Task], None] | None = None) -> None:
        """``at_point`` is called at each scheduling point, by the task that has come to it."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.candidates: list[Task] = []
        """Tasks that may be able to go on, of which the next is drawn."""
        self.waiting = _queues(hosts)
        """Those that cannot before anything changes on their host, for each host: of others it sees messages alone."""
        self.expecting = _queues(ranks)
        """Those that cannot before a message comes, or an operation is complete, for each rank."""
        self.asleep: list[Task] = []
        """Those that cannot before a moment comes."""
        self.choosing = False
        """Whether conditions of waiting tasks are looked at, which must not wait themselves."""
        self.ended: dict[str, Task] = {}
        """Tasks that have ended, the last of each name."""
        self.full: set[str] = set()
        """The hosts whose disk is full."""
        self.planned: PlannedCalls | None = None
        """What is planned for the calls of stores."""
        self._at_point = at_point
        self._tasks: list[Task] = []
        self._parked: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._turns = 0
        self._failure: BaseException | None = None
        self._over = threading.Event()
        # Whose state of warnings is in place; that of the caller is put back.
        self._inside = self._outside = Warned()
        self._given_up = False

    def run(self) -> None:
        """Run all tasks to their ends.

        Raises:
            Deadlock: those that are left wait for each other for ever.
            Hung: one computes for long without a scheduling point.
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
        """Say that something has changed on some hosts for which a task may wait."""
        for host in hosts:
            self.recall(self.waiting[host])

    def informed(self, ranks: Iterable[int]) -> None:
        """Say that the message-passing library has something for some ranks."""
        for rank in ranks:
            self.recall(self.expecting[rank])

    def recall(self, queue: list[Task]) -> None:
        """Let the tasks of a queue see whether they can go on."""
        if queue:
            self.candidates += queue
            queue.clear()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Have something done at a moment."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, act))

    def add(self, task: Task) -> None:
        """Let a task have turns."""
        self._tasks.append(task)
        self.candidates.append(task)

    def choose_after(self, task: Task, queue: list[Task]) -> Task:
        """Return the task whose turn it is after one that is at a scheduling point, and waits in a queue from now on.

        It has the turn again where its plan is to raise at this point.
        """
        if self._given_up:
            threading.Event().wait()  # for ever: none of a rank's code may run beside what comes next in the process
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
        """Put in place what a task's process has of its own, now that it is its turn."""
        inside = task.of.warned
        if inside is not self._inside and not self._given_up:
            self._inside.pass_to(inside)
            self._inside = inside

    def _put_back(self) -> None:
        if self._inside is not self._outside:
            self._inside.pass_to(self._outside)
            self._inside = self._outside

    def leave(self, task: Task) -> None:
        """End a task, from its thread."""
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
        """End what no program is left for: the threads of ranks that ended, then the ranks that were killed."""
        if not self._tasks:
            self._tasks, self._parked = self._parked, []
            self._end(self._tasks)
        elif not any(task.leads for task in self._tasks):
            self._end(self._tasks)  # as the daemon threads of a process that ends

    def _end(self, tasks: Sequence[Task]) -> None:
        """Have tasks, none of which has the turn, unwind at their next one."""
        self._remove(tasks)
        for task in tasks:
            task.ending = True
        self.candidates += tasks

    def _remove(self, tasks: Sequence[Task]) -> None:
        """Take tasks out of the lists of those that wait for a turn."""
        for task in tasks:
            for queue in (self.candidates, task.queue):
                if task in queue:
                    queue.remove(task)

    def park(self, rank: int) -> None:
        """Take the turns of a rank away, as if its process were killed: none of its code runs any more, but to unwind
        when all others have ended.
        """
        dead = [task for task in self._tasks if task.rank == rank]
        self._tasks = [task for task in self._tasks if task.rank != rank]
        self._remove(dead)
        self._parked += dead
        self._end_rest()

    def delay(self, rank: int, seconds: float) -> None:
        """Let a rank do nothing for so long."""
        late = [task for task in self._tasks if task.rank == rank]
        self._remove(late)
        for task in late:
            # A sleep that is longer goes on.
            task.due = max(self.now + seconds, task.due if task.queue is self.asleep else 0.0)
            task.queue = self.asleep
        self.asleep += late

    def tasks_of(self, rank: int) -> list[Task]:
        """Return the tasks of a rank that have not ended, its program's first."""
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
        """Return one of the tasks that can go on, each as likely as the others; None if there is none."""
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
        """Move the clock to where something happens next."""
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
        """Wait until all tasks have ended, or one does not come to a scheduling point."""
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
