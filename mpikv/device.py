"""The memory of a GPU: where its arrays come from and go to, and the order in which streams see them.

A store has one stream, on which everything that a call does to arrays is queued; a call returns when it is queued. By
events the stream begins after what the caller's stream has to do so far, and the caller's stream goes on after it. So
whoever uses one stream finds arrays as if each call had been done at once, and nobody waits for a GPU.

A call that another thread makes is after what the caller's stream had to do when it was issued, and before what the
stream is given that somebody has waited for it on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np

from .arrays import check_apart, check_mutable, is_array, lies_on_host, source, target
from .errors import MPIKVError, TransportError, Unsupported
from .spare import SpareTables
from .typing import Array, Event, Gpu, Graph, StoreTables, Stream

__all__ = ["DeviceMemory", "Issued", "found", "read"]

Door: TypeAlias = "Callable[[str], AbstractContextManager[object]]"
"""Returns the context in which something is queued that is known by this text."""

# The handle of CUDA's default stream of a thread: in each thread it is another stream.
_PER_THREAD = 2

_GPUS: WeakSet[Gpu] = WeakSet()
"""Those that stores of this process use, or used."""


def found(value: Any) -> tuple[Array, Gpu | None]:
    """Return an array to read ``value`` from where it lies, without a copy, and the GPU, None for the host. Local.

    Raises:
        TypeError: not an array.
        Unsupported: it lies on a GPU of which this process has no store.
    """
    if isinstance(value, np.ndarray) or not is_array(value) or lies_on_host(value):
        return source(value), None
    for gpu in tuple(_GPUS):
        if gpu.owns(value):
            return value, gpu
    refused: Unsupported | None = None
    for gpu in tuple(_GPUS):
        try:
            return gpu.adopt(value), gpu
        except Unsupported as error:
            refused = error
    why = "" if refused is None else f" ({refused})"
    raise Unsupported(f"the array is on a GPU of which this process has no store; create the store first{why}")


def read(value: Any) -> Array:
    """Return numpy's array of one that lies anywhere; that of a GPU is copied, and waited for. Raises as
    :func:`found`.
    """
    array, gpu = found(value)
    if gpu is None:
        return array
    out = np.empty(array.shape, array.dtype)
    gpu.download(array, out)
    return out


class DeviceMemory:
    """The :class:`~mpikv.typing.Memory` of one GPU, and the stream of one store."""

    on_host = False
    orders = True

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.tables: StoreTables = SpareTables(gpu)
        _GPUS.add(gpu)
        self.stream: Stream = gpu.stream()
        self._flag = self.zeros(1)
        self._call = _Call()
        # Whether calls were made that no stream of a caller comes after by itself.
        self._asides = False
        # What a GPU's allocator is given back is taken by others at once, whoever still reads it on another stream.
        self._in_use: deque[tuple[Event, Any]] = deque()
        self._said = False
        self._check: Callable[[], None] = _nothing
        self._abort: Callable[[str], None] = _nothing
        self._queued: Door = nullcontext
        self.recording = False
        """Whether work that is given to the stream is recorded, and not run."""
        # Those that may be launched, None once they were given up. The watchdog's thread gives them up, too.
        self._graphs: WeakSet[Graph] | None = WeakSet()
        self._recording = threading.Lock()

    @property
    def failed(self) -> bool:
        try:
            self._check()
        except MPIKVError:  # of another rank it is PeerFailed
            return True
        return False

    def watch(self, check: Callable[[], None], abort: Callable[[str], None], queued: Door) -> None:
        """Have something look after the stream, whose work may not come to its end by itself: ``check`` raises if it is
        known to have failed, ``abort`` ends it, and tells other ranks why, and what is not queued by a transport is
        queued in ``queued``.
        """
        self._check, self._abort, self._queued = check, abort, queued

    def zeros(self, nbytes: int) -> Array:
        with self.stream:
            return self.gpu.zeros(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self._call.caller is None or 0 in shape:
            return self.gpu.empty(shape, dtype)
        # Memory goes back to the stream that it was asked for on, and a caller has done with it on his own.
        with self._call.caller:
            array = self.gpu.empty(shape, dtype)
        if self._call.aside:
            # What the stream was given since the call was issued may use it yet.
            self.stream.wait(self._call.caller.record())
        self._call.made.append(array)
        return array

    def check_new(self) -> None:
        call = self._call
        if call.aside and call.caller is not None and call.caller.handle == _PER_THREAD:
            raise Unsupported(
                "with wait=False no new arrays are made for the default stream of a thread, as the thread that makes "
                "the call has another; pass arrays to fill, or leave wait=False out"
            )

    def source(self, value: Any) -> Array:
        # That owns() knows it for an array is nothing that types can say.
        if self.gpu.owns(value):
            return value  # type: ignore[no-any-return]
        if is_array(value) and not lies_on_host(value):
            return self._adopted(value)
        array = source(value)
        self._say_that_arrays_travel()
        return self.gpu.upload(array)

    def facts(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        here = self.gpu.owns(value) or (is_array(value) and not lies_on_host(value))
        array = self.source(value) if here else source(value)
        return array.shape, array.dtype

    def target(self, out: Any) -> Array:
        if self.gpu.owns(out):
            if not out.flags.c_contiguous:
                check_apart(out)
            return out  # type: ignore[no-any-return]
        if is_array(out) and not lies_on_host(out):
            check_mutable(out)
            there = self._adopted(out)
            check_apart(there)
            return there
        array = target(out)
        self._say_that_arrays_travel()
        return array

    def _adopted(self, value: Any) -> Array:
        # Of a call that was issued it comes after what the caller's stream had to do then.
        return self.gpu.adopt(value, ordered=self._call.aside)

    def view(self, array: Array) -> Array:
        view: Array = array.view()
        return view

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        pairs, here = list(zip(targets, sources, strict=True)), list[tuple[Array, Array]]()
        for out, array in pairs:
            if not self.gpu.owns(out):
                continue
            if self.gpu.owns(array) or array.dtype != out.dtype:
                here.append((out, array if self.gpu.owns(array) else self.gpu.upload(array)))
            else:
                self.gpu.upload(array, out)  # which takes no memory there
        if here:
            self.gpu.copy([out for out, _ in here], [array for _, array in here])
        for out, array in pairs:
            if not self.gpu.owns(out):
                out[...] = self.to_host(array)

    def to_host(self, array: Array) -> Array:
        if not self.gpu.owns(array):
            return array
        out = np.empty(array.shape, array.dtype)
        with self.stream:
            self.gpu.download(array, out)
        # Work that was aborted has an end, too, and leaves anything behind.
        self._check()
        return out

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        # In a call, which others are in, too, there must be memory: one array is looked at there.
        kept = self._call.caller is not None and len(every) == 1
        found = self.gpu.exceeding(every, bound, self._flag if kept else self.gpu.zeros(len(every))) if every else ()
        self._check()  # as in to_host
        return found

    def in_order(self, run: Callable[..., Any], *arguments: Any) -> Any:
        call = self._call
        if call.aside:  # on the store's stream all along
            call.made.append(arguments)
            return run(*arguments)
        caller, made = self.gpu.current(), list[Any]()
        outer = call.caller, call.made
        self.stream.wait(caller.record())
        call.caller, call.made = caller, made
        try:
            with self.stream:
                return run(*arguments)
        finally:
            call.caller, call.made = outer
            done = self.stream.record()
            caller.wait(done)
            self._keep(done, (arguments, made))

    @contextmanager
    def aside(self) -> Iterator[None]:
        call = self._call
        self.gpu.use()
        self._asides = call.aside = True
        call.made = []
        try:
            with self.stream:
                yield
        finally:
            call.aside = False

    def check_order(self) -> None:
        if self.gpu.capturing():
            raise Unsupported(
                "the present stream is captured, and what a store does to arrays is no part of a graph of one's own; "
                "call it before or after the capture, or see kv.compile, which makes a graph of a pushpull"
            )

    def issue(self) -> Issued:
        return Issued(self)

    def make(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Return ``run()``, a call that was issued in another thread. In :meth:`aside`, and in another such call."""
        call, made = self._call, list[Any]()
        outer = call.caller, call.made
        call.caller, call.made = issued.caller, made
        try:
            return run()
        finally:
            call.caller, call.made = outer
            issued.done = self.stream.record()
            # What was given, too: of a call that is refused, it may have been read before that.
            self._keep(issued.done, (run, made))

    def rejoin(self) -> None:
        if self._asides:
            self.gpu.current().wait(self.stream.record())

    def _keep(self, done: Event, arguments: Any) -> None:
        self._in_use.append((done, arguments))
        while self._in_use[0][0].done:
            self._in_use.popleft()
            if not self._in_use:
                return

    def forget(self) -> None:
        pass

    def record(self, run: Callable[..., object], *arguments: Any) -> Graph:
        """Return what ``run(*arguments)`` gives to the store's stream, which is not run. In :meth:`in_order`.

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
        raise TransportError("what was recorded was given up with the store")

    def replay(self, graph: Graph, call: str) -> None:
        """Queue what was recorded. In :meth:`in_order`, whose arguments are to keep what it uses."""
        with self._queued(call):
            graph.launch()

    def drop_graphs(self) -> None:
        """Give up all that was recorded, before what it uses ends."""
        with self._recording:
            graphs, self._graphs = self._graphs, None
        for graph in list(graphs or ()):
            graph.close()

    def wait(self) -> None:
        """Wait until the stream is done, and let go of what it used."""
        self.stream.synchronize()
        self._in_use.clear()

    def close(self) -> None:
        """Wait, and give up all that was recorded."""
        self.wait()
        self.drop_graphs()

    def release(self) -> None:
        self.gpu.release(self.stream)

    def abandon(self, why: str) -> None:
        self._abort(why)

    def _say_that_arrays_travel(self) -> None:
        if not self._said:
            self._said = True
            logging.getLogger("mpikv").warning(
                "a host array is used with a store on %s, to which it is copied at every call; keep it there",
                self.gpu.name,
            )


class Issued:
    """The :class:`~mpikv.typing.Issue` of a :class:`DeviceMemory`."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.caller = memory.gpu.current()
        self.begin: Event = self.caller.record()
        self.done: Event | None = None
        """Behind what the call has queued; None if it was not made."""

    def start(self) -> None:
        self._memory.stream.wait(self.begin)

    def make(self, run: Callable[[], Any]) -> Any:
        return self._memory.make(self, run)

    def rejoin(self) -> None:
        if self.done is not None:
            self._memory.gpu.current().wait(self.done)


class _Call(threading.local):
    """What a thread runs in the order of a store's stream, if it does."""

    caller: Stream | None = None
    aside = False
    """Whether this thread makes calls that others have issued."""
    made: list[Any]
    """What is to live as long as the arguments: what was made for the caller."""

    def __init__(self) -> None:
        self.made = []


def _nothing(*_: object) -> None:
    pass
