"""Sums of arrays of real GPUs by stores that keep no values: in place, with the host's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import PeerFailed, RankMismatch, Unsupported, ValueMismatch

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2, 3), pytest.mark.deadline(120)]
SEVERAL = pytest.mark.ranks(2, 3)


@pytest.fixture
def kv(cupy: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    with mpikv.create("horovod", **getattr(request, "param", {})) as store:
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
            array, out = cupy.full(1 << 18, np.nan, np.float32), cupy.empty(1 << 18, np.float32)
            for value in (np.nan, number):
                array.fill(value)
            kv.pushpull("a", array, out=out)
            array.fill(np.nan)
            del array
            others = [cupy.full(1 << 18, np.nan, np.float32) for _ in range(3)]
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
