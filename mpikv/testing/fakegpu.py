"""A GPU that is none: arrays over host memory, and a checker of the order in which streams use them.

Work is done at once, so that results can be compared. What is wrong with the order of work shows in the checker, which
knows what a GPU would have been free to do: each stream has a vector clock, an event takes a copy of it, and waiting
joins them. An access that is not ordered after the last conflicting one is a :class:`RaceError`, whatever numpy made of
it; so is memory that goes back to its allocator while a use of it is not ordered before the stream of its allocation,
whose next work may be given it, and a use of memory that is not ordered after what that stream had to do when it was
taken.

Work on a stream that is captured is recorded, and checked and done at each launch of its graph; what CUDA forbids
meanwhile is a :class:`MisuseError`.

Source: happens-before by vector clocks, as in Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race
Detection", PLDI 2009.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ..arrays import accumulator
from ..cuda.codes import code_of, has_code
from ..errors import TransportError, Unsupported, a_kind
from ..optimizers import BLOCK
from ..optimizers.forms import FORMS, call_of
from ..optimizers.optimizer import Optimizer
from ..typing import Array, Memory, RangeCodec, Updater

__all__ = [
    "Checker",
    "FakeArray",
    "FakeEvent",
    "FakeGpu",
    "FakeGraph",
    "FakeKernels",
    "FakeMark",
    "FakeStream",
    "FakeTable",
    "MisuseError",
    "RaceError",
]

# The characters of dtypes that CuPy knows.
_DTYPES = "?bhilqBHILQefdFD"
_ALIGNMENT = 256
_FIRST_ADDRESS = 0x7F00_0000_0000
# Bytes of NaN in each kind of float, so that what was never written is noticed.
_JUNK = 0xFF


class RaceError(AssertionError):
    """Work of a GPU that nothing orders uses the same memory."""


class MisuseError(AssertionError):
    """A GPU, or NCCL, was called as it must not be."""


class Clock(dict[int, int]):
    """How much of the work of each stream, by its number, is known to be done."""

    def join(self, other: Mapping[int, int]) -> None:
        """Know what the other knows, too."""
        for number, count in other.items():
            if count > self.get(number, 0):
                self[number] = count


class Access(NamedTuple):
    """A use of the bytes ``[low, high)`` of an allocation."""

    low: int
    high: int
    writes: bool
    stream: int
    time: int
    """Of the stream's clock."""
    work: str

    def __str__(self) -> str:
        return f"{self.work} on stream {self.stream} {'writes' if self.writes else 'reads'}"

    def without(self, low: int, high: int) -> Iterator[Access]:
        """Yield what is left of it beside a range."""
        if self.low < low:
            yield self._replace(high=min(self.high, low))
        if self.high > high:
            yield self._replace(low=max(self.low, high))


class Checker:
    """Finds uses of memory that nothing orders."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        """All that was found, also what could not be raised where it happened."""
        # Collecting garbage inside of a call may free memory, in the same thread.
        self.lock = threading.RLock()
        self._hosts: dict[int, Clock] = {}
        self._working: set[int] = set()

    def host(self) -> Clock:
        """Return what this thread of the host knows to be done."""
        return self._hosts.setdefault(threading.get_ident(), Clock())

    def work(self, stream: FakeStream, work: str, uses: Sequence[tuple[Block, int, int, bool]]) -> None:
        """Note work that uses bytes of allocations, and whether it writes them."""
        with self.lock:
            self._working.add(threading.get_ident())
            clock = stream.clock
            clock.join(self.host())
            clock[stream.number] = clock.get(stream.number, 0) + 1
            for block, low, high, writes in uses:
                if low < high:
                    self._use(block, Access(low, high, writes, stream.number, clock[stream.number], work), clock)

    def _use(self, block: Block, access: Access, clock: Clock) -> None:
        kept: list[Access] = []
        for other in block.accesses:
            if other.high <= access.low or access.high <= other.low:
                kept.append(other)
                continue
            if (access.writes or other.writes) and clock.get(other.stream, 0) < other.time:
                self.fault(f"{access} what {other}, and nothing orders them")
            # Whatever must come after the other one must come after this one, which comes after it.
            covers = access.writes or (not other.writes and other.stream == access.stream)
            kept.extend(other.without(access.low, access.high) if covers else [other])
        block.accesses = [*kept, access]

    def free(self, accesses: Sequence[Access], stream: FakeStream) -> None:
        """Note that memory went back to the allocator, for what comes next on the stream of its allocation."""
        with self.lock:
            clock = Clock(stream.clock)
            # Any thread that gives out work may have dropped it; one that only looks on does so by chance.
            for thread in self._working:
                clock.join(self._hosts.get(thread, {}))
            for access in accesses:
                if clock.get(access.stream, 0) < access.time:
                    self.faults.append(
                        f"memory of stream {stream.number} was freed while {access.work} on stream {access.stream} "
                        "uses it, and nothing orders them"
                    )

    def fault(self, text: str) -> None:
        """Note a fault, and raise it."""
        self.faults.append(text)
        raise RaceError(text)

    def assert_clean(self) -> None:
        """Raise if anything was found."""
        if self.faults:
            raise RaceError("; ".join(self.faults))


class Block:
    """One allocation."""

    def __init__(self, gpu: FakeGpu, nbytes: int, base: int) -> None:
        self.memory = np.full(nbytes, _JUNK, np.uint8)
        self.base, self.stream = base, gpu.current()
        # It is what the stream has let go of, and may be in use there yet.
        self.accesses = [Access(0, nbytes, True, self.stream.number, self.stream.time, "what had the memory before")]
        self._gpu = gpu

    def __del__(self) -> None:
        self._gpu.released(self)


class Recorded(NamedTuple):
    """Work that was recorded."""

    work: str
    uses: Sequence[tuple[weakref.ref[Block], int, int, bool]]
    """As :meth:`Checker.work` is given them, but that a graph keeps no memory."""
    run: Callable[[], object]
    """Does it, with numpy's arrays."""


class FakeGraph:
    """Recorded work."""

    def __init__(self, gpu: FakeGpu, stream: FakeStream) -> None:
        self._gpu, self.stream = gpu, stream
        self.works: list[Recorded] = []
        self.closed = False

    def launch(self) -> None:
        if self.closed:
            raise TransportError(f"what was recorded on {self._gpu.name} was given up")
        stream = self._gpu.current()
        if stream.capture is not None:
            raise MisuseError("a graph is launched in a capture")
        for work, uses, run in self.works:
            found = [(block(), *use) for block, *use in uses]
            if lost := [block for block, *_ in found if block is None]:
                raise MisuseError(f"{work} of a graph uses memory that was freed ({len(lost)} allocations)")
            self._gpu.checker.work(stream, work, found)  # type: ignore[arg-type]  # none is None
            run()

    def close(self) -> None:
        self.closed = True


class Blocker:
    """Work that does not come to its end as long as ``blocked``."""

    def __init__(self) -> None:
        self.blocked = True


class FakeEvent:
    """A point in the work of a stream."""

    def __init__(
        self, gpu: FakeGpu, clock: Clock, blockers: Sequence[Blocker], capture: FakeGraph | None = None
    ) -> None:
        self.clock, self.blockers, self.capture = clock, tuple(blockers), capture
        self._gpu, self._lag = gpu, gpu.lag

    @property
    def done(self) -> bool:
        self._gpu.check_used("an event is asked for")
        self._gpu.check_running("an event is asked for")
        if self.capture is not None:
            raise MisuseError("an event is asked for that was recorded in a capture")
        if any(blocker.blocked for blocker in self.blockers):
            return False
        if self._lag:
            self._lag -= 1
            return False
        with self._gpu.checker.lock:
            self._gpu.checker.host().join(self.clock)
        return True


class FakeMark:
    """A point in the work of a stream, of which the time is known."""

    def __init__(self, stream: FakeStream) -> None:
        stream.record()
        self._stream, self._time = stream, time.perf_counter()

    def seconds_to(self, later: FakeMark) -> float:
        """Wait for a later mark, and return the seconds between them."""
        later._stream.synchronize()
        return later._time - self._time


class FakeStream:
    """A queue of work."""

    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self.number = number
        # The default stream's handle is 0, as CUDA's.
        self.handle = number << 12
        self.clock = Clock()
        self.blockers: list[Blocker] = []
        self.capture: FakeGraph | None = None
        """What work is recorded in, as long as it is."""
        self._gpu = gpu

    @property
    def time(self) -> int:
        """How much work it has been given."""
        return self.clock.get(self.number, 0)

    def begin_capture(self) -> None:
        if not self.handle or self.capture is not None:
            raise MisuseError(f"a capture begins on {self!r}, the default stream or one that is captured")
        self.capture = FakeGraph(self._gpu, self)

    def end_capture(self) -> FakeGraph:
        graph, self.capture = self.capture, None
        if graph is None:
            raise MisuseError(f"a capture ends on {self!r} that did not begin")
        if self._gpu.capture_fails:
            raise TransportError(f"work of {self._gpu.name} could not be recorded: {self._gpu.capture_fails}")
        return graph

    def record(self) -> FakeEvent:
        checker = self._gpu.checker
        if self.capture is not None:
            return FakeEvent(self._gpu, Clock(), (), self.capture)
        with checker.lock:
            checker.work(self, "record", ())
            return FakeEvent(self._gpu, Clock(self.clock), self.blockers)

    def wait(self, event: FakeEvent) -> None:
        if self.capture is not event.capture:
            raise MisuseError(f"{self!r} waits for an event, and one of both is in a capture")
        with self._gpu.checker.lock:
            self.clock.join(event.clock)
            self.blockers += [blocker for blocker in event.blockers if blocker.blocked]

    def synchronize(self) -> None:
        self._gpu.check_used("a stream is waited for")
        self._gpu.check_running("a stream is waited for")
        while any(blocker.blocked for blocker in self.blockers):
            time.sleep(1e-3)
        self.blockers.clear()
        with self._gpu.checker.lock:
            self._gpu.checker.host().join(self.clock)

    def __enter__(self) -> FakeStream:
        self._gpu.entered.append(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._gpu.entered.pop()

    def __repr__(self) -> str:
        return f"<FakeStream {self.number}>"


class FakeArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a :class:`FakeGpu`: what it offers, ``cupy.ndarray`` offers, and where that refuses, it does."""

    def __init__(self, gpu: FakeGpu, block: Block, beneath: Array) -> None:
        self._gpu, self._block, self._beneath = gpu, block, beneath

    @property
    def shape(self) -> tuple[int, ...]:
        return self._beneath.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._beneath.dtype

    @property
    def size(self) -> int:
        return self._beneath.size

    @property
    def nbytes(self) -> int:
        return self._beneath.nbytes

    @property
    def itemsize(self) -> int:
        return self._beneath.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        return self._beneath.strides

    @property
    def ndim(self) -> int:
        return self._beneath.ndim

    @property
    def flags(self) -> SimpleNamespace:
        flags = self._beneath.flags
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=flags.owndata)

    def __len__(self) -> int:
        return len(self._beneath)

    def reshape(self, *shape: Any) -> FakeArray:
        beneath = self._beneath.reshape(*shape)
        if not np.may_share_memory(beneath, self._block.memory) and self.size:
            raise Unsupported("reshape copies here, which no store should rely on")
        return FakeArray(self._gpu, self._block, beneath)

    def view(self, dtype: Any = None) -> FakeArray:
        return FakeArray(self._gpu, self._block, self._beneath if dtype is None else self._beneath.view(dtype))

    def copy(self) -> FakeArray:
        return self.astype(self.dtype)

    def astype(self, dtype: Any, copy: bool = True) -> FakeArray:
        if not copy and self.dtype == dtype:
            return self
        out = self._gpu.empty(self.shape, np.dtype(dtype))
        self._gpu.copy([out], [self])
        return out

    def get(self) -> Array:
        """Return a numpy array of the same content."""
        out = np.empty(self.shape, self.dtype)
        self._gpu.download(self, out)
        return out

    def fill(self, value: Any) -> None:
        self._gpu.launch("fill", [], [self], partial(self._beneath.fill, value))

    def __getitem__(self, index: Any) -> FakeArray:
        beneath = self._beneath[index]
        if not isinstance(beneath, np.ndarray):
            # Of one element numpy makes a scalar, CuPy an array.
            beneath = self._beneath[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        if beneath.size and not np.may_share_memory(beneath, self._beneath):
            raise Unsupported("an index that copies, which no store should rely on")
        return FakeArray(self._gpu, self._block, beneath)

    def __setitem__(self, index: Any, value: Any) -> None:
        out = self[index]
        value = _beneath(value)
        self._gpu.launch("setitem", value.arrays, [out], partial(out._beneath.__setitem__, ..., value.content))

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("a fake array cannot be exported")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._gpu.ordinal

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method not in ("__call__", "reduce") or options.keys() - {"out", "dtype", "casting", "axis"}:
            return NotImplemented
        given = [_beneath(value) for value in inputs]
        reads = [array for value in given for array in value.arrays]
        outs = options.pop("out", None)
        if outs is None:
            # Made where it is known how large it is: by numpy, on the side.
            result = np.asarray(getattr(ufunc, method)(*(value.content for value in given), **options))
            out = self._gpu.empty(result.shape, result.dtype)
            self._gpu.launch(ufunc.__name__, reads, [out], partial(out._beneath.__setitem__, ..., result))
            return out
        (out,) = outs
        if not isinstance(out, FakeArray):
            raise TypeError(f"out is {a_kind(out)}")
        compute = partial(getattr(ufunc, method), *(value.content for value in given), out=out._beneath, **options)
        self._gpu.launch(ufunc.__name__, reads, [out], compute)
        return out

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is np.copyto:
            target, source = arguments
            value = _beneath(source)
            copy = partial(np.copyto, target._beneath, value.content, **options)
            self._gpu.launch("copyto", value.arrays, [target], copy)
            return None
        if function is np.may_share_memory:
            return np.may_share_memory(*(_beneath(value).content for value in arguments))
        return NotImplemented

    def __repr__(self) -> str:
        return f"<FakeArray {self.dtype}{list(self.shape)} of {self._gpu.name}>"


class Value(NamedTuple):
    """An operand: the arrays of the GPU in it, and what numpy computes with."""

    arrays: Sequence[FakeArray]
    content: Any


def _beneath(value: Any) -> Value:
    if isinstance(value, FakeArray):
        return Value([value], value._beneath)
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return Value([], value)


class FakeGpu:
    """A :class:`~mpikv.typing.Gpu` of host memory.

    Example:
        >>> import numpy as np
        >>> gpu = FakeGpu()
        >>> array = gpu.upload(np.ones(2))
        >>> with gpu.stream():
        ...     array += 1
        Traceback (most recent call last):
        mpikv.testing.fakegpu.RaceError: add on stream 1 reads what upload on stream 0 writes, and nothing orders them
    """

    def __init__(self, ordinal: int = 0, lag: int = 1) -> None:
        """An event is not done yet when it is asked for the first ``lag`` times."""
        self.name, self.uuid, self.ordinal, self.lag = f"fake:{ordinal}", f"GPU-fake-{ordinal}", ordinal, lag
        self.checker = Checker()
        self.allocations = 0
        """How many allocations there were."""
        self.spare: int | None = None
        """After how many more one fails, once, where a test wants that."""
        self.capture_fails = ""
        """Why captures cannot be ended, where a test wants that."""
        self._numbers = itertools.count(1)
        self._next = _FIRST_ADDRESS
        self._blocks: dict[int, weakref.ref[Block]] = {}
        self._streams = {0: FakeStream(self, 0)}
        self._threads = threading.local()
        self.use()

    def use(self) -> None:
        """Make this the GPU of the present thread."""
        self._threads.used = True

    def check_used(self, what: str) -> None:
        """Raise if it is not the GPU of the present thread."""
        if not getattr(self._threads, "used", False):
            raise MisuseError(f"{what} in a thread that has not chosen its GPU")

    def check_running(self, what: str) -> None:
        """Raise if the work of this thread's present stream is recorded."""
        if self.current().capture is not None:
            raise MisuseError(f"{what} in a capture")

    @property
    def entered(self) -> list[FakeStream]:
        """The streams that this thread has entered and not left."""
        if not hasattr(self._threads, "entered"):
            self._threads.entered = []
        entered: list[FakeStream] = self._threads.entered
        return entered

    def stream(self) -> FakeStream:
        stream = FakeStream(self, next(self._numbers))
        self._streams[stream.handle] = stream
        return stream

    def current(self) -> FakeStream:
        return self.entered[-1] if self.entered else self._streams[0]

    def capturing(self) -> bool:
        return self.current().capture is not None

    def find_stream(self, handle: int) -> FakeStream | None:
        """Return the stream of a handle, if there is one."""
        return self._streams.get(handle)

    def _block(self, nbytes: int) -> Block:
        self.check_running("memory is taken, which no graph keeps,")
        with self.checker.lock:
            if self.spare is not None and nbytes:
                self.spare = self.spare - 1 if self.spare else None
                if self.spare is None:
                    raise MemoryError(f"{self.name} has no {nbytes} bytes left")
            block = Block(self, nbytes, self._next)
            self._blocks[block.base] = weakref.ref(block)
            # No address is used twice, and none is next to another's.
            self._next += (nbytes // _ALIGNMENT + 2) * _ALIGNMENT
            self.allocations += 1
            return block

    def released(self, block: Block) -> None:
        """Note that nothing refers to an allocation any more."""
        with self.checker.lock:
            del self._blocks[block.base]
            self.checker.free(block.accesses, block.stream)

    def find(self, address: int, nbytes: int) -> tuple[Block, int] | None:
        """Return the allocation in which so many bytes lie, and where in it."""
        with self.checker.lock:
            bases = list(self._blocks)
            place = bisect_right(bases, address) - 1
            block = self._blocks[bases[place]]() if place >= 0 else None
            if block is None or address + nbytes > block.base + block.memory.size:
                return None
            return block, address - block.base

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeArray:
        dtype = np.dtype(dtype)
        block = self._block(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return FakeArray(self, block, block.memory.view(dtype).reshape(shape))

    def zeros(self, nbytes: int) -> FakeArray:
        array = self.empty((nbytes,), np.dtype(np.uint8))
        array.fill(0)
        return array

    def release(self, stream: FakeStream) -> None:
        pass

    def owns(self, value: object) -> bool:
        return isinstance(value, FakeArray) and value._gpu is self

    def adopt(self, value: Any, ordered: bool = False) -> FakeArray:
        if isinstance(value, FakeArray) and self.owns(value):
            return value
        raise Unsupported(f"the array lies on device {value.__dlpack_device__()} and this store is on {self.name}")

    def upload(self, array: Array, out: FakeArray | None = None) -> FakeArray:
        self.check_running("memory of the host is copied")
        if array.dtype.char not in _DTYPES and array.dtype.name != "bfloat16":
            raise ValueError(f"Unsupported dtype {array.dtype}")  # as CuPy's
        if out is None:
            out = self.empty(array.shape, array.dtype)
        elif not out.flags.c_contiguous:
            self.empty(array.shape, array.dtype)
        if (array.shape, array.dtype) != (out.shape, out.dtype):
            raise TypeError(f"{out!r} does not fit {array.dtype}{list(array.shape)}")
        self.launch("upload", [], [out], partial(out._beneath.__setitem__, ..., array))
        return out

    def download(self, array: FakeArray, out: Array) -> None:
        if (array.shape, array.dtype) != (out.shape, out.dtype):
            raise TypeError(f"{array!r} does not fit {out.dtype}{list(out.shape)}")
        self.check_running("memory of the host is copied")
        if not array.flags.c_contiguous:
            self.empty(array.shape, array.dtype)
        self.launch("download", [array], [])
        self.current().synchronize()
        out[...] = array._beneath

    def measure(self, arrays: Sequence[FakeArray], dtypes: Sequence[np.dtype[Any]]) -> list[tuple[float, bool]]:
        self.empty((2 * len(arrays),), np.dtype(np.float64))
        self.launch("measure", arrays, [])
        self.current().synchronize()
        found = []
        for array, dtype in zip(arrays, dtypes, strict=True):
            if "float" not in array.dtype.name or "float" not in dtype.name:
                raise Unsupported(f"{array!r} cannot be measured")
            with np.errstate(all="ignore"):
                kept = array._beneath.reshape(-1).astype(dtype).astype(np.float64)
                cells = [kept[low : low + BLOCK] for low in range(0, kept.size, BLOCK)]
                found.append(
                    (float(sum(float(np.square(cell).sum()) for cell in cells)), bool(np.isfinite(kept).all()))
                )
        return found

    def scale(self, arrays: Sequence[FakeArray], factor: float) -> None:
        self.launch("scale", arrays, arrays, partial(_scale, [array._beneath for array in arrays], factor))

    def kernels(self) -> FakeKernels:
        return FakeKernels(self)

    def address(self, array: FakeArray) -> int:
        return array._block.base + _bytes(array)[0]

    def copy(self, targets: Sequence[FakeArray], sources: Sequence[FakeArray]) -> None:
        for target, source in zip(targets, sources, strict=True):
            if target.shape != source.shape:
                raise ValueError(f"copy of {source!r} to {target!r}")
        pairs = [(target._beneath, source._beneath) for target, source in zip(targets, sources, strict=True)]
        self.launch("copy", sources, targets, partial(_copy, pairs))

    def mark(self) -> FakeMark:
        """Return a point in the work of the present stream, and the time of the host's clock, since work is done at
        once.
        """
        return FakeMark(self.current())

    def exceeding(self, arrays: Sequence[FakeArray], bound: float, flags: FakeArray) -> Sequence[bool]:
        if flags.shape != (len(arrays),) or flags.dtype != np.uint8:
            raise TypeError(f"{flags!r} is no memory for {len(arrays)} flags")
        for array in arrays:
            if not array.flags.c_contiguous:
                self.empty(array.shape, array.dtype)
        self.launch("exceeding", arrays, [flags])
        self.current().synchronize()
        with np.errstate(all="ignore"):
            return [not (np.abs(array._beneath.astype(np.float64)) <= bound).all() for array in arrays]

    def clear(self, array: FakeArray) -> None:
        array.fill(0)

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        pass

    def numbers(self, every: Sequence[Array]) -> list[FakeArray]:
        there, ends = self.upload(np.concatenate(every)), np.cumsum([ids.size for ids in every]).tolist()
        return [there[end - ids.size : end] for ids, end in zip(every, ends, strict=True)]

    def _uploaded(self, ids: Any) -> FakeArray:
        return ids if isinstance(ids, FakeArray) else self.upload(ids)

    def take_rows(self, table: FakeArray, ids: Any, out: FakeArray | None = None) -> FakeArray:
        ids = self._uploaded(ids)
        if out is None:
            out = self.empty((ids.size, *table.shape[1:]), table.dtype)
        if (out.shape, out.dtype) != ((ids.size, *table.shape[1:]), table.dtype):
            raise TypeError(f"{ids.size} rows of {table!r} do not fit {out!r}")
        into, beneath, numbers = out._beneath, table._beneath, ids._beneath
        self._launch_rows("take_rows", [table], [out], ids, lambda: np.copyto(into, beneath[numbers]))
        return out

    def put_rows(self, table: FakeArray, ids: Any, rows: FakeArray | None) -> None:
        ids = _unique(self._uploaded(ids))
        if rows is not None and rows.dtype != table.dtype:
            rows = rows.astype(table.dtype)
        into, values, numbers = table._beneath, 0 if rows is None else rows._beneath, ids._beneath
        reads = [] if rows is None else [rows]
        self._launch_rows("put_rows", reads, [table], ids, lambda: into.__setitem__(numbers, values))

    def add_rows(self, table: FakeArray, ids: Any, rows: FakeArray) -> None:
        ids = _unique(self._uploaded(ids))
        if table.dtype not in (rows.dtype, accumulator(rows.dtype)):
            raise TypeError(f"{rows!r} is not added to {table!r}")
        into, values, numbers = table._beneath, rows._beneath, ids._beneath

        def add() -> None:
            with np.errstate(all="ignore"):
                into[numbers] += values

        self._launch_rows("add_rows", [table, rows], [table], ids, add)

    def sum_runs(self, rows: FakeArray, order: Array, starts: Array) -> FakeArray:
        total = self.empty((starts.size, *rows.shape[1:]), rows.dtype)
        into, values = total._beneath, rows._beneath

        def add() -> None:
            with np.errstate(all="ignore"):
                sums = values[order[starts]].astype(accumulator(values.dtype))
                for place, run in enumerate(np.split(order, starts[1:])):
                    for number in run[1:]:
                        sums[place] += values[number]
                into[...] = sums

        self._launch_rows("sum_runs", [rows], [total], self.upload(np.concatenate([order, starts])), add)
        return total

    def _launch_rows(
        self,
        work: str,
        reads: Sequence[FakeArray],
        writes: Sequence[FakeArray],
        ids: FakeArray,
        run: Callable[[], object],
    ) -> None:
        """Give work on rows of contiguous arrays to the present stream."""
        if ids.dtype != np.int64:
            raise TypeError(f"{work} of rows whose numbers are {ids.dtype}")
        for array in (*reads, *writes, ids):
            if not array.flags.c_contiguous:
                raise MisuseError(f"{work} of {array!r}, which is not contiguous")
        self.launch(work, [*reads, ids], writes, run)

    def launch(
        self,
        work: str,
        reads: Sequence[FakeArray],
        writes: Sequence[FakeArray],
        run: Callable[[], object] = lambda: None,
    ) -> None:
        """Give work to this thread's present stream, that ``run`` does, which knows no arrays of the GPU."""
        uses = [(array, writing) for arrays, writing in ((reads, False), (writes, True)) for array in arrays]
        for array, _ in uses:
            if not self.owns(array):
                raise TypeError(f"{work}: {type(array).__name__} is no array of {self.name}")
        self.queue(self.current(), work, [(array._block, *_bytes(array), writing) for array, writing in uses], run)

    def queue(
        self, stream: FakeStream, work: str, uses: Sequence[tuple[Block, int, int, bool]], run: Callable[[], object]
    ) -> None:
        """Do work on a stream, that uses bytes of allocations, or record it."""
        if stream.capture is None:
            self.checker.work(stream, work, uses)
            run()
        else:
            kept = [(weakref.ref(block), low, high, writes) for block, low, high, writes in uses]
            stream.capture.works.append(Recorded(work, kept, run))


def _scale(arrays: Sequence[Array], factor: float) -> None:
    for array in arrays:
        with np.errstate(all="ignore"):
            array[...] = array.astype(np.float64) * factor


def _copy(pairs: Sequence[tuple[Array, Array]]) -> None:
    # A GPU casts without a word, too.
    with np.errstate(all="ignore"):
        for target, source in pairs:
            np.copyto(target, source, casting="unsafe")


def _unique(ids: FakeArray) -> FakeArray:
    """Return numbers of rows to be written, of which a GPU writes each at any time."""
    if np.unique(ids._beneath).size != ids.size:
        raise MisuseError(f"rows {ids._beneath} are to be written, some of them twice")
    return ids


def _bytes(array: FakeArray) -> tuple[int, int]:
    """Return the bytes of its allocation that an array spans."""
    if not array.size:
        return 0, 0
    beneath = array._beneath
    low: int = beneath.__array_interface__["data"][0] - array._block.memory.__array_interface__["data"][0]
    steps = zip(beneath.shape, beneath.strides, strict=True)
    return low, low + sum((length - 1) * stride for length, stride in steps) + beneath.itemsize


class FakeKernels:
    """The :class:`~mpikv.typing.Kernels` of a :class:`FakeGpu`: the rules of updaters, in numpy, as one launch each."""

    rules: Sequence[str] = ()

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        pass

    def has_rule(self, updater: Updater) -> bool:
        return type(updater) in FORMS

    def bind(
        self, updater: Updater, total: FakeArray, value: FakeArray, state: Mapping[str, FakeArray]
    ) -> Callable[[Any], None]:
        beneath = {name: array._beneath for name, array in state.items()}
        several = self._several(
            [total, value, *state.values()], [updater.bind(total._beneath, value._beneath, beneath)]
        )
        return lambda step: several((step,))

    def bind_ranges(
        self,
        updater: Updater,
        total: FakeArray,
        value: FakeArray,
        state: Mapping[str, FakeArray],
        ends: Sequence[int],
    ) -> Callable[[Sequence[Any]], None]:
        updates = []
        for part in (slice(low, high) for low, high in itertools.pairwise((0, *ends))):
            beneath = {name: array._beneath[part] for name, array in state.items()}
            updates.append(updater.bind(total._beneath[part], value._beneath[part], beneath))
        return self._several([total, value, *state.values()], updates)

    def _several(
        self, arrays: Sequence[FakeArray], updates: Sequence[Callable[[Any], None]]
    ) -> Callable[[Sequence[Any]], None]:
        """Return what makes all of some updates by one launch."""

        def launch(steps: Sequence[Any]) -> None:
            rows = [step.memory for step in steps if isinstance(step, FakeRow)]
            # An updater may overwrite the sum.
            self._gpu.launch("update", rows, arrays, partial(run, steps))

        def run(steps: Sequence[Any]) -> None:
            for update, step in zip(updates, steps, strict=True):
                if isinstance(step, FakeRow):
                    step.cell.run(update)
                else:
                    update(step)

        return launch

    # The arrays of a Whole are numpy's to types, and here of this GPU.
    def bind_whole(self, updater: Updater, wholes: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        arrays = [array for whole in wholes for array in (whole.total, whole.value, *whole.state.values())]
        beneath = [
            (whole.total._beneath, whole.value._beneath, {name: array._beneath for name, array in whole.state.items()})
            for whole in wholes
        ]

        norms = self._gpu.empty((3 * len(wholes),), np.dtype(np.float64))

        def launch(steps: Sequence[Any]) -> None:
            self._gpu.launch("update of whole values", [], [*arrays, norms], partial(run, steps))

        def run(steps: Sequence[Any]) -> None:
            for step, (total, value, state) in zip(steps, beneath, strict=True):
                updater.update(step, total, value, state)

        return launch

    def table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> FakeTable:
        return FakeTable(self._gpu, updater, memory, count)

    def bind_adding(self, updater: Updater, value: FakeArray, state: Mapping[str, FakeArray]) -> None:
        return None

    def codec(self, codec: Any) -> Any:
        return FakeRanges(self._gpu, codec) if has_code(codec) else codec


class FakeRanges:
    """A codec on a :class:`FakeGpu`, of those that CUDA has kernels for: what it does on the host, in a launch each."""

    elementwise: ClassVar[Literal[True]] = True

    def __init__(self, gpu: FakeGpu, codec: Any) -> None:
        self.largest = code_of(codec).largest
        self.codec: RangeCodec = codec
        self.feedback = self.codec.feedback
        self._gpu = gpu

    def settings(self) -> str:
        return self.codec.settings()

    def nbytes(self, count: int) -> int:
        return self.codec.nbytes(count)

    def encode(self, gradient: FakeArray, payload: FakeArray, residual: FakeArray | None = None) -> None:
        kept = [] if residual is None else [residual]
        arrays = gradient._beneath, payload._beneath, None if residual is None else residual._beneath
        self._gpu.launch("encode", [gradient, *kept], [payload, *kept], partial(self.codec.encode, *arrays))

    def decode_add(self, payload: FakeArray, total: FakeArray) -> None:
        decode = partial(self.codec.decode_add, payload._beneath, total._beneath)
        self._gpu.launch("decode_add", [payload, total], [total], decode)


class Form:
    """Which form of an optimizer's rule its present options ask for."""

    def __init__(self, updater: Updater) -> None:
        assert isinstance(updater, Optimizer)
        self._optimizer = updater
        self.name = call_of(updater, updater.step("", 1))[0]

    def fits(self, step: Any) -> bool:
        """Return whether the options of now ask for the same."""
        return call_of(self._optimizer, step)[0] == self.name


class Cell:
    """What a row of a table holds. It keeps no memory."""

    def __init__(self, form: Form) -> None:
        self.step: Any = None
        self._form = form

    def run(self, update: Callable[[Any], None]) -> None:
        """Update by the step."""
        if self.step is None or not self._form.fits(self.step):
            raise MisuseError(f"an update was queued as {self._form.name} and is run for {self.step}")
        update(self.step)


class FakeRow(NamedTuple):
    """Stands for a step that an update finds when it runs."""

    memory: Any
    cell: Cell


class FakeTable:
    """The :class:`~mpikv.typing.StepTable` of :class:`FakeKernels`. As in a kernel's launch, which form of a rule runs
    is settled when the update is queued.
    """

    def __init__(self, gpu: FakeGpu, updater: Updater, memory: Memory, count: int) -> None:
        self._gpu, self._form = gpu, Form(updater)
        self._memory: Any = memory.zeros(count)
        self.rows = [FakeRow(self._memory[row : row + 1], Cell(self._form)) for row in range(count)]

    def fits(self, step: Any) -> bool:
        return self._form.fits(step)

    def write(self, steps: Sequence[Any]) -> None:
        cells = [row.cell for row in self.rows[: len(steps)]]

        def write() -> None:
            for cell, step in zip(cells, steps, strict=True):
                cell.step = step

        self._gpu.launch("write steps", [], [self._memory[: len(steps)]], write)
