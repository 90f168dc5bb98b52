"""Groups of one array, or of a hundred small ones: latency, and the bandwidth of a sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .cases import Comparison, Factory, Group, Inputs
from .keysets import KeySet
from .options import Options
from .peers import Allreduce, AllreduceLoop
from .rules import RULES
from .stores import PrivateArrays, SharedStore, Verb

__all__ = ["hundred_keys", "one_key", "one_large_array", "shown", "sizes"]

_ROUNDS, _QUICK_ROUNDS = 41, 3
_SIZES, _QUICK_SIZES = tuple(64 << 2 * power for power in range(11)), (64, 1 << 12, 1 << 18)


def sizes(comm: Any, options: Options) -> list[Group]:
    """Return a group for each size: push and pull, alone and in turns, and pushpull, beside one Allreduce."""
    return [
        _sum(comm, options, f"sizes/{nbytes}", nbytes, ("push", "pull", "push, pull", "pushpull"), [])
        for nbytes in (_QUICK_SIZES if options.quick else _SIZES)
    ]


def one_large_array(comm: Any, options: Options) -> Group:
    """Return the group of one array of 64 MB (quick: 1 MB) and one Allreduce."""
    nbytes = 1 << (20 if options.quick else 26)
    goal = f"sum of {shown(nbytes)}: pushpull / Comm.Allreduce"
    bound = _bound(comm, options, 0.35)
    comparisons = [Comparison(goal, "pushpull", "Allreduce", bound)]
    return _sum(comm, options, "allreduce", nbytes, ("pushpull",), comparisons)


def one_key(comm: Any, options: Options) -> Group:
    """Return the group of a single key of 64 B with SGD-momentum, beside a loop with mpi4py."""
    keys, rule = KeySet("1 key of 64 B", ((16,),)), RULES["sgd"]
    inputs = Inputs(comm.rank, keys)
    # A store for each verb: two verbs on one store would step the same weight.
    ours = {verb: _verb(SharedStore(keys, rule, options.settings), inputs, verb) for verb in ("push, pull", "pushpull")}
    return _beside_the_loop(comm, options, "push-pull/1 key", inputs, keys, ours, 1.8)


def hundred_keys(comm: Any, options: Options) -> Group:
    """Return the group of a list of 100 keys of 64 B with SGD-momentum, beside a loop with mpi4py."""
    keys = KeySet("100 keys of 64 B", ((16,),) * 100)
    inputs = Inputs(comm.rank, keys)

    ours: dict[str, Factory] = {
        "pushpull": lambda: partial(PrivateArrays, keys, RULES["sgd"], options.settings, inputs.gradients, inputs.outs)
    }
    return _beside_the_loop(comm, options, "push-pull/100 keys", inputs, keys, ours, 0.35)


def _sum(
    comm: Any, options: Options, name: str, nbytes: int, verbs: tuple[str, ...], comparisons: list[Comparison]
) -> Group:
    keys = KeySet(shown(nbytes), ((nbytes // 4,),))
    inputs, shared = Inputs(comm.rank, keys), SharedStore(keys, None, options.settings)
    factories: dict[str, Factory] = {verb: _verb(shared, inputs, verb) for verb in verbs}
    factories["Allreduce"] = lambda: partial(Allreduce, comm, inputs.gradients[0])
    return Group(name, f"sum of {keys.title}", keys, None, _rounds(options), factories, comparisons)


def _beside_the_loop(
    comm: Any, options: Options, name: str, inputs: Inputs, keys: KeySet, ours: dict[str, Factory], bound: float
) -> Group:
    title = f"{keys.title}, SGD-momentum"
    comparisons = [
        Comparison(
            f"{title}: {case} / Allreduce and update per key", case, "Allreduce loop", _bound(comm, options, bound)
        )
        for case in ours
    ]
    factories: dict[str, Factory] = {**ours, "Allreduce loop": lambda: partial(AllreduceLoop, comm, inputs.gradients)}
    return Group(name, title, keys, RULES["sgd"], _rounds(options), factories, comparisons)


def _verb(shared: SharedStore, inputs: Inputs, verb: str) -> Factory:
    def prepare() -> Callable[[], Verb]:
        value = inputs.gradients[0]
        out = np.empty_like(value)
        return lambda: Verb(shared.store(), shared.rule, verb, value, out)

    return prepare


def _bound(comm: Any, options: Options, bound: float) -> float | None:
    """Return the bound; None unless it holds: for two ranks and the full measurement."""
    return bound if comm.size == 2 and not options.quick else None


def _rounds(options: Options) -> int:
    return options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)


def shown(nbytes: int) -> str:
    """Return a power of two in short.

    >>> shown(64), shown(4096), shown(64 << 20)
    ('64 B', '4 KB', '64 MB')
    """
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"
