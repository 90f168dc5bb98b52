"""The sum of gradients over ranks, bucket by bucket, during backward.

A pass is one call of ``backward()``. Its first hook begins it, and the autograd engine's final callback ends it. Ranks
send buckets in one order: the root's order in the first pass. A gradient outside of this rank's graph is sent as it is,
or as zeros; so ranks may use different parts of a model.

A pass makes the same calls on every rank: one for each bucket, and the census. An error may leave ranks at different
ones. So after any failed call of the store, all ranks meet before the next pass or step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, NoReturn
from weakref import WeakMethod
from zlib import crc32

import numpy as np
import torch

from ..errors import MPIKVError, PeerFailed, RankMismatch, Unsupported, noted, text_of
from ..store.kvstore import KVStore
from .calls import check_equal, raising_on_all
from .comparison import comparable, settings_of
from .gradients import Bucket, Gradient, fill_buckets
from .model_buffers import ModelBuffers
from .tensors import init_sums, row_of
from .weights import Weights

# Bytes of the first bucket: small, so that its exchange begins early. DDP uses the same.
_FIRST_BUCKET = 1 << 20

# The head of the census, summed over ranks: number of ranks, pass, pass squared, stamp of steps, stamp squared, and
# ranks with weights changed outside of a step. Squares show differences that cancel in the sum.
_HEAD = 6

# Reasons why gradients may be one rank's alone.
_KEPT_BACK = (
    "gradients have stayed on their rank, as the last backward was in no_sync(); make the last backward of a step "
    "outside of it"
)
_FAILED = (
    "the last backward has failed, so that gradients are not the mean over ranks; call zero_grad() and backward() "
    "before the step"
)

# The likely reasons of ranks in different places.
_ADVICE = (
    "a rank has left out a backward or a step, has other learning rates, or caught an exception; do the same on every "
    "rank, or use join()"
)


class BackwardSync:
    """Hooks that sum the gradients of parameters over the ranks of a store.

    Methods are collective, but for hooks and methods marked *Local*.
    """

    def __init__(
        self,
        kv: KVStore,
        sums: KVStore,
        prefix: str,
        bucket_bytes: int | None,
        model_buffers: ModelBuffers | None,
        weights: Weights,
    ) -> None:
        """Keep ``sums``, the store that sums gradients, and ``kv`` for all other calls; they differ only with
        compression. Without ``bucket_bytes`` one call at the end of a pass sends all gradients. No hook is registered
        before :meth:`watch`. Local, but waits for pending calls of both stores.
        """
        self._kv, self._sums, self._prefix = kv, sums, prefix
        self._bucket_bytes, self._model_buffers = bucket_bytes, model_buffers
        self.weights = weights
        self._overlaps = bucket_bytes is not None
        self.gradients: list[Gradient] = []
        self.watched: dict[Any, Gradient] = {}
        """The gradients by parameter."""
        self.buckets: list[Bucket] = []
        self.number = 0
        """Passes since the ranks last agreed after an error, the same on every rank."""
        self.steps = 0
        """A stamp of the optimizers' steps since then and their settings: 24 bits."""
        self.made = 0
        """Number of these steps."""
        self.passes = 0
        """Number of all passes."""
        self.paused = False
        """Whether gradients stay on their rank."""
        self.why_local = ""
        """Why some gradients may be this rank's alone: they are newer than the last complete pass, or it failed."""
        self.blocking = False
        """Whether each call waits for its end, as ``join`` needs it."""
        self.seconds_waited = 0.0
        self._handles: list[Any] = []
        # torch.compile must not look inside: compiling a function that calls backward, it would trace the store, too.
        self._hook = torch.compiler.disable(_weak(self._take_gradient))
        self._callback = torch.compiler.disable(self._finish)
        self._task: int | None = None
        self._failed_then = self._count_failed()
        """Failed calls when the ranks last met."""
        self._arrived: dict[Gradient, tuple[Any, int]] = {}
        """The exchanged tensor of each gradient computed by this backward, and its version."""
        self._works: list[Any] = []
        # Gradients as backward made them, kept until the next pass. If they were freed now, the allocator would return
        # their pages to the system, and the rest of backward would fault them in again.
        self._made: list[Any] = []
        self._sent = 0
        self._census_key = f"{prefix}*census"
        self._totals = np.zeros(0, np.int64)
        self._census = self._totals

    def watch(self, named: Iterable[tuple[str, Any]]) -> None:
        """Register hooks that average the gradients of these parameters over ranks, from the next pass on. Local."""
        for name, parameter in named:
            gradient = Gradient(name, parameter)
            self.gradients.append(gradient)
            self.watched[parameter] = gradient
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook))

    def release(self) -> None:
        """Remove the hooks, give each gradient its own memory, drop the buffers. Local; no pass may be under way."""
        for handle in self._handles:
            handle.remove()
        for gradient in self.gradients:
            if gradient.buffer is not None and gradient.parameter.grad is gradient.buffer:
                gradient.parameter.grad = gradient.buffer.clone()
            gradient.array = gradient.memory = gradient.buffer = None
        self._made.clear()
        self._census = self._totals
        for bucket in self.buckets:
            bucket.arrays.clear()

    # --- One pass

    def _take_gradient(self, parameter: Any) -> None:
        """In a hook, with a new gradient: begin a pass if none runs, stage the gradient, begin to sum the complete
        buckets. While ``paused`` only note that gradients stay here. Collective.
        """
        if self.paused:
            self.why_local = _KEPT_BACK
            return
        gradient = self.watched[parameter]
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin_pass(task)
        # Two sums of one gradient in a pass: the second would be added to a mean that is under way.
        if gradient in self._arrived:
            self.forbid(f"backward computed the gradient of {gradient.name!r} twice in one pass")
        self._stage(gradient)
        grad = gradient.parameter.grad
        # The version shows at the end whether another hook has written to the gradient since.
        self._arrived[gradient] = grad, grad._version
        if gradient.buffer is not None:
            gradient.bucket.missing -= 1
            if self._overlaps:
                self._send(complete=True)

    def _begin_pass(self, task: int) -> None:
        """Begin a pass, and have :meth:`_finish` called at its end; first complete one cut short, collectively."""
        in_flight = bool(self._works)
        self.complete()
        self._made.clear()
        self.number += 1
        self.passes += 1
        self._task, self.why_local = task, _FAILED  # until the pass has ended well
        if in_flight and any(one.parameter.grad is one.buffer is not None for one in self.gradients):
            self.forbid(
                "sums of the last backward, which did not end, have come into gradients since; after an error call "
                "zero_grad(), which sets them to None; with torch.utils.checkpoint pass use_reentrant=False"
            )
        # torch has no public name for a callback at the end of a backward; DDP uses the same.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._callback, task))

    def _end_pass(self) -> None:
        """Forget the pass, so that the next hook begins another one. Local."""
        self._task, self._sent = None, 0
        self._arrived.clear()
        self._works.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.gradients)

    def _stage(self, gradient: Gradient) -> bool:
        """Divide a gradient by the rank count into its buffer, and return True; if it is None, write zeros and return
        False. Before there is a buffer, only check the gradient. Local; faults raise on all ranks.
        """
        made = gradient.parameter.grad
        try:
            with torch.no_grad():
                staged = gradient.stage(1 / self._kv.size)
        except MPIKVError as error:
            self.refuse(error)
        self._made.append(made)
        return staged

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error on every rank in place of the pass's next call. Collective."""
        self.why_local = _FAILED
        self.next_store.raise_on_all_ranks(error, "backward")

    def forbid(self, text: str) -> NoReturn:
        """Raise Unsupported on every rank, as :meth:`refuse` does. Collective."""
        self.refuse(Unsupported(text))

    def _send(self, complete: bool) -> None:
        """Begin to sum buckets, in order: all, or with ``complete`` those before the first incomplete one. Wait for
        each sum if ``blocking``, or if sums do not overlap with backward. Collective.
        """
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if complete and bucket.missing:
                return
            self._sent += 1
            if self.blocking or not self._overlaps:
                self._sums.pushpull(bucket.keys, None, bucket.arrays)
            else:
                # Kept: the work's end is awaited at the end of the pass, and a dropped handle would lose its error.
                self._works.append(self._sums._issue_sums(bucket.keys, bucket.arrays))

    def _restart(self) -> None:
        """Set the counts of passes and steps to zero; every rank does so after an error. Local."""
        self.number = self.steps = self.made = 0

    def _finish(self, task: int) -> None:
        """At the end of a pass, in a callback: send the rest, await the means, compare ranks' passes. Collective."""
        if task != self._task:
            self.forbid(
                "a backward within this one has computed other gradients of the model, so that one pass became two; "
                "with torch.utils.checkpoint pass use_reentrant=False"
            )
        self._refuse_changed()
        began = perf_counter()
        try:
            brought = self._send_rest()
            for work in self._works:
                work.wait()
            self._end_pass()
            self._take_census(brought)
        except RankMismatch as error:
            advice = "with update='local' ranks with unequal numbers of batches need attached.join()"
            noted(error, f"in a backward of mpikv.torch; {advice}")
            raise
        if not self.blocking:
            self.weights.close_pass(bool(self._totals[_HEAD - 1]), self.number)
        self.seconds_waited += perf_counter() - began
        self.why_local = ""

    def _refuse_changed(self) -> None:
        """Raise on every rank if another hook changed a gradient after ours took it. Local otherwise."""
        for gradient, (grad, version) in self._arrived.items():
            now = gradient.parameter.grad
            if now is not grad or now._version != version:
                self.forbid(
                    f"a hook that was registered after attach has changed the gradient of {gradient.name!r}, which is "
                    "being exchanged; register the hook before attach, or change gradients, and call optimizer.step, "
                    "when backward has returned"
                )

    def _send_rest(self) -> list[bool]:
        """Begin to sum all buckets not sent yet, with zeros for absent gradients; make buckets for gradients without
        one. Return for each gradient whether this rank had it. Collective.
        """
        settled = [gradient for gradient in self.gradients if gradient.buffer is not None]
        brought = {gradient: gradient in self._arrived or self._stage(gradient) for gradient in settled}
        self._send(complete=False)
        if len(settled) < len(self.gradients):
            arrived = [gradient for gradient in self._arrived if gradient.buffer is None]
            unused = [one for one in reversed(self.gradients) if one.buffer is None and one not in self._arrived]
            self.make_buckets([*arrived, *unused])
            brought |= {gradient: self._stage(gradient) for gradient in (*arrived, *unused)}
            self._send(complete=False)
        return [brought[gradient] for gradient in self.gradients]

    def note_step(self, optimizer: Any) -> None:
        """Count a step, and mix its optimizer's settings into the stamp that the next pass compares. Local."""
        groups = optimizer.param_groups
        settings = [[comparable(value) for name, value in group.items() if name != "params"] for group in groups]
        self.steps = crc32(repr(settings).encode(), self.steps) & 0xFFFFFF
        self.made += 1

    # --- After an error

    @property
    def next_store(self) -> KVStore:
        """The store of a pass's next call: that of compressed sums until all are sent, then the program's."""
        return self._sums if self._sent < len(self.buckets) else self._kv

    def _count_failed(self) -> int:
        """Return the number of calls that have failed, the same on every rank. Local; waits for pending calls."""
        return sum(store.count_failed() for store in {self._sums, self._kv})

    def complete(self) -> None:
        """Wait for pending calls. Only after a broken pass or a failed call also make other ranks' pass fail, meet all
        ranks, and count passes and steps from 0. Collective then.
        """
        if self._task is None and self._count_failed() == self._failed_then:
            return
        if self._task == torch._C._current_graph_task_id():
            self.forbid("a call was made in a hook of a backward; make it when backward has returned")
        for work in self._works:
            # All ranks know of its error, and count it; or it has ended the store, as the next call says.
            with suppress(Exception):
                work.wait()
        if self._count_failed() == self._failed_then:
            self._announce_failure()
        for store in dict.fromkeys([self._sums, self._kv]):
            self._meet(store)
        self.note_met()
        self._restart()

    def note_met(self) -> None:
        """Forget the pass and the failed calls so far: all ranks are at one call. Local; waits for pending calls."""
        self._end_pass()
        self._failed_then = self._count_failed()

    def _announce_failure(self) -> None:
        """Raise in the other ranks' backward, not here. Collective."""
        error = sys.exc_info()[1]
        handled = "" if error is None else f"; it handles {type(error).__name__}: {text_of(error)}"
        with suppress(MPIKVError):
            self.refuse(MPIKVError(f"a backward of this rank has ended with an exception{handled}"))

    def _meet(self, store: KVStore) -> None:
        """Wait until all ranks meet here; other ranks' queued buckets fail meanwhile. RankMismatch if a rank makes
        other calls. Collective.

        Each queued bucket of another rank, perhaps of another model, fails one call here; each bucket has a key.
        """
        for failed in count():
            try:
                store.check_equal("go on after an error", "backward")
                break
            except (RankMismatch, PeerFailed):
                if failed > len(store):
                    raise

    # --- What ranks agree about

    def make_buckets(self, own_order: Sequence[Gradient]) -> None:
        """Init keys for gradients, and give them buffers there and buckets, in the order that the root passes; the
        others' does not count. Size the census anew. Collective.
        """
        kv, key = self._kv, f"{self._prefix}*order"
        places = {gradient: place for place, gradient in enumerate(self.gradients)}
        root_order = kv.broadcast(key, np.array([places[gradient] for gradient in own_order], np.int64))
        kv.delete(key)
        gradients = [self.gradients[place] for place in root_order]
        keys = {gradient: self._prefix + gradient.name for gradient in gradients}
        init_sums(self._sums, self._prefix, [*keys.values()], [row_of(gradient.parameter) for gradient in gradients])
        arrays = dict(zip(gradients, self._sums.buffer([*keys.values()]), strict=True))
        groups = [gradients]
        if self._bucket_bytes is not None:
            groups = fill_buckets(gradients, _FIRST_BUCKET, self._bucket_bytes)
        for group in groups:
            self.buckets.append(Bucket([keys[one] for one in group], group, [arrays[one] for one in group]))
        self._totals = np.zeros(_HEAD + len(self.gradients), np.int64)
        init_sums(kv, self._prefix, [self._census_key], [self._totals], overwrite=True)
        self._census = kv.buffer(self._census_key)

    def _take_census(self, brought: Sequence[bool]) -> None:
        """Compare ranks' passes, and copy the root's model buffers; set each gradient that this rank lacks to the mean,
        or to None if all ranks lack it. Collective.
        """
        self._compare(brought)
        if all(brought):
            return
        for gradient, ranks in zip(self.gradients, self._totals[_HEAD:], strict=True):
            # None if no rank has one, as in a single process: then the optimizer leaves the parameter alone.
            gradient.parameter.grad = gradient.buffer if ranks else None

    def _compare(self, brought: Sequence[bool]) -> None:
        """Sum facts of the pass over ranks, copy the root's buffers; RankMismatch if the facts differ. Collective."""
        self._census[:_HEAD] = 1, self.number, self.number**2, self.steps, self.steps**2, self.weights.is_suspect()
        self._census[_HEAD:] = brought
        names, values, outs = [self._census_key], [self._census], [self._totals]
        if self._model_buffers is not None and not self.blocking:
            with raising_on_all(self._kv, "backward"):
                self._model_buffers.add_to(names, values, outs)
        self._kv.pushpull(names, values, outs)
        if len(names) > 1 and self._model_buffers is not None:
            self._model_buffers.take()
        ranks, *found, _ = self._totals[:_HEAD].tolist()
        # Mean and mean of squares fit this rank's number only if the variance is 0. So all ranks raise, or none.
        if found != [ranks * own for own in self._census[1 : _HEAD - 1].tolist()]:
            here = self._describe()
            self._restart()  # on every rank alike, so that training can go on
            if not self.blocking:
                check_equal(self._kv, here, "backward", _ADVICE)
            raise RankMismatch(
                f"backward: {_ADVICE}; rank {self._kv.rank} of {self._kv.size} is in {here.splitlines()[0]}"
            )

    def _describe(self) -> str:
        """Return this rank's pass, steps and settings as a text, a line each, for ranks to compare. Local."""
        settings = settings_of(self.weights.optimizers, {one.name: one.parameter for one in self.gradients})
        # The stamp is last: it can only say that settings differed in an earlier step.
        place, stamp = f"pass {self.number}, {self.made} steps", f"stamp of earlier settings {self.steps:06x}"
        return "\n".join([place, *settings, stamp])

    def check_end(self, verb: str) -> None:
        """Raise RankMismatch if ranks' passes, steps or weights differ. Weights are not compared if a rank has touched
        its own since the last step. Collective.
        """
        check_equal(self._kv, self._describe(), verb, _ADVICE)
        if not self._kv.any_rank(self.weights.is_touched()):
            self.weights.compare(verb)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method while its object lives, and does nothing after. Local.

    Python's garbage collector does not see references from hooks of parameters: a strong one to the parameter's owner
    would keep both for ever.
    """
    found = WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := found()) is not None:
            alive(*arguments)

    return call
