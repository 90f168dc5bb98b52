"""Groups of whole key sets with an optimizer: all gradients of a model in one exchange."""

from __future__ import annotations

from functools import partial
from typing import Any

from .cases import Comparison, Factory, Group, Inputs
from .keysets import KeySet, key_set
from .options import Options
from .peers import Memcpy, ReducePerKey
from .rules import Rule
from .stores import PrivateArrays, ZeroCopy

_ROUNDS, _QUICK_ROUNDS = 15, 3

_OURS = {"store": "private arrays", "zero copy": "zero copy"}
_PEERS = {"Reduce per key": "Reduce, update, Bcast per key", "memcpy": "memcpy"}


def whole_set(comm: Any, options: Options, name: str, rule: Rule) -> tuple[Group, Inputs]:
    """Return the group of a key set with an optimizer, and the inputs of its cases on this rank."""
    keys = key_set(name, quick=options.quick)
    inputs = Inputs(comm.rank, keys)
    title = f"{keys.title}, {rule.title}"
    group = Group(
        f"{name}/{rule.name}",
        f"{keys.title} ({len(keys.shapes):,} keys, {keys.nbytes / 1e6:.3g} MB), {rule.title}",
        keys,
        rule,
        options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        _contenders(comm, options, keys, rule, inputs),
        [
            Comparison(f"{title}: {what} / {beside}", case, peer)
            for peer, beside in _PEERS.items()
            for case, what in _OURS.items()
        ],
        # Per rank: gradients, outputs and buffers (twice), and weights of a peer. Once: two stores, and the root's
        # sums and states.
        needed_bytes=keys.nbytes * (comm.size * 6 + 3 * (1 + rule.states)),
    )
    return group, inputs


def _contenders(comm: Any, options: Options, keys: KeySet, rule: Rule, inputs: Inputs) -> dict[str, Factory]:
    store = keys, rule, options.settings
    return {
        "store": lambda: partial(PrivateArrays, *store, inputs.gradients, inputs.outs),
        "zero copy": lambda: partial(ZeroCopy, *store, inputs.gradients),
        # Into the store's outputs: the store makes one more step before these are checked.
        "memcpy": lambda: partial(Memcpy, inputs.gradients, inputs.outs),
        "Reduce per key": lambda: partial(ReducePerKey, comm, inputs.gradients, rule),
    }
