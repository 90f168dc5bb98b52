"""The collective calls of a loop of steps: restore at its begin, and commits as often as 2 % of the time allows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.trees import decode, encode
from ..cluster.agreement import Agreement
from ..cluster.calls import Call, PreparedCall
from ..cluster.environment import launch_of
from ..cluster.runtime import owned, present
from ..engine.alltoallv import gather
from ..engine.exchange import Exchange
from ..errors import ConfigError
from ..protocols import Array
from ..verbs.comparison import text_call
from .contents import Contents, find_difference
from .folder import Start, read_start
from .slots import Slots
from .state import ObjectState

_SHARE = 0.02
"""The most that commits may take of the time. A death then costs the time of some 50 commits, made again."""


class Restored(NamedTuple):
    """How a loop of steps went on after a death."""

    step: int
    """The first step of the loop; 0 if there was no commit yet."""
    attempt: int
    """How often ``mpikv run`` has restarted the ranks; 0 after a start by hand."""
    again: int
    """How many steps had begun and are made again. What they print, and write to files, comes twice."""
    why: str
    """Why the ranks were restarted, in the words of ``mpikv run``."""


class Commits:
    """Restores one loop of a store, and makes its commits."""

    def __init__(
        self, exchange: Exchange, agreement: Agreement, folder: Path, states: Mapping[str, ObjectState], timeout: float
    ) -> None:
        """``timeout``: the seconds that other ranks wait for this one."""
        self._agreement, self._control, self._timeout = agreement, exchange.transport.control, timeout
        self._contents, self._states = Contents(exchange), states
        # Every rank of a launch has files of its own, whatever stores it is in.
        loops, world = owned("loops of steps"), present().world
        loops.append(None)
        self._slots = Slots(folder, len(loops), (world or launch_of() or self._control).rank)
        self._layout, self._epoch, self._interval, self._made, self._seconds, self._began = b"", 0, 1, 0, 0.0, 0.0

    def statistics(self) -> dict[str, Any]:
        """Return the number of commits, the seconds they took, and the present number of steps between two. Local."""
        return {"made": self._made, "seconds": self._seconds, "interval": self._interval}

    def run(self, collective: Callable[..., Any], step: int, total: int) -> Iterator[int]:
        """Yield the steps from ``step`` on; ``collective`` makes a call of the store. Collective at commits."""
        note, since, self._began = self._slots.map_note(), 0, present().now()
        began = self._began
        while step < total:
            if note[0] <= step:
                note[0] = step + 1
            yield step
            step, since = step + 1, since + 1
            if since >= self._interval or step == total:
                collective("steps", self._prepare_commit, step, (present().now() - began) / since)
                since, began = 0, present().now()

    # --- Restore

    def prepare_restore(self, total: int) -> PreparedCall:
        """Prepare a call that puts back the newest commit of all ranks; it returns how, or None on a first start."""
        call = text_call("steps", f"total {total}")
        return call, partial(self._restore, call)

    def _restore(self, call: Call) -> Restored | None:
        together = partial(self._agreement.run_together, call)
        start = together(self._begin)
        begun, _ = self._slots.read_note()
        epochs, last = gather(self._control, np.array([self._slots.newest().epoch, begun], np.int64)).T
        together(self._check_epochs, epochs)
        # Void before all: a rank that had one epoch more would later take it for the new one of that number.
        self._epoch, step = int(epochs.min()), 0
        together(self._slots.void_after, self._epoch)
        if self._epoch:
            step, store, objects = together(self._read)
            together(self._put_back, store, objects)
            self._contents.publish()
        again = max(int(last.max()) - step, 0)
        return Restored(step, start.attempt, again, start.why) if start.attempt or self._epoch else None

    def _begin(self) -> Start:
        """Lock this rank's files, and take room for its commits."""
        self._contents.fix_layout()
        self._layout = json.dumps(self._contents.layout).encode()
        self._slots.open(self._timeout / 2)
        self._slots.reserve(*self._collect())
        return read_start(self._slots.folder)

    def _check_epochs(self, epochs: Array) -> None:
        # No rank begins its second commit before all have the first.
        if not epochs.min() and epochs.max() > 1:
            raise ConfigError(
                f"the commits of ranks {np.flatnonzero(epochs == 0).tolist()} are missing in {self._slots.folder}; "
                "empty the folder to start from the beginning"
            )

    def _read(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Return the step of this rank's commit, and the state of the store and of the program, if they fit."""
        commit = self._slots.newest()
        text, take = self._slots.read(commit)
        layout, tree = map(json.loads, text.split(b"\n"))
        there, here = (
            [*texts, *(f"the kept object {name!r}" for name in names)]
            for texts, names in ((layout, tree["objects"]), (self._contents.layout, self._states))
        )
        if difference := find_difference(there, here):
            raise ConfigError(
                f"the commit in {self._slots.folder} has {difference[0]}, and this program has {difference[1]}; start "
                "the program that made it, or empty the folder to start from the beginning"
            )
        # In the order of _collect. Objects may keep what they are given.
        objects = {name: decode(each, lambda *form: take(*form).copy()) for name, each in tree["objects"].items()}
        return commit.step, decode(tree["store"], take), objects

    def _put_back(self, store: dict[str, Any], objects: dict[str, Any]) -> None:
        self._contents.put_back(store)
        for name, state in self._states.items():
            state.set(objects[name])

    # --- Commit

    def _prepare_commit(self, step: int, pace: float) -> PreparedCall:
        call = text_call("steps", f"commit before step {step}")
        return call, partial(self._commit, call, step, pace)

    def _commit(self, call: Call, step: int, pace: float) -> None:
        began = present().now()
        self._agreement.run_together(call, self._write, self._epoch + 1, step)
        # Each rank confirms after its header is written: from here on all have this commit, and it counts.
        self._epoch += 1
        now = present().now()
        numbers = np.array([now - began, pace, now - self._began])
        cost, slowest, elapsed = gather(self._control, numbers).max(axis=0).tolist()
        self._made, self._seconds = self._made + 1, self._seconds + cost
        # One more commit may then take its share of all the time, also after some that took more: the first ones, say.
        wanted = (self._seconds + cost) / _SHARE - elapsed
        self._interval = max(math.ceil(wanted / slowest), 1) if slowest else 1

    def _write(self, epoch: int, step: int) -> None:
        self._contents.check_layout()
        self._slots.write(epoch, step, *self._collect())

    def _collect(self) -> tuple[bytes, list[Array]]:
        """Return the text and the arrays of a commit."""
        arrays: list[Array] = []
        objects = {name: encode(state.get(), arrays, name) for name, state in self._states.items()}
        tree = {"objects": objects, "store": encode(self._contents.collect(), arrays, "the store")}
        return self._layout + b"\n" + json.dumps(tree).encode(), arrays
