"""Collectives of flat arrays against numpy in one process, over every transport."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.communicating import LIMIT, Ranks, brought, reduce_of

from mpikv.cluster.calls import Call
from mpikv.collectives.collectives import Collectives
from mpikv.collectives.operations import Op, check_reduction
from mpikv.engine.plan import digest
from mpikv.errors import PeerFailed, RankMismatch, Unsupported, ValueMismatch
from mpikv.testing.transport import dtypes
from mpikv.transports.cma import CopyChoice

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(params=[(1 << 20, 1, 1), (1000, 1 << 20, 1), (1000, 1, 0), (1000, 1, 1)], ids=str)
def world(
    request: pytest.FixtureRequest, comm: Any, transport: str, monkeypatch: Any, simulate_ranks_per_host: int
) -> Iterator[Ranks]:
    """Return ranks that send most messages as small ones, or as large ones that are copied or read in place."""
    small, large, way = request.param
    monkeypatch.setattr("mpikv.collectives.collectives._SMALL", small)
    monkeypatch.setattr(CopyChoice, "next", lambda choice: way)  # and not by time
    world = Ranks(
        comm, transport, (simulate_ranks_per_host if way else 1) if transport == "hierarchical" else 0, large=large
    )
    yield world
    world.close()


def takes(op: Op, dtype: np.dtype[Any]) -> bool:
    try:
        check_reduction(op, dtype)
    except Unsupported:
        return False
    return True


KINDS = st.sampled_from([(op, dtype) for op in Op for dtype in dtypes() if takes(op, dtype)])
SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([LIMIT // 16, LIMIT // 4, LIMIT, 9 * LIMIT]).flatmap(lambda n: st.integers(n - 2, n + 2)),
)
SEEDS = st.integers(0, 1 << 30)
some = settings(max_examples=25)


@some
@given(kind=KINDS, size=SIZES, seed=SEEDS, root=st.integers(0, 3), staged=st.booleans())
def test_all_reduce_and_reduce(world, kind, size, seed, root, staged):
    op, dtype = kind
    arrays = [brought(dtype, size, seed, rank) for rank in range(world.size)]
    expected = reduce_of(op, arrays)
    mine = arrays[world.rank].copy()
    world.call("all_reduce_each", [(mine, mine)], op, message=[mine] * staged)
    assert mine.tobytes() == expected.tobytes()
    mine, root = arrays[world.rank].copy(), root % world.size
    mine.flags.writeable = world.rank == root and world.size > 1
    world.call("reduce", mine, op, root, message=[mine] * staged)
    assert mine.tobytes() == (expected if world.rank == root else arrays[world.rank]).tobytes()


@some
@given(kind=KINDS, counts=st.tuples(SIZES, SIZES, SIZES, SIZES), seed=SEEDS, staged=st.booleans(), inside=st.booleans())
def test_reduce_scatter(world, kind, counts, seed, staged, inside):
    op, dtype = kind
    parts = [
        [brought(dtype, count, seed, rank, to) for to, count in enumerate(counts[: world.size])]
        for rank in range(world.size)
    ]
    expected = reduce_of(op, [each[world.rank] for each in parts])
    mine = [part.copy() for part in parts[world.rank]]
    out = mine[world.rank] if inside else np.empty_like(expected)
    world.call("reduce_scatter", mine, out, op, message=mine * staged)
    assert out.tobytes() == expected.tobytes()


@some
@given(
    dtype=st.sampled_from(dtypes()), counts=st.tuples(SIZES, SIZES, SIZES, SIZES), seed=SEEDS, root=st.integers(0, 3)
)
def test_all_gather_and_broadcast(world, dtype, counts, seed, root):
    uneven, root = counts[: world.size], root % world.size
    for even, sizes in enumerate((uneven, [counts[0]] * world.size)):
        whole = brought(dtype, sum(sizes), seed)
        low = sum(sizes[: world.rank])
        buffer = np.zeros_like(whole)
        mine = buffer[low : low + sizes[world.rank]]
        mine[:] = whole[low : low + mine.size]
        world.call("all_gather", buffer, sizes, message=[mine] * even)
        assert buffer.tobytes() == whole.tobytes()
        array = whole.copy() if world.rank == root else np.zeros_like(whole)
        world.call("broadcast", array, root, message=[array] * even)
        assert array.tobytes() == whole.tobytes()


@some
@given(
    dtype=st.sampled_from(dtypes()),
    counts=st.lists(SIZES, min_size=16, max_size=16),
    seed=SEEDS,
    root=st.integers(0, 3),
)
def test_all_to_all_gather_and_scatter(world, dtype, counts, seed, root):
    n, rank, root = world.size, world.rank, root % world.size
    parts = [[brought(dtype, counts[4 * s + r], seed, s, r) for r in range(n)] for s in range(n)]
    receives = [np.zeros_like(each[rank]) for each in parts]
    world.call("all_to_all", parts[rank], receives)
    for receive, each in zip(receives, parts, strict=True):
        assert receive.tobytes() == each[rank].tobytes()
    receives = [np.zeros_like(each[root]) for each in parts]
    world.call("gather", parts[rank][root], receives if rank == root else None, root)
    for receive, each in zip(receives, parts, strict=True):
        assert rank != root or receive.tobytes() == each[root].tobytes()
    receive = np.zeros_like(parts[root][rank])
    world.call("scatter", parts[root] if rank == root else None, receive, root)
    assert receive.tobytes() == parts[root][rank].tobytes()


def test_half_precision_is_rounded_once(world):
    """Each step would round the small numbers away."""
    for dtype in (each for each in dtypes() if each.name in ("float16", "bfloat16")):
        small = 2.0 ** -(11 if dtype.name == "float16" else 8)
        array = np.full(3000, 1.0 if world.rank == 0 else small).astype(dtype)
        world.call("all_reduce_each", [(array, array)], Op.SUM)
        assert (array == np.array(1 + small * (world.size - 1), np.float32).astype(dtype)).all()


def test_another_library_may_reduce(world):
    sizes = []
    collectives = Collectives(world.transport, combine=lambda *_, size, in_pairs: sizes.append(size))
    collectives.reduce_scatter([np.ones(3)] * world.size, np.empty(3), Op.SUM)
    collectives.close()
    assert sizes == [world.size]


@pytest.mark.parametrize(
    ("op", "name"), [(Op.MEAN, "int32"), (Op.MEAN, "bool"), (Op.BOR, "float32"), (Op.MAX, "complex64")]
)
def test_some_reductions_have_no_meaning(world, op, name):
    with pytest.raises(Unsupported, match=name if op is not Op.MAX else "complex"):
        check_reduction(op, np.dtype(name))


def test_a_mistake_on_one_rank_leaves_the_ranks_usable(world):
    second = world.rank == 1
    if world.size > 1:
        array = np.ones(2 + second, np.float32)
        call = Call("all_reduce", digest(f"{array.size}"), f"float32[{array.size}]")
        with pytest.raises(RankMismatch, match=r"ranks disagree at call #\d+: .* calls? all_reduce\(float32\[.\]\)"):
            world.communicator.call(call, pytest.fail, array)
        sends = [np.ones(1 + second)] * world.size
        wrong = r"all_to_all\(\): rank 1 sends 16 bytes to rank 0, which expects 8 \[rank"
        with pytest.raises(ValueMismatch, match=wrong):
            world.call("all_to_all", sends, [np.ones(1)] * world.size)
    call = Call("broadcast", digest("b"), "")
    if world.rank == 0:
        with pytest.raises(TypeError, match="broadcast: a list is no array"):
            world.communicator.refuse(call, TypeError("a list is no array"))
    else:
        with pytest.raises(PeerFailed, match="rank 0 raised TypeError: a list is no array"):
            world.communicator.call(call, pytest.fail)
    total = np.ones(3)
    world.call("all_reduce_each", [(total, total)], Op.SUM, message=[total])
    assert (total == world.size).all()
