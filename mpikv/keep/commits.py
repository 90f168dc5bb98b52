"""The collective calls of a loop of steps: restore at its begin, and meetings of the ranks after some of the steps.

There they commit, as often as 2 % of the time allows, save a checkpoint now and then, and learn of SIGTERM.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.files import inspect
from ..checkpoint.program import peek
from ..checkpoint.trees import list_parts, unpack
from ..cluster.agreement import Agreement
from ..cluster.calls import Call, PreparedCall
from ..cluster.environment import launch_of
from ..cluster.printing import log
from ..cluster.runtime import owned, present
from ..engine.alltoallv import gather
from ..engine.exchange import Exchange
from ..errors import ConfigError
from ..protocols import Array
from ..verbs.comparison import text_call
from .contents import Contents, check_owners, find_difference
from .folder import Briefing, read_briefing
from .slots import Slots
from .state import ObjectState

_SHARE = 0.0125
"""The most that commits may take of the time by their own clock: with the caches that they empty it is about 2 %. A
death then costs the time of some 80 commits, made again.
"""
_APART = 0.1
"""Seconds between two meetings, if steps are no longer and keep their pace: SIGTERM waits for one, and a death costs
the steps since one. A restart takes longer.
"""
_APART_ASYNC = 1.0
"""The same for ranks that else wait for none: each meeting takes from them a lead over a late one."""
_STEP, _OBJECT = "step", "keep/"
"""Names in the state of a checkpoint; the second precedes those of kept objects."""


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


class Disk(NamedTuple):
    """The checkpoint of a loop."""

    path: str
    every: float
    """Seconds between two saves."""
    checkpoints: Checkpoints


class Commits:
    """Restores one loop of a store, and makes its commits and its checkpoints."""

    def __init__(
        self,
        exchange: Exchange,
        agreement: Agreement,
        collective: Callable[..., Any],
        states: Mapping[str, ObjectState],
        folder: Path | None,
        disk: Disk | None,
        timeout: float,
        one_host: bool,
        in_rounds: bool,
    ) -> None:
        """Count the loop among those of this process, for the names of its files; open none yet.

        ``collective`` makes a call of the store. ``timeout``: the seconds that other ranks wait for this one.
        ``one_host``: all ranks are on this one. ``in_rounds``: each push waits for all.
        """
        self._agreement, self._control, self._timeout = agreement, exchange.transport.control, timeout
        self._exchange, self._collective, self._states = exchange, collective, states
        self._contents: Contents
        """Made with the files."""
        self._slots: Slots | None = None
        if folder is not None:
            # Every rank of a launch has files of its own, whatever stores it is in.
            loops, world = owned("loops of steps"), present().world
            loops.append(None)
            self._slots = Slots(folder, len(loops), (world or launch_of() or self._control).rank, not one_host)
        self._disk, self._stays, self._asked = disk, disk is not None, False
        self._epoch = self._made = 0
        self._apart = _APART if in_rounds else _APART_ASYNC
        self._cost = self._seconds = self._began = self._saved = 0.0

    def statistics(self) -> dict[str, Any]:
        """Return a dict: ``made``, the number of commits, and the ``seconds`` they took. Local."""
        return {"made": self._made, "seconds": self._seconds}

    def close(self) -> None:
        """Unlock and close the files, for another loop: an error may keep this object, with its locks. Local."""
        if self._slots is not None:
            self._slots.release()

    def run(self, step: int, total: int) -> Iterator[int]:
        """Yield the steps from ``step`` to below ``total``; after some and the last, commit and save; after a SIGTERM
        raise SystemExit. Only after :meth:`open_and_restore`. Collective.
        """
        note = self._slots.map_note() if self._slots else memoryview(bytearray(16)).cast("q")
        began = self._began = self._saved = present().now()
        apart, since = 1, 0
        with self._heed_sigterm():
            while step < total:
                if note[0] <= step:
                    note[0] = step + 1
                yield step
                step, since = step + 1, since + 1
                if since >= apart or step == total:
                    pace = (present().now() - began) / since
                    text, last = f"commit before step {step}", step == total
                    apart, saves, ends = self._collective("steps", _prepare, text, self._meet, step, pace, last)
                    if saves and self._disk:
                        self._save(self._disk, step)
                    if ends:
                        # A batch script can queue the job again by it: sysexits.h has it for what is to be tried again.
                        raise SystemExit(os.EX_TEMPFAIL)
                    began, since = present().now(), 0

    def _save(self, disk: Disk, step: int) -> None:
        """Complete a pending save; then write a checkpoint of this step, and wait for the file. Collective."""
        disk.checkpoints.finish()
        self._collective("save", self._prepare_save, disk, step)
        self._saved = present().now()

    def _prepare_save(self, disk: Disk, step: int) -> PreparedCall:
        """Return (call, run) of a save of store, step and objects. Local; run() is collective, waits for the file."""
        return disk.checkpoints.save_rest(disk.path, True, True, {_STEP: step, **self._get_objects()})

    def _get_objects(self) -> dict[str, Any]:
        """Return the states of the kept objects by their names in a checkpoint or commit, maybe not copied. Local."""
        return {_OBJECT + name: state.get() for name, state in self._states.items()}

    @contextmanager
    def _heed_sigterm(self) -> Iterator[None]:
        """In a with block: note a SIGTERM, for the next meeting to end the loop. Only if the state outlives the job.
        Local.

        Only in the main thread, and if the signal has its default action.
        """
        heeds = self._stays and threading.current_thread() is threading.main_thread()
        if not (heeds and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
            yield
            return
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_asked", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # --- Restore

    def open_and_restore(self, total: int) -> Restored | None:
        """Make, lock and enlarge the files for :meth:`run`, and check the path; put back the newest commit or
        checkpoint, and call the objects' ``after``; save if only the last save was missing. Return a Restored, or None
        at a first start. Collective.
        """
        restored: Restored | None
        text = f"total {total}" + (f", path {self._disk.path}" if self._disk else "")
        restored, from_disk = self._collective("steps", _prepare, text, self._restore)
        if (disk := self._disk) and from_disk:
            rest = self._collective("load", disk.checkpoints.load_rest, disk.path)
            text = f"objects before step {rest[_STEP]}"
            self._collective("steps", _prepare, text, self._agreement.run_together, self._take_objects, disk.path, rest)
        if restored is not None and restored.step:
            if restored.step > total and self._control.rank == 0:
                log("steps: total=%d is below step %d, where the loop goes on: it makes no step", total, restored.step)
            for _, state in sorted(self._states.items()):
                state.after()
            if disk and restored.step == total and not from_disk:
                # The ranks have died in the loop's last save.
                self._save(disk, total)
        return restored

    def _restore(self, call: Call) -> tuple[Restored | None, bool]:
        """Open files; put back the newest commit of all ranks, unless the checkpoint is newer: the caller has to load
        that. Return (Restored or None at a first start, whether the checkpoint is newer). Collective.
        """
        together = partial(self._agreement.run_together, call)
        briefing, saved = together(self._open_files)
        epoch, begun = (self._slots.newest().epoch, self._slots.read_note()[0]) if self._slots else (0, 0)
        epochs, last, saves = gather(self._control, np.array([epoch, begun, saved], np.int64)).T
        saved, step = int(saves.max()), 0
        if self._slots is not None:
            step = together(self._find_common, self._slots, epochs, saved)
        from_disk, step = saved > step, max(saved, step)
        together(self._check_other, briefing, step)
        if self._slots is not None and epochs.min() and not from_disk:
            together(self._put_back, *together(self._read, self._slots))
            self._contents.publish()
        again = max(int(last.max()) - step, 0)
        return Restored(step, briefing.attempt, again, briefing.why) if briefing.attempt or step else None, from_disk

    def _open_files(self) -> tuple[Briefing, int]:
        """Lock and enlarge this rank's files, record the layout, check that the checkpoint can be written there; return
        (briefing, step of the checkpoint or 0). Local.
        """
        check_owners(self._exchange, {state.owner for state in self._states.values()})
        briefing = Briefing()
        if self._slots is not None:
            self._contents = Contents(self._exchange, self._states)
            self._slots.open(self._timeout / 2)
            self._slots.reserve(self._collect())
            briefing = read_briefing(self._slots.folder)
            self._stays |= briefing.stays
        if self._disk is None:
            return briefing, 0
        if not os.path.basename(self._disk.path):
            raise ConfigError(f"path={self._disk.path!r} names no file; give the name of one, or None to save nothing")
        if self._control.rank == 0:
            # Find out now, and not after ten minutes of training, that nothing can be saved there.
            with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(self._disk.path))):
                pass
        if not os.path.exists(self._disk.path):
            return briefing, 0
        if not isinstance(step := peek(inspect(self._disk.path), _STEP), int):
            raise ConfigError(f"{self._disk.path!r} is no checkpoint of a loop of steps; give another path")
        return briefing, step

    def _find_common(self, slots: Slots, epochs: Array, saved: int) -> int:
        """Void this rank's commits that some rank lacks; return the step of its newest one left, or 0; ConfigError if a
        rank lost all and no checkpoint was ``saved``. Local.

        ``epochs`` are those of the newest commit of each rank; ``saved`` is the step of a checkpoint, or 0.
        """
        # No rank begins its second commit before all have the first.
        if not saved and not epochs.min() and epochs.max() > 1:
            raise ConfigError(
                f"the commits of ranks {np.flatnonzero(epochs == 0).tolist()} are missing in {slots.folder}; "
                "empty the folder to start from the beginning"
            )
        # A rank that had one epoch more would later take it for the new one of that number.
        self._epoch = int(epochs.min())
        slots.void_after(self._epoch)
        return slots.newest().step

    def _check_other(self, briefing: Briefing, step: int) -> None:
        """Raise ConfigError if a commit newer than ``step`` is of another number of ranks. Local."""
        if briefing.other_step > step:
            raise ConfigError(
                f"the newest commit, of step {briefing.other_step}, is in {briefing.other_folder}, and fits only as "
                f"many ranks; start as many, or remove that folder to go on from step {step}"
            )

    def _read(self, slots: Slots) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of store and kept objects in this rank's commit; ConfigError if they do not fit. Local."""
        tree = unpack(slots.read(slots.newest()), "commit", copies=False)
        store = tree.pop("store")
        if difference := find_difference(unpack(store["layout"], "layout"), self._contents.layout):
            raise ConfigError(
                f"the commit in {slots.folder} has {difference[0]}, and this program has {difference[1]}; start "
                "the program that made it, or empty the folder to start from the beginning"
            )
        # Objects may keep what they are given, and later commits overwrite this memory.
        return store, deepcopy(tree)

    def _put_back(self, store: dict[str, Any], objects: dict[str, Any]) -> None:
        """Overwrite this rank's part of the store, and the kept objects. Local."""
        self._contents.put_back(store)
        self._take_objects("the commit", objects)

    def _take_objects(self, path: str, saved: dict[str, Any]) -> None:
        """Give kept objects their ``saved`` states; ConfigError if one is missing. Only a generator without one stays
        as it is. Local.
        """
        for name, state in self._states.items():
            if (key := _OBJECT + name) in saved:
                state.set(saved[key])
            elif not state.draws:
                # As it is now, it is that of step 0: the loop would go on with it, and save it.
                raise ConfigError(
                    f"{path!r} has no state of the kept object {name!r} for {self._control.size} ranks: it was not "
                    "kept, or each of another number of ranks had a state of its own; start as many ranks as have "
                    "saved it, keep it alike on all ranks, or remove the file to start from the beginning"
                )
            elif self._control.rank == 0:
                log("%r has no state of the generator %r for this number of ranks: it starts anew", path, name)

    # --- Where ranks meet

    def _meet(self, call: Call, step: int, pace: float, is_last: bool) -> tuple[int, bool, bool]:
        """Commit if it is time; return (steps to the next meeting, whether to save, whether SIGTERM ends it).
        Collective.
        """
        now = present().now()
        mine = [pace, now - self._began, now - self._saved, self._cost, self._seconds, self._asked]
        slowest, elapsed, unsaved, cost, seconds, asked = gather(self._control, np.array(mine)).max(axis=0).tolist()
        ends = bool(asked) or is_last
        if asked and self._control.rank == 0:
            # Before the others can end, and with them the launcher, which would lose it.
            log("SIGTERM: the loop saves and ends before step %d, from which the same command goes on", step)
        # One more commit may then take its share of all the time, also after some that took more: the first ones, say.
        if self._slots is not None and (seconds + cost <= elapsed * _SHARE or ends):
            self._commit(call, self._slots, step)
        saves = self._disk is not None and (unsaved >= self._disk.every or ends)
        return max(math.ceil(self._apart / slowest), 1) if slowest else 1, saves, bool(asked)

    def _commit(self, call: Call, slots: Slots, step: int) -> None:
        """Write a commit of this step on all ranks, count it, and note the time that it took. Collective."""
        began = present().now()
        self._agreement.run_together(call, self._write, slots, self._epoch + 1, step)
        # Each rank confirms after its header is written: from here on all have this commit, and it counts.
        self._epoch, self._made, self._cost = self._epoch + 1, self._made + 1, present().now() - began
        self._seconds += self._cost

    def _write(self, slots: Slots, epoch: int, step: int) -> None:
        """Write this rank's commit over the older one; Unsupported if the store's layout has changed. Local."""
        self._contents.check_layout()
        slots.write(epoch, step, self._collect())

    def _collect(self) -> list[memoryview]:
        """Call the kept objects' ``get``; return the bytes of a commit: a text, then arrays, as views of the memory of
        store and objects. Copied are counts, tensors of a GPU and arrays that are not contiguous. Local.
        """
        return list_parts({"store": self._contents.collect(), **self._get_objects()}, "state")


def _prepare(text: str, run: Callable[..., object], *arguments: Any) -> PreparedCall:
    """Return (call, run) for ranks to compare ``text``; run() is ``run(call, *arguments)``. Local."""
    call = text_call("steps", text)
    return call, partial(run, call, *arguments)
