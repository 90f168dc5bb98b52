"""A fake GPU: arrays over host memory; ``fakestreams.py`` checks the order of their work."""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..arrays.arrays import accumulator
from ..errors import Unsupported, a_kind
from ..protocols import Array
from .fakekernels import FakeKernels
from .fakestreams import Block, Checker, FakeStream, MisuseError

__all__ = ["FakeArray", "FakeGpu", "FakeTensor"]

# The dtype characters that CuPy supports.
_DTYPES = "?bhilqBHILQefdFD"
_ALIGNMENT = 256
_present = threading.local()
"""The ``ordinal`` of the current GPU of a thread that has chosen one; in other threads it counts as 0."""
_FIRST_ADDRESS = 0x7F00_0000_0000


class FakeArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a :class:`FakeGpu`. It has a part of ``cupy.ndarray``, and refuses all that CuPy refuses."""

    def __init__(self, gpu: FakeGpu, block: Block, beneath: Array, parent: FakeArray | None = None) -> None:
        """``parent`` is the array of this view, as far as CuPy knows."""
        self._gpu, self._block, self._beneath = gpu, block, beneath
        self._owns = parent is None
        self._allocation: object = object() if parent is None else parent._allocation

    def _over(self, beneath: Array) -> FakeArray:
        """Return a view of this array."""
        return FakeArray(self._gpu, self._block, beneath, self)

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
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=self._owns)

    def __len__(self) -> int:
        return len(self._beneath)

    def reshape(self, *shape: Any) -> FakeArray:
        beneath = self._beneath.reshape(*shape)
        if not np.may_share_memory(beneath, self._block.memory) and self.size:
            raise Unsupported("reshape copies here, which no store should rely on")
        return self._over(beneath)

    def view(self, dtype: Any = None) -> FakeArray:
        return self._over(self._beneath if dtype is None else self._beneath.view(dtype))

    def copy(self) -> FakeArray:
        return self.astype(self.dtype)

    def astype(self, dtype: Any, copy: bool = True) -> FakeArray:
        if not copy and self.dtype == dtype:
            return self
        self._gpu.check_present("astype")
        out = self._gpu.empty(self.shape, np.dtype(dtype))
        self._gpu.copy([out], [self])
        return out

    def get(self) -> Array:
        """Return a numpy array of the same content."""
        out = np.empty(self.shape, self.dtype)
        self._gpu.download(self, out)
        return out

    def fill(self, value: Any) -> None:
        self._gpu.compute("fill", [], [self], partial(self._beneath.fill, value))

    def __getitem__(self, index: Any) -> FakeArray:
        beneath = self._beneath[index]
        if not isinstance(beneath, np.ndarray):
            # For one element numpy returns a scalar, and CuPy an array.
            beneath = self._beneath[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        if beneath.size and not np.may_share_memory(beneath, self._beneath):
            raise Unsupported("an index that copies, which no store should rely on")
        return self._over(beneath)

    def __setitem__(self, index: Any, value: Any) -> None:
        out = self[index]
        value = _beneath(value)
        self._gpu.compute("setitem", value.arrays, [out], partial(out._beneath.__setitem__, ..., value.content))

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
            # numpy computes the result's shape and dtype beforehand, without work on the fake GPU.
            result = np.asarray(getattr(ufunc, method)(*(value.content for value in given), **options))
            out = self._gpu.empty(result.shape, result.dtype)
            self._gpu.compute(ufunc.__name__, reads, [out], partial(out._beneath.__setitem__, ..., result))
            return out
        (out,) = outs
        if not isinstance(out, FakeArray):
            raise TypeError(f"out is {a_kind(out)}")
        compute = partial(getattr(ufunc, method), *(value.content for value in given), out=out._beneath, **options)
        self._gpu.compute(ufunc.__name__, reads, [out], compute)
        return out

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is np.copyto:
            target, source = arguments
            value = _beneath(source)
            copy = partial(np.copyto, target._beneath, value.content, **options)
            self._gpu.compute("copyto", value.arrays, [target], copy)
            return None
        if function is np.may_share_memory:
            # CuPy compares places inside of one allocation, and takes another library's memory for its own.
            first, other = arguments
            return first._allocation is other._allocation and np.may_share_memory(first._beneath, other._beneath)
        return NotImplemented

    def __repr__(self) -> str:
        return f"<FakeArray {self.dtype}{list(self.shape)} of {self._gpu.name}>"


class FakeTensor:
    """An array of another library, over the memory of one of a :class:`FakeGpu`."""

    def __init__(self, array: FakeArray) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Value(NamedTuple):
    """An operand: its GPU arrays, and the value for numpy."""

    arrays: Sequence[FakeArray]
    content: Any


def _beneath(value: Any) -> Value:
    if isinstance(value, FakeArray):
        return Value([value], value._beneath)
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return Value([], value)


class FakeGpu:
    """A :class:`~mpikv.protocols.Gpu` of host memory.

    >>> import numpy as np
    >>> gpu = FakeGpu()
    >>> array = gpu.upload(np.ones(2))
    >>> with gpu.stream():
    ...     array += 1
    Traceback (most recent call last):
    mpikv.testing.fakestreams.RaceError: add on stream 1 reads what upload on stream 0 writes, and nothing orders them
    """

    kind = FakeArray

    def __init__(self, ordinal: int = 0, lag: int = 1) -> None:
        """An event answers "not done" ``lag`` times first."""
        self.name, self.uuid, self.ordinal, self.lag = f"fake:{ordinal}", f"GPU-fake-{ordinal}", ordinal, lag
        self.checker = Checker()
        self.allocations = 0
        """Number of allocations."""
        self.spare: int | None = None
        """Allocations left before one fails, once; None: none fails."""
        self._numbers = itertools.count(1)
        self._next = _FIRST_ADDRESS
        self._blocks: dict[int, weakref.ref[Block]] = {}
        self._streams = {0: FakeStream(self, 0)}
        self._threads = threading.local()
        self.use()

    def use(self) -> None:
        """Make this GPU the thread's current one."""
        _present.ordinal = self.ordinal

    def watch(self) -> None:
        self.use()

    def check_used(self, what: str) -> None:
        """Raise if the thread has chosen no GPU: CUDA would make a context on the first one."""
        if not hasattr(_present, "ordinal"):
            raise MisuseError(f"{what} in a thread that has not chosen its GPU")

    def check_present(self, what: str) -> None:
        """Raise if another GPU is the thread's current one."""
        if getattr(_present, "ordinal", 0) != self.ordinal:
            raise MisuseError(f"{what} on {self.name}, which is not the present GPU")

    def enter(self, stream: FakeStream) -> None:
        """Make this GPU and a stream of it the thread's current ones."""
        self.entered.append(stream)
        self._left.append(dict(vars(_present)))
        self.use()

    def leave(self) -> None:
        """Restore the thread's GPU and stream."""
        self.entered.pop()
        vars(_present).clear()
        vars(_present).update(self._left.pop())

    @property
    def _left(self) -> list[dict[str, int]]:
        """The thread's current GPU before each stream that it has entered."""
        if not hasattr(self._threads, "left"):
            self._threads.left = []
        left: list[dict[str, int]] = self._threads.left
        return left

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
        return False

    def find_stream(self, handle: int) -> FakeStream | None:
        """Return the stream with a handle; None if there is none."""
        return self._streams.get(handle)

    def _block(self, nbytes: int) -> Block:
        with self.checker.lock:
            if self.spare is not None and nbytes:
                self.spare = self.spare - 1 if self.spare else None
                if self.spare is None:
                    raise MemoryError(f"{self.name} has no {nbytes} bytes left")
            block = Block(self, nbytes, self._next)
            self._blocks[block.base] = weakref.ref(block)
            # A fresh address each time, with a gap behind: so a use beyond or after an allocation hits no other one.
            self._next += (nbytes // _ALIGNMENT + 2) * _ALIGNMENT
            self.allocations += 1
            return block

    def released(self, block: Block) -> None:
        """Record that an allocation was freed."""
        with self.checker.lock:
            del self._blocks[block.base]
            self.checker.free(block.accesses, block.stream)

    def find(self, address: int, nbytes: int) -> tuple[Block, int] | None:
        """Return the allocation that holds ``nbytes`` at an address, and the offset in it."""
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
        self.clear(array)
        return array

    def release(self, stream: FakeStream) -> None:
        pass

    def owns(self, value: object) -> bool:
        return isinstance(value, FakeArray) and value._gpu is self

    def addresses(self, values: Sequence[Any]) -> Sequence[int] | None:
        plain = set(map(type, values)) == {self.kind} and all(map(self.owns, values))
        return list(map(self.address, values)) if plain else None

    def adopt(self, value: Any, ordered: bool = False) -> FakeArray:
        array = value.array if isinstance(value, FakeTensor) else value
        if self.owns(array):
            return FakeArray(self, array._block, array._beneath)
        raise Unsupported(f"the array lies on device {value.__dlpack_device__()} and this store is on {self.name}")

    def upload(self, array: Array, out: FakeArray | None = None) -> FakeArray:
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
        if not array.flags.c_contiguous:
            self.empty(array.shape, array.dtype)
        self.launch("download", [array], [])
        self.current().synchronize()
        out[...] = array._beneath

    def squares_and_finite(self, arrays: Sequence[FakeArray], dtypes: Sequence[np.dtype[Any]]) -> NoReturn:
        raise MisuseError("norms are measured by CUDA's kernels, on the emulated GPU")

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
        self.launch("fill", [], [array], partial(array._beneath.fill, 0))

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        pass

    def take_rows(self, table: FakeArray, ids: FakeArray, out: FakeArray) -> None:
        if (out.shape, out.dtype) != ((ids.size, *table.shape[1:]), table.dtype):
            raise TypeError(f"{ids.size} rows of {table!r} do not fit {out!r}")
        into, beneath, numbers = out._beneath, table._beneath, ids._beneath
        self._launch_rows("take_rows", [table], [out], ids, lambda: np.copyto(into, beneath[numbers]))

    def put_rows(self, table: FakeArray, ids: FakeArray, rows: FakeArray | None) -> None:
        ids = _unique(ids)
        if rows is not None and rows.dtype != table.dtype:
            raise TypeError(f"{rows!r} are not put into {table!r}")
        into, values, numbers = table._beneath, 0 if rows is None else rows._beneath, ids._beneath
        reads = [] if rows is None else [rows]
        self._launch_rows("put_rows", reads, [table], ids, lambda: into.__setitem__(numbers, values))

    def add_rows(self, table: FakeArray, ids: FakeArray, rows: FakeArray) -> None:
        ids = _unique(ids)
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
        """Queue work on rows of contiguous arrays on the current stream."""
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
        """Queue work on the thread's current stream; ``run`` does it, and knows no GPU arrays."""
        uses = [(array, writing) for arrays, writing in ((reads, False), (writes, True)) for array in arrays]
        for array, _ in uses:
            if not self.owns(array):
                raise TypeError(f"{work}: {type(array).__name__} is no array of {self.name}")
        self.checker.work(self.current(), work, [(array._block, *_bytes(array), writing) for array, writing in uses])
        run()

    def compute(
        self, work: str, reads: Sequence[FakeArray], writes: Sequence[FakeArray], run: Callable[[], object]
    ) -> None:
        """Queue work on the thread's current stream. Like a CUDA kernel, it needs the current GPU, not the arrays'."""
        self.check_present(work)
        self.launch(work, reads, writes, run)


def _scale(arrays: Sequence[Array], factor: float) -> None:
    for array in arrays:
        with np.errstate(all="ignore"):
            array[...] = array.astype(np.float64) * factor


def _copy(pairs: Sequence[tuple[Array, Array]]) -> None:
    # A GPU casts without warnings, too.
    with np.errstate(all="ignore"):
        for target, source in pairs:
            np.copyto(target, source, casting="unsafe")


def _unique(ids: FakeArray) -> FakeArray:
    """Return the numbers of rows to write. Raise if one occurs twice: a GPU may write the two in any order."""
    if np.unique(ids._beneath).size != ids.size:
        raise MisuseError(f"rows {ids._beneath} are to be written, some of them twice")
    return ids


def _bytes(array: FakeArray) -> tuple[int, int]:
    """Return the range of an array in its allocation, in bytes."""
    if not array.size:
        return 0, 0
    beneath = array._beneath
    low: int = beneath.__array_interface__["data"][0] - array._block.memory.__array_interface__["data"][0]
    steps = zip(beneath.shape, beneath.strides, strict=True)
    return low, low + sum((length - 1) * stride for length, stride in steps) + beneath.itemsize
