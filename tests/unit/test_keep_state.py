"""The state of a program's objects comes back as it was, into the same objects."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpikv.checkpoint.trees import encode, list_parts, pack, unpack
from mpikv.errors import CheckpointError, ValueMismatch
from mpikv.keep.slots import Slots
from mpikv.keep.state import find_state


def through_a_file(tree: Any, path: Any) -> Any:
    """Return a state that went through a commit."""
    slots = Slots(path, 1, 0)
    slots.open(0.0)
    slots.write(1, 0, list_parts(tree, "it"))
    return unpack(slots.read(slots.newest()), "it", copies=False)


TREES = [
    None,
    [True, 2**80, -0.5, float("inf"), "text", (1, (), [])],
    {"a": {1: "one", (2, "x"): None}, 3: []},
    [np.float32(0.1), np.int8(-3), np.bool_(True)],
    [np.zeros((0, 3)), np.array(1.5), np.arange(6, dtype=np.int16).reshape(2, 3).T, np.array([1 + 2j])],
]


@pytest.mark.parametrize("tree", TREES)
def test_a_state_comes_back(tree: Any, tmp_path: Any) -> None:
    assert repr(through_a_file(tree, tmp_path)) == repr(unpack(pack(tree, "it"), "it")) == repr(tree)


@pytest.mark.parametrize(
    "forge", [b"", b"\xff" * 8, b"\2" + bytes(7) + b"{}", b"\x1c" + bytes(7) + b'{"array": ["float64", [9]]}']
)
def test_a_forged_state_is_refused(forge: bytes) -> None:
    with pytest.raises(CheckpointError, match="the state 'it' of the checkpoint cannot be read"):
        unpack(np.frombuffer(forge, np.uint8), "it")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "uint64", "complex128", "bool"])
def test_every_dtype_comes_back(name: str, tmp_path: Any) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name)) if name == "bfloat16" else np.dtype(name)
    array = np.arange(7).astype(dtype)
    found = through_a_file([array, array], tmp_path)[1]
    assert (found.dtype, found.tobytes()) == (dtype, array.tobytes())


class Scheduler:
    """As torch has them."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def step_scheduler(scheduler: Scheduler) -> int:
    scheduler.epoch += 1
    return scheduler.epoch


OBJECTS: list[tuple[Any, Callable[[Any], Any]]] = [
    (np.random.default_rng(3), lambda rng: rng.standard_normal()),
    (np.random.Generator(np.random.MT19937(3)), lambda rng: rng.standard_normal()),
    (np.random.Generator(np.random.SFC64(3)), lambda rng: rng.standard_normal()),
    (random.Random(3), lambda rng: rng.gauss(0, 1)),
    (Scheduler(), step_scheduler),
    (np.zeros(3), lambda array: np.add(array, 1, out=array).tolist()),
    ([1, [2.0]], lambda items: items.append(len(items)) or list(items)),
]


@pytest.mark.parametrize(("kept", "step"), OBJECTS, ids=lambda each: type(each).__name__)
def test_an_object_goes_on_where_it_was(kept: Any, step: Callable[[Any], Any], tmp_path: Any) -> None:
    get, put, *_ = find_state("kept", kept)
    step(kept)
    state = through_a_file(get(), tmp_path)
    wanted = [step(kept) for _ in range(3)]
    put(state)
    assert [step(kept) for _ in range(3)] == wanted


def test_arrays_dicts_and_lists_stay_the_same_objects() -> None:
    inner, values = {"mean": np.ones(2)}, np.zeros(3)
    kept = {"ema": inner, "gone": 1, "values": [values, 5]}
    mean = inner["mean"]
    find_state("kept", kept).set({"ema": {"mean": np.full(2, 7.0), "new": 2}, "values": [np.full(3, 8.0), 6, "more"]})
    assert kept["ema"] is inner
    assert inner["mean"] is mean
    assert (mean.tolist(), inner["new"], values.tolist()) == ([7, 7], 2, [8, 8, 8])
    assert kept["values"][1:] == [6, "more"]
    assert "gone" not in kept


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueMismatch, match=r"the array was float64\[2\] in the commit, and is float64\[3\] now"):
        find_state("a", np.zeros(3)).set(np.zeros(2))


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"a": [1, {2}]}, r"it\['a'\]\[1\] is a set, which no commit and no checkpoint can hold"),
        (np.array([None]), r"it is an ndarray of dtype\('O'\), which no commit"),
        (np.zeros(2, ">f4"), r"it is an ndarray of dtype\('>f4'\)"),
        (np.ma.zeros(2), "it is a MaskedArray of"),
    ],
)
def test_what_no_commit_can_hold_is_named(tree: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        encode(tree, [], "it")
