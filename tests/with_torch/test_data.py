"""Shares of a dataset: all elements, each on one rank, and an error where ranks would share other data."""

import pytest

import mpikv
from mpikv import PeerFailed, RankMismatch

from .training import torch

sampler = mpikv.torch.sampler
pytestmark = pytest.mark.ranks(1, 2, 3)
SEVERAL = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("given", [True, False], ids=["store", "launch"])
@pytest.mark.parametrize("length", [12, 13])
def test_shares_are_all_of_the_data(kv, given, length):
    shares = sampler(range(length), kv=kv if given else None, seed=3)
    assert isinstance(shares, torch.utils.data.DistributedSampler)
    mine = list(shares)
    assert len(mine) == -(-length // kv.size)
    told = [mine] if kv.comm is None else kv.comm.allgather(mine)
    assert {one for share in told for one in share} == set(range(length))


@SEVERAL
@pytest.mark.parametrize("given", [True, False], ids=["store", "launch"])
def test_ranks_that_would_share_other_data(kv, given):
    last = kv.rank == kv.size - 1
    for length, option, pattern in [
        (8 + last, {}, "of 8 elements, shuffle=True, .*of 9 elements"),
        (8, {"shuffle": not last}, "shuffle=True.*shuffle=False"),
        (8, {"seed": 5 * last}, "seed=0.*seed=5"),
        (8, {"drop_last": last}, "drop_last=False.*drop_last=True"),
    ]:
        with pytest.raises(RankMismatch, match=pattern):
            sampler(range(length), kv=kv if given else None, **option)
    kv.barrier()


@SEVERAL
def test_data_without_a_length_on_one_rank(kv):
    last = kv.rank == kv.size - 1
    with pytest.raises(TypeError if last else PeerFailed, match=r"sampler.*has no len\(\)"):
        sampler(iter(()) if last else range(3), kv=kv)
    kv.barrier()
