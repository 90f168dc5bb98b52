"""Groups of one array, and of a hundred small ones, beside a loop with mpi4py."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv.cli.bench.cases import Comparison, Factory, Group, Inputs
from mpikv.cli.bench.keysets import KeySet
from mpikv.cli.bench.rules import SGD
from mpikv.cli.bench.single import make_verb, shown, sum_of
from mpikv.cli.bench.stores import PrivateArrays, SharedStore
from mpikv.protocols import Array

from .options import Options

_ROUNDS, _QUICK_ROUNDS = 41, 3


def one_large_array(comm: Any, options: Options) -> Group:
    """Return the group of one array of 64 MB (quick: 1 MB) and one Allreduce."""
    nbytes = 1 << (20 if options.quick else 26)
    goal = f"sum of {shown(nbytes)}: pushpull / Comm.Allreduce"
    comparisons = [Comparison(goal, "pushpull", "Allreduce", _bound(comm, options, 0.35))]
    return sum_of(comm, options, "allreduce", nbytes, ("pushpull",), comparisons)


def one_key(comm: Any, options: Options) -> Group:
    """Return the group of a single key of 64 B with SGD-momentum, beside a loop with mpi4py."""
    keys = KeySet("1 key of 64 B", ((16,),))
    inputs = Inputs(comm.rank, keys)
    # A store for each verb: two verbs on one store would step the same weight.
    ours = {
        verb: make_verb(SharedStore(keys, SGD, options.settings), inputs, verb) for verb in ("push, pull", "pushpull")
    }
    return _beside_the_loop(comm, options, "push-pull/1 key", inputs, keys, ours, 1.8)


def hundred_keys(comm: Any, options: Options) -> Group:
    """Return the group of a list of 100 keys of 64 B with SGD-momentum, beside a loop with mpi4py."""
    keys = KeySet("100 keys of 64 B", ((16,),) * 100)
    inputs = Inputs(comm.rank, keys)

    ours: dict[str, Factory] = {
        "pushpull": lambda: partial(PrivateArrays, keys, SGD, options.settings, inputs.gradients, inputs.outs)
    }
    return _beside_the_loop(comm, options, "push-pull/100 keys", inputs, keys, ours, 0.35)


def _beside_the_loop(
    comm: Any, options: Options, name: str, inputs: Inputs, keys: KeySet, ours: dict[str, Factory], bound: float
) -> Group:
    title = f"{keys.title}, {SGD.title}"
    goal = f"{title}: {{}} / Allreduce and update per key"
    wanted = _bound(comm, options, bound)
    comparisons = [Comparison(goal.format(case), case, "Allreduce loop", wanted) for case in ours]
    factories: dict[str, Factory] = {**ours, "Allreduce loop": lambda: partial(AllreduceLoop, comm, inputs.gradients)}
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    return Group(name, title, keys, SGD, rounds, factories, comparisons)


def _bound(comm: Any, options: Options, bound: float) -> float | None:
    """Return the bound; None unless it holds: for two ranks and the full measurement."""
    return bound if comm.size == 2 and not options.quick else None


class AllreduceLoop:
    """For each key an Allreduce and, on every rank, an SGD-momentum update: the shortest loop with mpi4py."""

    exact = False

    def __init__(self, comm: Any, gradients: Sequence[Array]) -> None:
        self._comm = comm
        self._weights = [np.ones_like(gradient) for gradient in gradients]
        self._rows = [
            (gradient, np.empty_like(gradient), np.zeros_like(gradient), weight)
            for gradient, weight in zip(gradients, self._weights, strict=True)
        ]
        options = SGD.options
        self._rate, self._momentum = options["learning_rate"], options["momentum"]

    def step(self) -> None:
        allreduce, rate, keep = self._comm.Allreduce, self._rate, self._momentum
        multiply, subtract, add = np.multiply, np.subtract, np.add
        for gradient, total, momentum, weight in self._rows:
            allreduce(gradient, total)
            multiply(momentum, keep, out=momentum)
            multiply(total, rate, out=total)
            subtract(momentum, total, out=momentum)
            add(weight, momentum, out=weight)

    def results(self) -> list[Array]:
        return self._weights

    def close(self) -> None:
        pass
