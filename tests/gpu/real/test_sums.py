"""Sums of arrays of real GPUs by stores that keep no values: in place, with the host's results."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.compute.cuda.gpu import CupyGpu
from mpikv.errors import (
    Closed,
    PeerFailed,
    RankMismatch,
    TransportError,
    TransportUnavailable,
    Unsupported,
    ValueMismatch,
)
from mpikv.transports.nccl import NcclTransport

from .. import MANY

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2, 3), pytest.mark.deadline(120)]
SEVERAL = pytest.mark.ranks(2, 3)


@pytest.fixture
def kv(cupy: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    with mpikv.create("horovod", **{"bucket_bytes": 1 << 20, **getattr(request, "param", {})}) as store:
        cupy.cuda.Device(store.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        yield store


@pytest.fixture
def check(cupy: Any, kv: Any) -> Callable[..., None]:
    """Return what sums ones under names, each in an array of the GPU, or of the host."""

    def check(names: str, *on_gpu: bool) -> None:
        arrays = [cupy.ones(2) if there else np.ones(2) for there in on_gpu]
        for array in kv.pushpull(list(names), arrays):
            assert array.tolist() == [kv.size] * 2

    return check


@pytest.mark.parametrize("kv", [{}, {"native_halves": True}, {"deterministic": True}], ids=str, indirect=True)
def test_sums(cupy: Any, kv: Any) -> None:
    """In place and into other arrays, of several dtypes; halves with two roundings, too."""
    kinds = ((1000, "f4"), ((3, 5), "f2"), (7, "i2"), ((), "f8"), ((0, 2), "u1"), (3, "?"), (9000, "c8"))
    names, total = list("abcdefg"), sum(range(1, kv.size + 1))
    arrays = [cupy.full(shape, kv.rank + 1, dtype) for shape, dtype in kinds]
    outs = [cupy.empty_like(array) for array in arrays]
    gaps = [cupy.zeros((*array.shape, 2), "f8" if array.dtype.kind == "f" else array.dtype)[..., 0] for array in arrays]
    assert kv.pushpull(names, arrays, out=outs) is outs
    assert kv.pushpull(names, [[array, cupy.zeros_like(array)] for array in arrays], out=gaps) is gaps
    kv.pushpull(dict(zip(names, arrays, strict=True)))
    for array in (*arrays, *outs, *gaps):
        assert (array.get() == (1 if array.dtype == bool else total)).all()
    again = [cupy.empty_like(array) for array in outs]
    kv.pushpull(names, [cupy.ones_like(array) for array in arrays], out=list(map(list, zip(outs, again, strict=True))))
    for array in (*outs, *again):
        assert (array.get() == (1 if array.dtype == bool else kv.size)).all()
    assert (kv.broadcast("a", cupy.full(1000, kv.rank, "f4")).get() == 0).all()


class Lent:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize("lent", [lambda array: array, Lent], ids=["CuPy's", "another library's"])
def test_arrays_that_are_filled_may_be_those_of_other_names(cupy: Any, kv: Any, lent: Any) -> None:
    first, second = (cupy.full(7, number + kv.rank, np.float32) for number in (0, 10))
    for _ in range(3):
        kv.pushpull(["a", "b"], [lent(first), lent(second)], out=[lent(second), lent(first)])
        first, second = second, first
    ranks = sum(range(kv.size))
    for array, one in ((first, ranks), (second, 10 * kv.size + ranks)):
        assert (array.get() == one * kv.size**2).all()


def test_calls_are_in_the_order_of_the_caller(cupy: Any, kv: Any) -> None:
    """An array is computed on the way, changed right after, and let go of, and its result used at once."""
    with cupy.cuda.Stream(non_blocking=True):
        for number in range(1, 20):
            array, out = cupy.full(MANY, np.nan, np.float32), cupy.empty(MANY, np.float32)
            for value in (np.nan, number):
                array.fill(value)
            kv.pushpull("a", array, out=out)
            array.fill(np.nan)
            del array
            others = [cupy.full(MANY, np.nan, np.float32) for _ in range(3)]
            doubled = out * 2
            out.fill(np.nan)
            assert (doubled.get() == 2 * number * kv.size).all()
            del others


def test_names_of_the_host_and_of_gpus(kv: Any, check: Callable[..., None]) -> None:
    """Where a name lies may change on all ranks; a list of both is summed on the host."""
    check("b", False)
    for names, places in (("a", (True,)), ("ab", (True, False)), ("a", (True,)), ("ab", (True, True)), ("b", (False,))):
        check(names, *places)


@SEVERAL
def test_ranks_that_bring_something_else(cupy: Any, kv: Any, check: Callable[..., None]) -> None:
    ones = cupy.ones(3)
    with pytest.raises(RankMismatch, match=r"'g' on GPUs, for the first time"):
        kv.pushpull("g", np.ones(3) if kv.rank == 0 else ones)
    kv.pushpull("g", ones)
    with pytest.raises(RankMismatch, match=r"\(item 1: on the host against on GPUs\)"):
        kv.pushpull("g", np.ones(3) if kv.rank == 0 else ones)
    with pytest.raises(RankMismatch, match=r"\(item 0: 'g' float64\[2\] against 'g' float64\[3\]\)"):
        kv.pushpull("g", cupy.ones(2) if kv.rank == 0 else ones)
    with pytest.raises(RankMismatch, match="broadcast"):
        (kv.broadcast if kv.rank else kv.pushpull)("g", ones)
    others = PeerFailed if kv.rank else ValueMismatch
    with pytest.raises(others, match="the array to fill of key 'g' has shape"):
        kv.pushpull("g", ones, out=cupy.ones(3 if kv.rank else 4))
    with pytest.raises(others, match="those of one list are alike"):
        kv.pushpull("g", [ones, ones if kv.rank else cupy.ones(3, np.float32)], out=ones)
    with pytest.raises(PeerFailed if kv.rank else TypeError):
        kv.pushpull("g", ones if kv.rank else [1.0, 2.0])
    check("a", True)


@SEVERAL
def test_a_stream_that_is_captured_on_one_rank(cupy: Any, kv: Any) -> None:
    array = cupy.ones(3)
    kv.pushpull("g", array)
    refused = pytest.raises(PeerFailed if kv.rank else Unsupported, match="the current stream is being captured")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        if kv.rank == 0:
            stream.begin_capture()
        with refused:
            kv.pushpull("g", array)
        if kv.rank == 0:
            stream.end_capture()
    kv.pushpull("g", array)


def test_sums_are_made_where_arrays_lie(cupy: Any, kv: Any, scarce: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, and no memory is taken."""
    arrays, copied = [cupy.full(size, kv.rank + 1, "f4") for size in (5, 3000, 40000)], list[Any]()
    outs, names = [cupy.empty_like(array) for array in arrays], list("abc")
    kv.pushpull(names, arrays, out=outs)
    scarce.taken.clear()
    if kv.size > 1:
        monkeypatch.setattr(CupyGpu, "copy", lambda *given: copied.append(given))
    kv.pushpull(names, arrays, out=outs)
    kv.pushpull(names, arrays)
    assert (scarce.taken, copied) == ([], [])
    for array in (*arrays, *outs):
        assert (array.get() == sum(range(1, kv.size + 1))).all()


# --- Where NCCL cannot be had, fails, and ends


@SEVERAL
def test_without_nccl_arrays_are_copied(
    cupy: Any, kv: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks, though one may lack it; and nobody asks again."""
    asked = list[int]()

    def find() -> None:
        asked.append(1)
        raise TransportUnavailable("no library")

    if kv.rank == kv.size - 1:
        monkeypatch.setattr("mpikv.creation.find_nccl", find)
    with caplog.at_level(logging.WARNING, "mpikv"):
        for name in ("a", "b", "a"):
            assert (kv.pushpull(name, cupy.ones(3)).get() == kv.size).all()
    said = [text for text in caplog.messages if "because a rank reports: no library" in text]
    assert (len(said), len(asked)) == (kv.rank == 0, kv.rank == kv.size - 1)


@SEVERAL
@pytest.mark.parametrize(("transport", "status"), [("shm", 1), ("mpi", 1), ("shm", None)])
def test_a_sum_that_fails_or_never_ends_on_one_rank_is_over_everywhere(
    cupy: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch, transport: str, status: int | None
) -> None:
    kv = mpikv.create("horovod", timeout=20 if status else 2.0, transport=transport, bucket_bytes=1 << 14)
    array, call = cupy.ones(3), NcclTransport._call
    kv.pushpull("g", array)

    def fail(mover: Any, function: Any, *arguments: int, on_stream: bool = True) -> None:
        def allreduce(*_: int) -> None:
            raise mover._nccl.NcclError(status)

        call(mover, allreduce if on_stream else function, *arguments, on_stream=on_stream)

    if kv.rank == 0:
        monkeypatch.setattr(NcclTransport, *(("_call", fail) if status else ("allreduce_each", lambda *_: None)))
    with pytest.raises((TransportError, Closed), match="NCCL_ERROR_UNHANDLED_CUDA" if status else None):
        again(lambda: kv.pushpull("g", array), *[] if status else [array.get, kv.barrier])
    with pytest.raises((Closed, TransportError)):
        kv.pushpull("g", np.ones(3))


def again(*calls: Callable[[], Any]) -> None:
    """Make calls until one fails."""
    for _ in range(1000):
        for each in calls:
            each()


@SEVERAL
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_end_of_a_store_ends_its_sums(cupy: Any, gpu: Any, error: type[Exception] | None) -> None:
    with pytest.raises(error) if error else nullcontext(), mpikv.create("horovod", bucket_bytes=1 << 14) as kv:
        kv.pushpull("g", cupy.ones(3))
        if error:
            raise error
    with pytest.raises(Closed):
        kv.pushpull("g", cupy.ones(3))
