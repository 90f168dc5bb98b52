"""The key sets of ``mpikv bench`` with compiled kernels, PyTorch beside them, and what the project aims at."""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from mpikv.cli.bench import sets
from mpikv.cli.bench.cases import Comparison, Factory, Group, unless
from mpikv.cli.bench.stores import PrivateArrays, ZeroCopy

from .options import Options
from .rules import Rule, floor
from .torch_peer import TorchBuckets, torch_problem

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


def kernels_problem(kernels: str) -> str:
    """Return why the store cannot use these kernels; empty if it can."""
    return "" if find_spec(kernels) else f"{kernels} is not installed"


def whole_set(comm: Any, options: Options, name: str, rule: Rule) -> Group:
    """Return the group of a key set with an optimizer: the store, the yardstick and peers."""
    group, inputs = sets.whole_set(comm, options, name, rule)
    keys, numba = group.keys, {**options.settings, "kernels": "numba"}
    ours: dict[str, Factory] = {
        "store numba": lambda: partial(PrivateArrays, keys, rule, numba, inputs.gradients, inputs.new_outs()),
        "zero copy numba": lambda: partial(ZeroCopy, keys, rule, numba, inputs.gradients),
    }
    given = dict(group.factories)
    group.factories = {
        "store": given.pop("store"),
        "store numba": unless(lambda: kernels_problem("numba"), ours["store numba"]),
        "zero copy": given.pop("zero copy"),
        "zero copy numba": unless(lambda: kernels_problem("numba"), ours["zero copy numba"]),
        **given,
        "torch DDP": unless(
            lambda: torch_problem(comm, rule), lambda: partial(TorchBuckets, comm, inputs.gradients, rule)
        ),
    }
    bounded = name != "many" and (rule.name, comm.size, options.quick) == ("sgd", 2, False)
    bounds: Mapping[tuple[str, str], float] = _BOUNDS if bounded else {}
    title = f"{keys.title}, {rule.title}"
    group.comparisons = [
        Comparison(f"{title}: {what} / {beside}", case, peer, bounds.get((case, peer)))
        for peer, beside in _PEERS.items()
        for case, what in _OURS.items()
    ]
    # Two more stores, and PyTorch's buckets, weights, states and gloo's buffers.
    group.needed_bytes += keys.nbytes * (comm.size * (3 + rule.states) + 2 * (1 + rule.states))
    group.floors = {case: floor(rule, comm.size, private=case.startswith("store")) for case in _OURS}
    group.floors |= {"memcpy": 8 * comm.size}
    return group
