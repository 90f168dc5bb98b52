"""The order of streams under every option of a store, on a GPU that is none.

Right after each call its caller overwrites what was given and changes what was filled, on one stream, and lets go of
both. The checker of the GPU finds what the store still reads or writes then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.gpus import store_on

from mpikv import RowSparse
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu, FakeTensor
from mpikv.testing.fakestreams import RaceError

# One of several messages, one that fills a message, which then is sent from where it lies, and two that share one.
SHAPES = {"big": (6000,), "even": (1024,), "w": (40, 3), "b": (5,)}
KEYS = list(SHAPES)


def double(_key: Any, given: Any, stored: Any) -> None:
    stored += 2 * given


SUMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "native_halves": {"native_halves": True},
    "p3": {"bucket_bytes": 4096},
}
CODECS = {
    **{name: name for name in ("fp16", "bf16", "2bit", "1bit", "topk", "lowrank")},
    "without feedback": {"type": "2bit", "error_feedback": False},
}
SETTINGS = [
    *product(SUMS, ("root", "sharded", "replicated"), ("assign", "adam", "lamb"), ("none",)),
    *product(SUMS, ("root",), ("function",), ("none",)),
    *product(("plain",), ("sharded",), ("adam",), CODECS),
    *product(("deterministic",), ("root",), ("assign",), CODECS),
]


class Caller:
    """Makes calls with arrays that it uses again at once, on a stream of its own."""

    def __init__(self, gpu: FakeGpu, kv: KVStore, dtype: Any) -> None:
        self.gpu, self.kv, self.dtype, self.stream = gpu, kv, dtype, gpu.stream()

    def arrays(self, dtype: Any = None) -> list[Any]:
        return [self.gpu.upload(np.ones(shape, dtype or self.dtype)) for shape in SHAPES.values()]

    def gaps(self) -> list[Any]:
        return [self.gpu.upload(np.ones((*shape, 2), self.dtype))[..., 0] for shape in SHAPES.values()]

    def call(self, verb: str, *arguments: Any, given: Sequence[Any] = (), out: Any = None, **options: Any) -> None:
        """Make a call, wait for it if it says so; overwrite what it was given, and change what it was to fill."""
        if out is not None:
            options["out"] = out
        made = getattr(self.kv, verb)(*arguments, **options)
        if options.get("wait", True) is False:
            made.wait()
        self.reuse(given, out or ())

    def reuse(self, given: Sequence[Any], filled: Sequence[Any]) -> None:
        for array in given:
            array.fill(7)
        for array in filled:
            array += 1

    # --- Ways to make a call

    def push(self, **options: Any) -> None:
        self.call("push", KEYS, given := self.arrays(), given=given, **options)

    def push_one(self, **options: Any) -> None:
        for key, array in zip(KEYS, self.arrays(), strict=True):
            self.call("push", key, array, given=[array], **options)

    def push_lists(self, **options: Any) -> None:
        pairs = list(zip(self.arrays(), self.arrays(), strict=True))
        self.call("push", KEYS, list(map(list, pairs)), given=sum(pairs, ()), **options)

    def push_casts(self, **options: Any) -> None:
        self.call("push", KEYS, given := self.arrays(np.float64), given=given, **options)

    def push_gaps(self, **options: Any) -> None:
        self.call("push", KEYS, given := self.gaps(), given=given, **options)

    def push_tensors(self, **options: Any) -> None:
        given = self.arrays()
        self.call("push", KEYS, list(map(FakeTensor, given)), given=given, **options)

    def push_buffers(self, **options: Any) -> None:
        given = self.kv.buffer(KEYS)
        self.call("push", KEYS, given=given, **options)

    def push_values(self, **options: Any) -> None:
        self.call("push", KEYS[:2], [self.kv.view(key) for key in KEYS[:2]], **options)

    def rows(self, **options: Any) -> None:
        if self.kv._exchange.compression is not None or not self.kv._exchange.updater.elementwise:
            return  # which rows do not go together with
        given = [self.gpu.upload(np.ones((2, 3), self.dtype)) for _ in range(2)]
        several = [RowSparse([number, 7], rows, SHAPES["w"]) for number, rows in enumerate(given)]
        self.call("push", "w", several[0], given=given[:1], **options)
        self.call("push", "w", several, given=given, **options)
        self.call("pushpull", "w", several[0], given=given[:1], out=self.arrays()[KEYS.index("w")], **options)

    def pull(self, **options: Any) -> None:
        for out in (self.arrays(), self.gaps(), self.arrays(np.float64)):
            self.call("pull", KEYS, out=out, **options)

    def pushpull(self, **options: Any) -> None:
        for out in (self.arrays(), self.gaps(), self.arrays(np.float64)):
            self.call("pushpull", KEYS, given := self.arrays(), given=given, out=out, **options)

    def pushpull_in_place(self, **options: Any) -> None:
        self.call("pushpull", KEYS, arrays := self.arrays(), out=arrays, **options)

    def pushpull_buffers(self, **options: Any) -> None:
        self.call("pushpull", KEYS, out=self.kv.buffer(KEYS), **options)

    def set_and_init(self) -> None:
        self.call("set", KEYS, given := self.arrays(), given=given)
        self.call("init", KEYS, given := self.arrays(), given=given, overwrite=True)
        self.call("broadcast", "new", given := self.gpu.upload(np.ones(3, self.dtype)), given=[given], out=[given])
        self.kv.delete("new")

    def capture(self, **options: Any) -> None:
        given, out = self.arrays(), self.arrays()
        step = self.kv.capture(KEYS, given, out=out)
        for _ in range(4):
            made = step(**options)
            if options:
                made.wait()
            self.reuse(given, out)

    def join(self) -> None:
        with self.kv.join():
            for _ in range(self.kv.rank):
                self.push()
                self.pushpull()


WAYS: tuple[Callable[..., None], ...] = (
    Caller.push,
    Caller.push_one,
    Caller.push_lists,
    Caller.push_casts,
    Caller.push_gaps,
    Caller.push_tensors,
    Caller.push_buffers,
    Caller.push_values,
    Caller.rows,
    Caller.pull,
    Caller.pushpull,
    Caller.pushpull_in_place,
    Caller.pushpull_buffers,
    Caller.capture,
)


@pytest.fixture
def gpu(gpu: FakeGpu) -> Iterator[FakeGpu]:
    yield gpu
    gc.collect()
    gpu.checker.assert_clean()


def told(way: Callable[..., None], caller: Caller, **options: Any) -> None:
    try:
        with caller.stream:
            way(caller, **options)
    except RaceError as error:
        raise AssertionError(f"{way.__name__}({options}): {error}") from error


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("sums", "placement", "updater", "codec"), SETTINGS)
def test_callers_use_arrays_again_at_once(
    gpu: FakeGpu, comm: Any, sums: str, placement: str, updater: str, codec: str
) -> None:
    dtype = np.float16 if sums == "native_halves" and codec == "none" else np.float32
    with store_on(gpu, comm, placement=placement, timeout=20, **SUMS[sums]) as kv:
        kv.init(KEYS, [np.ones(shape, dtype) for shape in SHAPES.values()])
        kv.set_gradient_compression(CODECS.get(codec))
        if updater == "function":
            kv.set_updater(double)
        elif updater != "assign":
            kv.set_optimizer(updater, average=True)
        caller = Caller(gpu, kv, dtype)
        for way in WAYS:
            told(way, caller)
            told(way, caller, wait=False)
        for way in (Caller.set_and_init, Caller.join):
            told(way, caller)
