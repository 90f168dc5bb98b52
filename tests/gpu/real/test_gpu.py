"""CuPy's GPU for a store, beside another GPU if there is one: copies, streams, events, finalizers and errors."""

from __future__ import annotations

import gc
import threading
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
    made = loading.loaded.cache_info().misses
    with gpu.present(), gpu.stream():
        gradient, payload = cupy.ones(100, np.float32), cupy.zeros(25, np.uint8)
        codec.encode(gradient, payload)
        codec.decode_add(payload, gradient)
        assert gradient.get().tolist() == [1.5] * 100
    assert loading.loaded.cache_info().misses == made, "a kernel was compiled when it was used"


@pytest.mark.parametrize(
    "array", [np.arange(LARGE), np.arange(12).reshape(3, 4)[:, ::2], np.float32(3)[...], np.empty((0, 3))]
)
def test_arrays_of_the_host_come_and_go(cupy: Any, gpu: CupyGpu, array: Any) -> None:
    here = gpu.upload(array)
    assert (here.shape, here.dtype) == (array.shape, array.dtype)
    out = np.zeros((*array.shape, 2), array.dtype)[..., 0]  # not contiguous
    gpu.download(here, out)
    assert (out == array).all()
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


def test_marks_know_the_time_between_them(gpu: CupyGpu, busy: Any) -> None:
    with gpu.stream():
        first = gpu.mark()
        with gpu.present():
            busy()
        assert first.seconds_to(gpu.mark()) > 0


def test_arrays_are_looked_at_on_their_gpu(cupy: Any, gpu: CupyGpu) -> None:
    arrays = [gpu.upload(np.array([1, value], np.float32)) for value in (1, np.nan, 1e9)]
    assert list(gpu.exceeding(arrays, 7.0, gpu.upload(np.ones(3, np.uint8)))) == [False, True, True]


def test_arrays_of_others(cupy: Any, gpu: CupyGpu) -> None:
    assert not gpu.owns(np.zeros(3))
    if gpu.ordinal:
        there = cupy.zeros(3)
        assert not gpu.owns(there)
        with pytest.raises(Unsupported, match=rf"is on cuda:0 .*the store on {gpu.name}"):
            gpu.adopt(there)
    with pytest.raises(Unsupported, match=r"DLPack's device \(10, 1\)"):
        gpu.adopt(SimpleNamespace(__dlpack_device__=lambda: (10, 1)))


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
