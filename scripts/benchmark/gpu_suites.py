"""Groups of cases on GPUs: sums of all sizes, kernels, and whole key sets with an optimizer."""

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

from .gpu_cases import COLLECTIVES, Copy, FlatUpdate, Nccl, OnGpu, Pack, Tiled, Update
from .gpus import RankGpu
from .options import Options
from .rules import RULES, Rule, floor
from .torch_peer import TorchBuckets, torch_problem
from .work import Work

_ROUNDS, _SET_ROUNDS, _QUICK_ROUNDS = 41, 15, 2
_SIZES, _QUICK_SIZES = tuple(64 << 2 * power for power in range(12)), (64, 1 << 16, 1 << 20)
# An array larger than any cache, of equal tiles, since the oracle is slower than a GPU.
_TILE, _TILES, _QUICK_TILE, _QUICK_TILES = 1 << 20, 64, 1000, 4
_PARTS = 160
# Sums stay on every rank: a push is an allReduce, and a pull a copy.
_REPLICATED = {"placement": "replicated"}
_VERBS = {"push": "allReduce", "pull": "", "pushpull": "allReduce"}


def gpu_works(comm: Any, options: Options, own: RankGpu) -> Iterator[Work]:
    """Yield the chosen groups; each makes its arrays with its cases. Local."""
    for name in options.groups:
        if name == "sizes":
            for nbytes in _QUICK_SIZES if options.quick else _SIZES:
                yield _sum(options, own, nbytes)
        elif name == "kernels":
            yield _kernels(options, own, None)
            for optimizer in options.optimizers:
                yield _kernels(options, own, RULES[optimizer])
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

    def nccl(name: str) -> Factory:
        def prepare() -> Callable[[], Contender]:
            own.find_nccl()
            return partial(Nccl, own, name, arrays.gradients[0])

        return prepare

    factories: dict[str, Factory] = {name: verb(name) for name in _VERBS}
    factories |= {name: nccl(name) for name in COLLECTIVES}
    factories["copy"] = lambda: partial(Copy, own, arrays.gradients[0])
    group = Group(
        f"sizes/{nbytes}",
        f"sum of {keys.title}",
        keys,
        None,
        _rounds(options, _ROUNDS),
        factories,
        [Comparison(f"sum of {keys.title}: {case} / NCCL's allReduce", case, "allReduce") for case in ("pushpull",)],
    )
    return Work(group, collectives={**_VERBS, **{name: name for name in COLLECTIVES}})


def _kernels(options: Options, own: RankGpu, rule: Rule | None) -> Work:
    """Return the kernel of an optimizer, or of packing, beside a copy; each rank by itself, all with one gradient."""
    tile, tiles = (_QUICK_TILE, _QUICK_TILES) if options.quick else (_TILE, _TILES)
    keys = KeySet(f"{tiles * tile:,} floats", ((tile,),))

    def whole() -> Array:
        (gradient,) = gradients(0, keys.shapes)
        return own.upload(np.tile(gradient, tiles))

    def tiled(make: Callable[[Array], Contender]) -> Factory:
        def prepare() -> Callable[[], Contender]:
            array = whole()
            return lambda: Tiled(make(array), tiles)

        return prepare

    factories: dict[str, Factory] = {"copy": tiled(lambda array: Copy(own, array, checked=rule is None))}
    floors = {"copy": 8}
    if rule is None:
        factories["pack"] = tiled(lambda array: Pack(own, array, _PARTS))
        floors["pack"] = 8
    else:
        factories["update"] = unless(lambda: _no_kernel(rule), tiled(lambda array: Update(own, rule, array)))
        floors["update"] = floor(rule, 1, private=False)
    what = f"{_PARTS} parts by one launch" if rule is None else f"the kernel of {rule.title}"
    rounds = _rounds(options, _SET_ROUNDS)
    name = f"kernels/{'copy' if rule is None else rule.name}"
    return Work(Group(name, f"{what}, {keys.title}", keys, rule, rounds, factories, summed=1, tiles=tiles), floors)


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
