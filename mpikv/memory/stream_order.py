"""In what order the calls of a store and the work of its callers happen: on the host at once, on a GPU by streams.

A store of a GPU has one stream, on which everything that a call does to arrays is queued; a call returns when it is
queued. By events the stream begins after what the caller's stream has to do so far, and the caller's stream goes on
after it: after all of the call, or, where that only brings arrays, after these were read. So whoever uses one stream
finds arrays as if each call had been done at once, and nobody waits for a GPU.

What moves between GPUs may be on a second stream meanwhile: each transfer begins after what the first stream has to do
when it is queued, and that goes on until it comes to where it needs what has come. At the end it waits for all.

A call that another thread makes is after what the caller's stream had to do when it was issued, and before what the
stream is given that somebody has waited for it on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np

from ..errors import MPIKVError, TransportError, Unsupported
from ..protocols import Array, Event, Gpu, Graph, Stream

__all__ = ["GpuOrder", "HostOrder", "Issued"]

Door: TypeAlias = "Callable[[str, Callable[[Any], Any]], Any]"
"""Returns what comes of something that queues work, which is known by this text, and is given what the transport queues
work with.
"""

# The handle of CUDA's default stream of a thread: in each thread it is another stream.
_PER_THREAD = 2
_CAPTURING = (
    "the current stream is being captured, and your graph cannot contain a store's calls; call it before or after the "
    "capture, or use kv.capture to record a pushpull"
)


class HostOrder:
    """The :class:`~mpikv.protocols.StreamOrder` of the host, where all is done when a call returns; but what fills
    arrays of GPUs is queued after the call, on its caller's stream.
    """

    def __init__(self) -> None:
        self._fills: list[Callable[[], object]] = []
        self.needed = False
        self.beside: GpuOrder | None = None
        """The stream of a GPU on which calls are made whose arrays lie there, if a store of the host makes such."""

    @property
    def failed(self) -> bool:
        return self.beside is not None and self.beside.failed

    def add(self, fill: Callable[[], object]) -> None:
        """Have an array filled after the call that is prepared."""
        self._fills.append(fill)
        self.needed = True

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = function(*arguments)
            for fill in self._fills:
                fill()
            return result
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._fills.clear()
        self.needed = False

    def issue(self) -> None:
        return None

    def on_worker(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        """Return at once: nothing is queued, to wait for or to come after."""

    begin = check_new = rejoin = close = wait

    def abandon(self, why: str) -> None:
        if self.beside is not None:
            self.beside.abandon(why)


class _Call(threading.local):
    """What a thread runs in the order of a store's stream, if it does."""

    caller: Stream | None = None
    begin: Event | None = None
    """Behind what the stream of the caller, who has issued the call, had to do then."""
    on_worker = False
    """Whether this thread makes calls that others have issued."""
    made: list[Any]
    """What is to live as long as the arguments: what was made for the caller."""
    read: Event | None = None
    """Behind the last use of what the caller has brought, if that is all that he has to wait for."""

    def __init__(self) -> None:
        self.made = []


class GpuOrder:
    """The :class:`~mpikv.protocols.StreamOrder` of a GPU: the streams of one store."""

    needed = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.stream: Stream = gpu.stream()
        self._transfers: Stream = gpu.stream()
        self.lane = self.stream
        """The stream for what moves between GPUs: another one in :meth:`apart`."""
        # Whether the first stream does not come after all transfers yet, and the point behind the last one, if known.
        self._lags = False
        self._last_sent: Event | None = None
        self.call = _Call()
        # Whether calls were made that no stream of a caller comes after by itself.
        self._some_issued = False
        # What a GPU's allocator is given back is taken by others at once, whoever still reads it on another stream.
        self._in_use: deque[tuple[Event, Any]] = deque()
        # A thread may come here twice: a finalizer that runs inside, as garbage is collected, may make a call.
        self._dropping = threading.RLock()
        self.wake: Callable[[], None] = _nothing
        """Is told that :meth:`drop_done` will have something to drop."""
        self.check: Callable[[], None] = _nothing
        """Raises if work is known to have failed."""
        self._abort: Callable[[str], None] = _nothing
        self.queue: Door = _queue_alone
        """Queues, in :meth:`run`, what no transport does."""
        self.recording = False
        """Whether work that is given to the stream is recorded, and not run."""
        # Those that may be launched, None once they were given up. The watchdog's thread gives them up, too.
        self._graphs: WeakSet[Graph] | None = WeakSet()
        self._recording = threading.Lock()

    def watch(
        self,
        check: Callable[[], None],
        abort: Callable[[str], None],
        queue: Door,
        wake: Callable[[], None],
    ) -> None:
        """Have something look after the stream, whose work may not come to its end by itself: ``check`` raises if it is
        known to have failed, ``abort`` ends it, and tells other ranks why, what is not queued by a transport is queued
        by ``queue``, and ``wake`` is :attr:`wake`.
        """
        self.check, self._abort, self.queue, self.wake = check, abort, queue, wake

    @property
    def failed(self) -> bool:
        try:
            self.check()
        except MPIKVError:  # of another rank it is PeerFailed
            return True
        return False

    def begin(self) -> None:
        if self._gpu.capturing():
            raise Unsupported(_CAPTURING)
        if self.call.begin is not None:
            self.stream.wait(self.call.begin)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content, for the caller of what this thread runs, if it runs a call."""
        call = self.call
        if call.caller is None or 0 in shape:
            return self._gpu.empty(shape, dtype)
        # Memory goes back to the stream that it was asked for on, and a caller has done with it on his own.
        with call.caller:
            array = self._gpu.empty(shape, dtype)
        if call.on_worker:
            # What the stream was given since the call was issued may use it yet.
            self.stream.wait(call.caller.record())
        call.made.append(array)
        return array

    def check_new(self) -> None:
        call = self.call
        if call.on_worker and call.caller is not None and call.caller.handle == _PER_THREAD:
            raise Unsupported(
                "with wait=False a call cannot make new arrays for a thread's default stream, because it runs on "
                "another thread; pass arrays to fill, or leave wait=False out"
            )

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        call = self.call
        if call.on_worker:  # on the store's stream all along
            call.made.append(arguments)
            return function(*arguments)
        caller, made = self._gpu.current(), list[Any]()
        outer = call.caller, call.made
        self.stream.wait(caller.record())
        call.caller, call.made = caller, made
        try:
            with self.stream:
                return function(*arguments)
        finally:
            call.caller, call.made = outer
            done = call.read or self.stream.record()
            call.read = None
            caller.wait(done)
            self._keep(done, (arguments, made))

    def cancel(self) -> None:
        pass

    def issue(self) -> Issued:
        if self._gpu.capturing():
            raise Unsupported(_CAPTURING)
        return Issued(self, self._gpu.current())

    @contextmanager
    def on_worker(self) -> Iterator[None]:
        call = self.call
        self._gpu.use()
        self._some_issued = call.on_worker = True
        call.made = []
        try:
            with self.stream:
                yield
        finally:
            call.on_worker = False

    def run_issued(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Return ``run()``, a call of another thread, which has issued it. In :meth:`on_worker`, and in such a call."""
        call, made = self.call, list[Any]()
        outer = call.caller, call.begin, call.made
        call.caller, call.begin, call.made = issued.caller, issued.begin, made
        try:
            return run()
        finally:
            call.caller, call.begin, call.made = outer
            issued.done = call.read or self.stream.record()
            call.read = None
            # What was given, too: of a call that is refused, it may have been read before that.
            self._keep(issued.done, (run, made))

    def rejoin(self) -> None:
        if self._some_issued:
            self.follow(self.stream.record())

    def follow(self, event: Event) -> None:
        """Let what this thread's present stream is given next come after an event."""
        self._gpu.current().wait(event)

    def _keep(self, done: Event, arguments: Any) -> None:
        self._in_use.append((done, arguments))
        if not self.drop_done():
            self.wake()

    def drop_done(self) -> bool:
        """Let go of what the GPU has done with; return whether that was all. In any thread."""
        dropped = []  # outside of the lock: to free memory may call anything
        with self._dropping:
            while self._in_use:
                first = self._in_use[0]
                if not first[0].done:
                    return False
                # A finalizer that ran meanwhile in this thread may have dropped it.
                if self._in_use and self._in_use[0] is first:
                    dropped.append(self._in_use.popleft())
            return True

    # --- Transfers beside other work

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have transfers on a stream of their own meanwhile; what comes after that comes after all of them. In
        :meth:`run`, on all ranks alike.
        """
        self.lane = self._transfers
        try:
            yield
        except BaseException:
            with suppress(TransportError):  # which says the same once more
                self._leave_apart()
            raise
        self._leave_apart()

    def _leave_apart(self) -> None:
        lane, self.lane = self.lane, self.stream
        if self._lags:
            self._lags = False
            self.stream.wait(lane.record())

    def begin_transfer(self) -> Stream:
        """Return the stream for a transfer, which comes there after all that the store's stream has to do by now. In
        :meth:`apart`.
        """
        self._lags, self._last_sent = True, None
        self.lane.wait(self.stream.record())
        return self.lane

    def sent(self) -> Event | None:
        """Return the point behind the last transfer; None where the store's stream comes after it anyway."""
        if self.lane is self.stream:
            return None
        self._last_sent = event = self.lane.record()
        return event

    def arrive(self, sent: Event | None) -> None:
        """Let what the store's stream is given next come after a transfer, and those before it."""
        if sent is not None:
            self.stream.wait(sent)
            self._lags = self._lags and sent is not self._last_sent

    def note_read(self) -> None:
        """Let the caller's stream go on when the GPU has come here, whatever the call queues after this: nothing of the
        caller's is used any more.
        """
        self.call.read = self.lane.record()

    # --- Recorded work

    def record(self, run: Callable[..., object], *arguments: Any) -> Graph:
        """Return what ``run(*arguments)`` gives to the store's stream, which is not run. In :meth:`run`.

        Raises:
            TransportError: it cannot be recorded.
        """
        self.recording = True
        try:
            self.stream.begin_capture()
            try:
                run(*arguments)
            except BaseException:
                with suppress(TransportError):  # which says the same once more
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
        """Give up all that was recorded, before what it uses ends."""
        with self._recording:
            graphs, self._graphs = self._graphs, None
        for graph in list(graphs or ()):
            graph.close()

    # --- The end

    def wait(self) -> None:
        """Wait until the stream is done, and let go of what it used."""
        self.stream.synchronize()
        with self._dropping:
            done, self._in_use = self._in_use, deque()
        done.clear()

    def close(self) -> None:
        self.wait()
        self.drop_graphs()
        self._gpu.release(self.stream)

    def abandon(self, why: str) -> None:
        self._abort(why)


class Issued:
    """The :class:`~mpikv.protocols.Issue` of a :class:`GpuOrder`."""

    def __init__(self, order: GpuOrder, caller: Stream) -> None:
        self._order, self.caller = order, caller
        self.begin: Event = caller.record()
        self.done: Event | None = None
        """Behind what the call has queued; None if it was not made."""

    def run(self, call: Callable[[], Any]) -> Any:
        return self._order.run_issued(self, call)

    def rejoin(self) -> None:
        if self.done is not None:
            self._order.follow(self.done)


def _queue_alone(call: str, run: Callable[[Any], Any]) -> Any:
    return run(None)


def _nothing(*_: object) -> None:
    pass
