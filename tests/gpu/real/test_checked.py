"""Checked communicators of mpi4py carry arrays of GPUs by NCCL: every verb against numpy, and what is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import PeerFailed, RankMismatch, Unsupported, ValueMismatch

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60), pytest.mark.ranks(1, 2, 3)]

N = 5
"""Elements of a block."""
EXACT = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
OPS: dict[str, Any] = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}


@pytest.fixture(scope="module")
def world() -> Any:
    """Return a checked communicator of all ranks, each with a GPU of its own if there are enough. NCCL takes seconds to
    make one.
    """
    import cupy
    from mpi4py import MPI

    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    checked = mpikv.checked(MPI.COMM_WORLD.Dup(), timeout=30)
    yield checked
    checked.Free()


def mpi() -> Any:
    from mpi4py import MPI

    return MPI


def values(rank: int, size: int, dtype: Any = np.float32) -> Any:
    """Return the numbers of a rank: small, so that all their sums and products are exact."""
    return ((np.arange(size) * 7 + rank * 3) % 4).astype(dtype)


def terms(comm: Any, size: int, dtype: Any = np.float32) -> Any:
    """Return the numbers of all ranks, a row each."""
    return np.stack([values(rank, size, dtype) for rank in range(comm.size)])


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("op", OPS)
def test_reductions(cupy: Any, world: Any, op: str, dtype: str) -> None:
    rank, size = world.rank, world.size
    every, root = terms(world, N * size, dtype), size - 1
    expected, mine = OPS[op].reduce(every, dtype=dtype), cupy.asarray(every[rank])
    out, op = cupy.zeros(N * size, dtype), getattr(mpi(), op)
    world.Allreduce(mine, out, op)
    assert (out.get() == expected).all()
    out.set(every[rank])
    world.Allreduce(mpi().IN_PLACE, out, op=op)
    assert (out.get() == expected).all()
    out = cupy.zeros(N * size, dtype)
    world.Reduce(mine, out if rank == root else None, op, root)
    assert (out.get() == (expected if rank == root else 0)).all()
    out.set(every[rank])
    world.Reduce(mpi().IN_PLACE if rank == root else out, out if rank == root else None, op, root)
    assert (out.get() == (expected if rank == root else every[rank])).all()
    block = cupy.zeros(N, dtype)
    world.Reduce_scatter_block(mine, block, op)
    assert (block.get() == expected[N * rank :][:N]).all()
    out.set(every[rank])
    world.Reduce_scatter_block(mpi().IN_PLACE, out, op)
    assert (out.get()[:N] == expected[N * rank :][:N]).all()
    assert (mine.get() == every[rank]).all()


@pytest.mark.parametrize("dtype", ["bool", "int16", "float64", "complex64"])
def test_moves(cupy: Any, world: Any, dtype: str) -> None:
    """Any dtype moves; blocks are equal, or of a count for each rank, with gaps."""
    rank, size, root = world.rank, world.size, world.size - 1
    in_place, blocks = mpi().IN_PLACE, terms(world, N * size, dtype).reshape(size, size, N)
    own, every = cupy.asarray(blocks[rank, 0]), cupy.asarray(blocks[rank].copy())

    def check(array: Any, expected: Any) -> None:
        assert (array.get() == expected).all()

    def filled(array: Any = None) -> Any:
        return cupy.zeros((size, N), dtype) if array is None else cupy.asarray(array)

    out = filled() if rank else cupy.asarray(blocks[0])
    world.Bcast(out)
    check(out, blocks[0])
    out = filled()
    world.Gather(own, out if rank == root else None, root)
    check(out, blocks[:, 0] if rank == root else 0)
    out = filled()
    out[rank].set(blocks[rank, 0])
    world.Gather(in_place if rank == root else own, out if rank == root else None, root=root)
    check(out, blocks[:, 0] if rank == root else np.where(np.arange(size)[:, None] == rank, blocks[rank, 0], 0))
    part = cupy.zeros(N, dtype)
    world.Scatter(every if rank == root else None, part, root)
    check(part, blocks[root, rank])
    world.Scatter(every if rank == root else None, in_place if rank == root else part, root)
    out = filled()
    world.Allgather(own, out)
    check(out, blocks[:, 0])
    out = filled()
    out[rank].set(blocks[rank, 0])
    world.Allgather(in_place, [out, N, mpi()._typedict[np.dtype(dtype).char]])
    check(out, blocks[:, 0])
    out = filled()
    world.Alltoall(every, out)
    check(out, blocks[:, rank])
    world.Alltoall(in_place, every)
    check(every, blocks[:, rank])


def test_moves_of_different_counts(cupy: Any, world: Any) -> None:
    rank, size, root = world.rank, world.size, world.size - 1
    counts, starts = [2 * one for one in range(size)], [2 * size * one for one in range(size)]
    every, total = terms(world, 2 * size * size), 2 * size * size
    expected, own = np.full(total, -1, np.float32), cupy.asarray(every[rank, : counts[rank]])
    for one, (low, count) in enumerate(zip(starts, counts, strict=True)):
        expected[low : low + count] = every[one, :count]
    message = [cupy.asarray(np.full(total, -1, np.float32)), (counts, starts)]
    world.Allgatherv(own, message)
    assert (message[0].get() == expected).all()
    message[0].set(np.full(total, -1, np.float32))
    world.Gatherv(own, message if rank == root else None, root)
    assert (message[0].get() == (expected if rank == root else -1)).all()
    part = cupy.zeros(counts[rank], np.float32)
    world.Scatterv([message[0], counts, starts, mpi().FLOAT] if rank == root else None, part, root)
    assert (part.get() == every[rank, : counts[rank]]).all()
    # Rank s sends s + r elements to rank r.
    sends, receives = [rank + one for one in range(size)], [one + rank for one in range(size)]
    given = cupy.asarray(np.arange(sum(sends), dtype=np.int32) + 100 * rank)
    out = cupy.zeros(sum(receives), np.int32)
    world.Alltoallv([given, sends], [out, receives])
    lows = [sum(one + other for other in range(rank)) + 100 * one for one in range(size)]
    wanted = [low + np.arange(count) for low, count in zip(lows, receives, strict=True)]
    assert (out.get() == np.concatenate(wanted)).all()


def test_other_forms_of_arrays(cupy: Any, world: Any) -> None:
    """Of the order of Fortran, of no elements, and of a library that has the interface of CUDA alone."""
    mine, size = cupy.asarray(values(world.rank, 12).reshape(3, 4), order="F"), world.size
    foreign = SimpleNamespace(
        __cuda_array_interface__=mine.__cuda_array_interface__, dtype=mine.dtype, nbytes=mine.nbytes
    )
    out = cupy.zeros((3, 4), np.float32, order="F")
    world.Allreduce(foreign, out)
    assert (out.get() == terms(world, 12).sum(axis=0).reshape(3, 4)).all()
    world.Allreduce(cupy.zeros(0), cupy.zeros(0))
    world.Alltoall(cupy.zeros(0), cupy.zeros((size, 0)))
    world.Bcast([out, (4, 8)])


def test_a_call_runs_after_the_current_stream_and_ends_before_it_returns(cupy: Any, world: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True):
        late = cupy.zeros(1 << 16, np.float32)
        for _ in range(20):
            late += 1
        world.Allreduce(mpi().IN_PLACE, late)
    # On another stream, without a wait.
    with cupy.cuda.Stream(non_blocking=True):
        assert (late.get() == 20 * world.size).all()


def test_complex_numbers_are_added(cupy: Any, world: Any) -> None:
    out = cupy.asarray([1 + 2j] * 3)
    world.Allreduce(mpi().IN_PLACE, out)
    assert (out.get() == world.size * (1 + 2j)).all()


REFUSED: dict[str, tuple[Callable[[Any, Any], object], type[Exception], str]] = {
    "dtype": (lambda comm, x: comm.Allreduce(x.view("i2"), x.view("i2")), Unsupported, "no sum of int16; .*asnumpy"),
    "bool": (lambda comm, x: comm.Allreduce(x.view("?"), x.view("?")), Unsupported, "no sum of bool"),
    "product": (lambda comm, x: comm.Allreduce(*[x[:6].view("c16")] * 2, mpi().PROD), Unsupported,
                "no prod of complex"),
    "op": (lambda comm, x: comm.Allreduce(x, x.copy(), mpi().LAND), Unsupported, "no land of float64"),
    "own op": (lambda comm, x: comm.Reduce(x, x.copy(), mpi().Op.Create(min)), Unsupported, "operation of the program"),
    "scan": (lambda comm, x: comm.Scan(x, x.copy()), Unsupported, "Scan: .*asnumpy.*Allreduce"),
    "alltoallw": (lambda comm, x: comm.Alltoallw([x, [1], [0], [mpi().DOUBLE]], [x, [1], [0], [mpi().DOUBLE]]),
                  Unsupported, "Alltoallw: "),
    "nonblocking": (lambda comm, x: comm.Iallreduce(x, x.copy()), Unsupported, "Iallreduce: .*CUDA-aware"),
    "send": (lambda comm, x: comm.Send(x, dest=0), Unsupported, "Send: .*CUDA-aware"),
    "receive": (lambda comm, x: comm.Irecv([x, mpi().DOUBLE]), Unsupported, "Irecv: "),
    "buffered": (lambda comm, x: comm.Bsend(x, 0), Unsupported, "Bsend: "),
    "persistent": (lambda comm, x: comm.Send_init(x, 0), Unsupported, "Send_init: "),
    "derived": (lambda comm, x: comm.Bcast([x, 1, mpi().DOUBLE.Create_vector(1, 1, 1)]), TypeError, "derived datatype"),
    "two places": (lambda comm, x: comm.Allreduce(x.get(), x), TypeError, r"cupy\.asarray"),
    "gaps": (lambda comm, x: comm.Bcast(x[::2]), ValueError, "ascontiguousarray"),
    "remainder": (lambda comm, x: comm.Bcast([x, 8]), ValueError, r"\[8\] elements"),
    "displacement": (lambda comm, x: comm.Bcast([x, (2, -1)]), ValueError, r"from \[-1\]"),
    "sizes": (lambda comm, x: comm.Allreduce(x, x[1:].copy()), ValueError, r"sends float64\[7\], receives .*\[6\]"),
    "root": (lambda comm, x: comm.Bcast(x, comm.size), ValueError, r"root \d"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_what_cannot_be_done(cupy: Any, world: Any, case: str) -> None:
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call(world, cupy.asarray(np.arange(7.0)))
    assert world.allreduce(1) == world.size, "the communicator can be used again"


@pytest.mark.ranks(2, 3)
def test_a_mistake_of_one_rank_is_told_to_all(cupy: Any, world: Any) -> None:
    x = cupy.zeros(6)
    with pytest.raises(ValueError if world.rank == 0 else PeerFailed, match="ascontiguousarray"):
        world.Bcast(x[::2] if world.rank == 0 else x)
    counts = [2] * world.size if world.rank == 0 else [1] * world.size
    with pytest.raises(ValueMismatch, match=r"rank \d sends \d+ bytes to rank \d, which expects"):
        world.Alltoallv([cupy.zeros(sum(counts)), counts], [cupy.zeros(sum(counts)), counts])
    world.Bcast(x)


@pytest.mark.ranks(2, 3)
def test_ranks_with_arrays_of_the_host_and_of_gpus_differ(cupy: Any, world: Any) -> None:
    x = np.zeros(4) if world.rank else cupy.zeros(4)
    with pytest.raises(RankMismatch, match=r"Allreduce\(sum, float64\[4\], on GPUs\).*Allreduce\(sum, float64\[4\]\)"):
        world.Allreduce(x, x.copy())


def test_objects_with_arrays_of_gpus_are_pickled(cupy: Any, world: Any) -> None:
    found = world.bcast(cupy.asarray([0, 1, 2]) if world.rank == 0 else None)
    assert found.get().tolist() == [0, 1, 2]


def test_what_is_made_has_gpus_too(cupy: Any, world: Any) -> None:
    half = world.Split(world.rank % 2)
    out = cupy.asarray(np.ones(3))
    half.Allreduce(mpi().IN_PLACE, out)
    assert (out.get() == half.size).all()
    half.Free()
