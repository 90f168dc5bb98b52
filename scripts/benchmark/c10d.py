"""Calls of PyTorch's process groups on tensors of the host: the backend ``mpikv`` beside gloo, one thread a rank."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from mpikv.cli.bench.cases import Comparison, Factory, Group, unless
from mpikv.cli.bench.keysets import KeySet
from mpikv.cli.bench.single import shown
from mpikv.protocols import Array

from .options import Options
from .torch_peer import close_group, gloo_problem, open_group

_LIBRARIES = ("mpikv", "gloo")
_ROUNDS, _QUICK_ROUNDS = 21, 3
_SIZES, _QUICK_SIZES = (64, 1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26), (64, 1 << 18)


def collectives(comm: Any, options: Options, name: str) -> Iterator[Group]:
    """Yield a group for each type and size of tensor, for the call with that name."""
    for kind, width in (("float32", 4), ("bfloat16", 2)):
        for nbytes in _QUICK_SIZES if options.quick else _SIZES:
            title = f"{name} of {shown(nbytes)}, {kind}"
            work = name, kind, nbytes // width
            cases = {
                library: unless(partial(gloo_problem, comm), _case(comm, library, *work)) for library in _LIBRARIES
            }
            rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
            comparisons = [Comparison(f"{title}: mpikv / gloo", "mpikv", "gloo")]
            yield Group(f"{name}/{kind} {shown(nbytes)}", title, KeySet(title, ()), None, rounds, cases, comparisons)


def _case(comm: Any, library: str, name: str, kind: str, numbers: int) -> Factory:
    return lambda: partial(_Call, comm, library, name, kind, numbers)


class _Call:
    """One call on a tensor of zeros: its whole, of which each rank has a part in two of the calls."""

    exact = None

    def __init__(self, comm: Any, library: str, name: str, kind: str, numbers: int) -> None:
        """Collective."""
        torch, distributed = import_module("torch"), import_module("torch.distributed")
        torch.set_num_threads(1)
        self._group = open_group(comm, library)
        whole = torch.zeros(numbers // comm.size * comm.size, dtype=getattr(torch, kind))
        part = torch.zeros(numbers // comm.size, dtype=whole.dtype)
        calls: dict[str, tuple[Any, ...]] = {
            "all-reduce": (("all_reduce",), whole),
            "all-gather": (("all_gather_single", "all_gather_into_tensor"), whole, part),
            "reduce-scatter": (("reduce_scatter_single", "reduce_scatter_tensor"), part, whole),
            "broadcast": (("broadcast",), whole, 0),
        }
        # PyTorch 2.13 renames two calls, and warns at their former names.
        names, *operands = calls[name]
        call = next(getattr(distributed, one) for one in names if hasattr(distributed, one))
        self.step = partial(call, *operands, group=self._group)

    def results(self) -> list[Array]:
        return []

    def close(self) -> None:
        close_group(self._group)
