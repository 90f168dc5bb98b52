"""Groups of whole key sets with an optimizer: all gradients of a model in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...protocols import Array
from .cases import Comparison, Factory, Group, Inputs, unless
from .keysets import KeySet, key_set
from .options import Options
from .peers import Memcpy, ReducePerKey
from .rules import Rule
from .stores import PrivateArrays, ZeroCopy, kernels_problem
from .torch_peer import TorchBuckets, torch_problem

__all__ = ["whole_set"]

_ROUNDS, _QUICK_ROUNDS = 15, 3

_OURS = {
    "store": "private arrays",
    "store numba": "private arrays, numba",
    "zero copy": "zero copy",
    "zero copy numba": "zero copy, numba",
}
_PEERS = {
    "torch DDP": "PyTorch gloo, DDP's buckets, fused update",
    "Reduce per key": "Reduce, update, Bcast per key",
    "memcpy": "memcpy",
}

# With SGD-momentum on two ranks.
_BOUNDS = {
    ("store", "torch DDP"): 0.30,
    ("store numba", "torch DDP"): 0.25,
    ("zero copy", "torch DDP"): 0.15,
    ("zero copy numba", "torch DDP"): 0.15,
    ("store", "Reduce per key"): 0.60,
    ("store numba", "Reduce per key"): 0.60,
    ("zero copy", "memcpy"): 1.5,
    ("zero copy numba", "memcpy"): 1.15,
}


def whole_set(comm: Any, options: Options, name: str, rule: Rule) -> Group:
    """Return the group of a key set with an optimizer: the store, the yardstick and peers."""
    keys = key_set(name, quick=options.quick)
    inputs = Inputs(comm.rank, keys)
    bounded = name != "many" and (rule.name, comm.size, options.quick) == ("sgd", 2, False)
    return Group(
        f"{name}/{rule.name}",
        f"{keys.title} ({len(keys.shapes):,} keys, {keys.nbytes / 1e6:.3g} MB), {rule.title}",
        keys,
        rule,
        options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        _contenders(comm, options, keys, rule, inputs),
        _comparisons(f"{keys.title}, {rule.title}", _BOUNDS if bounded else {}),
        _floors(rule, comm.size),
        inputs,
        # Per rank: gradients, outputs and buffers (twice), weights of a peer; PyTorch's buckets, weights, states and
        # gloo's buffers. Once: four stores, and the root's sums and states.
        keys.nbytes * (comm.size * (9 + rule.states) + 5 * (1 + rule.states)),
    )


def _contenders(comm: Any, options: Options, keys: KeySet, rule: Rule, inputs: Inputs) -> dict[str, Factory]:
    numba = {**options.settings, "kernels": "numba"}

    def private(settings: Mapping[str, Any], outs: Callable[[], list[Array]]) -> Factory:
        return lambda: partial(PrivateArrays, keys, rule, settings, inputs.gradients, outs())

    def zero_copy(settings: Mapping[str, Any]) -> Factory:
        return lambda: partial(ZeroCopy, keys, rule, settings, inputs.gradients)

    return {
        "store": private(options.settings, lambda: inputs.outs),
        "store numba": unless(lambda: kernels_problem("numba"), private(numba, inputs.new_outs)),
        "zero copy": zero_copy(options.settings),
        "zero copy numba": unless(lambda: kernels_problem("numba"), zero_copy(numba)),
        # Into the store's outputs: the store makes one more step before these are checked.
        "memcpy": lambda: partial(Memcpy, inputs.gradients, inputs.outs),
        "Reduce per key": lambda: partial(ReducePerKey, comm, inputs.gradients, rule),
        "torch DDP": unless(
            lambda: torch_problem(comm, rule), lambda: partial(TorchBuckets, comm, inputs.gradients, rule)
        ),
    }


def _comparisons(title: str, bounds: Mapping[tuple[str, str], float]) -> list[Comparison]:
    return [
        Comparison(f"{title}: {what} / {beside}", case, peer, bounds.get((case, peer)))
        for peer, beside in _PEERS.items()
        for case, what in _OURS.items()
    ]


def _floors(rule: Rule, size: int) -> dict[str, int]:
    ours = {case: rule.floor(size, private=case.startswith("store")) for case in _OURS}
    return {**ours, "memcpy": 8 * size}
