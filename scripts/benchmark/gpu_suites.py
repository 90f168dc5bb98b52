"""Groups of cases on GPUs: sums of all sizes, and whole key sets with an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from mpikv.cli.bench.cases import Comparison, Factory, Group, unless
from mpikv.cli.bench.keysets import KeySet, gradients, key_set
from mpikv.cli.bench.rounds import Contender
from mpikv.cli.bench.single import shown
from mpikv.cli.bench.stores import PrivateArrays, SharedStore, Verb
from mpikv.protocols import Array

from .gpu_cases import Copy, FlatUpdate, Nccl, OnGpu
from .gpus import RankGpu
from .options import Options
from .rules import RULES, Rule
from .torch_peer import TorchBuckets, torch_problem
from .work import Work

_ROUNDS, _SET_ROUNDS, _QUICK_ROUNDS = 41, 15, 2
_SIZES, _QUICK_SIZES = tuple(64 << 2 * power for power in range(12)), (64, 1 << 16, 1 << 20)
# Sums stay on every rank: a push is an allReduce, and a pull a copy.
_REPLICATED = {"placement": "replicated"}
_VERBS = ("push", "pull", "pushpull")


def gpu_works(comm: Any, options: Options, own: RankGpu) -> Iterator[Work]:
    """Yield the chosen groups; each makes its arrays with its cases. Local."""
    for name in options.groups:
        if name == "sizes":
            for nbytes in _QUICK_SIZES if options.quick else _SIZES:
                yield _sum(options, own, nbytes)
        else:
            for optimizer in options.optimizers:
                yield _whole_set(comm, options, own, name, RULES[optimizer])


class _Arrays:
    """A rank's gradients and outputs on its GPU, made at first use."""

    def __init__(self, own: RankGpu, keys: KeySet) -> None:
        self._own, self._keys = own, keys

    @cached_property
    def gradients(self) -> list[Array]:
        return [self._own.upload(gradient) for gradient in gradients(self._own.rank, self._keys.shapes)]

    @cached_property
    def outs(self) -> list[Array]:
        return [self._own.filled(shape, np.nan) for shape in self._keys.shapes]

    @cached_property
    def whole(self) -> Array:
        """All gradients in one array."""
        parts = [gradient.reshape(-1) for gradient in gradients(self._own.rank, self._keys.shapes)]
        return self._own.upload(np.concatenate(parts))


def _sum(options: Options, own: RankGpu, nbytes: int) -> Work:
    """Return push, pull and pushpull of one array without an updater, beside NCCL by itself, and a copy."""
    # A multiple of the ranks, as in nccl-tests.
    keys = KeySet(shown(nbytes), ((max(1, nbytes // 4 // own.size) * own.size,),))
    arrays = _Arrays(own, keys)
    shared = SharedStore(keys, None, {**options.settings, **_REPLICATED}, own.ones)

    def verb(name: str) -> Factory:
        def prepare() -> Callable[[], Contender]:
            value, out = arrays.gradients[0], own.filled(keys.shapes[0], np.nan)
            return lambda: OnGpu(own, Verb(shared.store(), None, name, value, out))

        return prepare

    def nccl() -> Callable[[], Contender]:
        own.find_nccl()
        return partial(Nccl, own, arrays.gradients[0])

    factories: dict[str, Factory] = {name: verb(name) for name in _VERBS}
    factories |= {"allReduce": nccl, "copy": lambda: partial(Copy, own, arrays.gradients[0])}
    group = Group(
        f"sizes/{nbytes}",
        f"sum of {keys.title}",
        keys,
        None,
        _rounds(options, _ROUNDS),
        factories,
        [Comparison(f"sum of {keys.title}: pushpull / NCCL's allReduce", "pushpull", "allReduce")],
    )
    return Work(group, sums=frozenset(("push", "pushpull", "allReduce")))


def _whole_set(comm: Any, options: Options, own: RankGpu, name: str, rule: Rule) -> Work:
    """Return one pushpull of all keys with an optimizer, beside the least work, PyTorch, and a copy of the bytes."""
    keys = _small(options) if name == "small" else key_set(name, quick=options.quick)
    arrays = _Arrays(own, keys)
    title = f"{keys.title}, {rule.title}"

    def flat() -> Callable[[], Contender]:
        own.find_nccl()
        return partial(FlatUpdate, own, keys, rule, arrays.whole)

    def store() -> Callable[[], Contender]:
        given = keys, rule, options.settings, arrays.gradients, arrays.outs, own.ones
        return lambda: OnGpu(own, PrivateArrays(*given))

    factories: dict[str, Factory] = {
        "store": store,
        "allReduce, update": unless(lambda: _no_kernel(rule), flat),
        "torch DDP": unless(
            lambda: torch_problem(comm, rule, own),
            lambda: partial(TorchBuckets, comm, list(gradients(own.rank, keys.shapes)), rule, own),
        ),
        "copy": lambda: partial(Copy, own, arrays.whole),
    }
    group = Group(
        f"{name}/{rule.name}",
        f"{keys.title} ({len(keys.shapes):,} keys, {keys.nbytes / 1e6:.3g} MB), {rule.title}",
        keys,
        rule,
        _rounds(options, _SET_ROUNDS),
        factories,
        [Comparison(f"{title}: pushpull / {beside}", "store", peer) for peer, beside in _PEERS.items()],
    )
    return Work(group)


def _small(options: Options) -> KeySet:
    """Return many equal keys; few with ``--quick``."""
    count = 20 if options.quick else 1000
    return KeySet(f"{count:,} keys of 4 KB", ((1024,),) * count)


_PEERS: Mapping[str, str] = {
    "allReduce, update": "one allReduce and one kernel",
    "torch DDP": "PyTorch's NCCL, DDP's buckets, fused update",
    "copy": "a copy of the bytes",
}


def _no_kernel(rule: Rule) -> str:
    """Return why an update is not one kernel over any part of a value; empty if it is."""
    return "the rate of LAMB is that of a whole value, and takes more than one kernel" if rule.name == "lamb" else ""


def _rounds(options: Options, usual: int) -> int:
    return options.rounds or (_QUICK_ROUNDS if options.quick else usual)
