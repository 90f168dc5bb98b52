"""A call that was made before is planned already, and still sees whatever has changed since."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import PeerFailed, ValueMismatch

pytestmark = pytest.mark.ranks(1, 2, 3)

F32 = np.float32


@pytest.fixture(params=["shm", "mpi"])
def kv(request: pytest.FixtureRequest, ranks: int) -> Iterator[mpikv.KVStore]:
    """Return a store that adds what is pushed, whose calls on ``w`` and on the list of ``a`` and ``b`` are planned."""
    if ranks == 1 and request.param == "mpi":
        pytest.skip("one rank has one transport")
    with mpikv.create(transport=request.param, timeout=10) as kv:
        kv.init(["w", "a", "b"], [np.zeros((4, 4), F32), np.zeros(5, F32), np.zeros((2, 3), F32)])
        kv.set_optimizer("sgd", learning_rate=1.0)
        for _ in range(2):
            kv.push("w", np.zeros((4, 4), F32))
            kv.pull("w", np.empty((4, 4), F32))
            kv.pushpull("w", np.zeros((4, 4), F32))
            kv.pushpull(["a", "b"], [np.zeros(5, F32), np.zeros((2, 3), F32)], out=new_pair())
            kv.pushpull({"a": np.zeros(5, F32), "b": np.zeros((2, 3), F32)})
        yield kv
        before = kv.pull("w")
        kv.push("w", np.full((4, 4), -1, F32))
        np.testing.assert_array_equal(kv.pull("w"), before + F32(kv.size))


def new_pair() -> list[Any]:
    return [np.zeros(5, F32), np.zeros((2, 3), F32)]


def fails_on_last(kv: mpikv.KVStore, kind: type[Exception], text: str, good: Callable[[], Any], bad: Any) -> None:
    """Check that a call, which is a bad one on the last rank, raises on all ranks, and changes nothing."""
    before = [value.copy() for value in kv.pull(["w", "a", "b"])]
    odd = kv.rank == kv.size - 1
    with pytest.raises(kind if odd else PeerFailed, match=text):
        bad() if odd else good()
    for value, old in zip(kv.pull(["w", "a", "b"]), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.parametrize(
    ("field", "made", "kind", "text"),
    [
        ("shape", (16,), ValueMismatch, r"of key 'w' has shape \(16,\)"),
        ("dtype", np.int32, ValueMismatch, "of key 'w' has dtype int32"),
        ("flags.writeable", False, TypeError, "cannot be written|read-only"),
    ],
)
@pytest.mark.parametrize("in_list", [False, True], ids=["one", "list"])
def test_an_array_that_was_changed(kv, field, made, kind, text, in_list):
    """The object, and the list, are those of the call before."""
    array, other = np.zeros((4, 4), F32), np.zeros(5, F32)
    key, given = (["a", "w"], [other, array]) if in_list else ("w", array)
    calls = [lambda: kv.push(key, given)] * (kind is not TypeError) + [lambda: kv.pull(key, given)]
    for call in calls * 2:
        call()
    array[...] = 0
    if kv.rank == kv.size - 1:
        *inner, name = field.split(".")
        setattr(array.flags if inner else array, name, made)
    for call in calls:
        fails_on_last(kv, kind, text, call, call)


def test_a_list_of_which_one_array_is_another(kv):
    """The list is the one of the call before."""
    pair = new_pair()
    kv.push(["a", "b"], pair)
    if kv.rank == kv.size - 1:
        pair[0] = np.zeros(6, F32)
    push = lambda: kv.push(["a", "b"], pair)  # noqa: E731
    fails_on_last(kv, ValueMismatch, r"value of key 'a' has shape \(6,\)", push, push)


class Named(np.ndarray):
    """An array of another class."""


def test_arrays_of_other_classes_and_layouts(kv):
    wide = np.full((4, 8), -1, F32)
    for number, mine in enumerate((wide[:, :4].view(Named), wide[:, ::2], np.asfortranarray(wide[:, :4]))):
        kv.push("w", mine)
        into = np.zeros((4, 8), F32)
        out = (into[:, :4].view(Named), into[:, ::2], into[:, :4].T)[number]
        assert kv.pull("w", out) is out
        assert (out == (number + 1) * kv.size).all()
        assert (into == 0).sum() == 16


def test_an_array_as_out_of_a_dict(kv):
    """It was filled with the first of the values, and the store ended."""
    arrays = {"a": np.ones(5, F32), "b": np.ones((2, 3), F32)}
    for given in (arrays, {"w": np.ones((4, 4), F32)}):
        for out in (np.ones(5, F32), np.ones((4, 4), F32)):
            with pytest.raises(TypeError, match="out of a dict of arrays is a dict"):
                kv.pushpull(given, out=out)
