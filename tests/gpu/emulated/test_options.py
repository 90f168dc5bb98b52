"""A caller uses its arrays again at once, on a stream of its own, under every option of a store.

Right after each call it overwrites what was given, changes what was filled, and lets go of both. Values, and what was
filled, have the bits of a store on the host.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse
from mpikv.testing.store import on_host

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]

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
    *product(("plain", "deterministic", "native_halves"), ("root", "sharded", "replicated"), ("assign", "adam"), ("",)),
    *product(("plain", "p3"), ("root", "sharded", "replicated"), ("lamb",), ("",)),
    *product(("plain", "deterministic"), ("root",), ("function",), ("",)),
    *product(("plain",), ("sharded",), ("adam",), CODECS),
    *product(("deterministic",), ("root",), ("assign",), CODECS),
]


class Caller:
    """Makes calls with arrays that it uses again at once, and keeps what was filled."""

    def __init__(self, kv: Any, place: Callable[[Any], Any], dtype: Any) -> None:
        self.kv, self.place, self.dtype, self.filled = kv, place, dtype, list[Any]()

    def arrays(self, dtype: Any = None, shape: tuple[int, ...] = ()) -> list[Any]:
        return [self.place(np.ones((*one, *shape), dtype or self.dtype)) for one in SHAPES.values()]

    def gaps(self) -> list[Any]:
        return [array[..., 0] for array in self.arrays(shape=(2,))]

    def call(self, verb: str, *arguments: Any, given: Sequence[Any] = (), out: Any = None, **options: Any) -> None:
        """Make a call, wait for it if it says so; overwrite what it was given, and change what it was to fill."""
        made = getattr(self.kv, verb)(*arguments, **options, **({} if out is None else {"out": out}))
        if options.get("wait", True) is False:
            made.wait()
        self.reuse(given, () if out is None else out)

    def reuse(self, given: Sequence[Any], filled: Sequence[Any]) -> None:
        for array in given:
            array.fill(7)
        for array in filled:
            array += 1
        # The GPU comes to all of that now, whatever the store has to do yet.
        self.filled += [on_host(array).copy() for array in (*filled, *given[-1:])]

    def push(self, **options: Any) -> None:
        for given in (self.arrays(), self.arrays(np.float64), self.gaps()):
            self.call("push", KEYS, given, given=given, **options)
        for key, array in zip(KEYS, self.arrays(), strict=True):
            self.call("push", key, array, given=[array], **options)
        pairs = list(zip(self.arrays(), self.arrays(), strict=True))
        self.call("push", KEYS, list(map(list, pairs)), given=sum(pairs, ()), **options)
        views = self.kv.pull(KEYS[:2], out=self.kv.view(KEYS[:2]))
        self.call("push", KEYS[:2], views, **options)

    def buffers(self, **options: Any) -> None:
        for verb, filled in (("push", None), ("pushpull", self.kv.buffer(KEYS))):
            given = self.kv.buffer(KEYS)
            for buffer in given:
                buffer.fill(1)
            self.call(verb, KEYS, given=() if filled else given, out=filled, **options)

    def rows(self, **options: Any) -> None:
        if self.kv._exchange.compression is not None or not self.kv._exchange.updater.elementwise:
            return  # which rows do not go together with
        given = [self.place(np.ones((2, 3), self.dtype)) for _ in range(2)]
        several = [RowSparse([number, 7], rows, SHAPES["w"]) for number, rows in enumerate(given)]
        self.call("push", "w", several, given=given, **options)
        self.call("pushpull", "w", several[0], given=given[:1], out=self.arrays()[KEYS.index("w")], **options)

    def pull(self, **options: Any) -> None:
        for out in (self.arrays(), self.gaps(), self.arrays(np.float64)):
            self.call("pull", KEYS, out=out, **options)
            self.call("pushpull", KEYS, given := self.arrays(), given=given, out=out, **options)
        self.call("pushpull", KEYS, arrays := self.arrays(), out=arrays, **options)

    def capture(self, **options: Any) -> None:
        given, out = self.arrays(), self.arrays()
        step = self.kv.capture(KEYS, given, out=out)
        for _ in range(3):
            made = step(**options)
            if options:
                made.wait()
            self.reuse(given, out)

    def set_and_init(self, **options: Any) -> None:
        self.call("set", KEYS, given := self.arrays(), given=given)
        self.call("init", KEYS, given := self.arrays(), given=given, overwrite=True)
        self.call("broadcast", "new", given := self.place(np.ones(3, self.dtype)), given=[given], out=[given])
        self.kv.delete("new")
        with self.kv.join():
            for _ in range(self.kv.rank):
                self.push()


WAYS = (Caller.push, Caller.buffers, Caller.rows, Caller.pull, Caller.capture, Caller.set_and_init)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("sums", "placement", "updater", "codec"), SETTINGS)
def test_callers_use_arrays_again_at_once(
    gpu: Any, cupy: Any, sums: str, placement: str, updater: str, codec: str
) -> None:
    dtype = np.float16 if sums == "native_halves" else np.float32
    options = {"placement": placement, "timeout": 20, "bucket_bytes": 1 << 14, **SUMS[sums]}
    with mpikv.create("nccl", **options) as there, mpikv.create("dist_sync", **options) as here:
        gpu.use()
        for kv in (there, here):
            kv.init(KEYS, [np.ones(shape, dtype) for shape in SHAPES.values()])
            kv.set_gradient_compression(CODECS.get(codec))
            if updater == "function":
                kv.set_updater(double)
            elif updater != "assign":
                kv.set_optimizer(updater, average=True)
        with cupy.cuda.Stream(non_blocking=True):
            callers = Caller(there, gpu.upload, dtype), Caller(here, np.copy, dtype)
            for way, wait in product(WAYS, ({}, {"wait": False})):
                for caller in callers:
                    way(caller, **wait)
                found, expected = ([*caller.filled, *map(on_host, caller.kv.pull(KEYS))] for caller in callers)
                for one, other in zip(found, expected, strict=True):
                    assert one.tobytes() == other.tobytes(), (way.__name__, wait)
