"""Arrays of GPUs in the calls of stores of the host, on a GPU that is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import TransportUnavailable, Unsupported
from mpikv.testing.fakegpu import FakeGpu
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
@pytest.mark.parametrize("seed", range(2))
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
