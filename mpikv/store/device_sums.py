"""Zero-copy sums over ranks of arrays on GPUs, for a store that keeps no values: NCCL reads and fills callers' arrays.

Ranks agree on such a call as on any of the store's. Only arrays with gaps, lists of arrays, and targets of another
dtype take memory of their own, before ranks agree, as a GPU may have too little. Two groups of dtypes are summed by
messages: half precision, as NCCL would round it at every step, and short integers, as NCCL has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays.arrays import accumulator, add_in_pairs_over, disjoint, local_sum, run_quietly, storable
from ..cluster.calls import PreparedCall
from ..engine.keys import Form
from ..errors import ValueMismatch
from ..memory.device import DeviceMemory
from ..protocols import Array, Key, Transport
from ..transports.nccl import NcclTransport
from ..verbs.arguments import outs_of, priorities, writable
from ..verbs.renewed import answer, widened
from .kvstore import let_gpus_queue

if TYPE_CHECKING:
    from .kvstore import KVStore

__all__ = ["DeviceSums"]


_Pairs: TypeAlias = "Sequence[tuple[Array, Array]]"


class _Work(NamedTuple):
    """The work of a call on a GPU."""

    parts: list[tuple[Array, Array]]
    """The array to send and the one to fill for each key: flat, and the same memory or without overlap."""
    before: list[tuple[Array, Array]]
    """Targets and sources of copies to make first."""
    after: list[tuple[Array, Array]]
    """Targets and sources of copies to make last."""


class DeviceSums:
    """Runs the calls of one :class:`~mpikv.AllReduce` on arrays that all lie on GPUs."""

    def __init__(self, store: KVStore, transport: Transport) -> None:
        """Collective. ``transport`` moves the GPUs' arrays, and is closed with the store."""
        assert isinstance(transport.memory, DeviceMemory)
        self.memory = transport.memory
        self._store, self._transport = store, transport
        self._nccl = transport if isinstance(transport, NcclTransport) else None
        self._in_pairs = store._config.deterministic
        # Half precision is summed in float32: twice as wide as the message.
        self._scratch = transport.allocate(2 * transport.limit)

    def close(self) -> None:
        """End them, and the transport. Collective."""
        self._scratch = self.memory.zeros(0)
        self._transport.close()

    # --- Check

    def _source(self, key: Key, group: Sequence[Any]) -> Array:
        first, *others = map(self.memory.source, group)
        storable(first.dtype)
        if not others:
            return first
        for array in others:
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise ValueMismatch(
                    f"the arrays for key {key!r} are {first.dtype.name}{list(first.shape)} and "
                    f"{array.dtype.name}{list(array.shape)}; those of one list are alike"
                )
        total: Array = self.memory.order.run(run_quietly, self._added, [first, *others])
        return total

    def _added(self, arrays: Sequence[Array]) -> Array:
        return local_sum(arrays, arrays[0].dtype, self._in_pairs).astype(arrays[0].dtype, copy=False)

    def prepare(self, key: Any, verb: str, form: Form, filled: Any, priority: Any) -> PreparedCall:
        """Prepare a ``pushpull`` or a ``broadcast`` that fills and returns ``filled``. Local.

        Raises:
            ValueMismatch: the arrays of a list, or the arrays to fill, do not fit, or cannot be summed.
            Unsupported: an array lies elsewhere, or the present stream is being captured.
        """
        self.memory.order.begin()
        sources = [self._source(name, group) for name, group in zip(form.keys, form.groups, strict=True)]
        outs = [
            [writable(each, name, source.shape, source.dtype, self.memory) for each in group]
            for name, source, group in zip(form.keys, sources, outs_of(key, filled, form.keys).groups, strict=True)
        ]
        targets, result = widened(form.keys, [each.dtype for each in sources], outs, self.memory, filled)
        work = self._work(sources, targets)
        option = f"on GPUs, priority {priorities(priority, form.keys)}"
        call = self._store._verbs.comparison.value_call(verb, form, sources, option)
        move = self._sum if verb == "pushpull" else self._broadcast
        return call, partial(self._run, move, work, result)

    def _work(self, sources: Sequence[Array], outs: Sequence[Sequence[Array]]) -> _Work:
        work, address = _Work([], [], []), self.memory.gpu.address
        apart = disjoint([[source] for source in sources], outs, address)
        for source, targets in zip(sources, outs, strict=True):
            send = source
            if not (apart and source.flags.c_contiguous):
                send = self.memory.empty(source.shape, source.dtype)
                work.before.append((send, source))
            into = next((out for out in targets if self._fits(out, source.dtype)), None)
            if into is None:
                into = self.memory.empty(source.shape, source.dtype)
            elif address(into) == address(send):
                send = into
            work.after.extend((out, into) for out in targets if out is not into)
            work.parts.append((send.reshape(-1), into.reshape(-1)))
        return work

    def _fits(self, out: Array, dtype: np.dtype[Any]) -> bool:
        return self.memory.gpu.owns(out) and out.dtype == dtype and bool(out.flags.c_contiguous)

    # --- Run

    def _run(self, move: Callable[[_Pairs], None], work: _Work, result: Any) -> Any:
        let_gpus_queue()
        self.memory.order.run(run_quietly, self._make, move, work)
        return answer(result)

    def _make(self, move: Callable[[_Pairs], None], work: _Work) -> None:
        self._copy(work.before)
        move([(send, into) for send, into in work.parts if send.size])
        self._copy(work.after)

    def _copy(self, pairs: _Pairs) -> None:
        if pairs:
            self.memory.copy([target for target, _ in pairs], [source for _, source in pairs])

    def _sum(self, parts: _Pairs) -> None:
        nccl = self._nccl
        if nccl is None:
            self._fill(parts)
            return
        exact = [part for part in parts if nccl.adds(part[0].dtype)]
        if exact:
            nccl.allreduce_each(exact)
        for send, into in parts:
            if not nccl.adds(send.dtype):
                self._sum_by_messages(send, into)

    def _sum_by_messages(self, send: Array, into: Array) -> None:
        wide, count = accumulator(send.dtype), self._transport.limit // send.itemsize
        for part in (slice(low, low + count) for low in range(0, send.size, count)):
            message = send[part]
            total = self._scratch[: message.size * wide.itemsize].view(wide)
            terms = self._transport.allreduce(message, total)
            if self._in_pairs:
                add_in_pairs_over(self._transport.rank, terms, 0, message.size, total)
            self.memory.copy((into[part],), (total,))

    def _broadcast(self, parts: _Pairs) -> None:
        if self._transport.rank == self._store.root:
            self._fill(parts)
        for _, into in parts:
            self._transport.broadcast(into, self._store.root)

    def _fill(self, parts: _Pairs) -> None:
        """Copy sent arrays to the filled ones, unless they are the same memory."""
        address = self.memory.gpu.address
        self._copy([(into, send) for send, into in parts if address(send) != address(into)])
