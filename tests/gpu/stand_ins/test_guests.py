"""Arrays of GPUs in the calls of stores of the host, on a GPU that is none."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpus import order_of

import mpikv
from mpikv.errors import KeyNotInitialized, PeerFailed, TransportUnavailable, Unsupported, ValueMismatch
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakestreams import MisuseError, RaceError
from mpikv.testing.store import on_host

KEYS = {"w": ((3, 4), np.float32), "b": ((5,), np.float64), "big": ((6000,), np.float32), "h": ((7, 3), np.float16)}


@pytest.fixture
def gpu(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPU of this rank, whose arrays stores know."""
    made = FakeGpu(comm.rank if comm else 0)

    def find(value: Any) -> FakeGpu:
        assert value.__dlpack_device__() == (2, made.ordinal)
        return made

    monkeypatch.setattr("mpikv.creation.gpu_of", find)
    yield made
    made.checker.assert_clean()


def fetched(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "mpi"}, {"placement": "root"}, {"deterministic": True, "bucket_bytes": 4096}],
    ids=str,
)
@pytest.mark.parametrize("updater", ["assign", "adam", "function"])
def test_the_same_as_with_arrays_of_the_host(comm: Any, gpu: Any, options: Any, updater: str, seed: int) -> None:
    """Random calls with arrays of the GPU and of the host, from several streams."""
    if comm is None:
        options = {name: value for name, value in options.items() if name != "transport"}
    draw = np.random.default_rng(seed)
    own = np.random.default_rng([seed, comm.rank if comm else 0])
    mixed, plain = (mpikv.create("dist_sync", comm=comm, **options) for _ in range(2))
    streams = [gpu.current(), gpu.stream(), gpu.stream()]
    for kv in (mixed, plain):
        ones = [np.ones(shape, dtype) for shape, dtype in KEYS.values()]
        kv.init(list(KEYS), ones if kv is plain else [gpu.upload(each) for each in ones])
        if updater == "function":
            kv.set_updater(double)
        elif updater != "assign":
            kv.set_optimizer(updater, learning_rate=0.25)
    for _ in range(20):
        keys = [str(key) for key in draw.permutation(list(KEYS))[: draw.integers(1, len(KEYS) + 1)]]
        verb = draw.choice(["push", "pull", "pushpull", "pushpull in place", "set", "broadcast"])
        with streams[own.choice(3)]:
            values = [own.integers(-4, 5, KEYS[key][0]).astype(KEYS[key][1]) for key in keys]
            there = own.random(len(keys)) < 0.7
            given = [gpu.upload(v) if on_gpu else v.copy() for v, on_gpu in zip(values, there, strict=True)]
            found, expected = call(mixed, verb, keys, given), call(plain, verb, keys, values)
            if verb == "pull":
                assert all(type(each) is np.ndarray for each in found)
            elif found is not None:
                assert all((type(each) is not np.ndarray) == on_gpu for each, on_gpu in zip(found, there, strict=True))
            for mine, wanted in zip(found or (), expected or (), strict=True):
                np.testing.assert_array_equal(fetched(mine), wanted)
            for pushed, value in zip(given, values, strict=True):  # nothing but what was to be filled has changed
                np.testing.assert_array_equal(fetched(pushed), value)
    for kv in (mixed, plain):
        kv.close()


def double(key: Any, given: Any, stored: Any) -> None:
    assert type(given) is type(stored) is np.ndarray
    stored += 2 * given


def call(kv: Any, verb: str, keys: list[str], arrays: list[Any]) -> Any:
    if verb == "pull":
        return kv.pull(keys)
    if verb == "pushpull in place":
        return kv.pushpull(dict(zip(keys, arrays, strict=True))).values()
    if verb == "pushpull":
        outs = [array.copy() for array in arrays]
        assert kv.pushpull(keys, arrays, out=outs) is outs
        return outs
    if verb == "broadcast":
        outs = [array.copy() for array in arrays]
        return kv.broadcast(keys, arrays, out=outs)
    getattr(kv, verb)(keys, arrays)
    return None


@pytest.mark.ranks(1, 2, 3)
def test_forms_and_casts(comm: Any, gpu: Any) -> None:
    with mpikv.create("dist_sync", comm=comm) as kv:
        kv.init("w", gpu.upload(np.zeros((2, 3))))
        kv.push("w", [gpu.upload(np.ones((2, 3), np.float32)), np.ones((2, 3))])
        half, column = gpu.empty((2, 3), np.float16), gpu.upload(np.zeros((2, 6)))[:, ::2]
        kv.pull("w", out=[half, column, plain := np.empty((2, 3))])
        for out in (half.get(), column.get(), plain):
            np.testing.assert_array_equal(out, np.full((2, 3), 2 * kv.size))
        with pytest.raises(ValueMismatch, match="the array to fill of key 'w' has shape"):
            kv.pull("w", out=gpu.empty((3, 2), np.float64))
        with pytest.raises(ValueMismatch, match="only dtypes of one kind are cast"):
            kv.push("w", gpu.upload(np.ones((2, 3), np.int64)))


@pytest.mark.ranks(1, 2, 3)
def test_other_stores(comm: Any, gpu: Any) -> None:
    with mpikv.create("dist_async", comm=comm, staleness=0) as kv:
        kv.init("w", np.zeros(3))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push("w", gpu.upload(np.ones(3)))
        out = gpu.upload(np.zeros(3))
        assert kv.pull("w", out=out) is out
        np.testing.assert_array_equal(out.get(), np.full(3, -kv.size))
    with mpikv.create("horovod", comm=comm) as kv:
        for size in (3, 3, 5):
            array = gpu.upload(np.ones(size, np.float32))
            kv.pushpull("g", array)
            np.testing.assert_array_equal(array.get(), np.full(size, kv.size))
    with mpikv.create("dist_sync", comm=comm) as kv:
        scope = kv.scope("one")
        scope.init("w", gpu.upload(np.ones(3)))
        scope.pushpull("w", array := gpu.upload(np.ones(3)))
        np.testing.assert_array_equal(array.get(), np.full(3, kv.size))


@pytest.mark.ranks(1, 2, 3)
def test_it_is_said_once(comm: Any, gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    with mpikv.create("dist_sync", comm=comm) as kv:
        kv.init("w", np.zeros(3))
        kv.push("w", np.ones(3))
        with caplog.at_level(logging.WARNING, "mpikv"):
            assert not caplog.records
            for _ in range(3):
                kv.pushpull("w", gpu.upload(np.ones(3)))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"an array on {gpu.name} is used with a host store")


@pytest.mark.ranks(1, 2, 3)
def test_a_call_that_is_not_made_fills_nothing(comm: Any, gpu: Any) -> None:
    """Neither then, nor by the next call."""
    with mpikv.create("dist_sync", comm=comm) as kv:
        kv.init("w", np.ones(3))
        sevens = np.full(3, 7.0)  # kept, so that no new memory holds sevens
        out = gpu.upload(sevens)
        last = kv.rank == kv.size - 1
        # Prepared on all ranks but the last, which has another key.
        with pytest.raises(KeyNotInitialized if last else PeerFailed):
            kv.pull("v" if last else "w", out=out)
        assert not order_of(kv).needed
        kv.push("w", gpu.upload(np.ones(3)))
        np.testing.assert_array_equal(out.get(), sevens)
        kv.pull("w", out=out)
        np.testing.assert_array_equal(out.get(), np.full(3, kv.size))
        assert not order_of(kv).needed


@pytest.mark.ranks(1, 2, 3)
def test_a_compiled_call_that_is_not_made_yet_fills_nothing(comm: Any, gpu: Any) -> None:
    with mpikv.create("dist_sync", comm=comm) as kv:
        kv.init("w", np.zeros(3))
        given, out = gpu.upload(np.ones(3)), gpu.upload(np.full(3, 7.0))
        into, alone = kv.capture("w", given, out=out), kv.capture("w", given)
        np.testing.assert_array_equal(given.get(), np.ones(3))
        np.testing.assert_array_equal(out.get(), np.full(3, 7.0))
        into()
        np.testing.assert_array_equal(out.get(), np.full(3, kv.size))
        alone()
        np.testing.assert_array_equal(given.get(), np.full(3, kv.size))


@pytest.mark.ranks(1, 2, 3)
def test_calls_that_nobody_waits_for(comm: Any, gpu: Any) -> None:
    with mpikv.create("dist_sync", comm=comm) as kv:
        if not kv._group.threads:
            pytest.skip("this MPI has no threads")
        kv.init("w", np.ones(3))
        for work in (
            lambda: kv.push("w", gpu.upload(np.ones(3)), wait=False),
            lambda: kv.pull("w", out=gpu.upload(np.ones(3)), wait=False),
        ):
            with pytest.raises(Unsupported, match="with wait=False a host store takes host arrays only"):
                work().wait()
        assert kv.pushpull("w", np.ones(3), wait=False).wait()[0] == kv.size


@pytest.mark.parametrize("late", ["source", "out"])
def test_the_callers_stream_is_the_present_one(gpu: Any, late: str) -> None:
    """What another stream computes is not waited for, and what is filled is so on the present one: the checker of the
    stand-in knows."""
    with mpikv.create() as kv:
        kv.init("w", np.zeros(3))
        with gpu.stream():
            array = gpu.upload(np.ones(3))
        calls: dict[str, Callable[[], Any]] = {
            "source": lambda: kv.push("w", array),
            "out": lambda: kv.pull("w", out=array),
        }
        with pytest.raises((RaceError, MisuseError)):
            calls[late]()
    gpu.checker.faults.clear()


def test_without_what_copies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    foreign = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (2, 0))
    other = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (8, 0))
    with mpikv.create() as kv:
        kv.init("w", np.ones(3))
        with pytest.raises(TransportUnavailable, match="push: arrays of GPUs need the package CuPy"):
            kv.push("w", foreign)
        with pytest.raises(Unsupported, match=r"an unknown DLPack device \(8, 0\)"):
            kv.push("w", other)
        np.testing.assert_array_equal(on_host(kv.pull("w")), np.ones(3))
