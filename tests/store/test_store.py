"""Every combination of transport, placement and bucket keeps the contract of the store."""

from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import ValueMismatch
from mpikv.testing import StoreContract


def contract(*ranks: int, callables: bool = True, **chosen: Any) -> type[StoreContract]:
    """Return the contract's tests of the stores that are created like that, on these numbers of ranks."""

    class Kept(StoreContract):
        def create(self, **options: Any) -> mpikv.KVStore:
            return mpikv.create(**chosen, **options)

    Kept.callables = callables
    return pytest.mark.ranks(*ranks)(Kept)


TestDefault = contract(1, 2, 3, 4)
TestRoot = contract(1, 2, 4, name="dist_sync", placement="root", bucket_bytes=4096)
TestSharded = contract(1, 2, 4, name="local", placement="sharded", callables=False)
TestReplicated = contract(2, 4, name="dist", placement="replicated", callables=False)
TestMpi = contract(2, 3, 4, name="device", transport="mpi")
TestMpiRoot = contract(2, 4, transport="mpi", placement="root")
TestMpiSharded = contract(2, 3, 4, transport="mpi", placement="sharded", bucket_bytes=4096, callables=False)
TestMpiReplicated = contract(2, 4, transport="mpi", placement="replicated", bucket_bytes=4096, callables=False)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "name",
    ["LOCAL", "local_update_cpu", "local_allreduce_cpu", "dist", "Dist_Sync", "device", "Local_AllReduce_Device"],
)
@pytest.mark.feature("names-host", "names-device", "names-any-case")
def test_names_of_stores(name):
    with mpikv.create(name) as kv:
        assert kv.type == name.lower()
        kv.init("w", np.zeros(2))
        kv.push("w", np.ones(2))
        np.testing.assert_array_equal(kv.pull("w"), np.full(2, float(kv.size)))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
def test_training_that_diverges_raises_nothing_halfway(transport):
    """A warning that is an error must not stop one rank in the middle of an exchange, where others wait for it."""
    with mpikv.create(transport=transport, timeout=5) as kv, np.errstate(all="raise"):
        kv.init(["w", "half", "small"], [np.zeros(2), np.zeros(2, np.float16), np.zeros(2, np.float32)])
        kv.push("w", [np.array([np.inf, 1e308]), np.array([-np.inf, 1e308])])
        np.testing.assert_array_equal(kv.pull("w"), [np.nan, np.inf])
        kv.push("w", np.array([np.inf if kv.is_root else -np.inf, 1e308]))
        kv.push("half", np.array([6e4, 1e9]))
        np.testing.assert_array_equal(kv.pull("half")[1], np.inf)
        kv.push("small", np.array([1.0, 1e300]))
        np.testing.assert_array_equal(kv.pushpull("small", np.array([1.0, 1e300], np.float64))[1], np.inf)
        kv.pull("w", out=np.zeros(2, np.float16))


@pytest.mark.ranks(1, 2)
@pytest.mark.feature("broadcast-again")
def test_broadcast_of_a_known_key_casts_as_set_does():
    with mpikv.create() as kv:
        kv.init("w", np.zeros(3, np.int32))
        np.testing.assert_array_equal(kv.broadcast("w", np.ones(3, np.uint8), out=np.zeros(3, np.int32)), np.ones(3))
        with pytest.raises(ValueMismatch, match=r"only dtypes of one kind are cast, .*; pass an out of int32"):
            kv.broadcast("w", np.ones(3, np.uint8))
        assert kv.pull("w").dtype == np.int32


def unaligned(array):
    memory = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    memory[...] = array
    return memory


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_large_arrays_are_summed_from_where_they_lie(placement, deterministic):
    """What a rank owns itself may be read from its own array: another every time, of any layout, and never changed."""
    layouts = (np.array, unaligned, read_only, lambda array: np.repeat(array, 2)[::2], lambda array: [array, 0 * array])
    with mpikv.create(placement=placement, deterministic=deterministic, bucket_bytes=1 << 18) as kv:
        # In several messages, and in one.
        for key, size in (("w", 200_000), ("one", 50_000)):
            check_sums(kv, key, size, layouts)


def check_sums(kv, key, size, layouts):
    kv.init(key, np.zeros(size, np.float32))
    for step in range(2 * len(layouts)):
        arrays = [np.arange(size, dtype=np.float32) * (rank + 1) + step for rank in range(kv.size)]
        mine = layouts[(step + kv.rank) % len(layouts)](arrays[kv.rank])
        if step % 2:
            kv.push(key, mine)
            total = kv.pull(key)
        else:
            total = kv.pushpull(key, mine, np.empty(size, np.float32))
        # Whole numbers below 2**24, whose sums are exact.
        np.testing.assert_array_equal(total, sum(arrays))
        np.testing.assert_array_equal(mine[0] if isinstance(mine, list) else mine, arrays[kv.rank])
