"""Groups of ranks, several Trainers on a store, and what ranks tell each other besides values."""

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, PeerFailed, RankMismatch

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.mark.feature("trainer-several-on-one-store")
def test_trainers_on_one_store(kv):
    """Two networks on one store, by turns."""
    nets = [{"generator": {"w": np.ones(2)}}, {"critic": {"w": np.ones(3)}}]
    trainers = [mpikv.Trainer(net, "adam", {"learning_rate": 0.5}, kvstore=kv, update_on_kvstore=False) for net in nets]
    alone = np.ones(2)
    with mpikv.create(comm=kv.comm) as other:
        reference = mpikv.Trainer({"w": alone}, "adam", {"learning_rate": 0.5}, kvstore=other)
        for step in range(3):
            for trainer, size, name in zip(trainers, (2, 3), ("generator", "critic"), strict=True):
                trainer.set_grads({name: {"w": np.full(size, step + 1.0)}})
                trainer.step(kv.size)
            reference.set_grads({"w": np.full(2, step + 1.0)})
            reference.step(kv.size)
    np.testing.assert_array_equal(nets[0]["generator"]["w"], alone)
    with pytest.raises(mpikv.KeyAlreadyInitialized, match="give each Trainer"):
        mpikv.Trainer(nets[0], "sgd", kvstore=kv, update_on_kvstore=False).start()
    kv.set_optimizer("sgd")
    trainers[0].set_grads({"generator": {"w": np.ones(2)}})
    with pytest.raises(ConfigError, match="the store was given an updater"):
        trainers[0].step(1)


# --- Groups


def test_groups_sum_over_their_ranks(kv):
    kv.init("w", np.zeros(2))
    members = list(range(kv.size))[::-2]
    part = kv.group(members)
    assert (part is not None) == (kv.rank in members)
    if part is not None:
        assert (part.size, part.rank, part.root) == (len(members), members.index(kv.rank), 0)
        part.init("w", np.full(3, float(kv.rank)))
        np.testing.assert_array_equal(part.pull("w"), np.full(3, float(members[0])))
        part.push("w", np.full(3, kv.rank + 1.0))
        np.testing.assert_array_equal(part.pull("w"), np.full(3, sum(rank + 1.0 for rank in members)))
        part.close()
    kv.push("w", np.ones(2))
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, float(kv.size)))


def test_a_group_keeps_the_options(comm):
    options = {"placement": "root", "bucket_bytes": 4096, "timeout": 7.0, "deterministic": True}
    with mpikv.create("dist_sync", comm=comm, transport="mpi", **options) as kv:
        part = kv.group(range(kv.size))
        assert (part.type, part.placement, part.transport) == ("dist_sync", "root", kv.transport)
        part.close()


def test_a_bad_group_on_one_rank(kv):
    for bad in ([], [0, 0], [kv.size], [-1], ["0"], [0.5]):
        with pytest.raises(ConfigError if kv.is_root else PeerFailed, match="not a list of some of the ranks"):
            kv.group(bad if kv.is_root else [0])
    with pytest.raises(TypeError if kv.is_root else PeerFailed):
        kv.group(0 if kv.is_root else [0])
    kv.barrier()


@pytest.mark.ranks(2, 3)
def test_ranks_that_want_other_groups(kv):
    with pytest.raises(RankMismatch, match=r"group\(\[0\]\).*group\(\[1\]\)"):
        kv.group([min(kv.rank, 1)])
    kv.barrier()


# --- check_equal, any_rank, raise_on_all_ranks


@pytest.mark.ranks(2, 3, 4)
def test_check_equal(kv):
    kv.check_equal("a text")
    with pytest.raises(RankMismatch, match=r"check_equal\(of rank 0\).*check_equal\(of another\)"):
        kv.check_equal("of rank 0" if kv.is_root else "of another")
    with pytest.raises(RankMismatch, match=r"check_equal\(a list\) \(item 2: 2 b against 2 c\); nothing"):
        kv.check_equal(f"a list\n1 a\n2 {'b' if kv.is_root else 'c'}\n3 d")
    kv.check_equal("")
    lines = ["settings", "lr 0.1", f"momentum {0.5 if kv.is_root else 0.9}", "nesterov False"]
    with pytest.raises(
        RankMismatch, match=r"check_equal\(settings\) \(item 2: momentum 0.5 against momentum 0.9\); nothing"
    ):
        kv.check_equal("\n".join(lines))


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_any_rank(comm, transport):
    with mpikv.create(comm=comm, transport=transport, timeout=5) as kv:
        assert [kv.any_rank(kv.rank == culprit) for culprit in range(kv.size)] == [True] * kv.size
        with pytest.raises(ValueError if kv.is_root else PeerFailed, match="truth value"):
            kv.any_rank(np.zeros(2) if kv.is_root else True)
        assert [kv.any_rank(False), kv.any_rank(True)] == [False, True]


def test_raise_on_all_ranks(kv):
    kv.init("w", np.zeros(2))
    with pytest.raises(OSError if kv.is_root else PeerFailed, match="no such batch"):
        kv.raise_on_all_ranks(OSError("no such batch"), "load") if kv.is_root else kv.push("w", np.ones(2))
    kv.push("w", np.ones(2))
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, float(kv.size)))
