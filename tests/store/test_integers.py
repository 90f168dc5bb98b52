"""Integers that a dtype does not hold would wrap in it: no call casts them to one, whatever their numbers."""

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse

pytestmark = pytest.mark.ranks(1, 2, 3)

DTYPES = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
CASTS = [(a, b) for a in DTYPES for b in DTYPES if a != b]
# Calls that bring an array for the key "k", or fill one from it; others are ``like`` the stored value.
CALLS = {
    "push": lambda kv, array, like: kv.push("k", array),
    "several": lambda kv, array, like: kv.push("k", [0 * like, array]),
    "dict": lambda kv, array, like: kv.push({"k": array}),
    "rows": lambda kv, array, like: kv.push("k", RowSparse([0, 1, 2], array, (3,))),
    "pending": lambda kv, array, like: kv.push("k", array, wait=False).wait(),
    "set": lambda kv, array, like: kv.set("k", array),
    "broadcast": lambda kv, array, like: kv.broadcast("k", array, out=like),
    "pull": lambda kv, array, like: kv.pull("k", out=array),
    "pull of a dict": lambda kv, array, like: kv.pull({"k": array})["k"],
    "pushpull": lambda kv, array, like: kv.pushpull("k", like, out=array),
    "row_sparse_pull": lambda kv, array, like: kv.row_sparse_pull("k", out=array, row_ids=[0, 2]),
    "rows of a pull": lambda kv, array, like: kv.pull("k", RowSparse([1], array[:1], (3,)), ignore_sparse=False).values,
}
FILLS = [*CALLS][[*CALLS].index("pull") :]
# The filled arrays, or else the stored value, unless it is the sum of all ranks' arrays.
RESULTS = {"set": 7, "broadcast": 7, "pull": [0, 1, 2], "pull of a dict": [0, 1, 2]}
RESULTS |= {"row_sparse_pull": [0, 0, 2], "rows of a pull": [1, 2]}


@pytest.mark.parametrize("call", CALLS)
def test_integers_are_cast_to_wider_dtypes_alone(comm, ranks, call):
    with mpikv.create(comm=comm, timeout=20) as kv:
        for number, (own, stored) in enumerate(CASTS):
            bounds = np.iinfo(own), np.iinfo(stored)
            given, wanted = reversed(bounds) if call in FILLS else bounds
            kv.init("k", np.arange(3).astype(stored), overwrite=True)
            array, like = np.full(3, 7, own), np.full(3, 7, stored)
            if wanted.min <= given.min and given.max <= wanted.max:
                filled = CALLS[call](kv, array, like)
                found = kv.pull("k") if filled is None else filled
                np.testing.assert_array_equal(found, RESULTS.get(call, 7 * ranks))
                continue
            is_culprit = kv.rank == number % ranks
            expected = mpikv.ValueMismatch if is_culprit else mpikv.PeerFailed
            with pytest.raises(expected, match=r"of key 'k' has dtype .* and integers to wider ones alone"):
                CALLS[call](kv, array if is_culprit else like.copy(), like)
            assert (array == 7).all()
            np.testing.assert_array_equal(kv.pull("k"), np.arange(3))
