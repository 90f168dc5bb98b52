"""Calls on a GPU store are in order with the caller's stream, whatever it has to do yet, and with other libraries'."""

import gc
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse
from mpikv.compute.cuda.gpu import CupyGpu

from .. import MANY
from .test_sums import Lent

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2), pytest.mark.deadline(60)]

LATE = r"""
extern "C" __global__ void late(float* out, long long size, float value, long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) {}
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; i += gridDim.x * (long long)blockDim.x)
    out[i] = value;
}
"""


@pytest.fixture
def late(cupy: Any) -> Any:
    """Return what fills an array with a value, some milliseconds after the GPU has come to it."""
    kernel = cupy.RawKernel(LATE, "late")

    def fill(array: Any, value: float, cycles: int = 5_000_000) -> None:
        kernel((32,), (256,), (array, np.int64(array.size), np.float32(value), np.int64(cycles)))

    return fill


@pytest.fixture(params=["default", "own", "per thread"])
def stream(request: pytest.FixtureRequest, cupy: Any) -> Any:
    streams = {
        "default": lambda: cupy.cuda.Stream.null,
        "own": lambda: cupy.cuda.Stream(non_blocking=True),
        "per thread": lambda: cupy.cuda.Stream.ptds,
    }
    with streams[request.param]() as made:
        yield made


@pytest.fixture
def kv() -> Any:
    with mpikv.create("nccl", bucket_bytes=4 * MANY) as store:
        yield store


def test_what_is_pushed_may_still_be_computed_and_what_is_filled_used(kv, cupy, late, stream):
    gradient, out = cupy.zeros(MANY, np.float32), cupy.zeros(MANY, np.float32)
    kv.init("w", gradient)
    for number in range(1, 6):
        late(gradient, number)
        kv.push("w", gradient)
        gradient.fill(np.nan)  # the push has read it by then
        value = kv.pull("w")
        late(out, np.nan)
        assert kv.pull("w", out) is out
        doubled = value + out
        value.fill(np.nan)
        assert (doubled.get() == 2 * number * kv.size).all()


@pytest.mark.parametrize("wait", [True, False])
def test_memory_that_is_let_go_of_is_not_taken_too_early(kv, cupy, late, stream, wait):
    kv.init("w", cupy.zeros(MANY, np.float32))
    for number in range(1, 20):
        gradient = cupy.empty(MANY, np.float32)
        late(gradient, number)
        kv.push("w", gradient, wait=wait)
        del gradient
        others = [cupy.full(MANY, np.nan, np.float32) for _ in range(3)]
        assert (kv.pull("w").get() == number * kv.size).all()
        del others


def test_memory_of_another_stream_is_not_taken_too_early(kv, cupy, late):
    """What is pushed was computed on another stream than the call's, which takes the memory again."""
    making, calling = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    kv.init("w", cupy.zeros(MANY, np.float32))
    for number in range(1, 10):
        with making:
            gradient = cupy.empty(MANY, np.float32)
            late(gradient, number)
        calling.wait_event(making.record())
        with calling:
            kv.push("w", gradient)
        del gradient
        with making:
            others = [cupy.full(MANY, np.nan, np.float32) for _ in range(3)]
        making.synchronize()
        with calling:
            assert (kv.pull("w").get() == number * kv.size).all()
        del others


def test_calls_return_when_they_are_queued(kv, cupy, late, stream):
    gradient = cupy.zeros(MANY, np.float32)
    kv.init("w", gradient)
    kv.pushpull("w", gradient, out=gradient)  # all is compiled
    cupy.cuda.get_current_stream().synchronize()
    if "EMULATED_CUDA" in os.environ and kv.size > 1:
        pytest.skip("the emulated GPU has no clock: it has done all as soon as another rank waits for it")
    late(gradient, 1, cycles=200_000_000)
    done = cupy.cuda.get_current_stream().record()
    kv.pushpull("w", gradient, out=gradient)
    assert not done.done, "the call has waited for the GPU"
    assert (gradient.get() == kv.size).all()


def test_calls_that_nobody_waits_for(kv, cupy, late, stream):
    gradient, out = cupy.zeros(MANY, np.float32), cupy.zeros(MANY, np.float32)
    kv.init("w", gradient)
    for number in range(1, 6):
        late(gradient, number)
        late(out, np.nan)
        work = kv.pushpull("w", gradient, out, wait=False)
        assert work.wait() is out
        gradient.fill(np.nan)
        assert (out.get() == number * kv.size).all()


def test_their_streams_go_on(kv, cupy, late, stream):
    """What a stream is given after the call is not waited for."""
    gradient, busy = cupy.ones(MANY, np.float32), cupy.zeros(MANY, np.float32)
    kv.init("w", gradient)
    kv.pushpull("w", gradient)  # all is compiled
    late(busy, 1)
    stream.synchronize()
    work = kv.push("w", gradient, wait=False)
    late(busy, 1, cycles=1_000_000_000)
    end = stream.record()
    while not work.done:
        time.sleep(1e-3)
    kv._transport.memory.order.stream.synchronize()
    assert not end.done, "the call has waited for what came after it"
    work.wait()
    assert (kv.pull("w").get() == kv.size**2).all()


def test_their_new_arrays(kv, cupy, late, stream):
    """They are memory that the stream may use yet, when the thread that makes the call takes it."""
    kv.init("w", cupy.full(MANY, 3, np.float32))
    if stream.ptr == cupy.cuda.Stream.ptds.ptr:
        rows = mpikv.RowSparse([0], cupy.ones((1, 3)), (4, 3))
        kv.init("rows", rows)
        for call in (
            lambda: kv.pull("w", wait=False),
            lambda: kv.pushpull("rows", rows, wait=False),
            lambda: kv.pull("rows", rows, ignore_sparse=False, wait=False),
        ):
            with pytest.raises(mpikv.Unsupported, match="cannot make new arrays for a thread's default stream"):
                call().wait()
        kv.push("rows", [rows, rows], wait=False).wait()
        assert kv.row_sparse_pull("rows", row_ids=[0]).values.get().tolist() == [[2 * kv.size] * 3]
        return
    for _ in range(10):
        work = kv.pull("w", wait=False)
        before = cupy.empty(MANY, np.float32)
        late(before, np.nan)
        del before
        assert (work.wait().get() == 3).all()


def held(kv: Any) -> threading.Event:
    """Hold the thread of a store before its next call until the event is set."""
    released, least = threading.Event(), kv._pending._least

    def wait(queued: int) -> int:
        assert released.wait(20)
        return least(queued)

    kv._pending._least = wait
    return released


def test_new_arrays_that_are_made_late(kv, cupy, late):
    """In memory that their stream has had meanwhile, and may still use; whoever takes them gives it back there."""
    kv.init("w", cupy.full(MANY, 3, np.float32))
    with cupy.cuda.Stream(non_blocking=True) as caller:
        released = held(kv)
        work = kv.pull("w", wait=False)
        before = cupy.empty(MANY, np.float32)
        late(before, np.nan)
        place = before.data.ptr
        del before
        released.set()
        with cupy.cuda.Stream(non_blocking=True):
            kv.pull("w").get()  # for which the store's stream has to make the first pull, too
        out = work.wait()
        assert out.data.ptr == place, "it is no memory of the caller's stream"
        assert (out.get() == 3).all()
        late(out, 7)
        del out, work
        again = cupy.ones(MANY, np.float32)
        assert (again.get() == 1).all()
        caller.synchronize()


def test_memory_of_a_call_that_is_refused_is_not_taken_too_early(kv, cupy, late):
    """Rows in a list are summed before the ranks agree."""
    kv.init("rows", RowSparse([0], cupy.zeros((1, MANY), np.float32), (3, MANY)))
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(3):
            rows = cupy.ones((2, MANY), np.float32)
            late(rows, 1)
            given = [RowSparse([1], each[None], (3, MANY)) for each in rows]
            work = kv.push("rows", given, priority="high", wait=False)
            del rows, given
            while not work.done:
                time.sleep(1e-3)
            others = [cupy.full((2, MANY), 5, np.float32) for _ in range(3)]
            with pytest.raises(mpikv.ValueMismatch, match="priority"):
                work.wait()
            assert all((other.get() == 5).all() for other in others)


def test_wait_orders_the_stream_of_whoever_waits(kv, cupy, late):
    kv.init("w", cupy.zeros(MANY, np.float32))
    issuing, *others = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    found = []

    def wait(stream):
        cupy.cuda.Device(work.wait().device.id).use()
        with stream:
            found.append(work.wait().get())

    with issuing:
        gradient = cupy.empty(MANY, np.float32)
        late(gradient, 2)
        work = kv.pushpull("w", gradient, wait=False)
    thread = threading.Thread(target=wait, args=(others[0],))
    thread.start()
    thread.join(20)
    wait(others[1])
    assert len(found) == 2
    assert all((each == 2 * kv.size).all() for each in found)


def left(kv):
    with kv.join():
        pass


def test_any_other_call_orders_all_that_were_not_waited_for(kv, cupy, late):
    kv.init("w", cupy.zeros(MANY, np.float32))
    view = kv.view("w")
    for number, other in enumerate([kv.barrier, lambda: kv.view("w"), lambda: left(kv), lambda: kv.pull("w")], 1):
        with cupy.cuda.Stream(non_blocking=True):
            gradient, out = cupy.empty(MANY, np.float32), cupy.zeros(MANY, np.float32)
            late(gradient, number)
            works = [kv.pushpull("w", gradient, out, wait=False) for _ in range(2)]
            other()
            assert works[1].done
            out += 1
            assert (out.get() == number * kv.size + 1).all()
            assert (view.get() == number * kv.size).all()


def test_a_store_comes_after_what_another_has_pending(kv, cupy):
    """NCCL wants one order of all calls of a process, and each store has a thread of its own."""
    ones = cupy.ones(9, np.float32)
    kv.init("w", ones)
    with mpikv.create("nccl", timeout=20, bucket_bytes=1 << 14) as other:
        other.init("w", ones)
        for verb, wait in (("push", True), ("push", False), ("pull", True), ("pull", False)):
            released = held(kv)
            works = [kv.push("w", ones, wait=False) for _ in range(3)]
            opening = threading.Timer(0.05, released.set)
            opening.start()
            made = getattr(other, verb)(*(("w",) if verb == "pull" else ("w", ones)), wait=wait)
            assert all(work.done for work in works), f"{verb} with wait={wait} came first"
            if not wait:
                made.wait()
            opening.join()


@pytest.mark.parametrize("wait", [True, False])
def test_arrays_are_let_go_of_without_another_call(kv, cupy, stream, wait):
    kv.init("w", cupy.zeros(3, np.float32))
    given, out = cupy.ones(3, np.float32), cupy.ones(3, np.float32)
    lives = [weakref.ref(array) for array in (given, out)]
    works = [kv.push("w", given, wait=wait), kv.pull("w", out, wait=wait)]
    if not wait:
        works[1].wait()
    del given, out, works[1]  # that of a push may stay
    for _ in range(1000):
        gc.collect()
        if all(life() is None for life in lives):
            return
        time.sleep(1e-2)
    pytest.fail("they are kept")


def test_arrays_of_other_libraries_are_in_order_already(kv, cupy, monkeypatch):
    """Those of calls that nobody waits for: what their library has to do by then came after the call."""
    adopted, adopt = [], CupyGpu.adopt

    def noted(gpu, value, ordered=False):
        adopted.append(ordered)
        return adopt(gpu, value, ordered)

    monkeypatch.setattr(CupyGpu, "adopt", noted)
    out = cupy.zeros(3)
    kv.init("w", cupy.zeros(3))
    for wait in (True, False):
        adopted.clear()
        made = kv.pushpull("w", Lent(cupy.ones(3)), lent := Lent(out), wait=wait)
        assert (made if wait else made.wait()) is lent
        assert set(adopted) == {not wait}
    assert (out.get() == kv.size).all()


def test_a_store_that_is_left_by_an_error_with_calls_pending(cupy):
    kv = mpikv.create("nccl", timeout=2, bucket_bytes=1 << 14)
    kv.init("w", np.zeros(3))
    released = held(kv)
    work = kv.push("w", np.ones(3), wait=False)
    with pytest.raises(ZeroDivisionError), kv:
        _ = 1 / 0
    released.set()
    with pytest.raises(mpikv.MPIKVError):
        work.wait(20)
    with pytest.raises(mpikv.Closed, match="ZeroDivisionError"):
        kv.pull("w")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_torch(kv, cupy, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    device = torch.device("cuda", cupy.cuda.get_device_id())
    weight = torch.ones(1000, dtype=getattr(torch, dtype), device=device, requires_grad=True)
    kv.init("w", weight)
    for number in range(1, 4):
        gradient = torch.full((1000,), number, dtype=weight.dtype, device=device)
        kv.push("w", gradient)
        gradient.fill_(float("nan"))
        out = torch.zeros_like(gradient)
        kv.pull("w", out)
        assert (out == number * kv.size).all()
        gradient.fill_(number + 1)
        assert kv.pushpull("w", gradient, out, wait=False).wait() is out
        gradient.fill_(float("nan"))
        assert (out == (number + 1) * kv.size).all()


@pytest.mark.parametrize("own", [False, True])
def test_a_stream_of_torch(kv, cupy, late, own):
    """The default one, or one of torch's own, on which gradients come late and are written over after the push."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    device = torch.device("cuda", cupy.cuda.get_device_id())
    stream = torch.cuda.Stream(device) if own else torch.cuda.default_stream(device)
    kv.init("w", cupy.zeros(MANY, np.float32))
    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(Named(stream.cuda_stream)):
        gradient, out = torch.zeros(MANY, device=device), torch.zeros(MANY, device=device)
        for number in range(1, 6):
            late(cupy.from_dlpack(gradient), number)
            kv.push("w", gradient)
            gradient.fill_(float("nan"))
            late(cupy.from_dlpack(out), np.nan)
            kv.pull("w", out)
            doubled = out * 2
            out.fill_(float("nan"))
            assert float((doubled - 2 * number * kv.size).abs().max()) == 0


class Named:
    """A stream of a handle, as CuPy takes it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@pytest.mark.ranks(1, 2)
def test_a_call_in_a_capture_is_refused_everywhere(kv, cupy):
    """What it does to arrays would be recorded, and not done."""
    kv.init("w", cupy.zeros(5, "f4"))
    gradient = cupy.ones(5, "f4")
    last = kv.rank == kv.size - 1
    with cupy.cuda.Stream(non_blocking=True) as stream:
        if last:
            stream.begin_capture()
        for wait in (True, False):
            with pytest.raises(mpikv.Unsupported if last else mpikv.PeerFailed, match="stream is being captured"):
                kv.push("w", gradient, wait=wait).wait()
        if last:
            stream.end_capture()
    kv.push("w", gradient)
    assert kv.pull("w").get().tolist() == [kv.size] * 5


def test_what_is_filled_has_its_elements_apart(kv, cupy):
    kv.init("w", cupy.zeros((4, 6), "f4"))
    with pytest.raises(TypeError, match="several elements at one address"):
        kv.pull("w", out=cupy.broadcast_to(cupy.zeros(6, "f4"), (4, 6)))
    out = cupy.ones((6, 8), "f4")
    kv.pull("w", out=out.T[::2])
    assert float(out.sum()) == 24


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("captured", [False, True])
def test_outputs_that_are_sources_of_other_keys_are_filled_when_these_were_read(cupy, captured):
    """Of several messages, of which some end in the middle of an array."""
    with mpikv.create("nccl", bucket_bytes=16384) as kv:
        kv.init(["a", "b"], [np.zeros(9000, np.float32)] * 2)
        first, second = (cupy.full(9000, number, np.float32) for number in (1, 2))
        step = kv.capture(["a", "b"], [first, second], [second, first])
        for number in range(4):
            step() if captured else kv.pushpull(["a", "b"], [first, second], out=[second, first])
            # Each is what the other was, times the ranks.
            for array, value in zip((first, second), (1, 2) if number % 2 else (2, 1), strict=True):
                assert (array.get() == value * kv.size ** (number + 1)).all()
        flat = cupy.full(18000, 3, np.float32)
        kv.pushpull(["a", "b"], [flat[:9000], flat[9000:]], out=[flat[8000:17000], first])
        assert (flat[8000:17000].get() == 3 * kv.size).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.deadline(120)
def test_two_stores_may_be_waited_for_in_any_order(cupy):
    """A GPU begins NCCL's work of both in the order of the calls, or each could wait for the other on another rank."""
    with mpikv.create("nccl") as one, mpikv.create("nccl") as other:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        for kv in (one, other):
            kv.init("w", cupy.zeros(1000, "f4"))
        for number in range(1, 4):
            outs = []
            for kv, stream in zip((one, other), streams, strict=True):
                with stream:
                    outs.append(kv.pushpull("w", cupy.full(1000, number, "f4")))
            for place in (0, 1) if one.rank == 0 else (1, 0):
                streams[place].synchronize()
                assert (outs[place].get() == number * one.size).all()
