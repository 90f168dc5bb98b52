"""Sums of all sizes, and the keys of networks with optimizers: beside NCCL by itself, and a copy of the bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from .step import Numbers, own_rank, store
from .timing import gpu_seconds

QUICK, SIZES = (64, 1 << 16, 1 << 20), (64, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
Reduce = Callable[[Any, Any], None]


def sets(quick: bool = False) -> Numbers:
    """Time pushpull of 64 B to 256 MB, and of sets of keys with optimizers, beside NCCL's allReduce and a copy of the
    bytes. All results are compared with numpy's.
    """
    from benchmark.rules import RULES

    from mpikv.cli.bench.keysets import KeySet, key_set
    from mpikv.cli.bench.single import shown

    with store() as kv, all_reduce(kv) as nccl:
        found: Numbers = {}
        for nbytes in QUICK if quick else SIZES:
            found |= times(KeySet(f"sum of {shown(nbytes)}", ((nbytes // 4,),)), None, nccl)
        count = 20 if quick else 1000
        small = KeySet(f"{count:,} keys of 4 KB", ((1024,),) * count)
        for keys in (small, *(key_set(name, quick=False) for name in (() if quick else ("resnet50", "bert-base")))):
            for rule in RULES.values():
                found |= times(keys, rule, nccl)
        return found


def times(keys: Any, rule: Any, nccl: Reduce | None) -> Numbers:
    """Time a store of these keys, NCCL and a copy. Collective."""
    import cupy
    import numpy as np

    from mpikv.cli.bench.keysets import gradients
    from mpikv.cli.bench.oracle import mismatches
    from mpikv.cli.bench.rounds import Case

    title = f"{keys.title}, {rule.title}" if rule else keys.title
    given = list(gradients(own_rank(), keys.shapes))
    sent, outs = [cupy.asarray(one) for one in given], [cupy.full(shape, np.nan, "f4") for shape in keys.shapes]
    whole = cupy.asarray(np.concatenate([one.reshape(-1) for one in given]))
    other = cupy.full_like(whole, np.nan)  # an element that is not written must not look like a sum
    # Sums stay on every rank: a push is an allReduce.
    with store(**({} if rule else {"placement": "replicated"})) as kv:
        kv.init(keys.keys, [cupy.ones(shape, "f4") for shape in keys.shapes])
        if rule:
            kv.set_optimizer(rule.name, **rule.options)
        contender: Any = SimpleNamespace(exact=False)
        contender.step = lambda: kv.pushpull(keys.keys, sent, out=outs)
        contender.results = lambda: (out.get() for out in outs)
        case = Case(title, contender)
        found: Numbers = {f"{title}: pushpull_us": gpu_seconds(case.run_once, 5) * 1e6}
        if wrong := mismatches([case], keys, kv.size, rule):
            raise AssertionError(f"rank {kv.rank}: {wrong}")
    found[f"{title}: copy_us"] = gpu_seconds(lambda: cupy.copyto(other, whole)) * 1e6
    if nccl is not None:
        found[f"{title}: allReduce_us"] = gpu_seconds(lambda: nccl(whole, other)) * 1e6
        if rule is None:
            np.testing.assert_allclose(other.get(), outs[0].get(), 1e-6, err_msg="NCCL's own sum")
    return found


@contextmanager
def all_reduce(kv: Any) -> Iterator[Reduce | None]:
    """Give NCCL's sum of float32, out of place; None on one rank, where it is a copy. Collective."""
    if kv.size == 1:
        yield None
        return
    import cupy

    from mpikv.compute.cuda.gpu import find_nccl

    nccl = find_nccl()
    identity = kv.comm.bcast(nccl.get_unique_id() if kv.is_root else None)
    ranks = nccl.NcclCommunicator(kv.size, identity, kv.rank)

    def reduce(source: Any, target: Any) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        ranks.allReduce(source.data.ptr, target.data.ptr, source.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    yield reduce
    cupy.cuda.get_current_stream().synchronize()
    kv.barrier()
    ranks.destroy()
