"""A save in the background: the copy of the store, and the handle of the save.

The thread of ``ahead`` writes the file. It calls no other rank, since MPI may allow calls from one thread only. So
:meth:`SaveWork.wait` compares the ranks' success, and renames the file to its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import zeros
from ..cluster.calls import Call, PreparedCall
from ..cluster.tracebacks import hidden_from_pytest
from ..engine.plan import digest
from ..errors import text_of
from ..protocols import Array, Memory
from .ahead import Ahead
from .chunks import Parts, Piece, cut_array

__tracebackhide__ = hidden_from_pytest


class Span(NamedTuple):
    """A contiguous array of the store, and its byte offset among the arrays of a file."""

    begin: int
    array: Array


class Copies:
    """A host copy of the store's arrays, written to the file while the store goes on.

    The memory is kept from one save to the next: the first write to new pages takes longer than the copy.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._room = np.empty(0, np.uint8)

    def make(self, spans: Iterable[Span]) -> list[Piece]:
        """Copy arrays to host memory at once, over the copies of the last save; return their pieces of the file. Local.

        Raises:
            MemoryError: there is too little memory for the copies.
        """
        spans = list(spans)
        arrays = [array.reshape(-1).view(np.uint8) for _, array in spans]
        edges = list(accumulate((array.nbytes for array in arrays), initial=0))
        room = self.ensure_room(edges[-1])
        # Without gathering the caller waits for this copy alone: the thread writes it, and the store goes on.
        self._memory.copy([room[low:high] for low, high in pairwise(edges)], arrays)
        copies = zip(spans, pairwise(edges), strict=True)
        return [piece for (begin, _), (low, high) in copies for piece in cut_array(begin, room[low:high])]

    def ensure_room(self, nbytes: int) -> Array:
        """Return the kept memory if it has exactly so many bytes, else free it and allocate, or raise. Local."""
        # release() first, so that the old copy and the new one never exist together.
        if self._room.nbytes != nbytes:
            self.release()
            self._room = zeros(nbytes, huge_pages=True)
        return self._room

    def release(self) -> None:
        """Let go of the memory: it is freed once no piece uses it. Local."""
        self._room = np.empty(0, np.uint8)


class SaveWork:
    """A checkpoint that is written while the store goes on; ``save(path, wait=False)`` returns it.

    Example:
        >>> import mpikv, numpy as np, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "digits.mpikv")
        >>> kv = mpikv.create()
        >>> kv.init("w", np.zeros(2))
        >>> work = kv.save(path, wait=False)
        >>> kv.push("w", np.ones(2))
        >>> work.wait()
        >>> kv.load(path)
        {}
        >>> kv.pull("w")
        array([0., 0.])
    """

    def __init__(
        self, call: Call, parts: Parts, ahead: Ahead[Any], run: Callable[..., None], collective: Callable[..., Any]
    ) -> None:
        """Keep a save that has begun; start no thread. ``run`` runs parts together with the other ranks; ``collective``
        makes a call of the store.
        """
        self._call, self._parts, self._ahead = call, parts, ahead
        self._run, self._collective = run, collective
        self.done = False
        """Whether the save has ended: the file is at its path, or the save has failed. The same on every rank."""
        self.error: BaseException | None = None
        """The exception of the save; None if there is none, or not yet."""

    def __repr__(self) -> str:
        state = "written" if self.written else "pending"
        if self.done:
            state = "done" if self.error is None else f"failed: {text_of(self.error, repr)}"
        return f"<mpikv.SaveWork {self._call} {state}>"

    @property
    def written(self) -> bool:
        """Whether this rank has written its part, or failed. Local. :meth:`wait` is short if all ranks have."""
        return self._ahead.ended

    def wait(self) -> None:
        """Wait until all ranks have written, rename the file to its path, or raise the save's error. Collective.

        The next :meth:`KVStore.save`, ``load`` or ``close`` does it, too, as do the calls for the
        optimizer's state. After the end of the save it is local, and raises the save's exception again.

        Raises:
            OSError, CheckpointError: as in :meth:`KVStore.save`; the other ranks raise ``PeerFailed``.
            RankMismatch: another rank made another call; the save is still pending.
            Closed: the store has ended before, and the file is not at its path.
        """
        if not self.done:
            self._collective("wait", self._prepare)
        elif self.error is not None:
            raise self.error.with_traceback(None)

    def _prepare(self) -> PreparedCall:
        """Return the Call of :meth:`wait`, for ranks to compare, and the function that runs it. Local."""
        return Call("wait", digest(f"wait {self._call}"), str(self._call)), self._finish

    def _finish(self) -> None:
        """Set :attr:`done`; run the rest of the save with the other ranks, keep and raise its exception. Collective."""
        # Before the run: a failed save is over as well, and wait() raises its error again.
        self.done = True
        try:
            self._run(self._call, self._parts)
        except BaseException as error:
            self.error = error
            raise

    def give_up(self) -> None:
        """Wait for the thread's current window, stop it, remove the unfinished file. Local; for the store's end."""
        self._parts.close()
