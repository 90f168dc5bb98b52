"""CuPy's GPU for a store, and NCCL: the only module that calls CuPy's devices and streams.

A GPU store imports CuPy, and nothing else does: the import takes a third of a second, and most machines lack CuPy. Each
missing part is named by itself, with the line that installs it, before any CUDA object is made: CuPy's own objects
complain on stderr when they are destroyed on a machine without a driver.

A thread has one current GPU, and a stream takes work only while its own GPU is current. Callers may have another one.
So every call here makes its GPU current, and restores the caller's.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from typing import Any, TypeVar, cast
from weakref import finalize, ref

import numpy as np

from ...arrays.arrays import accumulator
from ...cluster.environment import launch_of
from ...errors import TransportError, TransportUnavailable, Unsupported, a_kind, brief
from ...memory.device import ALIGNMENT
from ...protocols import Array, Event, GpuKernels, Graph, Stream, Workspace
from . import copies, norms
from . import rows as cuda_rows
from .sharing import share_gpus

_INSTALL = "pip install 'mpikv[cuda13]', or 'mpikv[cuda12]' where the driver is older than 580"
# DLPack's kDLCUDA and kDLCUDAManaged (memory that migrates to its user).
_DEVICE, _MANAGED = 2, 13
# The highest priority is about -5; CUDA clamps lower numbers to it.
_HIGHEST = -100
# cudaErrorMemoryAllocation; CuPy has no name for it.
_OUT_OF_MEMORY = 2
# cudaErrorInsufficientDriver; CUDA also returns it without any driver.
_INSUFFICIENT_DRIVER = 35
# The driver, and its CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.
DRIVER, _THREAD_LOCAL = "libcuda.so.1", 1
# cudaErrorNotReady; CuPy has no name for it.
_NOT_READY = 600
# Staging in two pieces of 4 MiB: the GPU copies one, while the host fills or empties the other.
_PIECE, _PIECES = 4 << 20, 2
# Threads may share it, since it has no state.
_STAYS = nullcontext()

_find_spec = cache(find_spec)
_device_of, _address_of = attrgetter("data.device_id"), attrgetter("data.ptr")

Method = TypeVar("Method", bound=Callable[..., Any])


def find_gpu(local_rank: int, local_size: int, *, sharing: bool = False, visible: str | None = None) -> CupyGpu:
    """Make a rank's GPU this thread's current one; return it, or raise; ``sharing`` sets environment variables. Local.

    It becomes the thread's current GPU, so new arrays lie on it.

    Args:
        local_rank: the rank's number on its host; it is the number of its GPU, too.
        local_size: the number of ranks on the host.
        sharing: ranks share GPUs, in turn, if there are too few. For tests: it shows correctness, not speed. The
            settings reach NCCL and CuPy by this process's environment, read at their first use.
        visible: the value of CUDA_VISIBLE_DEVICES; None if unset. If it names one GPU, a launcher may have given each
            rank its own GPU; every rank then knows its GPU by the number 0.

    Raises:
        TransportUnavailable: CuPy or a GPU is missing, there are fewer GPUs than ranks, or the GPU is unusable.
    """
    if sharing:
        launch = launch_of()
        share_gpus(launch.rank if launch else local_rank)
    cupy = find_cupy()
    ordinal = choose_gpu(count_gpus(cupy, visible), local_rank, local_size, sharing, visible)
    try:
        gpu = CupyGpu(cupy, ordinal)
        gpu.use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise TransportUnavailable(f"the GPU cuda:{ordinal} cannot be used: {error}") from error
    return gpu


def choose_gpu(count: int, local_rank: int, local_size: int, sharing: bool, visible: str | None) -> int:
    """Return the number of a rank's GPU among ``count`` visible ones, or raise if they are too few. Local.

    Arguments as for :func:`find_gpu`.

    >>> choose_gpu(8, 3, 8, False, None), choose_gpu(1, 3, 8, False, "GPU-5e8c"), choose_gpu(2, 3, 4, True, None)
    (3, 0, 1)

    Raises:
        TransportUnavailable: there are fewer GPUs than ranks.
    """
    if count == 1 and visible and "," not in visible:
        return 0
    if sharing:
        return local_rank % count
    if local_size > count:
        where = f" of CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
        raise TransportUnavailable(
            f"the {local_size} ranks of this host need one GPU each and see {count}{where}; start {count} per host, as "
            f"by 'mpikv run -n {count}', or use 'dist_sync' with host arrays (MPIKV_GPU_SHARING=1 lets ranks share a "
            "GPU, for tests)"
        )
    return local_rank


def find_nccl() -> Any:
    """Import and return the module ``cupy.cuda.nccl``; TransportUnavailable without the library. Needs no GPU. Local.

    Raises:
        TransportUnavailable: CuPy or the library is missing.
    """
    cupy = find_cupy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from cupy.cuda import nccl
    if not nccl.available:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        reasons = [line for warning in caught for line in str(warning.message).splitlines() if "Reason" in line]
        why = f" ({brief(reasons[0].partition('Reason: ')[2], 200)})" if reasons else ""
        raise TransportUnavailable(
            f"CuPy {cupy.__version__} cannot load the library NCCL{why}: pip install 'mpikv[cuda{major}]'"
        )
    return nccl


class _Own(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.gpus: dict[int, CupyGpu] = {}
        """The GPUs of the arrays that it has seen. No thread waits for another's copies."""
        self.earlier: list[Any] = []
        """Its way back to earlier GPUs, one for each stream entered, the last one first."""


_own = _Own()


def gpu_of(value: Any) -> CupyGpu:
    """Return the GPU that any library's array lies on, an object per thread; Unsupported if it lies elsewhere. Local.

    The first call imports CuPy, and keeps the object for later calls.

    Raises:
        TransportUnavailable: CuPy, the GPU or its driver is missing.
        Unsupported: the array is on a device of another kind.
    """
    kind, ordinal = map(int, value.__dlpack_device__())
    if kind not in (_DEVICE, _MANAGED):
        raise Unsupported(f"the array is on an unknown DLPack device ({kind}, {ordinal}); copy it to the host")
    if ordinal not in _own.gpus:
        cupy = find_cupy("arrays of GPUs")
        try:
            _own.gpus[ordinal] = CupyGpu(cupy, ordinal)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            text = f"the array is on cuda:{ordinal}, which cannot be used here: {error}"
            raise TransportUnavailable(text) from error
    return _own.gpus[ordinal]


def has_cupy() -> bool:
    """Return whether CuPy is installed, or another module of its name. Local; imports nothing."""
    return sys.modules.get("cupy") is not None or _find_spec("cupy") is not None


def find_cupy(what: str = "sums on GPUs") -> Any:
    """Import and return the module ``cupy``; TransportUnavailable, about ``what``, if it is missing. Local.

    Raises:
        TransportUnavailable: it is missing.
    """
    try:
        import cupy
    except ImportError as error:
        raise TransportUnavailable(f"{what} need the package CuPy ({brief(str(error))}): {_INSTALL}") from error
    except OSError as error:  # CuPy makes a folder for compiled kernels in the home directory
        raise TransportUnavailable(
            f"CuPy cannot be imported ({brief(str(error))}); let CUPY_CACHE_DIR name a folder that can be written to"
        ) from error
    return cupy


def count_gpus(cupy: Any, visible: str | None) -> int:
    """Return the number of visible GPUs; TransportUnavailable if there is none. Local.

    Raises:
        TransportUnavailable: none is visible.
    """
    why, advice = "the driver sees none", "nvidia-smi lists the GPUs of this host"
    try:
        if count := cupy.cuda.runtime.getDeviceCount():
            return int(count)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        why = str(error)
        if error.status == _INSUFFICIENT_DRIVER:
            advice = (
                "install NVIDIA's driver, 580 or newer, or CuPy for CUDA 12 ('mpikv[cuda12]') in place of that for 13, "
                "where the driver is from 525 on (nvidia-smi shows it)"
            )
    where = f", with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
    raise TransportUnavailable(
        f"CuPy {cupy.__version__} is installed, but no GPU can be used here ({why}{where}); {advice}, or use "
        "'dist_sync' with host arrays"
    )


def _translated(text: str = "CUDA failed on {0}, in '{1}'") -> Callable[[Method], Method]:
    """Return a decorator: run a method with its GPU current; raise CUDA's errors as TransportError or MemoryError.

    ``text`` has places for the names of the GPU and of the method. If memory is short, it raises MemoryError.
    """

    def decorate(method: Method) -> Method:
        """Wrap a method of :class:`CupyGpu`, or of an object with a ``gpu``."""

        @wraps(method)
        def translated(self: Any, *arguments: Any) -> Any:
            """Run the method with its GPU current, and return its result; raise CUDA's errors as the decorator says."""
            gpu: CupyGpu = getattr(self, "gpu", self)  # the GPU itself, or a stream of it
            cuda = gpu.cuda
            try:
                if gpu.present_number() == gpu.ordinal:
                    return method(self, *arguments)
                with cuda.Device(gpu.ordinal):
                    return method(self, *arguments)
            except (cuda.memory.OutOfMemoryError, cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
                if getattr(error, "status", _OUT_OF_MEMORY) == _OUT_OF_MEMORY:
                    raise gpu.lacking(error) from error
                raise TransportError(f"{text.format(gpu.name, method.__name__)}: {error}") from error

        return cast(Method, translated)

    return decorate


class CupyGpu:
    """The :class:`~mpikv.protocols.Gpu` of CuPy. Copies between host and GPU from several threads run in turn."""

    def __init__(self, cupy: Any, ordinal: int) -> None:
        """Look up the id of the GPU number ``ordinal``, without making it current. Local."""
        self.cupy = cupy
        self.cuda = cupy.cuda
        self.kind: type = cupy.ndarray
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.present_number: Callable[[], int] = self.cuda.runtime.getDevice
        """Returns the number of the thread's current GPU."""
        # CuPy cuts the 16 bytes at a zero, so two GPUs may get equal ids; the PCI bus address makes them distinct.
        uuid = self.cuda.runtime.getDeviceProperties(ordinal)["uuid"][:16].hex()
        self.uuid = f"{uuid} {self.cuda.runtime.deviceGetPCIBusId(ordinal)}"
        self._staging: Staging | None = None
        self._making = threading.Lock()
        # Of torch's tensors, by id, until the tensor is gone: a weak reference, the place, and the array.
        self._tensors: dict[int, tuple[Any, Any, Array]] = {}
        # All events ever made: in a collected cycle, CuPy's finalizer would destroy one that is still in use.
        self._events = list[Any]()
        self.spare_events = deque[Any]()
        """CuPy's events without an owner. Threads take and return them without a lock: deque is atomic."""

    def lacking(self, error: Exception) -> MemoryError:
        """Return a MemoryError with advice for CUDA's error, to be raised. Local."""
        why = str(error).rstrip(".")
        return MemoryError(
            f"{self.name} has too little memory ({why}); use fewer or smaller values, or smaller bucket_bytes: a store "
            "takes 8 times that for messages"
        )

    def present(self) -> Any:
        """Return a context that makes this the thread's current GPU. Local."""
        if self.present_number() == self.ordinal:
            return _STAYS
        # A new one each time: CuPy's object stores the previous GPU in itself, so threads must not share one.
        return self.cuda.Device(self.ordinal)

    def use(self) -> None:
        """Make this the thread's current GPU, as a new thread must before it calls a CUDA library. Local."""
        self.cuda.Device(self.ordinal).use()

    def watch(self) -> None:
        """Make this the thread's current GPU; let the thread query events without ending other threads' captures."""
        self.use()
        mode = ctypes.c_int(_THREAD_LOCAL)
        # CuPy lacks this call. The driver's library exists wherever a GPU is.
        status = ctypes.CDLL(DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if status:
            raise TransportError(f"CUDA failed on {self.name}, in 'cuThreadExchangeStreamCaptureMode': status {status}")

    @_translated()
    def stream(self) -> Stream:
        """Return a new stream of high priority that does not wait for the default stream. Local."""
        return CupyStream(self, self.cuda.Stream(non_blocking=True, priority=_HIGHEST))

    def current(self) -> Stream:
        """Return CuPy's current stream of this thread, on this GPU, as a new object; torch has its own. Local."""
        return CupyStream(self, self.cuda.get_current_stream(self.ordinal))

    @_translated()
    def capturing(self) -> bool:
        """Return whether torch's or CuPy's current stream records its work instead of running it. Local."""
        # Torch has its own current stream. The module may be missing, or half imported by another thread.
        torch_captures = getattr(sys.modules.get("torch.cuda"), "is_current_stream_capturing", bool)
        return bool(torch_captures() or self.cuda.get_current_stream(self.ordinal).is_capturing())

    @_translated()
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of undefined content on this GPU. Local."""
        return self.cupy.empty(shape, dtype)  # type: ignore[no-any-return]

    @_translated()
    def zeros(self, nbytes: int) -> Array:
        """Return so many new zeroed bytes on this GPU. Local."""
        return self.cupy.zeros(nbytes, np.uint8)  # type: ignore[no-any-return]

    @_translated()
    def release(self, stream: Any) -> None:
        """Free the unused memory that CuPy's pool keeps for a stream, so that other libraries can allocate it."""
        self.cupy.get_default_memory_pool().free_all_blocks(stream=stream.beneath)

    def owns(self, value: object) -> bool:
        """Return whether this is an array of CuPy on this GPU. Local."""
        return isinstance(value, self.cupy.ndarray) and value.data.device_id == self.ordinal

    def addresses(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Return the arrays' addresses if all are of CuPy's own class and on this GPU, contiguous or not; else, or for
        none, None. Local.
        """
        if set(map(type, values)) != {self.kind} or set(map(_device_of, values)) != {self.ordinal}:
            return None
        return list(map(_address_of, values))

    def adopt(self, value: Any, ordered: bool = False) -> Array:
        """Return an array over another library's memory, or raise Unsupported. It is ordered after that library's work,
        but not torch's if ``ordered``. Local.
        """
        if type(value).__module__.partition(".")[0] == "torch":
            return self._adopt_tensor(value, ordered)
        return self._adopt(value)

    def _adopt(self, value: Any) -> Array:
        """Return an array over another library's memory, never a copy; Unsupported if that cannot be. Local."""
        kind, ordinal = map(int, value.__dlpack_device__())
        if kind != _MANAGED and (kind, ordinal) != (_DEVICE, self.ordinal):
            where = f"cuda:{ordinal}" if kind == _DEVICE else f"DLPack's device ({kind}, {ordinal})"
            raise Unsupported(
                f"the array is on {where} and the store on {self.name}; make arrays there, as after "
                f"'cupy.cuda.Device({self.ordinal}).use()'"
            )
        with self.present():
            try:
                return self.cupy.from_dlpack(value)  # type: ignore[no-any-return]
            except (BufferError, NotImplementedError, TypeError, ValueError) as error:
                raise Unsupported(f"CuPy cannot use the memory of {a_kind(value)}: {error}") from error

    def _adopt_tensor(self, tensor: Any, ordered: bool) -> Array:
        """Return an array over a torch tensor's memory, or raise Unsupported; without ``ordered``, work on it follows
        torch's. The array is cached as long as the tensor lives and keeps its memory. Local.

        Asking torch takes as long as a launch.
        """
        try:
            here = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        except RuntimeError:  # a sparse tensor, or one without memory: DLPack's error says it better
            return self._adopt(tensor.detach())
        known = self._tensors.get(id(tensor))
        if known and known[1] == here and (ordered or self._shares_stream()):
            return known[2]
        array = self._adopt(_Ordered(tensor.detach()) if ordered else tensor.detach())
        # When the tensor is gone, the entry is removed; pop's second argument is the reference, and not used.
        gone = ref(tensor, partial(self._tensors.pop, id(tensor)))
        self._tensors[id(tensor)] = gone, here, array
        return array

    def _shares_stream(self) -> bool:
        """Return whether torch and CuPy have the same current stream. Local.

        If not, torch orders the two when it is asked for the memory.
        """
        of_torch = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
        return of_torch is not None and of_torch(self.ordinal) == self.cuda.get_current_stream(self.ordinal).ptr

    @_translated()
    def upload(self, array: Array, out: Any = None) -> Array:
        """Queue a copy of a numpy array, which may change on return, to ``out`` or new memory; return it. May wait."""
        whole = out if out is not None and out.flags.c_contiguous else self.cupy.empty(array.shape, array.dtype)
        self._stage().upload(np.ascontiguousarray(array).reshape(-1).view(np.uint8), whole.data.ptr)
        if out is None or out is whole:
            return whole  # type: ignore[no-any-return]
        copies.copy((out,), (whole,))
        return out  # type: ignore[no-any-return]

    @_translated()
    def download(self, array: Array, out: Array | None = None) -> Array:
        """Copy a GPU array into ``out``, a numpy array, or a new one; wait for the copy; return that. Local."""
        whole = self.cupy.ascontiguousarray(array)
        flat = out if out is not None and out.flags.c_contiguous else np.empty(array.shape, array.dtype)
        self._stage().download(whole.data.ptr, flat.reshape(-1).view(np.uint8))
        if out is None or flat is out:
            return flat
        out[...] = flat
        return out

    def _stage(self) -> Staging:
        """Return the GPU's only Staging, which copies through pinned memory; the first call makes it. Local."""
        with self._making:
            if self._staging is None:
                pinned = [self.cuda.alloc_pinned_memory(_PIECE) for _ in range(_PIECES)]
                pieces = [np.frombuffer(memory, np.uint8, _PIECE) for memory in pinned]
                self._staging = Staging(pieces, self._move, self._now)
            return self._staging

    def _move(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between addresses, of host or GPU, on the current stream. This GPU must be current."""
        stream = self.cuda.get_current_stream().ptr
        self.cuda.runtime.memcpyAsync(target, source, nbytes, self.cuda.runtime.memcpyDefault, stream)

    def event(self) -> Any:
        """Return an event to be recorded: taken from ``spare_events``, or a new one. The GPU must be current. Local."""
        try:
            # It may be reused although a stream still waits for it: CUDA binds a wait to the event's last record when
            # the wait is queued (cudaStreamWaitEvent), and later records do not change that.
            return self.spare_events.pop()
        except IndexError:
            self._events.append(made := self.cuda.Event(disable_timing=True))
            return made

    def _now(self) -> Any:
        """Record a new event on CuPy's current stream, and return CuPy's event. This GPU must be current."""
        return self.cuda.get_current_stream().record(self.cuda.Event(disable_timing=True))

    @_translated()
    def squares_and_finite(self, arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> list[tuple[float, bool]]:
        """Return for each array, as if its numbers were rounded to its dtype of ``dtypes``, the sum of squares and
        whether all are finite; wait for the GPU. Unsupported: no float. Local.
        """
        sums, counts = norms.measure([self.cupy.ascontiguousarray(array) for array in arrays], dtypes)
        squares, bad = norms.join_pieces(self.download(sums)).T.tolist()
        ends = pairwise(accumulate(counts, initial=0))
        return [(float(sum(squares[first:last])), not any(bad[first:last])) for first, last in ends]

    @_translated()
    def scale(self, arrays: Sequence[Array], factor: float) -> None:
        """Queue a multiplication of arrays in place, in float64, rounded once. Local."""
        whole = [self.cupy.ascontiguousarray(array) for array in arrays]
        norms.scale(whole, factor)
        apart = [pair for pair in zip(arrays, whole, strict=True) if not pair[0].flags.c_contiguous]
        copies.copy([array for array, _ in apart], [copied for _, copied in apart])

    def kernels(self) -> GpuKernels:
        """Return new CUDA kernels for this GPU; nothing is compiled yet. Local."""
        from .kernels import CudaKernels

        return CudaKernels(self.present)

    def address(self, array: Any) -> int:
        """Return the address of an array's first byte. Local."""
        return int(array.data.ptr)

    @_translated()
    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Queue a copy of each source to its target, cast where the dtypes differ. Local."""
        if len(targets) == 1:
            (target,), (source,) = targets, sources
            if target.dtype == source.dtype and target.flags.c_contiguous and source.flags.c_contiguous:
                # CUDA's own copy is queued in a third of the time.
                self._move(self.address(target), self.address(source), target.nbytes)
                return
        copies.copy(targets, sources)

    @_translated()
    def exceeding(self, arrays: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array if it has NaN or a magnitude above ``bound``; wait for the GPU. Local."""
        flags = self.zeros(len(arrays))
        copies.flag_exceeding(arrays, flags, bound)
        return list(map(bool, self.download(flags).tolist()))

    def workspace(self) -> Workspace:
        """Return a new object that moves and sums rows of this GPU's arrays, for one thread at a time. Local."""
        return CupyWorkspace(self)


class CupyWorkspace:
    """The :class:`~mpikv.protocols.Workspace` of CuPy, for one thread at a time.

    It has memory reserved beforehand: no rank may run out of memory in the middle of a call. :meth:`sum_runs` alone
    takes memory of the allocator: it makes row-sparse arrays, before a call moves data.
    """

    def __init__(self, gpu: CupyGpu) -> None:
        """Reserve no memory: :meth:`over` lends some for a block. Local."""
        self.gpu, self.copy = gpu, gpu.copy
        self._memory: Array | None = None
        self._used = 0

    @contextmanager
    def over(self, memory: Array) -> Iterator[None]:
        """In a with block: take new arrays and numbers, but not those of :meth:`sum_runs`, from ``memory`` until it is
        full. After the block others may overwrite them. Local.
        """
        outer = self._memory, self._used
        self._memory, self._used = memory, 0
        try:
            yield
        finally:
            # Nested use: without the outer offset, rows in use would be handed out again.
            self._memory, self._used = outer

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content: inside a block of :meth:`over` a part of its memory, valid until the block
        ends; without a block, or beyond its memory, the allocator's. Local.
        """
        begin, nbytes = self._used, prod(shape) * np.dtype(dtype).itemsize
        if self._memory is None or begin + nbytes > self._memory.size:
            # Beyond the reserve the allocator may fail on this rank alone; callers reserve enough (see Rows._bound).
            return self.gpu.empty(shape, dtype)
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        array: Array = self._memory[begin : begin + nbytes].view(dtype).reshape(shape)
        return array

    @_translated()
    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        """Compile or load the kernels that move and add rows of this dtype. Local."""
        cuda_rows.prepare(dtype, accumulator(dtype))

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        """Return copies of row numbers on the GPU, in memory of :meth:`empty`. One upload brings all, and may wait for
        earlier uploads. Local.
        """
        # One upload for all: each copy from the host costs a call of its own, however short it is.
        there, ends = self._there(np.concatenate(every)), np.cumsum([ids.size for ids in every]).tolist()
        return [there[end - ids.size : end] for ids, end in zip(every, ends, strict=True)]

    @_translated()
    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        """Queue a copy of the rows of these numbers into ``out``, or an array of :meth:`empty`; return that. Local."""
        rows = self.empty((ids.size, *table.shape[1:]), table.dtype) if out is None else out
        cuda_rows.take(table, self._there(ids), rows)
        return rows

    @_translated()
    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        """Queue a copy of rows, or zeros, to the rows of these numbers; each number must occur once. Rows of another
        dtype are cast in memory of :meth:`empty`. Local.
        """
        # The kernel copies bits: a cast is a pass of its own, in reserved memory.
        if rows is not None and rows.dtype != table.dtype:
            given, rows = rows, self.empty(rows.shape, table.dtype)
            self.copy((rows,), (given,))
        cuda_rows.put(table, self._there(ids), rows)

    @_translated()
    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        """Queue an addition of rows to the rows of these numbers; each number must occur once. Local."""
        cuda_rows.add(table, self._there(ids), rows)

    @_translated()
    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        """Queue the sums of runs of rows, each run in its order; return new GPU memory that will hold them. Local."""
        total = self.gpu.empty((starts.size, *rows.shape[1:]), rows.dtype)
        numbers = self.gpu.upload(np.concatenate([order, starts, [order.size]], dtype=np.int64))
        cuda_rows.sum_runs(rows, numbers[: order.size], numbers[order.size :], total)
        return total

    def _there(self, ids: Array) -> Array:
        """Return row numbers on the GPU: themselves if they lie there, or a copy in memory of :meth:`empty`. Local."""
        return ids if self.gpu.owns(ids) else self.gpu.upload(ids, self.empty(ids.shape, ids.dtype))


class _Ordered:
    """A torch tensor, ordered after the work of CuPy's current stream only. By default torch would order it after its
    own current stream, too.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Return torch's DLPack capsule; no stream waits for another, whatever ``stream`` is."""
        # -1: the DLPack protocol's "do not synchronize".
        return self._tensor.__dlpack__(stream=-1, **options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class CupyStream:
    """The :class:`~mpikv.protocols.Stream` of CuPy."""

    def __init__(self, gpu: CupyGpu, stream: Any) -> None:
        """Wrap ``stream``, an existing stream of CuPy on this GPU. Local."""
        self.gpu = gpu
        self.handle = int(stream.ptr)
        self.beneath = stream

    # CUDA resolves the default stream, and makes an event, for the current GPU only.

    @_translated("nothing can be queued on {0}")
    def record(self) -> Event:
        """Record an event behind all work queued so far, and return it. Local."""
        return CupyEvent(self.gpu, self.beneath.record(self.gpu.event()))

    @_translated("nothing can be queued on {0}")
    def wait(self, event: Any) -> None:
        """Make work queued from now on wait for the event; return at once."""
        self.beneath.wait_event(event.beneath)

    @_translated("what was queued on {0} failed")
    def synchronize(self) -> None:
        """Block until all queued work is done, or raise TransportError if CUDA failed. Local."""
        self.beneath.synchronize()

    @_translated("work of {0} cannot be recorded")
    def begin_capture(self) -> None:
        """Record work queued on this stream from now on, instead of running it. Local."""
        # Relaxed mode: other threads, such as the watchdog's, may query events during a capture.
        self.beneath.begin_capture(self.gpu.cuda.runtime.streamCaptureModeRelaxed)

    @_translated("work of {0} could not be recorded")
    def end_capture(self) -> Graph:
        """Stop recording; return the recorded work as a graph, or raise TransportError. Local."""
        return CupyGraph(self.gpu, self.beneath.end_capture())

    def __enter__(self) -> CupyStream:
        """Make the stream, and its GPU, the thread's current ones until the block ends; return it. Nests. Local."""
        present = self.gpu.present()
        present.__enter__()
        self.beneath.__enter__()
        _own.earlier.append(present)
        return self

    def __exit__(self, *failure: object) -> None:
        """Make the thread's earlier stream and GPU current again."""
        self.beneath.__exit__(*failure)
        _own.earlier.pop().__exit__(*failure)


class CupyGraph:
    """The :class:`~mpikv.protocols.Graph` of CuPy. CuPy destroys CUDA's graph with its last reference."""

    def __init__(self, gpu: CupyGpu, graph: Any) -> None:
        """Wrap ``graph``, which CuPy has recorded on this GPU. Local."""
        self.gpu = gpu
        self._graph = graph

    @_translated("CUDA failed on {0}, in a graph")
    def launch(self) -> None:
        """Queue all recorded work on the current stream; TransportError if the graph was closed. Local."""
        if (graph := self._graph) is None:  # another thread has discarded it
            raise TransportError(f"the graph recorded on {self.gpu.name} was discarded")
        graph.launch()

    def close(self) -> None:
        """Drop the recorded work; a later launch raises. Local."""
        self._graph = None


class CupyEvent:
    """The :class:`~mpikv.protocols.Event` of CuPy. CuPy's own event takes every CUDA error for "not yet".

    Without references it returns CuPy's event for reuse. So that event must not leave this object.
    """

    def __init__(self, gpu: CupyGpu, beneath: Any) -> None:
        """Take over ``beneath``, an event of CuPy that is recorded already. Local."""
        self.beneath = beneath
        self._gpu = gpu

    def __del__(self) -> None:
        """Give CuPy's event to the GPU's ``spare_events``, to be recorded again."""
        # In a collected cycle another finalizer may still call this object; it then has no event.
        beneath, self.beneath = self.beneath, None
        self._gpu.spare_events.append(beneath)

    @property
    def done(self) -> bool:
        """Return whether the GPU has passed the event; raise TransportError if CUDA failed. Never waits."""
        runtime = self._gpu.cuda.runtime
        status = runtime.eventQuery(self.beneath.ptr)
        if status not in (0, _NOT_READY):
            raise TransportError(f"what was queued on {self._gpu.name} failed: {runtime.CUDARuntimeError(status)}")
        return bool(status == 0)


_left: deque[tuple[Array, Any]] = deque()
"""Pinned memory without an owner, each piece with the event of its last copy."""


class Staging:
    """Pinned memory for copies between host and GPU, in pieces.

    One piece is in flight while the host fills or empties another. A GPU accesses pinned memory by itself; for pageable
    memory the driver must copy.
    """

    def __init__(self, pieces: Sequence[Array], move: Callable[[int, int, int], None], now: Callable[[], Any]) -> None:
        """Take over pinned pieces; drop those of ended objects that no copy uses. ``move(target, source,
        nbytes)`` must queue a copy, and ``now()`` record an event after queued work. Local.
        """
        self._pieces: deque[tuple[Array, Any]] = deque((piece, None) for piece in pieces)
        self._move = move
        self._now = now
        # The weight of a Trainer keeps its GPU, and any thread may use the weight.
        self._using = threading.Lock()
        finalize(self, _keep_busy, self._pieces).atexit = False
        for _ in range(len(_left)):
            with suppress(IndexError):  # another thread may empty it, too
                left = _left.popleft()
                if not left[1].done:
                    _left.append(left)

    def upload(self, source: Array, target: int) -> None:
        """Queue a copy of bytes, through pinned memory, to an address; may wait. The bytes may be changed on return."""
        with self._using:
            for start, piece in self._cut(source.size):
                part = source[start : start + piece.size]
                piece[: part.size] = part
                self._send(piece, target + start, piece.ctypes.data, part.size)

    def download(self, source: int, target: Array) -> None:
        """Copy from an address into bytes of the host, piece by piece, and wait for it. Local."""
        coming: deque[tuple[Array, Array, Any]] = deque()
        with self._using:
            for start, piece in self._cut(target.size):
                part = target[start : start + piece.size]
                coming.append((part, piece, self._send(piece, piece.ctypes.data, source + start, part.size)))
                if len(coming) == len(self._pieces):
                    _receive(*coming.popleft())
            while coming:
                _receive(*coming.popleft())

    def _cut(self, nbytes: int) -> Iterator[tuple[int, Array]]:
        """For each part wait for a free pinned piece; yield the part's begin and the piece, for the caller to _send."""
        start = 0
        while start < nbytes:
            piece, busy = self._pieces[0]
            if busy is not None:
                busy.synchronize()
            yield start, piece
            start += piece.size

    def _send(self, piece: Array, target: int, source: int, nbytes: int) -> Any:
        """Queue a copy from or to pinned memory; move the piece to the end of the queue; return the copy's event."""
        self._move(target, source, nbytes)
        event = self._now()
        self._pieces.popleft()
        self._pieces.append((piece, event))
        return event


def _keep_busy(pieces: deque[tuple[Array, Any]]) -> None:
    """Keep pieces alive in ``_left``, as their copies may be in flight; a later Staging drops them. Local."""
    # CuPy gives freed pinned memory to the next caller, even if a copy is in flight, e.g. when a thread has ended.
    _left.extend(pair for pair in pieces if pair[1] is not None)


def _receive(target: Array, piece: Array, event: Any) -> None:
    """Wait for a copy's event, then copy the pinned piece into ``target``. Local."""
    event.synchronize()
    target[...] = piece[: target.size]
