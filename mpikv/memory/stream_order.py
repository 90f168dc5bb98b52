"""The order of a store's calls and its callers' work: at once on the host, by streams on a GPU.

A GPU store has one stream. A call queues its work on this stream and returns. Events order the two streams: the store's
stream waits for the work queued on the caller's stream so far; the caller's stream then waits for the call. A call that
only reads the caller's arrays makes it wait for the last read, and for nothing after that. The caller finds arrays as
if each call had ended on return, and the host waits for no GPU.

Transfers between GPUs may run on a second stream. A transfer waits for the work queued on the first stream so far. The
first stream waits for a transfer before it uses the data, and for all transfers at the end.

A call made by a worker thread runs after the work queued on the caller's stream when it was issued, and before any
work queued after ``wait()``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np

from ..cluster.printing import log
from ..errors import MPIKVError, TransportError, Unsupported
from ..protocols import Array, Event, Gpu, Graph, Stream

Result = TypeVar("Result")
Door: TypeAlias = "Callable[[str, Callable[[Any], Any]], Any]"
"""Runs a function that queues work, with the transport's argument, and returns its result. The text names the call in
errors.
"""

# CUDA's handle of the per-thread default stream: the same number means another stream in each thread.
_PER_THREAD = 2
_CAPTURING = (
    "the current stream is being captured, and your graph cannot contain a store's calls; call it before or after the "
    "capture, or use kv.capture to record a pushpull"
)


class HostOrder:
    """The :class:`~mpikv.protocols.StreamOrder` of the host: a call ends before it returns. Results for arrays of a GPU
    are queued after the call, on the caller's stream.
    """

    def __init__(self) -> None:
        """Start without noted functions, and without calls on GPU arrays (:attr:`beside`). Local."""
        self._fills: list[Callable[[], object]] = []
        self.needed = False
        self.beside: GpuOrder | None = None
        """The GPU order of calls on GPU arrays; None unless a host store makes such calls."""

    @property
    def failed(self) -> bool:
        """Whether calls of this host store on GPU arrays, if it makes any, are known to have failed. Local."""
        return self.beside is not None and self.beside.failed

    def add(self, fill: Callable[[], object]) -> None:
        """Note ``fill``: the next :meth:`run` calls it after its function, to fill an array of a GPU. Local."""
        self._fills.append(fill)
        self.needed = True

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``function``, then the noted functions that fill GPU arrays; forget these; return the result. Local."""
        try:
            result = function(*arguments)
            for fill in self._fills:
                fill()
            return result
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Forget the noted functions that would fill GPU arrays, as their call is not made. Local."""
        self._fills.clear()
        self.needed = False

    def on_worker(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: on the host no stream orders calls."""
        return nullcontext()

    def wait(self) -> None:
        """Return at once: the host has no queued work."""

    begin = check_new = issue = rejoin = close = wait

    def abandon(self, why: str) -> None:
        """Abort the store's calls on GPU arrays, if it makes any, and tell other ranks why. Local."""
        if self.beside is not None:
            self.beside.abandon(why)


class _Thread(threading.local):
    """What a thread does on a store's stream."""

    call: Issued | None = None
    """The call that it makes now."""
    on_worker = False
    """Whether it makes calls that other threads issued."""


class GpuOrder:
    """The :class:`~mpikv.protocols.StreamOrder` of a GPU: the streams of one store."""

    needed = True

    def __init__(self, gpu: Gpu) -> None:
        """Make one stream for calls and one for transfers between GPUs. Local."""
        self._gpu = gpu
        self.stream: Stream = gpu.stream()
        self._transfers: Stream = gpu.stream()
        self.lane = self.stream
        """The stream of transfers between GPUs: a second one inside :meth:`apart`."""
        # Whether the first stream still has to wait for transfers, and the event of the last one, if it is known.
        self._lags = False
        self._last_sent: Event | None = None
        self.thread = _Thread()
        # Whether a worker thread ran calls: no caller's stream waits for these by itself.
        self._some_issued = False
        # Freed GPU memory is reused at once, even if another stream still reads it; so references are held here.
        self._in_use: deque[tuple[Event, Any]] = deque()
        # Reentrant: a garbage collection inside may run a finalizer, and the finalizer a call, in the same thread.
        self._dropping = threading.RLock()
        # The store's watchdog replaces these functions, as work on a stream may never end by itself.
        self.wake: Callable[[], None] = _nothing
        """Called when :meth:`drop_done` will have something to drop."""
        self.check: Callable[[], None] = _nothing
        """Raises if work is known to have failed."""
        self.abandon: Callable[[str], None] = _nothing
        """Ends work in flight, and tells other ranks why."""
        self.queue: Door = lambda _, run: run(None)
        """Queues work without a transport, in :meth:`run`."""
        self.recording = False
        """Whether the stream records work and does not run it."""
        # Launchable graphs; None once they were discarded. The watchdog's thread discards them, too.
        self._graphs: WeakSet[Graph] | None = WeakSet()
        self._recording = threading.Lock()

    @property
    def failed(self) -> bool:
        """Whether :attr:`check` would raise: work on this GPU, or another rank, is known to have failed. Local."""
        try:
            self.check()
        except MPIKVError:  # of another rank it is PeerFailed
            return True
        return False

    def fail(self, error: Exception, _: str = "") -> None:
        """Log an error, and make later calls raise a TransportError of it. For a single rank's watchdog. Any thread."""
        log("%s; the next call on the GPU raises", error, level=logging.ERROR)

        def check() -> None:
            """Raise a TransportError of the error."""
            raise TransportError(f"the GPU has failed: {error}") from error

        self.check = check

    def begin(self) -> None:
        """Raise if the GPU failed or a capture runs; for an issued call, queue a wait for its caller's work. Local."""
        self.check()
        if self._gpu.capturing():
            raise Unsupported(_CAPTURING)
        if self.thread.call is not None:
            self.stream.wait(self.thread.call.begin)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new GPU array of any content; inside a call it is allocated on the caller's stream. Local."""
        call = self.thread.call
        if call is None or 0 in shape:
            return self._gpu.empty(shape, dtype)
        # The allocator reuses memory in the order of the allocating stream: the caller's, since he frees the array.
        with call.caller:
            array = self._gpu.empty(shape, dtype)
        if self.thread.on_worker:
            # The caller's stream may still read the memory's earlier content; our stream must write after that.
            self.stream.wait(call.caller.record())
        call.made.append(array)
        return array

    def check_new(self) -> None:
        """Raise Unsupported if this call, on a worker thread, cannot make new arrays for its caller's stream. Local."""
        # Freed memory goes back in the order of the stream it was taken on, and the worker's default stream is another.
        call = self.thread.call
        if self.thread.on_worker and call is not None and call.caller.handle == _PER_THREAD:
            raise Unsupported(
                "with wait=False a call cannot make new arrays for a thread's default stream, because it runs on "
                "another thread; pass arrays to fill, or leave wait=False out"
            )

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function on the store's stream, between the caller's earlier and later work; return its result."""
        if self.thread.on_worker:  # on_worker() has made the store's stream current
            if (call := self.thread.call) is not None:
                call.made.append(arguments)
            return function(*arguments)
        caller = self._gpu.current()
        issued = Issued(self, caller)
        self.stream.wait(issued.begin)
        try:
            with self.stream:
                return issued.run(partial(function, *arguments))
        finally:
            # Also after an error. Queued, not waited for: the host goes on.
            if issued.done is not None:
                caller.wait(issued.done)

    def cancel(self) -> None:
        """Do nothing: a call that is not made leaves nothing behind."""

    def issue(self) -> Issued:
        """Record an event on the current stream; return a call for another thread. Raise in a capture. Local."""
        if self._gpu.capturing():
            raise Unsupported(_CAPTURING)
        return Issued(self, self._gpu.current())

    @contextmanager
    def on_worker(self) -> Iterator[None]:
        """In a with block: let this thread make other threads' calls, with the store's stream current. Local."""
        self._gpu.use()
        self._some_issued = self.thread.on_worker = True
        try:
            with self.stream:
                yield
        finally:
            self.thread.on_worker = False

    def rejoin(self) -> None:
        """Queue a wait on the current stream for all calls that worker threads made. Local."""
        if self._some_issued:
            self._gpu.current().wait(self.stream.record())

    def _keep(self, done: Event, arguments: Any) -> None:
        """Keep arguments alive until the GPU has passed an event; drop those of ended work. Local."""
        self._in_use.append((done, arguments))
        if not self.drop_done():
            self.wake()

    def drop_done(self) -> bool:
        """Drop the arguments of ended work; return whether none is left. Any thread may call it. Local."""
        dropped = []  # freed after the lock is released: a destructor may call anything, this method included
        with self._dropping:
            while self._in_use:
                first = self._in_use[0]
                if not first[0].done:
                    return False
                # Event.done may have run a finalizer in this thread, and that may have dropped it.
                if self._in_use and self._in_use[0] is first:
                    dropped.append(self._in_use.popleft())
            return True

    # --- Transfers beside other work

    ahead = 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In a with block inside :meth:`run`: queue transfers on a second stream; at its end the first stream waits for
        all. Collective: all ranks enter it alike.
        """
        self.lane = self._transfers
        try:
            yield
        except BaseException:
            with suppress(TransportError):  # the same failure; the first one is raised
                self._leave_apart()
            raise
        self._leave_apart()

    def _leave_apart(self) -> None:
        """Go back to the store's stream, and make it wait for all transfers. Local."""
        lane, self.lane = self.lane, self.stream
        if self._lags:
            self._lags = False
            self.stream.wait(lane.record())

    def begin_transfer(self) -> Stream:
        """Make the transfers' stream wait for the store's work so far; return it. Only inside :meth:`apart`. Local."""
        self._lags, self._last_sent = True, None
        self.lane.wait(self.stream.record())
        return self.lane

    def sent(self) -> Event | None:
        """Record and return an event after the last transfer; None if the store's stream runs the transfers. Local."""
        self._last_sent = None if self.lane is self.stream else self.lane.record()
        return self._last_sent

    def wait_for(self, sent: Event | None) -> None:
        """Make the store's stream, not the host, wait for a transfer and all before it; for None do nothing. Local."""
        if sent is not None:
            self.stream.wait(sent)
            # One stream runs all transfers in order: after the last one nothing is left to wait for.
            self._lags = self._lags and sent is not self._last_sent

    def note_read(self) -> None:
        """Note that this call reads the caller's arrays no more: the caller's stream will wait for the work queued so
        far, and not for later work. Outside of a call it does nothing. Local.
        """
        if self.thread.call is not None:
            self.thread.call.read = self.lane.record()

    # --- Recorded work

    def record(self, run: Callable[..., object], *arguments: Any) -> Graph:
        """Call ``run(*arguments)``; return as a graph the work that it would queue, or raise TransportError. Only
        inside :meth:`run`. Local.

        Raises:
            TransportError: it cannot be recorded.
        """
        self.recording = True
        try:
            self.stream.begin_capture()
            try:
                run(*arguments)
            except BaseException:
                with suppress(TransportError):  # the same failure; the first one is raised
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()
        finally:
            self.recording = False
        with self._recording:
            if self._graphs is not None:
                self._graphs.add(graph)
                return graph
        graph.close()
        raise TransportError("the recorded graph was discarded with the store")

    def drop_graphs(self) -> None:
        """Discard all recorded graphs, before resources that they use are freed; :meth:`record` raises from now on. Any
        thread may call it. Local.
        """
        # None from now on: a graph that is being recorded closes itself when it finds that.
        with self._recording:
            graphs, self._graphs = self._graphs, None
        for graph in list(graphs or ()):
            graph.close()

    # --- The end

    def wait(self) -> None:
        """Wait on the host until the stream is done; drop the arguments of its work. Local."""
        self.stream.synchronize()
        # The stream is done, so is all work that used them.
        with self._dropping:
            done, self._in_use = self._in_use, deque()
        # Outside of the lock, as in drop_done.
        done.clear()

    def close(self) -> None:
        """Wait for the stream, discard graphs, and give unused memory back to the GPU. Local."""
        self.wait()
        self.drop_graphs()
        self._gpu.release(self.stream)


class Issued:
    """A call on a store's stream. If another thread makes it, the :class:`~mpikv.protocols.Issue` of a
    :class:`GpuOrder`.
    """

    def __init__(self, order: GpuOrder, caller: Stream) -> None:
        """Record an event on the caller's stream, for the call's work to wait for; make no call yet. Local."""
        self._order, self.caller = order, caller
        self.begin: Event = caller.record()
        self.made: list[Any] = []
        """New arrays for the caller, and arguments: they must live as long as the call."""
        self.read: Event | None = None
        """Recorded after the last read of the caller's arrays, if the caller needs to wait for nothing else."""
        self.done: Event | None = None
        """Recorded after the work of the call; None if the call was not made."""

    def run(self, call: Callable[[], Result]) -> Result:
        """Run ``call()`` as this call; return its result; keep its arrays alive until the GPU is done. Local."""
        order, thread = self._order, self._order.thread
        # Calls nest: an updater may call another store on this GPU.
        outer, thread.call = thread.call, self
        try:
            return call()
        finally:
            thread.call = outer
            # A push that only reads lets the caller go on after the last read, before the update.
            self.done = self.read or order.stream.record()
            # Keep the arguments even if the call failed or was refused: queued work may still read them. But no longer
            # than that: the caller may keep a Work, which keeps this.
            order._keep(self.done, (call, self.made))
            self.made = []

    def rejoin(self) -> None:
        """Queue a wait on the current stream for this call, if it was made. Local."""
        if self.done is not None:
            self._order._gpu.current().wait(self.done)


def _nothing(*_: object) -> None:
    """Do nothing."""
