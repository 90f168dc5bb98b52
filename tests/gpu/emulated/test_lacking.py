"""Memory that is lacking on one GPU: no rank waits for the one that lacks it, and the store goes on, or says that not.

For each kind of call each allocation of one rank fails in turn.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse
from mpikv.testing.store import on_host

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]

TIMEOUT, SOON = 30.0, 5.0
SHAPES = {"w": (30, 7), "b": (5,), "big": (6000,)}
KEYS = list(SHAPES)

Place = Callable[[Any], Any]
Run = Callable[[], Any]
Scenario = Callable[[Any, Place], Run]
"""Prepares a store, with arrays that a function takes to the GPU; returns the call in which memory is lacking."""


def drawn(kv: Any, place: Place, dtype: Any = np.float32, lists: int = 1) -> list[Any]:
    """Return an array for each key, or a list, the same in each run."""
    draw = np.random.default_rng(kv.rank)
    groups = [[place(draw.integers(-4, 5, shape).astype(dtype)) for _ in range(lists)] for shape in SHAPES.values()]
    return groups if lists > 1 else [group[0] for group in groups]


def filled(kv: Any, dtype: Any = np.float32) -> Any:
    kv.init(KEYS, [np.ones(shape, dtype) for shape in SHAPES.values()])
    return kv


def pushes(
    optimizer: str | None = "adam",
    compression: Any = None,
    stored: Any = np.float32,
    given: Any = np.float32,
    lists: int = 1,
    here: bool = True,
    wait: bool = True,
    **options: Any,
) -> Scenario:
    """Return a scenario of pushpulls, with an optimizer of these options."""

    def scenario(kv: Any, place: Place) -> Run:
        filled(kv, stored)
        if optimizer:
            kv.set_optimizer(optimizer, learning_rate=0.25, **options)
        kv.set_gradient_compression(compression)
        there = place if here else np.asarray
        values, outs = drawn(kv, there, given, lists), drawn(kv, there, stored)
        if wait:
            return lambda: kv.pushpull(KEYS, values, out=outs)
        return lambda: kv.pushpull(KEYS, values, out=outs, wait=False).wait()

    return scenario


def buffers(kv: Any, place: Place) -> Run:
    filled(kv).set_optimizer("sgd", learning_rate=0.25, momentum=0.5)
    gradients = drawn(kv, place)

    def run() -> Any:
        for buffer, gradient in zip(kv.buffer(KEYS), gradients, strict=True):
            buffer[...] = gradient
        kv.push(KEYS)
        return kv.pull(KEYS)

    return run


def strided(kv: Any, place: Place) -> Run:
    """Arrays and outs with gaps, on the GPU and on the host."""
    kv.init("w", np.ones((30, 7), np.float32))
    wide, narrow = place(np.ones((30, 14), np.float32)), np.ones((30, 14), np.float32)

    def run() -> Any:
        kv.push("w", [wide[:, ::2], narrow[:, ::2]])
        kv.pull("w", out=[wide[:, 1::2], narrow[:, 1::2]])
        return [wide, narrow]

    return run


def new_values(verb: str) -> Scenario:
    def scenario(kv: Any, place: Place) -> Run:
        filled(kv).set_optimizer("adam")
        views = [kv.pull("w"), kv.view("b"), kv.pull("big")]
        calls = {
            "init": lambda: kv.init(["w", "x"], [views[0], views[1]], overwrite=True),
            "set": lambda: kv.set(KEYS, views),
            "broadcast": lambda: kv.broadcast(["y", "w"], [views[2], views[0]]),
            "set_optimizer": lambda: kv.set_optimizer("adamw"),
            "compress": lambda: kv.set_gradient_compression("2bit"),
        }

        def run() -> Any:
            calls[verb]()
            kv.push("w", np.full((30, 7), 2, np.float32))
            return kv.pull(KEYS)

        return run

    return scenario


def rows(optimizer: str | None, verb: str, dtype: Any = np.float32) -> Scenario:
    def scenario(kv: Any, place: Place) -> Run:
        shapes = {"u": (50, 3), "v": (40,)}
        for key, shape in shapes.items():
            kv.init(key, RowSparse([3], np.ones((1, *shape[1:]), dtype), shape))
        if optimizer:
            kv.set_optimizer(optimizer, learning_rate=0.25)
        draw = np.random.default_rng(kv.rank)
        given, ids = list[RowSparse](), list[Any]()
        for shape in shapes.values():
            numbers = draw.permutation(shape[0])[:11]
            given.append(RowSparse(numbers, place(draw.integers(-4, 5, (11, *shape[1:])).astype(dtype)), shape))
            ids.append(draw.permutation(shape[0])[:9])
        outs = [RowSparse([0], place(np.ones((1, *shape[1:]), dtype)), shape) for shape in shapes.values()]

        def run() -> Any:
            if verb == "pushpull":
                kv.pushpull(list(shapes), given, out=outs)
                return [each.values for each in outs]
            kv.push(list(shapes), given)
            if verb == "init":
                kv.init("u", given[0], overwrite=True)
            if verb == "into":
                kv.pull(list(shapes), out=outs, ignore_sparse=False)
                return [each.values for each in outs]
            if verb == "row_sparse_pull":
                return [each.values for each in kv.row_sparse_pull(list(shapes), row_ids=ids)]
            return kv.pull(list(shapes))

        return run

    return scenario


def callable_updater(kv: Any, place: Place) -> Run:
    filled(kv).set_updater(lambda key, received, stored: np.add(stored, received, out=stored))
    kv.set_gradient_compression("2bit")
    values = drawn(kv, place)
    return lambda: kv.pushpull(KEYS, values)


def compiled(kv: Any, place: Place) -> Run:
    filled(kv).set_optimizer("sgd", learning_rate=0.25, momentum=0.5)
    step: Run = kv.capture(KEYS, drawn(kv, place), out=drawn(kv, place))
    return step


FIXED, ROOT = {"deterministic": True}, {"placement": "root"}
SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "arrays of the GPU": (pushes(), {}),
    "casts": (pushes(given=np.float64), {}),
    "halves": (pushes(stored=np.float16, given=np.float32), {}),
    "in a fixed order": (pushes("sgd"), FIXED),
    "steps of their own": (pushes(lr_mult={"b": 2.0}), {}),
    "arrays of the host": (pushes(here=False), {}),
    "lists": (pushes(lists=3), {}),
    "lists of the host": (pushes(None, given=np.float64, lists=2, here=False), {}),
    "lists of halves": (pushes("sgd", stored=np.float16, given=np.float32, lists=3), {}),
    "halves in a fixed order": (pushes("sgd", stored=np.float16, lists=2), FIXED),
    "at the root": (pushes("adam", lists=2), ROOT),
    "replicated": (pushes("adam", lists=2), {"placement": "replicated"}),
    "LARS": (pushes("lars"), {}),
    "LAMB": (pushes("lamb", lists=2), {}),
    "2bit of lists": (pushes("sgd", "2bit", lists=3), {}),
    "fp16": (pushes("sgd", "fp16", here=False), {}),
    "topk": (pushes("sgd", "topk", lists=2), {}),
    "lowrank": (pushes("sgd", {"type": "lowrank", "rank": 2}, lists=2), {}),
    "wait=False": (pushes(lists=2, here=False, wait=False), {}),
    "a function": (callable_updater, {}),
    "buffers": (buffers, {}),
    "gaps": (strided, {}),
    "compiled": (compiled, {}),
    "init": (new_values("init"), {}),
    "set": (new_values("set"), {}),
    "broadcast": (new_values("broadcast"), {}),
    "set_optimizer": (new_values("set_optimizer"), {}),
    "set_gradient_compression": (new_values("compress"), {}),
    "rows": (rows(None, "row_sparse_pull"), {}),
    "rows of Adam": (rows("adam", "row_sparse_pull"), {}),
    "rows of halves": (rows("sgd", "whole", np.float16), {}),
    "rows into rows": (rows("sgd", "into"), {}),
    "rows there and back": (rows("sgd", "pushpull"), ROOT),
    "rows in a fixed order": (rows(None, "row_sparse_pull"), {"deterministic": True, "placement": "replicated"}),
    "init of rows": (rows(None, "init"), {}),
}
TAKING_NONE = {"arrays of the GPU", "casts", "halves", "in a fixed order", "steps of their own"}


class Trial(NamedTuple):
    """What a rank met in a call."""

    lacked: bool
    """Whether an allocation failed."""
    error: str
    seconds: float


Outcomes = Callable[..., "Iterator[str]"]


@pytest.fixture
def outcomes(gpu: Any, scarce: Any, comm: Any) -> Outcomes:
    """Return what yields for each allocation that failed in a call why the store has ended, or nothing where it goes
    on. The ranks' are the same.
    """
    rank, size = (comm.rank, comm.size) if comm else (0, 1)

    def together(mine: Any) -> list[Any]:
        return comm.allgather(mine) if comm else [mine]

    def outcomes(scenario: Scenario, name: str = "nccl", **options: Any) -> Iterator[str]:
        def make() -> Any:
            kv = mpikv.create(name, bucket_bytes=1 << 13, timeout=TIMEOUT, **options)
            gpu.use()
            return kv, scenario(kv, gpu.upload)

        kv, run = make()
        expected = [contents(run()) for _ in range(3)]
        kv.close()
        without = number = 0
        while without < size:  # until none of the ranks takes so much memory
            kv, run = make()
            victim = rank == (number + size - 1) % size
            scarce.spare = number if victim else None
            began, error = time.monotonic(), ""
            try:
                run()
            except Exception as raised:
                error = repr(raised)
            trials = together(Trial(victim and scarce.spare is None, error, time.monotonic() - began))
            scarce.spare, number = None, number + 1
            if any(trial.lacked for trial in trials):
                without = 0
                assert all(trial.seconds < SOON for trial in trials), trials
                yield goes_on(kv, run, expected, f"allocation {number - 1}: {trials}")
            else:
                without += 1
                assert [trial.error for trial in trials] == [""] * size
                kv.close()

    def goes_on(kv: Any, run: Run, expected: list[list[Any]], about: str) -> str:
        began, ended = time.monotonic(), ""
        try:
            found = contents(run())
        except Exception as raised:
            ended = repr(raised)
        every = together((time.monotonic() - began, ended))
        if any(error for _, error in every):
            assert all(seconds < SOON and "MemoryError" in error for seconds, error in every), (about, every)
            return f"{about}: {every}"
        again = contents(run())
        # A scenario of several calls may have made some of them before one failed.
        assert any(
            all(same(one, other) for one, other in zip((found, again), expected[first:], strict=False))
            for first in (0, 1)
        ), about
        kv.close()
        return ""

    return outcomes


def contents(result: Any) -> list[Any]:
    every = list(result.values()) if isinstance(result, dict) else result
    every = every if isinstance(every, (list, tuple)) else [every]
    return [np.array(on_host(array)) for array in every]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_lack_of_memory_ends_no_store(outcomes: Outcomes, name: str) -> None:
    scenario, options = SCENARIOS[name]
    found = list(outcomes(scenario, **options))
    assert bool(found) == (name not in TAKING_NONE), "whether memory is taken by the call"
    assert [each for each in found if each] == []


@pytest.mark.ranks(1, 2)
def test_a_lack_of_memory_while_a_checkpoint_is_written_and_read(outcomes: Outcomes, folder: Path) -> None:
    def scenario(kv: Any, place: Place) -> Run:
        filled(kv).set_optimizer("adam")
        kv.set_gradient_compression("2bit")
        kv.push(KEYS, drawn(kv, place))

        def run() -> Any:
            kv.save(folder / "saved", residuals=True)
            kv.load(folder / "saved")
            return kv.pull(KEYS)

        return run

    found = list(outcomes(scenario))
    assert found
    assert set(found) <= {""}


@pytest.mark.ranks(1, 2)
def test_a_lack_of_memory_for_arrays_in_a_store_of_the_host(outcomes: Outcomes) -> None:
    found = list(outcomes(strided, "dist_sync"))
    assert found
    assert set(found) <= {""}


@pytest.mark.ranks(1, 2)
def test_it_is_told_with_the_call(gpu: Any, scarce: Any, comm: Any) -> None:
    with mpikv.create("nccl", timeout=5) as kv:
        where = rf" \[rank {kv.rank}/{kv.size}\]$" if kv.size > 1 else "$"
        kv.init("w", np.ones(3))
        scarce.spare = 0
        with pytest.raises(MemoryError, match=rf"^push\('w'\): {gpu.name} has too little memory .*{where}"):
            kv.push("w", np.ones(3))
        value = gpu.upload(np.ones(1 << 20))
        scarce.spare = 0
        with pytest.raises(MemoryError, match=rf"^init\('x'\): .*cuda:0 has too little memory .*{where}"):
            kv.init("x", value)
    if comm:  # of the memory for messages; on every rank, though one alone lacks it
        scarce.spare = 3 if comm.rank == 0 else None
        said = r"\d+ bytes for messages \(bucket_bytes is 16384\) are needed and ranks \[0\] have too little"
        with pytest.raises(MemoryError, match=said):
            mpikv.create("nccl", bucket_bytes=1 << 14, timeout=5)
