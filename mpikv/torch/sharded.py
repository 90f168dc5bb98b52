"""An optimizer's step in shards: each rank updates its part of the weights, and sends that to the others.

A rank keeps the state of its part alone. The optimizer itself runs, on slices of weights and gradients. So its rule,
options, groups and schedules are PyTorch's. This is stage 1 of ZeRO: Rajbhandari et al., ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models, SC 2020, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported
from ..store.kvstore import KVStore
from .calls import mean_loss, raising_on_all
from .tensors import init_sums, row_of

if TYPE_CHECKING:
    from .backward import BackwardSync

_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Optimizers of torch that update each element by itself; a rank can own any part of a parameter."""

_WHOLE = ("Adafactor", "Muon")
"""Optimizers of torch that update each parameter by itself; a rank owns whole parameters."""


def _kinds(names: Sequence[str]) -> tuple[type[Any], ...]:
    """Return the classes of torch.optim with these names, without those that this PyTorch lacks. Local."""
    return tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))


def check_shardable(optimizer: Any) -> None:
    """Raise Unsupported unless this type of optimizer updates each element, or parameter, by itself. Local.

    >>> check_shardable(torch.optim.LBFGS([torch.zeros(2)]))
    Traceback (most recent call last):
    mpikv.errors.Unsupported: update='store' ...
    """
    if type(optimizer) not in _kinds(_ELEMENTWISE + _WHOLE):
        raise Unsupported(
            f"update='store' runs an optimizer on parts of the weights, and cannot know whether {type(optimizer)!r} "
            f"may be; pass update='local', or one of torch.optim's {', '.join(_ELEMENTWISE + _WHOLE)}"
        )


@dataclass
class _Part:
    """A parameter with its division among the ranks, and this rank's part of it."""

    key: str
    """Names the parameter, for the comparison of ranks and in checkpoints; the store has no such key."""
    parameter: Any
    strides: tuple[int, ...]
    """The parameter's when it was divided."""
    ranges: Mapping[int, tuple[int, int]]
    """For each rank with a part: its elements ``[low, high)`` in memory order."""
    rank: int
    """This rank."""
    whole: bool
    """Whether ranks own whole parameters; then a nonempty part has the parameter's shape."""
    shard: Any = None
    """The optimizer's parameter during a step; None if the part is empty."""

    def of(self, tensor: Any) -> Any:
        """Return this rank's part of a tensor like the parameter: all of it, or a flat view of it, or of a copy if its
        strides are others. Local.
        """
        if self.whole:
            return tensor.detach()
        if tensor.stride() != self.parameter.stride():
            other, pattern = tensor.detach(), self.parameter
            tensor = torch.empty_strided(pattern.shape, pattern.stride(), dtype=other.dtype).copy_(other)
        return row_of(tensor)[slice(*self.ranges[self.rank])]


class ShardedStep:
    """Replaces an optimizer's ``step``: it updates this rank's part and exchanges the weights. Collective."""

    def __init__(
        self, kv: KVStore, prefix: str, optimizer: Any, sync: BackwardSync, check: Callable[..., None]
    ) -> None:
        """Replace ``optimizer.step``, and hook its state dicts: from now on ``state_dict`` is collective, and gathers
        all parts. ``check(optimizer)`` raises before a bad step. Local; the parameters come by :meth:`divide`.
        """
        self._kv, self._prefix, self.optimizer, self._sync, self._check = kv, prefix, optimizer, sync, check
        self._is_whole = type(optimizer) in _kinds(_WHOLE)
        self._parts: dict[Any, _Part] = {}
        self._wrapped = optimizer.step
        self._key = ""
        """The key whose memory the weights pass through."""
        self._released = False

        @wraps(self._wrapped)
        def step(_: Any, closure: Any = None) -> Any:
            """Make the sharded step, and return the mean loss over ranks. Collective."""
            return self._step(closure)

        # A method, not a function: torch's schedulers unbind it (``step.__func__``) to count its calls.
        self._method = optimizer.step = MethodType(torch.compiler.disable(step), optimizer)
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._gather_state()),
            optimizer.register_state_dict_post_hook(lambda *_: self._cut_state()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._cut_state()),
        ]

    def release(self) -> None:
        """Remove the hooks and restore the optimizer, with the whole state on every rank. Collective."""
        for handle in self._handles:
            handle.remove()
        if self.optimizer.step is self._method:
            self.optimizer.step = self._wrapped
        self._released = True
        try:
            self._gather_state()
        finally:
            self._parts.clear()

    def divide(self, named: Iterable[tuple[str, Any]]) -> None:
        """Give each rank its part of these parameters, and memory to pass them on; cut the state to it. Collective.

        All ranks must have the root's values already.
        """
        # As they are if there is too little memory: then every rank raises MemoryError.
        named, kv, parts = list(named), self._kv, dict(self._parts)
        for (name, parameter), ranges in zip(named, self._divide([one.numel() for _, one in named]), strict=True):
            key, strides = f"{self._prefix}{name}*weight", parameter.stride()
            part = parts[parameter] = _Part(key, parameter, strides, ranges, kv.rank, self._is_whole)
            if kv.rank in ranges:
                part.shard = torch.nn.Parameter(part.of(parameter))
        if named and kv.size > 1:
            self._key = self._key or f"{self._prefix}{named[0][0]}*weights"
            nbytes = sum(one.numel() * one.element_size() for one in parts)
            # One zero, seen as many: this rank needs no memory of its own here.
            init_sums(
                kv, self._prefix, [self._key], [torch.zeros((), dtype=torch.uint8).expand(nbytes)], overwrite=True
            )
        self._parts = parts
        self._cut_state()

    def _divide(self, sizes: Sequence[int]) -> Iterator[dict[int, tuple[int, int]]]:
        """Yield a dict for each parameter, from each rank that owns some of its elements to their range. Local."""
        ranks, begin = self._kv.size, 0
        if self._is_whole:
            yield from ({owner: (0, size)} for size, owner in zip(sizes, _balance(sizes, ranks), strict=True))
            return
        # Equal shares of all elements, across parameters: a rank's share may begin and end inside of one.
        shares = [*pairwise(sum(sizes) * rank // ranks for rank in range(ranks + 1))]
        for size in sizes:
            ranges = [(max(low - begin, 0), min(high - begin, size)) for low, high in shares]
            yield {rank: (low, high) for rank, (low, high) in enumerate(ranges) if low < high}
            begin += size

    def _find_fault(self) -> Unsupported | None:
        """Return an Unsupported error if a parameter's strides have changed since attach, else None. Local."""
        for part in self._parts.values():
            if (strides := part.parameter.stride()) != part.strides:
                shape = tuple(part.parameter.shape)
                return Unsupported(
                    f"a parameter of shape {shape} has strides {strides}, and had {part.strides} when the "
                    "model was attached (model.to(memory_format=...) changes them); call detach(), and attach the "
                    "model as it is now, with a new optimizer"
                )
        return None

    # --- A step

    def _step(self, closure: Any) -> Any:
        """Run the closure, update this rank's shards, exchange the new weights; return the mean loss. Collective."""
        if self._released:  # a scheduler has kept this method
            return self._wrapped(closure)
        # Before the step: these optimizers call a closure once, at the start; in the step it would find shards in place
        # of the parameters.
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._check(self.optimizer)
        if fault := self._find_fault():
            self._kv.raise_on_all_ranks(fault, "optimizer.step")
        loss = mean_loss(self._kv, loss)
        trained = [one for group in self.optimizer.param_groups for one in _with_gradient(group)]
        self.divide((self._sync.watched[one].name, one) for one in trained if one not in self._parts)
        changed = [self._parts[one] for one in trained]
        # Before the rule changes anything: ranks that differ here may go on.
        self._kv.check_equal("\n".join(["weights", *(part.key for part in changed)]), "optimizer.step")
        with self._shards_in_place(), raising_on_all(self._kv, "optimizer.step"):  # a user's hook may raise
            self._wrapped()
        if changed:
            self._exchange(changed)
        self._sync.weights.accept()
        return loss

    @contextmanager
    def _shards_in_place(self) -> Iterator[None]:
        """In a with block: put this rank's shards in place of the parameters in the optimizer's groups. Local."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group in groups:
            parts = [self._parts[parameter] for parameter in _with_gradient(group)]
            owned = [part for part in parts if part.shard is not None]
            for part in owned:
                part.shard.data, part.shard.grad = part.of(part.parameter.data), part.of(part.parameter.grad)
            group["params"] = [part.shard for part in owned]
        try:
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            for part in self._parts.values():
                if part.shard is not None:
                    part.shard.grad = None

    def _exchange(self, parts: Sequence[_Part]) -> None:
        """Send this rank's updated parts of these parameters, and overwrite the rest by the others'. Collective."""
        if self._kv.size > 1:
            owned: list[list[Any]] = [[] for _ in range(self._kv.size)]
            for part in parts:
                memory, size = row_of(part.parameter).view(torch.uint8).numpy(), part.parameter.element_size()
                for rank, (low, high) in part.ranges.items():
                    owned[rank].append(memory[low * size : high * size])
            self._kv._all_gather(self._key, owned)
        for part in parts:  # as a step of torch's: backward through an older graph must refuse to run
            torch.autograd.graph.increment_version(part.parameter)

    # --- State

    def part_state(self) -> dict[str, Any]:
        """Return the optimizer's options and the state of this rank's part, for :meth:`take_part_state`; the tensors
        are those that it goes on using. Before, cut state of whole parameters to this rank's part. Local.
        """
        groups = [
            {name: one for name, one in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        self._cut_state()
        owned = [part for part in self._parts.values() if part.shard is not None]
        return {"groups": groups, "parts": {part.key: self.optimizer.state.get(part.shard, {}) for part in owned}}

    def take_part_state(self, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's options and this rank's state by a :meth:`part_state`, not copied. Local."""
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(options)
        for part in self._parts.values():
            if found := state["parts"].get(part.key):
                self.optimizer.state[part.shard] = found

    def _cut_state(self) -> None:
        """Replace the state of whole parameters in the optimizer by this rank's part of it. Local.

        The state of whole parameters comes from the optimizer's constructor, a checkpoint, or ``state_dict``, which may
        have failed.
        """
        state = self.optimizer.state
        for part in self._parts.values():
            whole = state.pop(part.parameter, None)
            if whole and part.shard is not None:
                state[part.shard] = {name: _cut(part, name, value) for name, value in whole.items()}

    def _gather_state(self) -> None:
        """Give the optimizer the whole parameters' state, from all ranks' parts, on every rank. Collective.

        If a call has failed, the ranks meet first.
        """
        kv, state = self._kv, self.optimizer.state
        self._cut_state()
        self._sync.complete()
        own = {part.key: dict(state.get(part.shard, {})) for part in self._parts.values() if part.shard is not None}
        kv.check_equal(f"state_dict of {type(self.optimizer).__name__}", "state_dict")
        # After check_equal, which has a deadline: MPI's allgather would wait for a missing rank for ever.
        pieces = [own] if kv.comm is None else kv.comm.allgather(own)
        whole = type(state)(state.default_factory) if hasattr(state, "default_factory") else type(state)()
        for key, value in state.items():
            if not any(key is part.shard for part in self._parts.values()):
                whole[key] = value
        for part in self._parts.values():
            found = [piece[part.key] for piece in pieces if piece.get(part.key)]
            if found:
                whole[part.parameter] = _join_state(part.parameter, found)
        self.optimizer.state = whole


def _with_gradient(group: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of an optimizer's group that have a gradient; only these change in a step. Local."""
    return [one for one in group["params"] if one.grad is not None and one.numel()]


def _cut(part: _Part, name: str, value: Any) -> Any:
    """Return a flat copy of the part's elements of a state of the parameter's shape. Return the state itself if it has
    another shape, or is named "step", or ranks own whole parameters. Local.
    """
    if part.whole or name == "step" or not isinstance(value, torch.Tensor) or value.shape != part.parameter.shape:
        return value
    in_order = torch.empty_strided(value.shape, part.parameter.stride(), dtype=value.dtype).copy_(value)
    return part.of(in_order).clone()


def _join_state(parameter: Any, pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a whole parameter, joined from its parts in rank order. Local."""
    first, joined = pieces[0], {}
    for name, value in first.items():
        shared_out = isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape != parameter.shape
        if shared_out and sum(piece[name].numel() for piece in pieces) == parameter.numel():
            row = torch.cat([piece[name] for piece in pieces])
            value = torch.as_strided(row, parameter.shape, parameter.stride())
        joined[name] = value
    return joined


def _balance(costs: Sequence[int], ranks: int) -> list[int]:
    """Return an owner for each cost: the largest goes first, to the rank with the least sum so far. Local.

    Reference: Graham, Bounds on multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 17, 1969.

    >>> _balance([1, 5, 2, 3], 2)
    [0, 0, 1, 1]
    """
    loads, owners = [0] * ranks, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = min(range(ranks), key=loads.__getitem__)
        loads[owners[place]] += costs[place]
    return owners
