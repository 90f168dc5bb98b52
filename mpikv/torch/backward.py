"""The sum of gradients over ranks, bucket by bucket, while backward computes the rest.

A pass is one call of ``backward()``. Its first hook begins it, and the engine's callback after its last gradient ends
it. Ranks send buckets in one order, which the root found in the first pass. A gradient that this rank's graph has not
reached is sent as it is, or as zeros, so that ranks may use different parts of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch

from ..errors import MPIKVError, RankMismatch, Unsupported
from ..store.kvstore import KVStore
from .gradients import Bucket, Gradient, fill_buckets
from .model_buffers import ModelBuffers
from .tensors import row_of

__all__ = ["BackwardSync"]

# Of which the exchange begins early; DDP has the same.
_FIRST_BUCKET = 1 << 20

# What the census counts before it counts gradients: ranks, their passes, and the squares of these.
_HEAD = 3


class BackwardSync:
    """Hooks that add up the gradients of parameters over the ranks of a store. All methods but those of hooks are
    collective.
    """

    def __init__(
        self,
        kv: KVStore,
        sums: KVStore,
        prefix: str,
        scale: float,
        bucket_bytes: int | None,
        model_buffers: ModelBuffers | None,
    ) -> None:
        """``sums`` adds up gradients, and ``kv`` all else; they are two where gradients are compressed. Without
        ``bucket_bytes`` a pass sends all gradients at its end.
        """
        self._kv, self._sums, self._prefix, self._scale = kv, sums, prefix, scale
        self._bucket_bytes, self._model_buffers = bucket_bytes, model_buffers
        self.gradients: list[Gradient] = []
        self.buckets: list[Bucket] = []
        self.number = 0
        """How many passes have begun."""
        self.paused = False
        """Whether gradients stay on their rank."""
        self.kept_back = False
        """Whether some have, since the last exchange."""
        self.overlaps = bucket_bytes is not None
        """Whether buckets are sent while backward goes on."""
        self.joined = False
        """Whether ranks may have left, and calls without waiting cannot be made."""
        self.seconds_waited = 0.0
        self._handles: list[Any] = []
        self._task: int | None = None
        self._arrived: dict[Gradient, None] = {}
        self._works: list[Any] = []
        self._sent = 0
        self._totals = np.zeros(0, np.int64)
        self._census = self._totals

    def watch(self, named: Iterable[tuple[str, Any]]) -> None:
        """Add up the gradients of these parameters from the next pass on."""
        for name, parameter in named:
            gradient = Gradient(self._prefix + name, parameter)
            self.gradients.append(gradient)
            hook = partial(self._take, gradient)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def release(self) -> None:
        """Remove the hooks, and give each gradient memory of its own. Local."""
        for handle in self._handles:
            handle.remove()
        for gradient in self.gradients:
            if gradient.buffer is not None and gradient.parameter.grad is gradient.buffer:
                gradient.parameter.grad = gradient.buffer.clone()

    # --- One pass

    def _take(self, gradient: Gradient, _: Any) -> None:
        """A hook: the gradient is in its place."""
        if self.paused:
            self.kept_back = True
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        if gradient in self._arrived:
            self._refuse(
                Unsupported(
                    f"backward computed the gradient of {gradient.name!r} twice in one pass, the second time after it "
                    "was sent; with torch.utils.checkpoint pass use_reentrant=False"
                )
            )
        self._arrived[gradient] = None
        if gradient.buffer is not None:
            self._stage(gradient)
            gradient.bucket.missing -= 1
            if self.overlaps and not self.joined:
                self._send(complete=True)

    def _begin(self, task: int) -> None:
        """Begin a pass, also where an exception has cut the one before short."""
        self._reset()
        self._task = task
        self.number += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _reset(self) -> None:
        self._task, self._sent = None, 0
        self._arrived.clear()
        self._works.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.gradients)

    def _stage(self, gradient: Gradient) -> bool:
        try:
            with torch.no_grad():
                return gradient.stage(self._scale)
        except MPIKVError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        self._reset()
        self._sums.raise_on_all_ranks(error, "backward")

    def _send(self, complete: bool) -> None:
        """Send buckets in their order: those that are complete, or all."""
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if complete and bucket.missing:
                return
            self._sent += 1
            queued = self.overlaps and not self.joined
            work = self._sums.pushpull(bucket.names, None, bucket.arrays, wait=not queued)
            if queued:
                self._works.append(work)

    def _finish(self) -> None:
        """The engine's callback: complete the pass, so that every gradient is the sum when backward returns."""
        try:
            new = [gradient for gradient in self.gradients if gradient.buffer is None]
            if new:
                arrived = [gradient for gradient in self._arrived if gradient.buffer is None]
                self.settle([*arrived, *(gradient for gradient in reversed(new) if gradient not in self._arrived)])
                for gradient in arrived:
                    self._stage(gradient)
            brought = [gradient in self._arrived or self._stage(gradient) for gradient in self.gradients]
            began = perf_counter()
            self._send(complete=False)
            for work in self._works:
                work.wait()
            self._take_census(brought)
            self.seconds_waited += perf_counter() - began
            self.kept_back = False
        finally:
            self._reset()

    # --- What ranks agree about

    def settle(self, order: Sequence[Gradient]) -> None:
        """Give new gradients memory and buckets, in the root's order."""
        kv, key = self._kv, f"{self._prefix}*order"
        places = {gradient: place for place, gradient in enumerate(self.gradients)}
        root_order = kv.broadcast(key, np.array([places[gradient] for gradient in order], np.int64))
        kv.delete(key)
        gradients = [self.gradients[place] for place in root_order]
        names = [gradient.name for gradient in gradients]
        self._sums.init(names, [row_of(gradient.parameter) for gradient in gradients])
        arrays = dict(zip(names, self._sums.buffer(names), strict=True))
        groups = [gradients]
        if self._bucket_bytes is not None:
            groups = fill_buckets(gradients, _FIRST_BUCKET, self._bucket_bytes)
        for group in groups:
            self.buckets.append(Bucket(group, [arrays[gradient.name] for gradient in group]))
        self._totals = np.zeros(_HEAD + len(self.gradients), np.int64)
        kv.init(self._census_key, self._totals, overwrite=True)
        self._census = kv.buffer(self._census_key)

    @property
    def _census_key(self) -> str:
        return f"{self._prefix}*census"

    def _take_census(self, brought: Sequence[bool]) -> None:
        """Find out whether all ranks are in the same pass, and which gradients no rank has."""
        self._census[:_HEAD] = 1, self.number, self.number**2
        self._census[_HEAD:] = brought
        names, values, outs = [self._census_key], [self._census], [self._totals]
        if self._model_buffers is not None and not self.joined:
            self._model_buffers.add_to(names, values, outs)
        self._kv.pushpull(names, values, outs)
        ranks, passes, squares = self._totals[:_HEAD]
        if passes != ranks * self.number or squares != ranks * self.number**2:
            number, self.number = self.number, 0  # on every rank, so that all can go on
            raise RankMismatch(
                f"backward: rank {self._kv.rank} is in pass {number}, and other ranks are not, so the gradients are of "
                f"different steps (mean pass: {passes / ranks:.2f}); a rank has left out a backward, or caught an "
                "exception in one; leave it out on every rank, or use join() [rank "
                f"{self._kv.rank}]"
            )
        if all(brought):
            return
        for gradient, count in zip(self.gradients, self._totals[_HEAD:], strict=True):
            # None where no rank has one, as in one process: the optimizer then leaves the parameter alone.
            gradient.parameter.grad = gradient.buffer if count else None
