"""Groups of one array: the latency and the bandwidth of a sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .cases import Comparison, Factory, Group, Inputs
from .keysets import KeySet
from .options import Options
from .peers import Allreduce
from .stores import SharedStore, Verb

_ROUNDS, _QUICK_ROUNDS = 41, 3
_SIZES, _QUICK_SIZES = tuple(64 << 2 * power for power in range(11)), (64, 1 << 12, 1 << 18)


def sizes(comm: Any, options: Options) -> list[Group]:
    """Return a group for each size: push and pull, alone and in turns, and pushpull, beside one Allreduce."""
    return [
        sum_of(comm, options, f"sizes/{nbytes}", nbytes, ("push", "pull", "push, pull", "pushpull"), [])
        for nbytes in (_QUICK_SIZES if options.quick else _SIZES)
    ]


def sum_of(
    comm: Any, options: Options, name: str, nbytes: int, verbs: tuple[str, ...], comparisons: list[Comparison]
) -> Group:
    """Return the group of calls of the store that sum one array, beside one Allreduce."""
    keys = KeySet(shown(nbytes), ((nbytes // 4,),))
    inputs, shared = Inputs(comm.rank, keys), SharedStore(keys, None, options.settings)
    factories: dict[str, Factory] = {verb: make_verb(shared, inputs, verb) for verb in verbs}
    factories["Allreduce"] = lambda: partial(Allreduce, comm, inputs.gradients[0])
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    return Group(name, f"sum of {keys.title}", keys, None, rounds, factories, comparisons)


def make_verb(shared: SharedStore, inputs: Inputs, verb: str) -> Factory:
    """Return the case of one or two calls for a single key."""

    def prepare() -> Callable[[], Verb]:
        value = inputs.gradients[0]
        out = np.empty_like(value)
        return lambda: Verb(shared.store(), shared.rule, verb, value, out)

    return prepare


def shown(nbytes: int) -> str:
    """Return a power of two in short.

    >>> shown(64), shown(4096), shown(64 << 20)
    ('64 B', '4 KB', '64 MB')
    """
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"
