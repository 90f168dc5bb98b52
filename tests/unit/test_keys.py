"""The forms in which a call names keys and brings arrays."""

import numpy as np
import pytest

from mpikv.engine.arena import Arena
from mpikv.engine.keys import KeyTable, parse
from mpikv.engine.spans import Spans
from mpikv.errors import KeyNotInitialized, ValueMismatch
from mpikv.transports.local import LocalTransport

A, B = np.full(2, 1), np.full(2, 2)
FLOAT = np.dtype(np.float64)


def table(*keys):
    arena, table = Arena(LocalTransport(4096)), KeyTable()
    for key, place in zip(keys, arena.place([(FLOAT, 6)] * len(keys)), strict=True):
        table.add(key, (2, 3), FLOAT, place)
    return table


@pytest.mark.parametrize(
    ("key", "value", "kind", "pattern"),
    [
        ("a", 3.0, TypeError, r"value of key 'a' is a float, not an array; numpy.asarray\(value\) makes one"),
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
        block.kept = Spans(ranges)
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
