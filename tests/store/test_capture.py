"""A pushpull that is captured, on stores of the host, which make it by plain calls: what it fills, returns and refuses.

``tests/gpu/real/test_replay.py`` makes the same of stores on GPUs, where it is recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse
from mpikv.errors import Closed, KeyNotInitialized, PeerFailed, RankMismatch, Unsupported, ValueMismatch

pytestmark = pytest.mark.ranks(1, 2, 3)

New = Callable[[Any], Any]


class Row(list[Any]):
    def __init__(self, *arrays: Any) -> None:
        super().__init__(arrays)


FORMS: dict[str, Callable[[Any, New], tuple[Any, Any, Any]]] = {
    "one key": lambda kv, new: ("a", new(1), new(0)),
    "lists": lambda kv, new: (["a", "b"], [new(1), new(1)], [new(0), new(0)]),
    "lists of a class": lambda kv, new: (["a", "b"], Row(new(1), new(1)), Row(new(0), new(0))),
    "two outs": lambda kv, new: (["a", "b"], [new(1), new(1)], [[new(0), new(0)], new(0)]),
    "dicts": lambda kv, new: ({"a": new(1), "b": new(1)}, None, {"b": new(0), "a": new(0)}),
    "a dict": lambda kv, new: ({"a": new(1), "b": new(1)}, None, None),
    "into the gradient": lambda kv, new: ("a", new(1), None),
    "buffers": lambda kv, new: (["b", "a"], None, [new(0), new(0)]),
    "buffers and views": lambda kv, new: ("a", None, None),
    "an own view": lambda kv, new: ("a", new(1), kv.view("a")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_arguments(kv: mpikv.KVStore, form: str) -> None:
    check_form(kv, form, lambda number: np.full((2, 3), float(number)), captured=False)


def check_form(kv: mpikv.KVStore, form: str, new: New, captured: bool) -> None:
    """What is filled, and what is returned, are those of pushpull; lists and dicts may change afterwards."""
    kv.init(["a", "b"], [np.zeros((2, 3))] * 2)
    for buffer in kv.buffer(["a", "b"]):
        buffer.fill(1)
    key, value, out = FORMS[form](kv, new)
    pushed = list(leaves(key)) if isinstance(key, dict) else [] if value is None else list(leaves(value))
    plain = out if out is not None else value if value is not None else key if pushed else None
    filled = list(leaves(kv.view("a") if plain is None else plain))
    step = kv.capture(key, value, out)
    for arrays in (key, value, out):
        if isinstance(arrays, (dict, list)):
            arrays.clear()
    for number in range(5):
        for array in pushed:
            array.fill(number + 1)
        result = step()
        assert step.captured is (captured and number > 0), step.reason
        assert result is plain if plain is not None else result.shape == (2, 3)
        for array in filled:
            assert array.tolist() == [[kv.size * (number + 1 if pushed else 1)] * 3] * 2


def leaves(arrays: Any) -> Sequence[Any]:
    if isinstance(arrays, dict):
        arrays = list(arrays.values())
    return [leaf for each in arrays for leaf in leaves(each)] if isinstance(arrays, list) else [arrays]


def test_a_tuple_of_keys_gives_a_tuple_of_views(kv: mpikv.KVStore) -> None:
    kv.init(["a", "b"], [np.zeros(2)] * 2)
    kv.buffer(["a", "b"])
    assert type(kv.capture(("a", "b"))()) is type(kv.pushpull(("a", "b"))) is tuple


def test_bad_arguments_are_refused_when_it_is_compiled(kv: mpikv.KVStore) -> None:
    check_bad_arguments(kv)


def check_bad_arguments(kv: mpikv.KVStore) -> None:
    def others(error: type[Exception]) -> type[Exception]:
        return error if kv.rank == 0 else PeerFailed

    kv.init("w", np.zeros(3))
    with pytest.raises(others(KeyNotInitialized), match="capture"):
        kv.capture("w" if kv.rank else "v", np.zeros(3))
    with pytest.raises(others(ValueMismatch), match="has shape"):
        kv.capture("w", np.zeros(3 if kv.rank else 4))
    if kv.size > 1:
        kv.init("v", np.zeros(3))
        with pytest.raises(RankMismatch, match=r"capture\('[wv]'\)"):
            kv.capture("v" if kv.rank else "w", np.zeros(3))
    step = kv.capture("w", np.ones(3))
    assert step().tolist() == [kv.size] * 3
    kv.close()
    with pytest.raises(Closed):
        step()


def test_what_a_host_pushes(kv: mpikv.KVStore, comm: Any) -> None:
    """Rows, compressed gradients and updaters are those of any push."""
    kv.init("s", RowSparse([], np.zeros((0, 2)), (5, 2)))
    kv.set_optimizer("sgd", learning_rate=1.0)
    rows, out = RowSparse([1, 3], np.ones((2, 2)), (5, 2)), np.empty((5, 2))
    step = kv.capture("s", rows, out)
    for number in range(1, 4):
        assert step() is out
        assert out.sum() == -4 * number * kv.size
    with mpikv.create("dist_sync", comm=comm, compression="fp16") as compressed:
        compressed.init("w", np.zeros(3, np.float32))
        assert (compressed.capture("w", np.ones(3, np.float32))() == kv.size).all()
    with mpikv.create("dist_async", comm=comm) as late, pytest.raises(Unsupported, match="capture: the store 'dist_as"):
        late.capture("w", np.ones(3))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("before", [0, 2])
def test_ranks_that_call_something_else(kv: mpikv.KVStore, before: int) -> None:
    kv.init(["a", "b"], [np.zeros(3)] * 2)
    kv.set_optimizer("adam")
    check_mismatch(kv, (["a", "b"], [np.ones(3)] * 2, [np.ones(3), np.ones(3)]), before, captures=False)


def check_mismatch(kv: mpikv.KVStore, arguments: tuple[Any, Any, Any], before: int, captures: bool) -> None:
    """All are told, in whatever state the step is, nothing has changed, and they go on."""
    step, other = kv.capture(*arguments), kv.capture(*arguments)
    keys = arguments[0]
    for _ in range(before):
        step()
    wrong = [lambda: kv.pushpull(*arguments), other, lambda: kv.pull(keys[0]), kv.barrier]
    for number, call in enumerate(wrong):
        versions = [kv.version(key) for key in keys]
        with pytest.raises(RankMismatch, match="captured step #0" if number < 2 else "pushpull"):
            (step if kv.rank == 0 else call)()
        with pytest.raises(RankMismatch):
            (step if kv.rank == kv.size - 1 else call)()
        assert [kv.version(key) for key in keys] == versions
    assert step.captured is (captures and before > 1)
    for _ in range(3):
        step()
    assert step.captured is captures
    assert kv.version(keys[0]) == before + 3


def test_steps_that_are_waited_for_when_their_values_are_used(kv: mpikv.KVStore, comm: Any) -> None:
    with mpikv.create("dist_sync", comm=comm) as plain:
        check_steps_of_layers(kv, plain, np.asarray, captures=False)


def check_steps_of_layers(kv: mpikv.KVStore, plain: mpikv.KVStore, place: New, captures: bool) -> None:
    """One for each layer, issued as a backward pass goes, and waited for as the next forward pass does."""
    shapes, random = {"w": (3, 4), "big": (6000,), "none": (0, 2)}, np.random.default_rng(kv.rank)
    for each in (kv, plain):
        each.init(list(shapes), [np.ones(shape, np.float32) for shape in shapes.values()])
        each.set_optimizer("adam", learning_rate=0.1, lr_mult={"big": 0.5})
    sent, outs = ([place(np.ones(shape, np.float32)) for shape in shapes.values()] for _ in "so")
    steps = [kv.capture(*each) for each in zip(shapes, sent, outs, strict=True)]
    for number in range(4):
        gradients = [random.integers(-8, 9, array.shape).astype(np.float32) / 4 for array in sent]
        for array, gradient in zip(sent, gradients, strict=True):
            array[...] = place(gradient)
        works = [step(wait=False) for step in reversed(steps)]
        expected = [plain.pushpull(key, gradient) for key, gradient in zip(shapes, gradients, strict=True)]
        for work, out, wanted in zip(reversed(works), outs, expected, strict=True):
            assert work.wait() is out
            assert out.tolist() == wanted.tolist()
        assert all(step.captured is (captures and number > 0) for step in steps)
        assert repr(works[0]) == "<mpikv.Work pushpull('none') done>"
