"""Time calls beside each other, in turns on the ranks of this job.

    mpikv run -n 2 scripts/bench_calls.py agreement    a store that compares calls, beside one that only waits
    mpikv run -n 2 scripts/bench_calls.py checks       mpi4py with and without checks
    mpikv run -n 2 scripts/bench_calls.py halves       half precision beside float32: as many bytes, as many elements
    mpikv run -n 2 scripts/bench_calls.py codecs       codecs alone, and pushes with each beside pushes without
    mpikv run -n 1 scripts/bench_calls.py threads      one thread of a rank, beside as many as the rank has cores
    mpikv run -n 2 scripts/bench_calls.py rows         0.1 % of a million rows, beside the whole array
    mpikv run -n 2 scripts/bench_calls.py rows --assign --rows 200000 --shares 0.02,0.1,0.5,1

A turn is one long call or many short ones; the slowest rank's time counts. Each table has medians over the rounds, and
beside the first case the median of the differences and ratios within a round, with the middle half of the ratios.

*agreement*: in shared memory the store without the comparison waits for the other ranks as well, since values must not
be read too early. Over MPI it does not, and the difference is one small Allreduce. How fast large arrays move depends
on where their memory lies, so there are two stores of each kind, made in the order without, with, with, without.

*codecs*: rank 0 packs and unpacks 1 MiB of float32 with error feedback while the others sleep. Pushes go through shared
memory and MPI, which inside of a host is no network.

*rows*: a push of rows begins with their numbers, in no order, and their gradients; that of the whole array with the
array, so that filling it is left out. Each push has other rows than the one before.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

import mpikv
from mpikv import codecs
from mpikv.cli.bench.report import table
from mpikv.cli.bench.rounds import Case, measure
from mpikv.compute.kernels import find_kernels

KERNELS = ("numpy", "numba") if find_spec("numba") else ("numpy",)
PACKING = ("2bit", "1bit", "fp16", "bf16")
"""What packs any range of a value."""

Work = Callable[[], object]


def compare(
    comm: Any, title: str, cases: list[tuple[str, Work]], rounds: int, nbytes: int = 0, warm: bool = False
) -> None:
    """Time the cases in turns, and print them beside the first. Times of cases of one name are put together. ``warm``:
    each makes a call before its turn, which finds what another has left in the caches.
    """
    made = [Case(name, SimpleNamespace(exact=None, step=work)) for name, work in cases]
    for case in made if warm else ():
        vars(case.contender).update(prepare=case.contender.step, results=tuple, close=tuple)
    for case in made:
        case.run_once()
    measure(comm, made, rounds)
    found: dict[str, list[float]] = {}
    for case in made:
        found.setdefault(case.name, []).extend(case.seconds)
    if comm.rank:
        return
    first = np.array(next(iter(found.values())))
    rows = [(title, "µs", *["GB/s"] * bool(nbytes), "more", "ratio", "middle half")]
    for name, seconds in found.items():
        took, more, ratios = (
            np.median(seconds),
            np.median(seconds - first),
            np.quantile(seconds / first, [0.25, 0.5, 0.75]),
        )
        speed = [f"{nbytes / took / 1e9:.1f}"] * bool(nbytes)
        spread = f"{ratios[0]:.3f} to {ratios[2]:.3f}"
        rows.append((name, f"{took * 1e6:.2f}", *speed, f"{more * 1e6:.2f}", f"{ratios[1]:.3f}", spread))
    print("\n".join(["", *table(rows)]), flush=True)


# --- The comparison of calls


class Unchecked:
    """A transport that waits where data need it, and compares nothing."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def agree(self, token: int, send_ready: bool = False) -> bool:
        self._transport.fence()
        # As a comparison leaves it in shared memory, which between hosts is that of an inner transport.
        getattr(self._transport, "_inner", self._transport)._send_ready = send_ready
        return True


def made(check: bool, **options: Any) -> mpikv.KVStore:
    """Return a store with the comparison of calls, or one without, as no user can have it."""
    kv = mpikv.create(**options)
    if not check:
        kv._agreement._transport = Unchecked(kv._agreement._transport)
    return kv


def agreement(comm: Any, options: argparse.Namespace) -> None:
    order = ("without", "with", "with", "without")
    stores = [(name, made(name == "with", transport=options.transport)) for name in order]
    for count, nbytes in ((1, 64), (100, 64), (1, 1 << 20), (1, 16 << 20)):
        keys = [f"{nbytes} B, {number} of {count}" for number in range(count)]
        values = [np.zeros(nbytes // 8) for _ in keys]
        given = (keys, values, values) if count > 1 else (keys[0], values[0], values[0])
        for _, kv in stores:
            kv.init(*given[:2])
        cases = [(name, partial(kv.pushpull, *given)) for name, kv in stores]
        compare(comm, f"pushpull, {count} x {nbytes} B", cases, options.rounds)
    for _, kv in stores:
        kv.close()


# --- Checks of mpi4py


def checks(comm: Any, options: argparse.Namespace) -> None:
    plain, checked, send, receive = comm.Dup(), mpikv.checked(comm.Dup()), np.ones(8), np.zeros(8)
    calls: dict[str, Callable[[Any], object]] = {
        "Allreduce": lambda comm: comm.Allreduce(send, receive),
        "Bcast": lambda comm: comm.Bcast(send),
        "Barrier": lambda comm: comm.Barrier(),
        "allreduce": lambda comm: comm.allreduce(1),
        "bcast": lambda comm: comm.bcast(1),
    }
    for name, call in calls.items():
        compare(comm, name, [("plain", partial(call, plain)), ("with checks", partial(call, checked))], options.rounds)
    checked.Free()


# --- Half precision


def halves(comm: Any, options: argparse.Namespace) -> None:
    size, given = int(options.mebibytes or 4) << 18, {"float16": np.dtype(np.float16)}
    if find_spec("ml_dtypes"):
        given["bfloat16"] = np.dtype(__import__("ml_dtypes").bfloat16)
    arrays = {"float32": np.ones(size, np.float32)}
    for name, dtype in given.items():
        arrays |= {f"{name}, same bytes": np.ones(2 * size, dtype), f"{name}, same elements": np.ones(size, dtype)}
    with mpikv.create(kernels=options.kernels) as kv:
        kv.init(arrays)

        def exchange(name: str, array: Any, out: Any) -> None:
            kv.push(name, array)
            kv.pull(name, out)

        cases = [(name, partial(exchange, name, array, np.empty_like(array))) for name, array in arrays.items()]
        compare(comm, f"push and pull, {size >> 18} MiB, {options.kernels}", cases, options.rounds)


# --- Codecs


def packing(gradient: Any, kernels: str) -> Iterator[tuple[str, Work]]:
    """Yield what packs an array, and what unpacks and adds it, for each codec that has these kernels."""
    for name in PACKING:
        plain = codecs.create(name)
        codec = find_kernels(kernels).codec(plain)
        if kernels == "numpy" or codec is not plain:
            payload = np.empty(codec.nbytes(gradient.size), np.uint8)
            yield f"{name}, pack", partial(codec.encode, gradient, payload, np.zeros_like(gradient))
            yield f"{name}, unpack and add", partial(codec.decode_add, payload, np.zeros_like(gradient))


def compare_codecs(comm: Any, options: argparse.Namespace) -> None:
    if comm.rank == 0:
        gradient = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
        for kernels in KERNELS:
            compare(MPI.COMM_SELF, f"1 MiB, {kernels}", [*packing(gradient, kernels)], options.rounds, gradient.nbytes)
    done = comm.Ibarrier()
    while not done.Test():  # a rank that waits in MPI would take a core
        time.sleep(0.01)
    gradient = (
        np.random.default_rng(comm.rank).standard_normal((1024, int(options.mebibytes or 16) << 8)).astype(np.float32)
    )
    for transport in ("shm", "mpi") if comm.size > 1 else ("local",):
        cases, stores = [], []
        for name in (None, *PACKING, "topk", "lowrank"):
            stores.append(kv := mpikv.create(transport=transport, kernels=KERNELS[-1], compression=name))
            kv.init("w", np.zeros_like(gradient))
            cases.append((name or "none", partial(kv.push, "w", gradient)))
        compare(comm, f"push of {gradient.nbytes >> 20} MiB, {transport}", cases, options.rounds)
        for kv in stores:
            kv.close()


# --- Threads


def threads(comm: Any, options: argparse.Namespace) -> None:
    gradient = np.ones(int(options.mebibytes or 64) << 18, np.float32)
    out = np.zeros_like(gradient)
    for name, given in (("none", {}), ("sgd", {"momentum": 0.9}), ("adam", {})):
        stores = []
        for asked in ("1", "0"):
            os.environ["MPIKV_THREADS"] = asked
            stores.append(kv := mpikv.create(kernels=options.kernels))
            if name != "none":
                kv.set_optimizer(name, **given)
            kv.init("w", out)
        cases = [partial(kv.pushpull, "w", gradient, out=out) for kv in stores]
        named = [*zip(("one thread", "all cores"), cases, strict=True)]
        compare(comm, f"pushpull, {name}, {gradient.nbytes >> 20} MiB", named, options.rounds)
        for kv in stores:
            kv.close()


# --- Rows


def rows(comm: Any, options: argparse.Namespace) -> None:
    shape, random = (options.rows, 64), np.random.default_rng(0)
    with mpikv.create(transport=options.transport) as kv:
        kv.init("rows", mpikv.RowSparse([], np.zeros((0, 64), np.float32), shape))
        kv.init("whole", np.ones(shape, np.float32))
        kv.set("rows", np.ones(shape, np.float32))  # memory that was never written to takes longer the first time
        if not options.assign:
            kv.set_optimizer("sgd", learning_rate=0.1)
        for share in map(float, options.shares.split(",")):
            count, whole = max(1, int(share * options.rows)), np.zeros(shape, np.float32)
            some = [random.permutation(options.rows)[:count] for _ in range(3)]
            given = cycle([(ids, random.standard_normal((count, 64), dtype=np.float32)) for ids in some])
            whole[some[0]] = 1
            pushes = {
                "whole array": partial(kv.push, "whole", whole),
                "rows": lambda given=given: kv.push("rows", mpikv.RowSparse(*next(given), shape)),
            }
            title = f"push, {share:.1%} of {options.rows:,} x 64"
            compare(comm, title, list(pushes.items()), options.rounds, warm=True)


SUITES = {"agreement": agreement, "checks": checks, "halves": halves, "codecs": compare_codecs, "threads": threads}
SUITES["rows"] = rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--rounds", type=int, default=41, help="rounds of each case (default 41)")
    parser.add_argument("--transport", default="auto", help="of the stores of agreement and rows (default auto)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a value (default 1000000)")
    parser.add_argument("--shares", default="0.001", help="of the rows, in a push (default 0.001)")
    parser.add_argument("--assign", action="store_true", help="rows without an optimizer: the sum replaces the value")
    parser.add_argument("--kernels", default="numpy", help="of the stores of halves and threads (default numpy)")
    parser.add_argument(
        "--mebibytes",
        type=int,
        help="MiB of float32 in halves (default 4), and of pushes in codecs (16) and threads (64)",
    )
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        library = " ".join(MPI.Get_library_version().split()[:3]).strip("\x00,")
        print(f"{comm.size} ranks, {library}; medians of {options.rounds} rounds")
    SUITES[options.suite](comm, options)


if __name__ == "__main__":
    main()
