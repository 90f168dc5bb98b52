"""Integers that a dtype does not hold: in a cast they would wrap, so that no call makes it.

The oracle is Python's own integers, which never do.
"""

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse

pytestmark = pytest.mark.ranks(1, 2, 3)

DTYPES = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
CASTS = [(a, b) for a in DTYPES for b in DTYPES if a != b and not (a.kind == "i" and b.kind == "u")]
ONE = np.ones(3, np.uint8)  # any integer holds it
# How a rank brings an array for the key "k". The others bring ones.
BRING = {
    "push": lambda kv, array: kv.push("k", array),
    "several": lambda kv, array: kv.push("k", [ONE, array]),
    "list": lambda kv, array: kv.push(["other", "k"], [ONE, array]),
    "dict": lambda kv, array: kv.push({"k": array}),
    "rows": lambda kv, array: kv.push("k", RowSparse([0, 1, 2], array, (3,))),
    "rows of several": lambda kv, array: kv.push("k", [RowSparse([0, 1, 2], each, (3,)) for each in (ONE, array)]),
    "pushpull": lambda kv, array: kv.pushpull("k", array, out=np.zeros(3, np.int64)),
    "pending": lambda kv, array: kv.push("k", array, wait=False).wait(),
}
# What the root brings; others may have anything.
STORE = {
    "set": lambda kv, array: kv.set("k", array),
    "broadcast": lambda kv, array: kv.broadcast("k", array, out=np.zeros(3, np.int64)),
}


def drawn(rng, dtype, bounds):
    """Return integers of a dtype, some of them beside the bounds of another one."""
    known, near = np.iinfo(dtype), [int(np.iinfo(bounds).min), int(np.iinfo(bounds).max)]
    numbers = [int(rng.choice(near)) + int(rng.integers(-1, 2)) for _ in range(2)] + [int(rng.integers(100))]
    return np.array([min(max(number, known.min), known.max) for number in numbers], dtype)


def holds(dtype, numbers):
    return all(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max for number in map(int, numbers))


@pytest.mark.parametrize("bring", [*BRING, *STORE])
def test_no_integer_wraps_on_its_way_into_a_value(comm, ranks, bring):
    with mpikv.create(comm=comm, timeout=20) as kv:
        for number, (given, stored) in enumerate(CASTS if bring == "push" else CASTS[len(bring) % 5 :: 5]):
            rng = np.random.default_rng([number, *bring.encode()])
            array, culprit = drawn(rng, given, stored), 0 if bring in STORE else number % ranks
            kv.init({"k": np.arange(3).astype(stored), "other": np.zeros(3, np.int64)}, overwrite=True)
            others = np.full(3, np.iinfo(given).max if bring in STORE else 1, given)
            mine = array if kv.rank == culprit else others
            if holds(stored, array):
                (BRING | STORE)[bring](kv, mine)
                continue
            expected = mpikv.ValueMismatch if kv.rank == culprit else mpikv.PeerFailed
            with pytest.raises(expected, match=f"of key 'k' has .*{stored.name} holds .*wider"):
                (BRING | STORE)[bring](kv, mine)
            np.testing.assert_array_equal(kv.pull("k"), np.arange(3))
            assert kv.version("k") == 0


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_no_integer_wraps_on_its_way_out(comm, ranks, name):
    """Every rank but one pulls into the dtype of the value, and has it."""
    with mpikv.create(name, comm=comm, timeout=20) as kv:
        for number, (stored, wanted) in enumerate(CASTS):
            value, before = drawn(np.random.default_rng(number), stored, wanted), np.array([7, 8, 9])
            out = before.astype(wanted if kv.rank == number % ranks else stored)
            kv.init("k", value, overwrite=True)
            if holds(out.dtype, value):
                assert kv.pull("k", out=out) is out
                np.testing.assert_array_equal(out, value)
            else:
                with pytest.raises(mpikv.ValueMismatch, match=f"{wanted.name} holds .*pass an out of {stored.name}"):
                    kv.pull("k", out=out)
                np.testing.assert_array_equal(out, before)


# What is filled with a value of 2**40, in fewer bits.
FILL = {
    "list": lambda kv, out: kv.pull(["w", "k"], out=[np.zeros(1), out]),
    "each of several": lambda kv, out: kv.pull("k", out=[np.zeros(3, np.int64), out]),
    "dict": lambda kv, out: kv.pull({"k": out}),
    "broadcast": lambda kv, out: kv.broadcast("k", np.full(3, 2**40), out=out),
    "pushpull": lambda kv, out: kv.pushpull("k", np.full(3, 2**40), out=out),
    "sum": lambda kv, out: kv.pushpull("k", [np.full(3, 2**30, np.int32)] * 1024, out=out),
    "rows of whole": lambda kv, out: kv.pushpull("k", RowSparse([0, 1, 2], np.full(3, 2**40), (3,)), out=out),
    "row_sparse_pull": lambda kv, out: kv.row_sparse_pull("k", out=out, row_ids=[0, 2]),
    "pending": lambda kv, out: kv.pull("k", out=out, wait=False).wait(),
}


@pytest.mark.parametrize("fill", FILL)
def test_an_out_of_any_call_is_left_as_it_was(comm, fill):
    with mpikv.create(comm=comm, timeout=20) as kv:
        kv.init({"k": np.full(3, 2**40), "w": np.zeros(1)})
        for out in (np.arange(3, dtype=np.int32), np.repeat(np.arange(3, dtype=np.int16), 2)[::2]):
            with pytest.raises(mpikv.ValueMismatch, match="the value of key 'k' has"):
                FILL[fill](kv, out)
            assert out.tolist() == [0, 1, 2]
        assert (kv.pull("k") % 2**40 == 0).all()


@pytest.mark.parametrize("call", ["row_sparse_pull", "pull", "pushpull"])
def test_rows_of_an_out_are_left_as_they_were(comm, call):
    rows = RowSparse([1], np.array([[5]], np.int32), (3, 1))
    with mpikv.create(comm=comm, timeout=20) as kv:
        kv.init("k", np.full((3, 1), 2**40))
        calls = {
            "row_sparse_pull": lambda: kv.row_sparse_pull("k", out=rows, row_ids=[0]),
            "pull": lambda: kv.pull("k", out=rows, ignore_sparse=False),
            "pushpull": lambda: kv.pushpull("k", RowSparse([1], np.array([[2**40]]), (3, 1)), out=rows),
        }
        with pytest.raises(mpikv.ValueMismatch, match="the value of key 'k' has"):
            calls[call]()
        assert rows.values.tolist() == [[5]]


def test_what_every_element_of_fits_is_cast(comm, ranks):
    with mpikv.create(comm=comm) as kv:
        kv.init("k", np.zeros(3, np.int8))
        values = np.full(3, 2, np.int64)
        assert kv.pushpull("k", values) is values  # which are wider
        kv.push("k", np.full(3, 100 // ranks, np.uint64))
        assert kv.pull("k", out=np.zeros(3, np.int16)).tolist() == [100 // ranks * ranks] * 3
        kv.init("wide", np.zeros(3, np.int64))
        with pytest.raises(TypeError, match="hold less than the stored ones"):
            kv.capture("wide", np.ones(3, np.int64), out=np.zeros(3, np.int8))
