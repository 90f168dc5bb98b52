"""Copies of weights between ranks, and checks that all have the same: a rank may have loaded or changed its own.

Most passes compare and send nothing. Each rank notices changes outside of a step by the version counters and addresses
of its tensors; the census of the next pass tells the others. Some changes leave no such mark. Comparisons in passes 1,
2, 4, 8 and so on, and at the end, find these.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from pickle import dumps, loads
from typing import Any
from zlib import crc32

import numpy as np
import torch

from ..store.kvstore import KVStore
from .calls import check_equal

_version_of = attrgetter("_version")

# Least number of passes between comparisons after changes: a program may change weights in each pass.
_PAUSE = 64

# Relative tolerance of the sum over a loaded state: ranks with different processors may round differently.
_ROUNDING = 1e-4

_ADVICE = (
    "load and change weights, gradients and states on every rank alike, or weights before attach, or copy the root's "
    "states by optimizer.load_state_dict, and its weights by mpikv.torch.broadcast(model)"
)


def fill_from_root(kv: KVStore, prefix: str, named: dict[Any, Any]) -> None:
    """Overwrite tensors, in place, by the root's; the store has keys for them meanwhile. Collective."""
    with torch.no_grad():
        rows = {f"{prefix}{name}": tensor.detach() for name, tensor in named.items() if tensor.numel()}
        if rows:
            kv.broadcast(rows)
            kv.delete(list(rows))


def copy_from(
    kv: KVStore, leader: int, buffers: Iterable[Any], parameters: Iterable[Any], optimizers: Iterable[Any]
) -> None:
    """Overwrite tensors and optimizer states by the leader's, in place. The caller must report an error of one rank to
    the others, e.g. by ``raising_on_all``. Collective.

    User code runs here, and no rank waits outside of a call of the store.
    """
    # By .data, past autograd's version counter: a live graph has saved the buffers, and would refuse to run backward.
    tensors, optimizers = [*(one.data for one in buffers), *parameters], list(optimizers)
    packed = b""
    if kv.rank == leader:
        packed = dumps(([one.detach() for one in tensors], [one.state_dict() for one in optimizers]))
    kv.barrier()
    packed = kv.comm.bcast(packed, leader)
    if kv.rank != leader:
        copies, states = loads(packed)
        with torch.no_grad():
            for one, other in zip(tensors, copies, strict=True):
                one.copy_(other)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    kv.barrier()


class Weights:
    """The parameters of a model, trained or frozen, and the loaded states of its optimizers."""

    def __init__(self, kv: KVStore, prefix: str, optimizers: Iterable[Any]) -> None:
        """Note, by hooks, every load of a state by these optimizers, until :meth:`release`; send nothing. Local.

        The tensors to compare come by :meth:`watch`.
        """
        self._kv, self._key = kv, f"{prefix}*weights"
        self._tensors: dict[str, Any] = {}
        self.optimizers = list(optimizers)
        self._handles = [one.register_load_state_dict_post_hook(self._note_loaded_state) for one in self.optimizers]
        self._states: dict[Any, float] = {}
        """For an optimizer a sum over its loaded state."""
        self._marks, self._is_loaded = 0, False
        self._pending, self._wait = False, 0
        """Whether a comparison is due, and after how many passes; the same on every rank."""

    def watch(self, named: Iterable[tuple[str, Any]]) -> None:
        """Add tensors to compare; accept all as they are, unless one has changed since the last step. Local."""
        touched = self.is_touched()
        self._tensors.update(named)
        if not touched:
            self.accept()

    def release(self) -> None:
        """Remove the hooks on loads of optimizer states. Local."""
        for handle in self._handles:
            handle.remove()

    def is_touched(self) -> bool:
        """Return whether weights have changed, or a state was loaded, on this rank since the last step. Local."""
        return self._is_loaded or self._marks != self._find_marks()

    def is_suspect(self) -> bool:
        """Return whether weights have changed since the last step, or a loaded state was not compared yet. Local."""
        return bool(self._states) or self.is_touched()

    def accept(self) -> None:
        """Note the versions of weights: only later changes count as made outside of a step. Local; after each step."""
        self._marks, self._is_loaded = self._find_marks(), False

    def forget(self) -> None:
        """Forget loaded states and changes of weights so far, as all ranks count as equal now. Local."""
        self._states.clear()
        self.accept()

    def close_pass(self, changed: bool, number: int) -> None:
        """At a pass's end: compare weights if that is due, or ``number`` a power of two; accept changes. Collective.

        ``changed`` says whether weights of a rank had changed before the pass ended.

        Raises:
            RankMismatch: ranks have different weights.
        """
        self._pending, self._wait = self._pending or changed, max(self._wait - 1, 0)
        due = self._pending and not self._wait
        if due or not number & (number - 1):  # a power of two
            self._pending, self._wait = False, _PAUSE if due else self._wait
            self.compare("backward")
        if changed:
            self.forget()

    def compare(self, verb: str) -> None:
        """Raise RankMismatch unless weights and loaded states agree up to rounding; drop the states' sums. Collective.

        The loaded states then count as compared.
        """
        kv, tensors = self._kv, self._tensors.values()
        if kv.size == 1 or not (self._tensors or self.optimizers):
            return
        states = [self._states.get(optimizer, 0.0) for optimizer in self.optimizers]
        self._states.clear()
        # Exact in a float64, which carries it: a CRC-32 has 32 bits, a float64 53.
        sums = [crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy()) for tensor in tensors]
        own = np.array([*states, *sums])
        roots = own.copy()
        kv.broadcast(self._key, roots)
        kv.delete(self._key)
        differ = [
            f"the state that {type(optimizer).__name__} has loaded"
            for optimizer, here, there in zip(self.optimizers, own, roots, strict=False)
            if abs(here - there) > _ROUNDING * there
        ]
        if kv.any_rank(bool((own != roots).any())):
            differ += self._find_other_weights()
        here = f"other than on the root: {_join_names(differ)}" if differ else "as on the root"
        check_equal(kv, here, verb, f"weights or states are not the same on all ranks; {_ADVICE}")

    def _find_other_weights(self) -> list[str]:
        """Return the names of weights that are not the root's up to rounding, comparing all numbers. Collective."""
        differ = []
        for name, tensor in self._tensors.items():
            own = tensor.detach()
            roots = own.clone()
            fill_from_root(self._kv, f"{self._key}/", {name: roots})
            if not _are_close(own, roots):
                differ.append(name)
        return differ

    def _note_loaded_state(self, optimizer: Any) -> None:
        """In a hook after an optimizer has loaded a state: note that, with a sum over the state. Local.

        This hook runs first, before a sharded step cuts the state.
        """
        values = (value for state in optimizer.state.values() for value in state.values())
        tensors = [value.detach() for value in values if isinstance(value, torch.Tensor)]
        # Plus one: a state of zeros must differ from no state.
        self._is_loaded = True
        self._states[optimizer] = 1.0 + sum(float(_finite(one.abs()).sum(dtype=torch.float64)) for one in tensors)

    def _find_marks(self) -> int:
        """Return a sum of the tensors' versions and addresses, which most changes of one alter. Local."""
        tensors = self._tensors.values()
        # Addresses, too: an assignment to ``.data`` leaves the version as it was.
        return int(sum(map(_version_of, tensors)) + sum(map(torch.Tensor.data_ptr, tensors)))


def _are_close(tensor: Any, other: Any) -> bool:
    """Return whether the differences of two tensors are as small as rounding on other processors. Local.

    An infinity is close to itself alone, and NaN to NaN.

    >>> _are_close(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-6]))
    True
    >>> _are_close(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-2]))
    False
    """
    if not (tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())):
        return bool(torch.equal(tensor, other))
    room = torch.finfo(tensor.dtype).eps ** 0.5
    largest = float(_finite(other.abs()).max())
    return bool(torch.allclose(tensor, other, room, room * largest, equal_nan=True))


def _finite(tensor: Any) -> Any:
    """Return a copy with zeros for infinities and NaN: these would hide differences of all other numbers. Local."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _join_names(names: list[str]) -> str:
    """Return a text of up to three names, and of how many more there are. Local."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
