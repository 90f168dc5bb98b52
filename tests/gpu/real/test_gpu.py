"""CuPy's GPU for a store, beside another GPU if there is one: copies, streams, events, finalizers and errors."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpikv import codecs, optimizers
from mpikv.compute.cuda import copies, loading
from mpikv.compute.cuda.gpu import CupyGpu, gpu_of
from mpikv.errors import Unsupported
from mpikv.optimizers.updaters import Assign

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]

LARGE = (9 << 20) + 5
"""More bytes than the pinned memory through which copies go."""
NANOSECONDS = 50_000_000


@pytest.fixture
def gpu(cupy: Any) -> Iterator[CupyGpu]:
    """Return the last GPU, where the thread's own one is the first, and stays so."""
    cupy.cuda.Device(0).use()
    yield CupyGpu(cupy, cupy.cuda.runtime.getDeviceCount() - 1)
    assert cupy.cuda.runtime.getDevice() == 0
    assert cupy.cuda.get_current_stream().ptr == 0


@pytest.fixture
def busy(cupy: Any, gpu: CupyGpu) -> Callable[[], None]:
    """Return what gives the present stream something to do that takes long."""
    source = "long long begin = clock64(); while (clock64() - begin < cycles) {}"
    kernel = cupy.RawKernel(f'extern "C" __global__ void wait(long long cycles) {{ {source} }}', "wait")
    return lambda: kernel((1,), (1,), (np.int64(NANOSECONDS),))


def test_all_is_done_on_its_gpu(cupy: Any, gpu: CupyGpu) -> None:
    stream = gpu.stream()
    with stream, stream:
        assert gpu.current().handle == stream.handle
        made = [gpu.zeros(8), gpu.empty((2, 3), np.dtype("f4")), gpu.upload(np.ones(3))]
    stream.synchronize()
    target = gpu.upload(np.zeros(3))
    gpu.copy([target], [made[2]])
    assert target.get().tolist() == [1, 1, 1]
    assert all(gpu.owns(array) for array in [*made, target])
    assert gpu_of(target).name == gpu.name
    stream.wait(gpu.current().record())
    stream.synchronize()
    runtime = cupy.cuda.runtime
    assert runtime.streamGetFlags(stream.handle) == runtime.streamNonBlocking
    assert runtime.streamGetPriority(stream.handle) < runtime.streamGetPriority(0)


def test_kernels_are_compiled_for_its_gpu(cupy: Any, gpu: CupyGpu) -> None:
    kernels = gpu.kernels()
    for updater in (optimizers.SGD(), optimizers.LARS(), Assign()):
        kernels.prepare(updater, np.dtype("f4"), False)
    codec = kernels.codec(codecs.create("2bit"))
    made = loading.load_kernel.cache_info().misses
    with gpu.present(), gpu.stream():
        gradient, payload = cupy.ones(100, np.float32), cupy.zeros(25, np.uint8)
        codec.encode(gradient, payload)
        codec.decode_add(payload, gradient)
        assert gradient.get().tolist() == [1.5] * 100
    assert loading.load_kernel.cache_info().misses == made, "a kernel was compiled when it was used"


@pytest.mark.parametrize(
    "array", [np.arange(LARGE), np.arange(12).reshape(3, 4)[:, ::2], np.float32(3)[...], np.empty((0, 3))]
)
def test_arrays_of_the_host_come_and_go(cupy: Any, gpu: CupyGpu, array: Any) -> None:
    here = gpu.upload(array)
    assert (here.shape, here.dtype) == (array.shape, array.dtype)
    out = np.zeros((*array.shape, 2), array.dtype)[..., 0]  # not contiguous
    assert gpu.download(here, out) is out
    assert (np.stack([out, gpu.download(here)]) == array).all()
    with gpu.present():
        filled = cupy.zeros((*array.shape, 2), array.dtype)[..., 0]
    assert gpu.upload(array, filled) is filled
    assert (cupy.asnumpy(filled) == array).all()


def test_uploads_arrive_whole_though_their_arrays_change(cupy: Any, gpu: CupyGpu, busy: Any) -> None:
    with gpu.present(), gpu.stream():
        target, array = cupy.zeros(LARGE, np.uint8), np.arange(LARGE, dtype=np.uint8) // 3 + np.arange(LARGE) // 1000
        array, expected = array.astype(np.uint8), array.astype(np.uint8)
        busy()
        gpu.upload(array, target)
        array[...] = 2
        assert (target.get() == expected).all()


def test_pinned_memory_outlives_the_copies_from_it(cupy: Any, busy: Any) -> None:
    """CuPy would give it to somebody else, who fills it: as where the thread has ended that copied."""
    with cupy.cuda.Stream(non_blocking=True):
        target = cupy.zeros(1000, np.uint8)
        busy()
        own = CupyGpu(cupy, 0)
        own.upload(np.ones(1000, np.uint8), target)
        own.itself = own  # type: ignore[attr-defined]  # a cycle
        del own
        gc.collect()
        CupyGpu(cupy, 0).upload(np.ones(1, np.uint8))  # which has pinned memory of its own, and leaves it
        gc.collect()
        others = [np.frombuffer(cupy.cuda.alloc_pinned_memory(4 << 20), np.uint8, 4 << 20) for _ in range(3)]
        for other in others:
            other[...] = 7
        assert (target.get() == 1).all()


def test_an_event_that_a_cycle_holds_is_not_destroyed(cupy: Any, gpu: CupyGpu) -> None:
    """CuPy's own finalizer would destroy it, while it waits for its next owner."""
    stream = gpu.stream()
    for _ in range(3):
        cycle: dict[str, Any] = {"event": stream.record()}
        cycle["itself"] = cycle
        del cycle
        gc.collect()
        with gpu.present():
            fresh = cupy.cuda.Event(disable_timing=True)
        later = [stream.record() for _ in range(3)]
        assert len({fresh.ptr, *(event.beneath.ptr for event in later)}) == 4
        stream.synchronize()
        assert all(event.done for event in later)


def test_no_event_is_recorded_again_that_somebody_holds(gpu: CupyGpu) -> None:
    stream, random = gpu.stream(), np.random.default_rng(5)
    held: list[Any] = []
    for _ in range(300):
        held.append(stream.record())
        assert len({event.beneath.ptr for event in held}) == len(held)
        while held and random.random() < 0.5:
            held.pop(int(random.integers(len(held))))


def test_an_event_is_there_or_not_yet(gpu: CupyGpu, busy: Any) -> None:
    stream = gpu.stream()
    with gpu.present(), stream:
        busy()
        event = stream.record()
        assert not event.done
        stream.synchronize()
        assert event.done


def test_arrays_are_looked_at_on_their_gpu(cupy: Any, gpu: CupyGpu) -> None:
    """Of many there are several launches."""
    values = (1, np.nan, 1e9, -1, -np.inf) * 60
    arrays = [gpu.upload(np.array([[1, 0], [value, 0]], np.float32))[:, 0] for value in values]
    assert list(gpu.exceeding(arrays, 7.0)) == [False, True, True, False, True] * 60


def test_arrays_of_others(cupy: Any, gpu: CupyGpu) -> None:
    assert not gpu.owns(np.zeros(3))
    if gpu.ordinal:
        there = cupy.zeros(3)
        assert not gpu.owns(there)
        with pytest.raises(Unsupported, match=rf"is on cuda:0 .*the store on {gpu.name}"):
            gpu.adopt(there)
    with pytest.raises(Unsupported, match=r"DLPack's device \(10, 1\)"):
        gpu.adopt(SimpleNamespace(__dlpack_device__=lambda: (10, 1)))
    with pytest.raises(Unsupported, match=r"an unknown DLPack device \(10, 0\); copy it"):
        gpu_of(SimpleNamespace(__dlpack_device__=lambda: (10, 0)))
    managed = SimpleNamespace(__dlpack_device__=lambda: (13, gpu.ordinal))  # memory that moves
    assert gpu_of(managed).name == gpu.name

    def refuse(**_: object) -> None:
        raise BufferError("it is conjugated")

    with pytest.raises(Unsupported, match="cannot use the memory of a SimpleNamespace: it is conjugated"):
        gpu.adopt(SimpleNamespace(__dlpack_device__=managed.__dlpack_device__, __dlpack__=refuse))


class Tensor:
    """A tensor of torch, which notes the streams that it is asked to order."""

    def __init__(self, array: Any, asked: list[Any]) -> None:
        self.array, self.asked, self.shape, self.dtype = array, asked, array.shape, array.dtype
        self.place, self.strides = array.data.ptr, array.strides

    def detach(self) -> Tensor:
        return self

    def data_ptr(self) -> int:
        return int(self.place)

    def stride(self) -> tuple[int, ...]:
        if self.strides is None:
            raise RuntimeError("sparse tensors do not have strides")
        return tuple(self.strides)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream, **options)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what stands for the module torch, whose present stream is ``stream``."""
    made = SimpleNamespace(stream=0)
    made._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: made.stream)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def tensor(gpu: CupyGpu) -> Callable[[str], Any]:
    """Return what makes a tensor of a class of a module."""
    return lambda module: type("Tensor", (Tensor,), {"__module__": module})(gpu.upload(np.zeros((3, 3))), [])


def test_tensors_of_torch_that_come_in_order_already(gpu: CupyGpu, torch: Any, tensor: Any) -> None:
    """Torch is asked to order nothing, and else it would; the arrays of other libraries are asked as ever."""
    for module, ordered in (("torch", True), ("torch.nn", True), ("torch", False), ("jax", True)):
        made = tensor(module)
        assert gpu.owns(gpu.adopt(made, ordered=ordered))
        (asked,) = made.asked
        assert (asked == -1) is (ordered and module != "jax")


def test_a_tensor_is_asked_for_its_memory_once(gpu: CupyGpu, torch: Any, tensor: Any) -> None:
    """As long as it lies there, and torch has nothing to bring in order."""
    made = tensor("torch")
    first = gpu.adopt(made)
    assert all(gpu.adopt(made, ordered=ordered) is first for ordered in (False, True, False))
    torch.stream = 5
    gpu.adopt(made, ordered=True)
    assert len(made.asked) == 1
    gpu.adopt(made)
    torch.stream = 0
    for number, (name, value) in enumerate(
        {"place": 64, "shape": (9,), "dtype": np.dtype("i8"), "strides": (8, 24)}.items(), 3
    ):
        setattr(made, name, value)
        for _ in range(2):
            gpu.adopt(made)
        assert len(made.asked) == number
    made.strides = None
    for _ in range(2):
        gpu.adopt(made)
    assert len(made.asked) == number + 2


def test_memory_of_a_tensor_goes_with_it(gpu: CupyGpu, torch: Any, tensor: Any) -> None:
    made, other = tensor("torch"), tensor("torch")
    memory = weakref.ref(gpu.adopt(made))
    gpu.adopt(made)
    gpu.adopt(other)
    del made
    assert memory() is None
    assert list(gpu._tensors) == [id(other)]


def test_a_capture_by_torch_is_known(gpu: CupyGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for captures in (False, True):
        asked = SimpleNamespace(is_current_stream_capturing=lambda captures=captures: captures)
        monkeypatch.setitem(sys.modules, "torch.cuda", asked)
        assert gpu.capturing() is captures


def test_an_event_that_a_finalizer_waits_for_after_it_was_let_go_of_is_refused(gpu: CupyGpu) -> None:
    """In a cycle that is collected one may find it after its own finalizer: the wait would be for another point."""
    stream, event = gpu.stream(), gpu.stream().record()
    event.__del__()  # type: ignore[attr-defined]  # CuPy's own
    with pytest.raises(AttributeError):
        stream.wait(event)
    with pytest.raises(AttributeError):
        assert event.done
    event.beneath = gpu.spare_events.pop()  # type: ignore[attr-defined]  # for its other finalizer


def test_to_order_streams_takes_few_python_calls(gpu: CupyGpu) -> None:
    """Each call of a store makes five such steps or more."""
    stream, passed = gpu.stream(), list[str]()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("cuda/gpu.py"):
            passed.append(frame.f_code.co_name)

    with gpu.present():
        gc.collect()  # none inside, whose finalizers would be counted
        sys.setprofile(note)
        stream.wait(stream.record())
        sys.setprofile(None)
    assert len(passed) <= 7, passed


def test_too_little_memory(gpu: CupyGpu) -> None:
    with pytest.raises(MemoryError, match=rf"^{gpu.name} has too little memory .*bucket_bytes"):
        gpu.zeros(1 << 45)


def test_a_thread_that_watches_ends_no_capture(cupy: Any, gpu: CupyGpu) -> None:
    """Of another library, in CUDA's strictest mode."""
    stream, asked = gpu.stream(), []
    event = stream.record()
    with gpu.present():
        captured = cupy.cuda.Stream(non_blocking=True)
        captured.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)

    def watch() -> None:
        gpu.watch()
        asked.append(event.done)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    with gpu.present():
        captured.end_capture()
    assert len(asked) == 1


def test_a_capture_lets_other_threads_ask(cupy: Any, gpu: CupyGpu) -> None:
    stream, asked = gpu.stream(), []
    event = stream.record()
    stream.begin_capture()
    thread = threading.Thread(target=lambda: asked.append(event.done))
    thread.start()
    thread.join()
    stream.end_capture()
    assert len(asked) == 1


def test_a_capture_is_known(cupy: Any, gpu: CupyGpu) -> None:
    stream = gpu.stream()
    with gpu.present(), stream:
        assert not gpu.capturing()
        stream.begin_capture()
        assert gpu.capturing()
        copies.copy([], [])
        stream.end_capture().launch()
        stream.synchronize()


def test_threads_that_are_in_one_stream_leave_it_for_what_they_came_from(cupy: Any, gpu: CupyGpu) -> None:
    stream, entered, left, found = gpu.stream(), threading.Event(), threading.Event(), []

    def enter() -> None:
        cupy.cuda.Device(0).use()
        with stream:
            entered.set()
            assert left.wait(20)
        found.append((cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr))

    with stream:
        thread = threading.Thread(target=enter)
        thread.start()
        assert entered.wait(20)
    left.set()
    thread.join(20)
    assert found == [(0, 0)]
