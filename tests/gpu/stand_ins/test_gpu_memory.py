"""Memory that is lacking on one GPU: no rank waits for the one that lacks it, and the store goes on, or says that not.

For each kind of call each allocation of one rank fails in turn, on a stand-in for a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.gpus import store_on

import mpikv
from mpikv import RowSparse
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeArray, FakeGpu

TIMEOUT, SOON = 30.0, 5.0
SHAPES = {"w": (30, 7), "b": (5,), "big": (6000,)}

Run = Callable[[], Any]


class Trial(NamedTuple):
    """What a rank met in a call, and how the store was then."""

    lacked: bool
    """Whether an allocation failed."""
    error: str
    seconds: float


def on_gpu(gpu: FakeGpu, comm: Any, **options: Any) -> KVStore:
    return store_on(gpu, comm, bucket_bytes=1 << 13, timeout=TIMEOUT, **options)


def drawn(gpu: FakeGpu, dtype: Any = np.float32, lists: int = 1, here: bool = True) -> list[Any]:
    """Return an array for each key, or a list, the same in each run."""
    draw = np.random.default_rng(gpu.ordinal)
    groups = [[draw.integers(-4, 5, shape).astype(dtype) for _ in range(lists)] for shape in SHAPES.values()]
    there = [[gpu.upload(array) if here else array for array in group] for group in groups]
    return there if lists > 1 else [group[0] for group in there]


def filled(kv: KVStore, dtype: Any = np.float32) -> KVStore:
    kv.init(list(SHAPES), [np.ones(shape, dtype) for shape in SHAPES.values()])
    return kv


def pushes(
    optimizer: str | None = "adam",
    compression: Any = None,
    stored: Any = np.float32,
    given: Any = np.float32,
    lists: int = 1,
    here: bool = True,
    **options: Any,
) -> Callable[[KVStore, FakeGpu], Run]:
    """Return a scenario of pushpulls, with an optimizer of these options."""

    def scenario(kv: KVStore, gpu: FakeGpu) -> Run:
        filled(kv, stored)
        if optimizer:
            kv.set_optimizer(optimizer, learning_rate=0.25, **options)
        kv.set_gradient_compression(compression)
        values = drawn(gpu, given, lists, here)
        outs = drawn(gpu, stored, here=here)
        return lambda: kv.pushpull(list(SHAPES), values, out=outs)

    return scenario


def buffers(kv: KVStore, gpu: FakeGpu) -> Run:
    filled(kv)
    kv.set_optimizer("sgd", learning_rate=0.25, momentum=0.5)
    gradients = drawn(gpu)

    def run() -> Any:
        for buffer, gradient in zip(kv.buffer(list(SHAPES)), gradients, strict=True):
            buffer[...] = gradient
        kv.push(list(SHAPES))
        return kv.pull(list(SHAPES))

    return run


def strided(kv: KVStore, gpu: FakeGpu) -> Run:
    """Arrays and outs with gaps, on the GPU and on the host."""
    kv.init("w", np.ones((30, 7), np.float32))
    wide, narrow = gpu.upload(np.ones((30, 14), np.float32)), np.ones((30, 14), np.float32)

    def run() -> Any:
        kv.push("w", [wide[:, ::2], narrow[:, ::2]])
        kv.pull("w", out=[wide[:, 1::2], narrow[:, 1::2]])
        return [wide, narrow]

    return run


def new_values(verb: str) -> Callable[[KVStore, FakeGpu], Run]:
    def scenario(kv: KVStore, gpu: FakeGpu) -> Run:
        filled(kv).set_optimizer("adam")
        views = [kv.pull("w"), kv.view("b"), kv.pull("big")]
        calls = {
            "init": lambda: kv.init(["w", "x"], [views[0], views[1]], overwrite=True),
            "set": lambda: kv.set(list(SHAPES), views),
            "broadcast": lambda: kv.broadcast(["y", "w"], [views[2], views[0]]),
            "set_optimizer": lambda: kv.set_optimizer("adamw"),
            "compress": lambda: kv.set_gradient_compression("2bit"),
        }

        def run() -> Any:
            calls[verb]()
            kv.push("w", np.full((30, 7), 2, np.float32))
            return kv.pull(["w", "b", "big"])

        return run

    return scenario


def rows(optimizer: str | None, verb: str, dtype: Any = np.float32) -> Callable[[KVStore, FakeGpu], Run]:
    def scenario(kv: KVStore, gpu: FakeGpu) -> Run:
        shapes = {"u": (50, 3), "v": (40,)}
        for key, shape in shapes.items():
            kv.init(key, RowSparse([3], np.ones((1, *shape[1:]), dtype), shape))
        if optimizer:
            kv.set_optimizer(optimizer, learning_rate=0.25)
        draw = np.random.default_rng(gpu.ordinal)
        given, ids = list[RowSparse](), list[Any]()
        for shape in shapes.values():
            numbers = draw.permutation(shape[0])[:11]
            given.append(RowSparse(numbers, gpu.upload(draw.integers(-4, 5, (11, *shape[1:])).astype(dtype)), shape))
            ids.append(draw.permutation(shape[0])[:9])
        outs = [RowSparse([0], gpu.upload(np.ones((1, *shape[1:]), dtype)), shape) for shape in shapes.values()]

        def run() -> Any:
            if verb == "pushpull":
                kv.pushpull(list(shapes), given, out=outs)
                return [each.values for each in outs]
            kv.push(list(shapes), given)
            if verb == "whole":
                return kv.pull(list(shapes))
            if verb == "into":
                kv.pull(list(shapes), out=outs, ignore_sparse=False)
                return [each.values for each in outs]
            return [each.values for each in kv.row_sparse_pull(list(shapes), row_ids=ids)]

        return run

    return scenario


def init_rows(kv: KVStore, gpu: FakeGpu) -> Run:
    given = RowSparse([3, 5], gpu.upload(np.ones((2, 3), np.float32)), (50, 3))

    def run() -> Any:
        kv.init("u", given, overwrite=True)
        kv.push("u", given)
        return kv.pull("u")

    return run


def callable_updater(kv: KVStore, gpu: FakeGpu) -> Run:
    filled(kv)

    @kv.updater
    def update(key: Any, received: Any, stored: Any) -> None:
        stored += received

    kv.set_gradient_compression("2bit")
    values = drawn(gpu)
    return lambda: kv.pushpull(list(SHAPES), values)


def pending(kv: KVStore, gpu: FakeGpu) -> Run:
    filled(kv).set_optimizer("adam")
    values, outs = drawn(gpu, lists=2, here=False), drawn(gpu)
    return lambda: kv.pushpull(list(SHAPES), values, out=outs, wait=False).wait()


def compiled(kv: KVStore, gpu: FakeGpu) -> Run:
    filled(kv).set_optimizer("sgd", learning_rate=0.25, momentum=0.5)
    values, outs = drawn(gpu), drawn(gpu)
    return kv.capture(list(SHAPES), values, out=outs)


def checkpoint(tmp: str) -> Callable[[KVStore, FakeGpu], Run]:
    def scenario(kv: KVStore, gpu: FakeGpu) -> Run:
        filled(kv).set_optimizer("adam")
        kv.set_gradient_compression("2bit")
        values = drawn(gpu)
        kv.push(list(SHAPES), values)

        def run() -> Any:
            kv.save(tmp, residuals=True)
            kv.load(tmp)
            return kv.pull(list(SHAPES))

        return run

    return scenario


SCENARIOS: dict[str, tuple[Callable[[KVStore, FakeGpu], Run], dict[str, Any]]] = {
    "arrays of the GPU": (pushes(), {}),
    "arrays of the host": (pushes(here=False), {}),
    "casts": (pushes(given=np.float64), {}),
    "halves": (pushes(stored=np.float16, given=np.float32), {}),
    "lists": (pushes(lists=3), {}),
    "lists of halves": (pushes("sgd", stored=np.float16, given=np.float32, lists=3), {}),
    "lists of the host": (pushes(None, given=np.float64, lists=2, here=False), {}),
    "in a fixed order": (pushes("sgd"), {"deterministic": True}),
    "steps of their own": (pushes(lr_mult={"b": 2.0}), {}),
    "steps of their own in a fixed order": (pushes("sgd", lr_mult={"b": 2.0}), {"deterministic": True}),
    "lists in a fixed order": (pushes("sgd", lists=3), {"deterministic": True}),
    "halves in a fixed order": (pushes("sgd", stored=np.float16, lists=2), {"deterministic": True}),
    "at the root": (pushes("adam", lists=2), {"placement": "root"}),
    "replicated": (pushes("adam", lists=2), {"placement": "replicated"}),
    "LARS": (pushes("lars"), {}),
    "LAMB": (pushes("lamb", lists=2), {}),
    "2bit": (pushes("sgd", "2bit"), {}),
    "2bit of lists": (pushes("sgd", "2bit", lists=3), {}),
    "fp16": (pushes("sgd", "fp16", here=False), {}),
    "topk": (pushes("sgd", "topk", lists=2), {}),
    "lowrank": (pushes("sgd", {"type": "lowrank", "rank": 2}, lists=2), {}),
    "a function": (callable_updater, {}),
    "buffers": (buffers, {}),
    "gaps": (strided, {}),
    "compiled": (compiled, {}),
    "wait=False": (pending, {}),
    "init": (new_values("init"), {}),
    "set": (new_values("set"), {}),
    "broadcast": (new_values("broadcast"), {}),
    "set_optimizer": (new_values("set_optimizer"), {}),
    "set_gradient_compression": (new_values("compress"), {}),
    "rows": (rows(None, "row_sparse_pull"), {}),
    "rows of Adam": (rows("adam", "row_sparse_pull"), {}),
    "rows of halves": (rows("sgd", "row_sparse_pull", np.float16), {}),
    "rows, and whole values": (rows("sgd", "whole"), {}),
    "rows into rows": (rows("sgd", "into"), {}),
    "rows there and back": (rows("sgd", "pushpull"), {"placement": "root"}),
    "rows in a fixed order": (rows(None, "row_sparse_pull"), {"deterministic": True, "placement": "replicated"}),
    "init of rows": (init_rows, {}),
}


TAKING_NONE = {"arrays of the GPU", "casts", "halves", "in a fixed order", "steps of their own"}
TAKING_NONE |= {"steps of their own in a fixed order"}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_lack_of_memory_ends_no_store(comm: Any, name: str) -> None:
    scenario, options = SCENARIOS[name]
    found = list(outcomes(comm, scenario, options))
    assert bool(found) == (name not in TAKING_NONE), "whether memory is taken by the call"
    assert [each for each in found if each] == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.deadline(120)
def test_a_lack_of_memory_while_a_checkpoint_is_written_and_read(comm: Any, folder: Path) -> None:
    found = list(outcomes(comm, checkpoint(str(folder / "saved")), {}))
    assert found
    assert set(found) <= {""}


@pytest.mark.ranks(1, 2, 3)
def test_a_lack_of_memory_for_arrays_in_a_store_of_the_host(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(gpu: FakeGpu, comm: Any) -> KVStore:
        monkeypatch.setattr("mpikv.creation.gpu_of", lambda value: gpu)
        return mpikv.create("dist_sync", comm=comm, timeout=TIMEOUT)

    found = list(outcomes(comm, strided, {}, make))
    assert found
    assert set(found) <= {""}


def outcomes(
    comm: Any,
    scenario: Callable[[KVStore, FakeGpu], Run],
    options: dict[str, Any],
    make: Callable[..., KVStore] = on_gpu,
) -> Iterator[str]:
    """Yield for each allocation that failed in a call why the store has ended, or nothing where it goes on. The ranks'
    are the same.
    """
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    gpu = FakeGpu(rank)
    with make(gpu, comm, **options) as kv:
        run = scenario(kv, gpu)
        expected = [contents(run()) for _ in range(3)]
    without = 0
    for number in range(1000):
        gpu = FakeGpu(rank)
        kv = make(gpu, comm, **options)
        run = scenario(kv, gpu)
        victim = rank == (number + size - 1) % size
        gpu.spare = number if victim else None
        began, error = time.monotonic(), ""
        try:
            run()
        except Exception as raised:
            error = repr(raised)
        trials = together(comm, Trial(victim and gpu.spare is None, error, time.monotonic() - began))
        gpu.spare = None
        if not any(trial.lacked for trial in trials):
            assert [trial.error for trial in trials] == [""] * size
            kv.close()
            without += 1
            if without == size:  # none of the ranks takes so much memory
                return
            continue
        without = 0
        assert all(trial.seconds < SOON for trial in trials), trials
        yield goes_on(comm, kv, gpu, run, expected, f"allocation {number}: {trials}")


def goes_on(comm: Any, kv: KVStore, gpu: FakeGpu, run: Run, expected: list[list[Any]], about: str) -> str:
    began = time.monotonic()
    try:
        found = contents(run())
    except Exception as raised:
        ended = together(comm, (time.monotonic() - began, repr(raised)))
        assert all(seconds < SOON and "MemoryError" in error for seconds, error in ended), (about, ended)
        return f"{about}: {[error for _, error in ended]}"
    assert together(comm, (0, "")) == [(0, "")] * (comm.size if comm else 1), about
    again = contents(run())
    # A scenario of several calls may have made some of them before one failed.
    assert any(
        all(same(one, other) for one, other in zip((found, again), expected[first:], strict=False)) for first in (0, 1)
    ), about
    kv.close()
    gpu.checker.assert_clean()
    return ""


def contents(result: Any) -> list[Any]:
    every = list(result.values()) if isinstance(result, dict) else result
    every = every if isinstance(every, (list, tuple)) else [every]
    return [array.get() if isinstance(array, FakeArray) else np.array(array) for array in every]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def together(comm: Any, mine: Any) -> list[Any]:
    return comm.allgather(mine) if comm else [mine]
