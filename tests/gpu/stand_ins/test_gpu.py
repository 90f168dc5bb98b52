"""The seam to CuPy, where there is no GPU: which one is chosen, what is said when something is missing, that every name
of CuPy's that is used is one, and the order of things, on a CuPy that copies in the host's memory, late.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpikv.cli.gpus import survey
from mpikv.cli.info import _gpu_rows
from mpikv.cli.nccl_faults import faults_of
from mpikv.cluster.environment import Launch
from mpikv.compute.cuda.gpu import CupyGpu, Staging, choose_gpu, find_gpu, find_nccl, gpu_of
from mpikv.compute.cuda.sharing import sharing
from mpikv.errors import TransportUnavailable, Unsupported
from mpikv.memory.stream_order import _PER_THREAD

ROOT = Path(__file__).parents[3]
needs_cupy = pytest.mark.skipif(not find_spec("cupy"), reason="CuPy is not installed")


# --- Which GPU


@pytest.mark.parametrize(
    ("count", "local_rank", "local_size", "sharing", "visible", "expected"),
    [
        (1, 0, 1, False, None, 0),
        (8, 5, 8, False, None, 5),
        (8, 5, 6, False, "0,1,2,3,4,5,6,7", 5),
        (1, 3, 4, False, "3", 0),  # a launcher shows each rank its own
        (1, 3, 4, False, "MIG-4a5f", 0),
        (1, 3, 4, True, None, 0),
        (2, 3, 4, True, None, 1),
        (4, 3, 4, True, None, 3),
    ],
)
def test_a_rank_has_the_gpu_of_its_number(count, local_rank, local_size, sharing, visible, expected):
    assert choose_gpu(count, local_rank, local_size, sharing, visible) == expected


def test_too_few_gpus():
    with pytest.raises(
        TransportUnavailable, match=r"^the 4 ranks of this host need one GPU each and see 2; start 2 per host"
    ):
        choose_gpu(2, 0, 4, False, None)
    with pytest.raises(TransportUnavailable, match=r"see 2 of CUDA_VISIBLE_DEVICES='0,1'; .*MPIKV_GPU_SHARING=1"):
        choose_gpu(2, 3, 4, False, "0,1")


# --- What is missing


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for find in (lambda: find_gpu(0, 1), find_nccl):
        with pytest.raises(TransportUnavailable, match=r"need the package CuPy .*pip install 'mpikv\[cuda13\]'"):
            find()
    found = survey()
    assert (found.cupy, found.nccl, found.devices, len(found.problems)) == (None, None, [], 1)


def run(code: str, **variables: str) -> tuple[str, float]:
    """Return what a new process prints, which must say nothing else, and the seconds after the import of CuPy."""
    code = f"import time, cupy; begin = time.perf_counter(); {code}; print(time.perf_counter() - begin)"
    environ = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": "/nowhere", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=18, check=True
    )
    assert done.stderr == ""
    *lines, seconds = done.stdout.splitlines()
    return "\n".join(lines), float(seconds)


@needs_cupy
def test_without_a_gpu():
    use = "gpu.find_gpu(0, 1, visible='')"
    code = f"import mpikv\nfrom mpikv.compute.cuda import gpu\ntry: {use}\nexcept mpikv.MPIKVError as e: print(e)\n"
    text, seconds = run(f"exec({code!r})", CUDA_VISIBLE_DEVICES="")
    assert re.search(r"^CuPy \S+ is installed, but no GPU can be used here \(.+, with CUDA_VISIBLE_DEVICES=''\)", text)
    assert re.search("install NVIDIA's driver, 580 or newer|nvidia-smi lists the GPUs", text)
    assert seconds < 1


@needs_cupy
def test_without_nccl():
    """The library is there, but what loads it fails as where it is not."""
    code = """
import sys, mpikv, mpikv.compute.cuda.gpu
class Missing:
    def find_spec(self, name, *others):
        if name == "cupy_backends.cuda.libs.nccl":
            raise ImportError("libnccl.so.2: cannot open shared object file")
sys.meta_path.insert(0, Missing())
try: mpikv.compute.cuda.gpu.find_nccl()
except mpikv.MPIKVError as e: print(e)
"""
    text, seconds = run(f"exec({code!r})")
    assert re.search(r"^CuPy \S+ cannot load the library NCCL \(ImportError \(libnccl.so.2: cannot open", text)
    assert re.search(r"pip install 'mpikv\[cuda1[23]\]'$", text)
    assert seconds < 1


@needs_cupy
def test_versions():
    import cupy

    found = survey()
    assert found.cupy == cupy.__version__
    if found.nccl is not None:
        assert re.fullmatch(r"2\.\d+\.\d+", found.nccl)
        assert find_nccl().NcclCommunicator
    assert bool(found.devices) is cupy.cuda.is_available()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (22707, ""),
        (22803, "NCCL 2.28.3: PyTorch has passed over"),
        (22808, r"pip install 'mpikv\[cuda12\]'$"),
        (22809, ""),
        (22902, "sums may hang"),
        (23007, ""),
        (23102, "destroyed only after an abort "),
        (23203, "NCCL 2.32.3: from 2.31.2 on"),
    ],
)
def test_versions_of_nccl_with_known_faults(imported, monkeypatch, version, said):
    imported.cuda.runtime.runtimeGetVersion = lambda: 12090
    monkeypatch.setattr("mpikv.cli.gpus.find_nccl", lambda: SimpleNamespace(get_version=lambda: version))
    found = survey()
    assert (found.nccl, found.problems) == (f"2.{version // 100 % 100}.{version % 100}", [])
    assert len(found.warnings) == bool(said)
    assert re.search(said, "".join(found.warnings))
    rows = _gpu_rows(found._asdict())
    assert rows[1:] == [("warning", text) for text in found.warnings]


def test_a_fresh_installation_has_none_of_them():
    text = (ROOT / "pyproject.toml").read_text()
    (wanted,) = set(re.findall(r'"nvidia-nccl-cu1[23](.*?)"', text))
    low, high = (int(minor) * 100 + int(patch) for minor, patch in re.findall(r"2\.(\d+)\.(\d+)", wanted))
    assert not any(faults_of(20000 + number, 13) for number in range(low, high))


# --- CuPy's names


USED = """
    cuda.Device:device cuda.Device.use:self cuda.Device.__enter__:self cuda.Device.__exit__:self
    cuda.Event:disable_timing cuda.Event.synchronize:self cuda.Event.done cuda.Stream:non_blocking,priority
    cuda.Stream.record:event cuda.Stream.wait_event:event cuda.Stream.synchronize:self
    cuda.Stream.begin_capture:mode cuda.Stream.end_capture:self cuda.Stream.is_capturing:self
    cuda.Graph.launch:stream cuda.runtime.streamCaptureModeRelaxed cuda.Stream.__enter__ cuda.Stream.__exit__
    cuda.Stream.null.ptr cuda.Stream.from_external:obj cuda.get_current_stream:device_id
    cuda.get_elapsed_time:start_event,end_event cuda.alloc_pinned_memory:size cuda.is_available
    cuda.MemoryPointer.ptr cuda.MemoryPointer.device_id cuda.runtime.CUDARuntimeError cuda.runtime.eventQuery:event
    cuda.runtime.memcpyDefault cuda.runtime.memcpyAsync:dst,src,size,kind,stream cuda.runtime.getDevice
    cuda.runtime.getDeviceCount cuda.runtime.getDeviceProperties:device cuda.runtime.deviceGetPCIBusId:device
    cuda.runtime.runtimeGetVersion ndarray.data from_dlpack:array empty zeros ascontiguousarray
"""
NAMES = {name: parameters.split(",") for name, _, parameters in (each.partition(":") for each in USED.split())}
"""Of each name the parameters that are named in a call."""


@needs_cupy
@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_cupy_that_is_used_is_one(name):
    import cupy

    found: Any = cupy
    for part in name.split("."):
        found = getattr(found, part)
    # CapturedStep functions have their signatures in the first line of their documentation only.
    lines = [getattr(one, "__doc__", None) or "" for one in (found, getattr(found, "__init__", None))]
    signatures = " ".join(line.partition("\n")[0] for line in lines)
    for parameter in filter(None, NAMES[name]):
        assert re.search(rf"\b{parameter}\b", signatures), signatures


def test_the_table_names_all_that_gpu_py_uses():
    text = (ROOT / "mpikv/compute/cuda/gpu.py").read_text()
    used = set(
        re.findall(r"\b(?:self\.gpu\.|self\.|cupy\.)(cuda(?:\.\w+)+|(?:empty|zeros|from_dlpack|ascont\w+))\(", text)
    )
    assert used <= set(NAMES), used - set(NAMES)
    assert len(used) > 8


@needs_cupy
def test_cupy_takes_memory_that_another_library_lends_for_an_arrays_own():
    """So neither of both may be asked whether arrays lie apart."""
    import cupy

    host = np.zeros(64, np.uint8)
    own, lent = (
        cupy.ndarray((8,), "f4", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(begin, 64, host, 0), offset))
        for begin, offset in ((host.ctypes.data, 32), (host.ctypes.data + 32, 0))
    )
    assert own.data.ptr == lent.data.ptr
    assert lent.flags.owndata
    assert not np.may_share_memory(own, lent)


@needs_cupy
def test_errors_of_cupy_are_those_that_are_caught():
    import cupy

    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)
    error = cupy.cuda.runtime.CUDARuntimeError(2)
    assert error.status == 2
    assert "cudaErrorMemoryAllocation" in str(error)


# --- Order, on a CuPy that copies late


class Late:
    """A stream whose copies are done when somebody waits for an event behind them, and not before."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def move(self, target: int, source: int, nbytes: int) -> None:
        self.queue.append(lambda: ctypes.memmove(target, source, nbytes))

    def now(self) -> LateEvent:
        return LateEvent(self)

    def run(self, behind: int) -> None:
        for index in range(behind):
            self.queue[index]()
            self.queue[index] = int


class Destroyable:
    """An event of CuPy's, which its finalizer destroys, though others may refer to it yet in a cycle."""

    destroyed = False

    def __del__(self) -> None:
        self.destroyed = True


class LateEvent(Destroyable):
    """A point behind what a stream was given."""

    def __init__(self, late: Late) -> None:
        self._late, self._behind = late, len(late.queue)

    @property
    def done(self) -> bool:
        assert not self.destroyed
        return all(each is int for each in self._late.queue[: self._behind])

    def synchronize(self) -> None:
        self._late.run(self._behind)


def staging(late: Late, piece: int = 8, pieces: int = 2) -> Staging:
    return Staging([np.zeros(piece, np.uint8) for _ in range(pieces)], late.move, late.now)


def test_threads_take_turns():
    """A thread that comes while another waits for a piece does not take it."""
    late, others = Late(), []
    arrays = [np.full(size, number + 1, np.uint8) for number, size in enumerate((20, 12, 9, 17))]
    targets = [np.zeros_like(array) for array in arrays]
    stage = staging(late)

    def send(number: int) -> None:
        stage.upload(arrays[number], targets[number].ctypes.data)

    class Interrupted:
        """An event behind which a copy is, during the wait for which another thread copies, too."""

        def __init__(self, event: Any) -> None:
            self._event, self.done = event, True

        def synchronize(self) -> None:
            if len(others) < 3:
                others.append(threading.Thread(target=send, args=(len(others) + 1,)))
                others[-1].start()
                others[-1].join(0.2)
            self._event.synchronize()

    stage._now = lambda: Interrupted(late.now())
    send(0)
    for thread in others:
        thread.join()
    assert len(others) == 3
    late.run(len(late.queue))
    for target, array in zip(targets, arrays, strict=True):
        np.testing.assert_array_equal(target, array)


class Failure(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class DriverFailure(RuntimeError):
    status = 700


class OutOfMemory(MemoryError):
    pass


class Standin:
    """What :class:`CupyGpu` uses of CuPy, over the host's memory; notes on which GPU each thing was done."""

    def __init__(self) -> None:
        self.present, self.notes, self.status, self.queried = 0, [], 0, 0
        self.__version__ = "14"
        self.ndarray = StandinArray
        self.empty = lambda shape, dtype: self.note("empty", StandinArray(np.empty(shape, dtype), self.present))
        self.zeros = lambda count, dtype: self.note("zeros", StandinArray(np.zeros(count, dtype), self.present))
        self.ascontiguousarray = lambda array: array
        self.from_dlpack = lambda value: StandinArray(np.from_dlpack(value.host), value.ordinal)
        self.streams = [StandinStream(self)]
        self.cuda = SimpleNamespace(
            Device=lambda ordinal: StandinDevice(self, ordinal),
            Event=lambda disable_timing=False: self.note("event", StandinEvent(self, not disable_timing)),
            Stream=lambda **options: self.note("stream", StandinStream(self, **options)),
            get_current_stream=lambda ordinal=0: self.streams[-1],
            alloc_pinned_memory=bytearray,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemory),
            driver=SimpleNamespace(CUDADriverError=DriverFailure),
            runtime=SimpleNamespace(
                CUDARuntimeError=Failure,
                memcpyDefault=4,
                memcpyAsync=self.copy,
                getDeviceProperties=lambda ordinal: {"uuid": bytes(range(1, 20)), "name": b"Stand-in"},
                deviceGetPCIBusId=lambda ordinal: f"0000:0{ordinal}:00.0",
                getDevice=lambda: self.present,
                getDeviceCount=lambda: 2,
                eventQuery=lambda event: self.queried,
            ),
        )

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (4, self.streams[-1].ptr)
        ctypes.memmove(target, source, nbytes)

    def note(self, what: str, made: Any) -> Any:
        if self.status:
            raise Failure(self.status)
        self.notes.append((what, self.present))
        return made


class StandinArray:
    def __init__(self, host: np.ndarray[Any, Any], ordinal: int) -> None:
        self.host, self.ordinal, self.shape, self.dtype = host, ordinal, host.shape, host.dtype
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=ordinal)
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)

    def fill(self, value: int) -> None:
        self.host.fill(value)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.ordinal


class StandinDevice:
    def __init__(self, cupy: Standin, ordinal: int) -> None:
        self.cupy, self.ordinal, self.before = cupy, ordinal, []

    def use(self) -> None:
        self.cupy.present = self.ordinal

    def __enter__(self) -> None:
        self.before.append(self.cupy.present)
        self.use()

    def __exit__(self, *failure: object) -> None:
        self.cupy.present = self.before.pop()


class StandinEvent(Destroyable):
    def __init__(self, cupy: Standin, timing: bool) -> None:
        self.made, self.ptr, self.timing, self.synchronize, self.done = cupy.present, id(cupy), timing, int, True


class StandinStream:
    def __init__(self, cupy: Standin, **options: object) -> None:
        self.cupy, self.options, self.ptr = cupy, options, id(self)

    def record(self, event: StandinEvent) -> StandinEvent:
        assert not event.destroyed
        event.synchronize = int
        return self.cupy.note("record", event)

    def wait_event(self, event: StandinEvent) -> None:
        assert event.timing is event.destroyed is False
        self.cupy.note("wait", event)

    def synchronize(self) -> None:
        self.cupy.note("synchronize", None)

    def __enter__(self) -> None:
        self.cupy.streams.append(self)

    def __exit__(self, *failure: object) -> None:
        assert self.cupy.streams.pop() is self


@pytest.fixture
def cupy() -> Standin:
    return Standin()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Standin:
    """Return what ``import cupy`` gives, where nothing has been told NCCL."""
    made = Standin()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr("mpikv.compute.cuda.sharing.os", SimpleNamespace(environ={}))
    return made


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Return a function that replaces what gpu.py uses of other modules."""
    return lambda name, other: monkeypatch.setattr(f"mpikv.compute.cuda.gpu.{name}", other)


@pytest.fixture
def gpu(cupy: Standin) -> Iterator[CupyGpu]:
    """Return the second of two GPUs, where the thread's present one is the first, and stays so."""
    made = CupyGpu(cupy, 1)
    yield made
    assert cupy.present == 0
    assert len(cupy.streams) == 1


def test_the_gpu_of_an_array(imported, replace):
    replace("_known", SimpleNamespace(gpus={}))
    array = StandinArray(np.arange(3.0), 1)
    gpu = gpu_of(array)
    assert (gpu.name, imported.present) == ("cuda:1", 0)
    assert gpu_of(SimpleNamespace(__dlpack_device__=lambda: (13, 1))) is gpu  # memory that moves
    gpu.download(array, out := np.empty(3))
    assert (out == array.host).all()
    with pytest.raises(Unsupported, match=r"an unknown DLPack device \(10, 0\); copy it"):
        gpu_of(SimpleNamespace(__dlpack_device__=lambda: (10, 0)))


def test_what_to_do_without_a_driver_or_a_gpu(imported):
    for status, advice in (
        (35, "status 35); install NVIDIA's driver, 580 or newer, or CuPy for CUDA 12 ('mpikv[cuda12]')"),
        (100, "status 100); nvidia-smi lists"),
    ):

        def failing(status=status):
            raise Failure(status)

        imported.cuda.runtime.getDeviceCount = failing
        with pytest.raises(TransportUnavailable, match=re.escape(advice)):
            find_gpu(0, 1)


def test_an_array_of_a_gpu_that_cannot_be_used(imported, replace):
    replace("_known", SimpleNamespace(gpus={}))

    def without_driver(ordinal):
        raise Failure(35)

    imported.cuda.runtime.getDeviceProperties = without_driver
    for _ in range(2):
        with pytest.raises(TransportUnavailable, match="the array is on cuda:1, which cannot be used here: status"):
            gpu_of(StandinArray(np.arange(3.0), 1))


def test_arrays_of_others(gpu, cupy):
    assert not gpu.owns(np.zeros(3))
    assert not gpu.owns(StandinArray(np.zeros(3), 0))
    assert gpu.owns(gpu.adopt(SimpleNamespace(host=np.zeros(3), ordinal=1, __dlpack_device__=lambda: (2, 1))))
    for device, where in (((2, 0), "cuda:0"), ((10, 1), r"DLPack's device \(10, 1\)")):
        with pytest.raises(Unsupported, match=rf"is on {where}.* the store on cuda:1; .*Device\(1\).use"):
            gpu.adopt(SimpleNamespace(__dlpack_device__=lambda device=device: device))

    def refuse(value: object) -> None:
        raise BufferError("it is conjugated")

    cupy.from_dlpack = refuse
    with pytest.raises(Unsupported, match="cannot use the memory of a SimpleNamespace: it is conjugated"):
        gpu.adopt(SimpleNamespace(__dlpack_device__=lambda: (2, 1)))


class Tensor(StandinArray):
    """A tensor of torch, which notes what it is asked."""

    __module__ = "torch"

    def __init__(self, asked: list[Any] | None = None) -> None:
        super().__init__(np.zeros((3, 3)), 1)
        self.asked = [] if asked is None else asked

    def detach(self) -> Tensor:
        return self

    def data_ptr(self) -> int:
        return self.data.ptr

    def stride(self) -> tuple[int, ...]:
        return self.host.strides

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> StandinArray:
        self.asked.append((stream, max_version))
        return StandinArray(self.host, 1)


@pytest.fixture
def torch(cupy: Standin, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what stands for the module torch, whose present stream is ``stream``; CuPy asks as ever for memory."""
    made = SimpleNamespace(stream=cupy.streams[0].ptr)
    made._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: made.stream if ordinal == 1 else None)
    monkeypatch.setitem(sys.modules, "torch", made)

    def from_dlpack(value: Any) -> StandinArray:
        assert value.__dlpack_device__() == (2, 1)
        return value.__dlpack__(stream=77, max_version=(1, 0))

    cupy.from_dlpack = from_dlpack
    return made


def test_tensors_of_torch_that_come_in_order_already(gpu, torch):
    """Torch is asked to order nothing, and else it would; the arrays of other libraries are asked as ever."""
    asked: list[Any] = []
    for module, ordered in (("torch", True), ("torch.nn", True), ("torch", False), ("jax", True)):
        kind = type("Tensor", (Tensor,), {"__module__": module})
        assert gpu.owns(gpu.adopt(kind(asked), ordered=ordered))
    assert asked == [(-1, (1, 0)), (-1, (1, 0)), (77, (1, 0)), (77, (1, 0))]


def test_a_tensor_is_asked_for_its_memory_once(gpu, cupy, torch):
    """As long as it lies there, and torch has nothing to bring in order."""
    tensor = Tensor()
    first = gpu.adopt(tensor)
    assert all(gpu.adopt(tensor, ordered=ordered) is first for ordered in (False, True, False))
    assert len(tensor.asked) == 1
    torch.stream = 5
    gpu.adopt(tensor, ordered=True)
    assert len(tensor.asked) == 1
    gpu.adopt(tensor)
    assert len(tensor.asked) == 2
    torch.stream = cupy.streams[0].ptr
    changes: list[Callable[[], Any]] = [
        lambda: setattr(tensor, "data", SimpleNamespace(ptr=tensor.data.ptr + 64, device_id=1)),
        lambda: setattr(tensor, "shape", (9,)),
        lambda: setattr(tensor, "dtype", np.dtype("i8")),
        lambda: setattr(tensor, "stride", lambda: (8, 24)),
    ]
    for number, change in enumerate(changes, 3):
        change()
        for _ in range(2):
            gpu.adopt(tensor)
        assert len(tensor.asked) == number
    del torch._C._cuda_getCurrentRawStream
    gpu.adopt(tensor)
    assert len(tensor.asked) == number + 1


@pytest.mark.parametrize("by", ["cupy", "torch", ""])
def test_a_capture_by_either_library_is_known(gpu, cupy, monkeypatch, by):
    cupy.streams[0].is_capturing = lambda: by == "cupy"
    assert gpu.capturing() is (by == "cupy")
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_current_stream_capturing=lambda: by == "torch"))
    assert gpu.capturing() is bool(by)


def test_a_tensor_without_strides(gpu, torch):
    def refuse() -> None:
        raise RuntimeError("sparse tensors do not have strides")

    tensor = Tensor()
    tensor.stride = refuse
    for _ in range(2):
        gpu.adopt(tensor)
    assert len(tensor.asked) == 2


def test_memory_of_a_tensor_goes_with_it(gpu, torch):
    tensor = Tensor()
    memory = weakref.ref(gpu.adopt(tensor))
    gpu.adopt(tensor)
    other = Tensor()
    gpu.adopt(other)
    del tensor
    assert memory() is None
    assert list(gpu._tensors) == [id(other)]


@needs_cupy
def test_the_handle_of_the_default_stream_of_a_thread():
    import cupy

    assert cupy.cuda.Stream.ptds.ptr == _PER_THREAD


def test_an_event_that_a_finalizer_waits_for_after_it_was_let_go_of_is_refused(gpu, cupy):
    """In a cycle that is collected one may find it after its own finalizer: the wait would be for another point."""
    stream, event = gpu.stream(), gpu.stream().record()
    event.__del__()
    with pytest.raises(AttributeError):
        stream.wait(event)
    with pytest.raises(AttributeError):
        event.done
    event.beneath = stream.record().beneath  # for its other finalizer


def test_to_order_streams_takes_few_python_calls(gpu, cupy):
    """Each call of a store makes five such steps or more."""
    stream, passed = gpu.stream(), list[str]()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("cuda/gpu.py"):
            passed.append(frame.f_code.co_name)

    cupy.present = 1
    sys.setprofile(note)
    stream.wait(stream.record())
    sys.setprofile(None)
    cupy.present = 0
    assert len(passed) <= 7, passed


@needs_cupy
def test_cupy_returns_what_cuda_says_of_an_event_unchecked():
    import cupy

    assert cupy.cuda.runtime.eventQuery(0) not in (0, 600)
    event = cupy.cuda.Event.__new__(cupy.cuda.Event)
    with pytest.raises(AttributeError, match="'ptr'"):
        event.done
    event.ptr = 0
    assert event.done is False


@pytest.mark.parametrize("name", ["NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"])
def test_ranks_that_share_a_gpu_tell_nccl_before_cupy_is_used(imported, monkeypatch, replace, name):
    environ = {"NCCL_PROTO": "LL"}
    monkeypatch.setattr("mpikv.compute.cuda.sharing.os", SimpleNamespace(environ=environ))
    replace("launch_of", lambda: Launch("a launcher", 6, 5))
    imported.cuda.runtime.getDeviceCount = lambda: len(environ) > 10 or name in environ
    assert find_gpu(1, 2, sharing=True).name == "cuda:0"
    # Of all hosts; what somebody has chosen stays.
    assert environ == {**sharing(5), "NCCL_PROTO": "LL"}
    environ.clear()
    environ[name] = "1"
    assert find_gpu(1, 2, sharing=True).name == "cuda:0"
    assert environ == {name: "1"}


def test_the_gpu_of_a_rank(imported):
    assert find_gpu(1, 2).name == "cuda:1"
    assert imported.present == 1
    with pytest.raises(TransportUnavailable, match="the 3 ranks of this host need one GPU each and see 2"):
        find_gpu(1, 3)
    assert find_gpu(2, 3, sharing=True).name == "cuda:0"
    imported.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(TransportUnavailable, match="no GPU can be used here"):
        find_gpu(0, 1)


# --- The example


@pytest.mark.parametrize("writable", [True, False])
def test_the_example_says_what_is_missing(tmp_path, writable):
    pytest.importorskip("sklearn")
    (tmp_path / "file").touch()
    cache = tmp_path / ("cache" if writable else "file/no folder")
    environ = {"PYTHONPATH": str(ROOT), "PATH": "", "CUDA_VISIBLE_DEVICES": "", "CUPY_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/train_digits.py", "--device", "gpu", "--epochs", "1"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=18,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    why = "no GPU can be used here" if writable else "CUPY_CACHE_DIR"
    assert re.fullmatch(rf"train_digits\.py: create: .*(need the package CuPy|{why}).*\n", done.stderr)
