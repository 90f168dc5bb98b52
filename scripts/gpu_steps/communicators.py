"""NCCL by itself, through CuPy: what a communicator takes, the first use of each operation, and what it adds."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .step import MB, Numbers, Skip
from .timing import gpu_seconds, host_seconds, once

LATENESS = 0.3


class Ranks:
    """The ranks of a job and their communicators; or one rank, without MPI."""

    def __init__(self) -> None:
        import cupy

        from mpikv.compute.cuda.gpu import find_nccl
        from mpikv.config import launch_of

        self.nccl, self.rank, self.size, self.mpi = find_nccl(), 0, 1, None
        if launch_of() is not None:
            from mpi4py import MPI

            self.mpi = MPI.COMM_WORLD
            self.rank, self.size = self.mpi.rank, self.mpi.size
        cupy.cuda.Device(self.rank % cupy.cuda.runtime.getDeviceCount()).use()

    def meet(self) -> None:
        if self.mpi is not None:
            self.mpi.Barrier()

    def communicator(self) -> Any:
        identity = self.nccl.get_unique_id() if self.rank == 0 else None
        if self.mpi is not None:
            identity = self.mpi.bcast(identity)
        return self.nccl.NcclCommunicator(self.size, identity, self.rank)

    def free_bytes(self) -> int:
        """Return what memory the GPU has left, when all ranks are here."""
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
        self.meet()
        free = int(cupy.cuda.runtime.memGetInfo()[0])
        self.meet()
        return free

    def sharing(self) -> int:
        """Return how many ranks the present GPU has."""
        import cupy

        return -(-self.size // int(cupy.cuda.runtime.getDeviceCount()))


def kinds(ranks: Ranks, comm: Any, array: Any, stream: int) -> dict[str, Callable[[], None]]:
    """Return the operations, on an array of float32."""
    nccl, address, part = ranks.nccl, array.data.ptr, array.size // ranks.size
    real, total, mine = nccl.NCCL_FLOAT32, nccl.NCCL_SUM, address + 4 * part * ranks.rank
    following, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

    def send_and_receive() -> None:
        nccl.groupStart()
        comm.send(address, part, real, following, stream)
        comm.recv(address + 4 * part * (ranks.size - 1), part, real, before, stream)
        nccl.groupEnd()

    return {
        "allReduce": lambda: comm.allReduce(address, address, array.size, real, total, stream),
        "reduce": lambda: comm.reduce(address, address, array.size, real, total, 0, stream),
        "broadcast": lambda: comm.broadcast(address, address, array.size, real, 0, stream),
        "reduceScatter": lambda: comm.reduceScatter(address, mine, part, real, total, stream),
        "allGather": lambda: comm.allGather(mine, address, part, real, stream),
        **({"sendRecv": send_and_receive} if ranks.size > 1 else {}),
    }


def communicator() -> Numbers:
    """Time the making of NCCL's communicator, the first and the second use of each operation, and a call on the host;
    and see how much memory it takes.
    """
    import cupy

    ranks = Ranks()
    found: Numbers = {}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.ones(MB, "f4")
        stream.synchronize()
        free = ranks.free_bytes()
        begin = time.perf_counter()
        comm = ranks.communicator()
        found["init_ms"] = (time.perf_counter() - begin) * 1e3
        found["memory_MB"] = (free - ranks.free_bytes()) / MB / ranks.sharing()
        for name, run in kinds(ranks, comm, array, stream.ptr).items():
            for time_of in ("first", "second"):
                ranks.meet()
                returned, done = once(run)
                found[f"{name}_{time_of}_us"] = done * 1e6
                found[f"{name}_{time_of}_returned_us"] = returned * 1e6
        found["memory_after_use_MB"] = (free - ranks.free_bytes()) / MB / ranks.sharing()
        found |= call_costs(ranks, comm, array, stream) if ranks.size == 1 else lateness(ranks, array, stream)
        comm.destroy()
    return found


def call_costs(ranks: Ranks, comm: Any, array: Any, stream: Any) -> Numbers:
    """Say how long the host takes for a call, by CuPy and by ctypes; and that what was added is right."""
    nccl, address = ranks.nccl, array.data.ptr
    array.fill(1)
    plain = library()
    given = [ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_size_t(1), nccl.NCCL_FLOAT32, nccl.NCCL_SUM]
    given += [ctypes.c_void_p(comm.comm), ctypes.c_void_p(stream.ptr)]
    found = {
        "call_us": 1e6 * host_seconds(lambda: comm.allReduce(address, address, 1, *given[3:5], stream.ptr)),
        "ctypes_call_us": 1e6 * host_seconds(lambda: plain.ncclAllReduce(*given)),
    }
    assert plain.ncclAllReduce(*given) == 0
    assert float(array.sum()) == array.size
    return found


def library() -> Any:
    """Return the library NCCL that CuPy has loaded, for ctypes."""
    return ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)


def lateness(ranks: Ranks, array: Any, stream: Any) -> Numbers:
    """Say whether the first use of a new communicator waits on the host for a rank that is 300 ms late."""
    comm, found = ranks.communicator(), {}
    run = kinds(ranks, comm, array, stream.ptr)["allReduce"]
    for use in ("first", "second"):
        ranks.meet()
        if ranks.rank:
            time.sleep(LATENESS)
        found[f"{use}_returned_beside_a_late_rank_ms"] = once(run)[0] * 1e3
    ranks.meet()
    comm.destroy()
    return found


def several_on_one() -> Numbers:
    """Join ranks of one GPU by NCCL alone, as it can from 2.30 on without names of hosts."""
    import cupy

    ranks = Ranks()
    if ranks.nccl.get_version() < 23000:
        raise Skip(f"NCCL is {ranks.nccl.get_version()}, of 2.30 or later this is known")
    begin = time.perf_counter()
    comm = ranks.communicator()
    found: Numbers = {"init_s": time.perf_counter() - begin}
    nccl, total = ranks.nccl, ranks.size * (ranks.size + 1) / 2
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for size, name in ((1, "4_B"), (MB // 4, "1_MB"), (4 * MB, "16_MB")):
            sent, out = cupy.full(size, ranks.rank + 1, "f4"), cupy.empty(size, "f4")
            given = sent.data.ptr, out.data.ptr, size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr
            ranks.meet()
            found[f"{name}_first_ms"] = once(partial(comm.allReduce, *given))[1] * 1e3
            found[f"{name}_ms"] = gpu_seconds(partial(comm.allReduce, *given), 10) * 1e3
            assert (out.get() == total).all()
    ranks.meet()
    comm.destroy()
    return found


def dtypes() -> Numbers:
    """Try sums of many dtypes, some unknown to CuPy, and other operations, by NCCL alone."""
    import cupy

    ranks = Ranks()
    comm, found = ranks.communicator(), {}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for name, array, number, operation, expected in cases(ranks):
            found[name] = outcome(ranks, comm, stream, array, number, operation, expected)
    ranks.meet()
    comm.destroy()
    return found


def cases(ranks: Ranks) -> Iterator[tuple[str, Any, int, int, Any]]:
    """Yield names, arrays of the host, as what NCCL takes their elements, its operation, and what must come out."""
    import ml_dtypes
    import numpy as np

    nccl, numbers = ranks.nccl, np.arange(3)
    own, most = ranks.rank + 1, ranks.size
    total = most * (most + 1) // 2
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"):
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        constant = getattr(nccl, f"NCCL_{name.upper()}")
        yield name, (own * numbers).astype(dtype), constant, nccl.NCCL_SUM, (total * numbers).astype(dtype)
    # CuPy has no constants for these.
    for name, dtype, number in (("fp8_e4m3", ml_dtypes.float8_e4m3fn, 10), ("fp8_e5m2", ml_dtypes.float8_e5m2, 11)):
        yield name, (own * numbers).astype(dtype), number, nccl.NCCL_SUM, (total * numbers).astype(dtype)
    one = np.array([ranks.rank == 0, False, True])
    yield "bool_as_uint8_max", one, nccl.NCCL_UINT8, nccl.NCCL_MAX, np.array([True, False, True])
    for name, parts in (("complex64", nccl.NCCL_FLOAT32), ("complex128", nccl.NCCL_FLOAT64)):
        whole = (numbers * (1 + 2j)).astype(name)
        yield f"{name}_as_floats", own * whole, parts, nccl.NCCL_SUM, total * whole
    factorial = int(np.prod(np.arange(1, most + 1)))
    for name, value in (("PROD", factorial), ("MAX", most), ("MIN", 1), ("AVG", total / most)):
        operation = getattr(nccl, f"NCCL_{name}")
        yield f"float32_{name}", np.full(3, own, "f4"), nccl.NCCL_FLOAT32, operation, np.full(3, value, "f4")


def outcome(ranks: Ranks, comm: Any, stream: Any, array: Any, number: int, operation: int, expected: Any) -> str:
    """Return whether a sum is right, or why there is none."""
    import cupy
    import numpy as np

    wide = 2 if array.dtype.kind == "c" else 1
    there = cupy.asarray(np.ascontiguousarray(array).view(np.uint8))
    ranks.meet()
    try:
        comm.allReduce(there.data.ptr, there.data.ptr, array.size * wide, number, operation, stream.ptr)
    except (ranks.nccl.NcclError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    found = there.get().view(array.dtype)
    return "right" if found.tobytes() == expected.astype(array.dtype).tobytes() else f"wrong: {found}, not {expected}"
