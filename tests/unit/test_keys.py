"""The forms in which a call names keys and brings arrays."""

import enum

import numpy as np
import pytest

from mpikv.engine.arena import Arena
from mpikv.engine.keys import KeyTable, flatten, parse
from mpikv.engine.spans import Spans
from mpikv.errors import KeyNotInitialized, ValueMismatch
from mpikv.transports.local import LocalTransport

A, B, C = (np.full(2, number) for number in (1, 2, 3))
SCALAR = np.float64(3)
FLOAT = np.dtype(np.float64)


def table(*keys):
    arena, table = Arena(LocalTransport(4096)), KeyTable()
    for key, place in zip(keys, arena.place([(FLOAT, 6)] * len(keys)), strict=True):
        table.add(key, (2, 3), FLOAT, place)
    return table


@pytest.mark.parametrize(
    ("key", "value", "keys", "groups"),
    [
        (3, A, (3,), [[A]]),
        ("w", [A, B], ("w",), [[A, B]]),
        ("w", (A, B), ("w",), [[A, B]]),
        ([5, 7], [A, B], (5, 7), [[A], [B]]),
        ((5, 7), (A, B), (5, 7), [[A], [B]]),
        ([5, 7], [[A, B], C], (5, 7), [[A, B], [C]]),
        (["a", "b", "a"], [A, B, C], ("a", "b"), [[A, C], [B]]),
        (["a", "a"], [[A, B], C], ("a",), [[A, B, C]]),
        (["a", "a"], [A, A], ("a",), [[A, A]]),
        ({"a": A, "b": [B, C]}, None, ("a", "b"), [[A], [B, C]]),
        ({"a": {"b": A, "c": {"d": B}}, "e": C}, None, ("a/b", "a/c/d", "e"), [[A], [B], [C]]),
        ({1: A, 2: B}, None, (1, 2), [[A], [B]]),
        (["a"], [SCALAR], ("a",), [[SCALAR]]),
        ([], [], (), []),
        ({}, None, (), []),
        (["a", "b", "a"], None, ("a", "b"), [[], []]),
        ("a", None, ("a",), [[]]),
    ],
)
def test_forms(key, value, keys, groups):
    form = parse(key, value)
    assert form.keys == keys
    assert len(form.groups) == len(groups)
    for group, expected in zip(form.groups, groups, strict=True):
        assert len(group) == len(expected)
        assert all(array is other for array, other in zip(group, expected, strict=True))


class Layer(enum.IntEnum):
    FIRST = 7


@pytest.mark.parametrize(
    ("given", "key"), [(np.int64(3), 3), (np.uint8(3), 3), (np.str_("w"), "w"), (Layer.FIRST, 7), (-1, -1), ("", "")]
)
def test_keys_become_plain(given, key):
    for form in (parse(given, None), parse([given], None), parse({given: A}, None)):
        assert form.keys == (key,)
        assert type(form.keys[0]) is type(key)


def test_the_callers_list_is_not_kept():
    keys = ["a", "b"]
    form = parse(keys, None)
    keys[0] = "c"
    assert form.keys == ("a", "b")


@pytest.mark.parametrize("key", [1.0, True, None, b"w", {"a"}, object, np.bool_(True), (1.5,), ["a", ["b"]]])
def test_bad_keys(key):
    with pytest.raises(TypeError, match=r"a key is an int or a str, not (a|None)"):
        parse(key, None)


@pytest.mark.parametrize(
    ("key", "value", "kind", "pattern"),
    [
        (["a", "b"], [A], ValueMismatch, "2 keys and 1 values; give one value, or a list of them, per key"),
        (["a"], A, ValueMismatch, "1 keys need a list of as many values, not an ndarray"),
        ("a", [], ValueMismatch, "an empty list of values for key 'a'"),
        (["a", "b"], [A, []], ValueMismatch, "an empty list of values for key 'b'"),
        ("a", 3.0, TypeError, r"value of key 'a' is a float, not an array; numpy.asarray\(value\) makes one"),
        (["a", "b"], [A, [B, [C]]], TypeError, "value of key 'b' is a list, not an array"),
        ({"a": A}, [A], TypeError, "a dict of keys has the arrays for value; leave value= out"),
        ({"a": {"b": A}, "a/b": B}, None, ValueMismatch, "the dict names key 'a/b' twice"),
    ],
)
def test_bad_values(key, value, kind, pattern):
    with pytest.raises(kind, match=pattern):
        parse(key, value)


def test_an_array_that_is_traced():
    """One of JAX inside of a function that it compiles: it has no elements yet."""
    traced = type("DynamicJaxprTracer", (), {"__module__": "jax._src.interpreters.partial_eval"})
    with pytest.raises(TypeError, match=r"it is traced; call the store outside of functions that jax\.jit compiles"):
        parse("w", traced())


def test_messages_name_the_argument():
    with pytest.raises(ValueMismatch, match="2 keys and 1 outs; give one out"):
        parse(["a", "b"], [A], "out")


def test_flatten_keeps_the_order():
    names, leaves = flatten({"b": 1, "a": {"z": 2, "y": 3}, "c": 4})
    assert names == ["b", "a/z", "a/y", "c"]
    assert leaves == [1, 2, 3, 4]


def test_a_table_keeps_the_order_and_counts():
    keys = [f"k{number}" for number in range(100)]
    known = table(*keys)
    assert list(known) == keys
    assert len(known) == 100
    assert known["k99"].index == 99
    known.counts[99] = 7
    known.remove("k0")
    known.add("k0", (2, 3), FLOAT, Arena(LocalTransport(4096)).place([(FLOAT, 6)])[0])
    assert list(known) == [*keys[1:], "k0"]
    assert known.version("k99") == 7
    assert known.version("k0") == 0
    known.start_counts()
    known.counts[99] += 1
    assert known.version("k99") == 8


def test_a_rank_keeps_all_of_a_value_if_one_of_its_ranges_has_every_element():
    known = table("a", "b", "c")
    block, size = known["a"].place.block, known["c"].place.start + 6
    for ranges, kept in (
        (((0, size),), "abc"),
        (((0, 4), (6, size)), "bc"),
        (((2, 6), (6, 12)), "b"),
        (((0, 6), (14, size)), "a"),
        (((8, 11),), ""),
        ((), ""),
    ):
        block.replace_state(Spans(ranges), {})
        assert [key for key in known if known[key].keeps_all] == list(kept)


def test_growth_keeps_counts():
    known = table(*range(64))
    known.counts[:] = np.arange(64)
    (place,) = Arena(LocalTransport(4096)).place([(FLOAT, 6)])
    known.add(64, (2, 3), FLOAT, place)
    assert [known.version(key) for key in range(65)] == [*range(64), 0]
    assert not known.stale.any()
    assert known.counts.size == known.stale.size == known.earlier.size >= 65


def test_a_table_takes_memory_for_no_more_than_twice_its_keys():
    known, (place,) = table(), Arena(LocalTransport(4096)).place([(FLOAT, 6)])
    first = known.counts.size
    for key in range(10 * first):
        known.add(key, (2, 3), FLOAT, place)
        assert len(known) <= known.counts.size <= max(first, 2 * len(known))


def test_an_unknown_key_lists_near_ones():
    with pytest.raises(KeyNotInitialized, match=r"key 'layre1' was never .*'layer1'.*init\('layre1', value\)"):
        table("layer1", "layer2", "other")["layre1"]
    with pytest.raises(KeyNotInitialized, match=r"no key was"):
        table()["w"]
    with pytest.raises(KeyNotInitialized, match=r"nearest known keys: 'a'"):
        table("a")["zzzzzz"]


def test_keys_of_one_type():
    known = table()
    with pytest.raises(TypeError, match=r"key 'a' is of type str; the store's keys are all int"):
        known.check_kind([3, "a"])
    known.check_kind(["a", "b"])
