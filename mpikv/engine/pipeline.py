"""Pushes and pulls, once all ranks have agreed on them: five stages of each message.

=======  ================================================================  ==========
stage    does                                                              collective
=======  ================================================================  ==========
pack     copies this rank's arrays to a send buffer, or sends them as is   no
reduce   adds up the messages of all ranks, at the owners                  yes
update   gives the sum to the updater, while it is in the cache            no
publish  gives every rank the owners' values, unless memory is shared      yes
unpack   copies the values to the caller's arrays                          no
=======  ================================================================  ==========

One loop, :meth:`Pipeline._run`, takes the messages of all calls through them. ``gpu_pipeline.py`` replaces stages for
a GPU; a codec of ``compression.py`` replaces pack and reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, groupby, pairwise, zip_longest
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import add, add_in_pairs, disjoint, local_sum, run_quietly
from ..errors import noted
from ..protocols import Array, Transfers
from .calls import Confirm, Steps
from .compression import Compression, Layers, restoring
from .keys import Entry
from .plan import Bucket, Plan, Update
from .team import CUT_BYTES, SHARED_OUT, Team, deal
from .values import Values

# At least so many bytes of each rank are in a message of an all-gather: with many ranks it is longer than a bucket, as
# shorter pieces would take more time to start than to travel.
_SHORTEST_PART = 64 << 10

# numpy finds a function in its module in as long as the function adds a few numbers.
_add_two = np.add

Arrays: TypeAlias = "Sequence[Any]"
"""The arrays of a call, one item per key. Either each item is *plain*: one array in the store's memory, of the value's
shape and dtype. Or each is a tuple of any number of arrays, flat ones for a push."""

_Pairs: TypeAlias = "list[tuple[list[Array], list[Array]]]"
"""For each rank its parts of a message, and its arrays, from or to which these parts are copied."""


class Pipeline:
    """Moves the values of a store, with one updater, placement and compression.

    Methods are collective unless marked *Local*. The verbs prepare calls here and run them after ranks have agreed.
    They prepare the plan first.
    """

    def __init__(self, values: Values, compression: Compression | None) -> None:
        """Take the settings of ``values.planner`` as they are now: other settings need a new pipeline. Allocate
        nothing. Local.
        """
        planner, transport = values.planner, values.transport
        self._values, self._transport, self._memory = values, transport, transport.memory
        self._updater, self._whole = planner.updater, planner.whole
        self._everywhere, self._in_pairs = planner.placement.everywhere, planner.in_pairs
        self._team = planner.team
        self._copy = _copy if planner.team is None else partial(_copy_in_lanes, planner.team)
        self._add = add_in_pairs if planner.in_pairs else add
        self._compression = compression
        self.streams: Transfers | None = transport if isinstance(transport, Transfers) else None
        """The streams of a GPU, or the transport between hosts, where transfers run beside updates; else None."""
        self.current = planner.current
        """Whether a push leaves every rank with the newest values."""
        self.prefetched: Array | None = None
        """The first message of a push, packed before ranks agree. A call that is given up has to clear it."""

    # --- Before the ranks agree

    def prepare(self, plan: Plan) -> None:
        """Cut a plan into buckets, allocate its sums before ranks agree; MemoryError if this rank lacks it. Local."""
        plan.prepare()

    def pack_first(self, plan: Plan, sources: Arrays) -> None:
        """If the plan prefetches, pack a push's first message into the send buffer. The next push sends it: a call that
        is given up before has to clear :attr:`prefetched`. Local.
        """
        if (first := plan.prefetches) is not None:
            self.prefetched = self._pack(first, sources)

    def add_lists(self, plan: Plan, sources: Arrays) -> Arrays:
        """Return the sources as they are; the pipeline of a GPU adds up their lists here. Local."""
        return sources

    def restoring(self, plan: Plan, confirm: Confirm | None) -> Confirm | None:
        """Copy residuals and codec state now; return ``confirm`` wrapped to put them back if it raises. Uncompressed,
        return the given one. Local.
        """
        return confirm if confirm is None or self._compression is None else restoring(plan, confirm)

    # --- Push and pull

    def push(self, plan: Plan, sources: Arrays | None, steps: Steps, confirm: Confirm | None) -> None:
        """Sum the sources over ranks, or the buffers if they are None; update values, and count the push. Collective.

        The caller may write to both again on return. ``confirm`` takes the error of this rank's updater, or None, and
        raises if the updater of any rank raised.
        """
        self._run(plan, sources, steps, confirm)
        if plan.single_copy or sources is None:
            # Other ranks read the caller's arrays, or the buffers, until here.
            self._transport.fence()

    def pull(self, plan: Plan, targets: Arrays, result: Any = None) -> Any:
        """Fetch the owners' values if one is stale; copy all to any targets; return ``result``. Collective if stale."""
        plain = len(targets) > 0 and type(targets[0]) is not tuple
        # The flags are the same on all ranks, so all publish or none does.
        if not self.current and self._values.table.stale[plan.rows].any():
            outs = targets if plain and plan.overlaps else ()
            self.publish(plan, outs)
            if outs:
                return result
        if plain:
            bound = plan.bound_values
            if bound is None or not bound.give(targets):
                self._copy(targets, plan.values)
        elif targets:
            pairs = zip(plan.entries, targets, strict=True)
            copies = [(out, entry) for entry, group in pairs for out in group if out is not entry.view]
            self._copy([out for out, _ in copies], [entry.value for _, entry in copies])
        return result

    def pushpull(
        self, plan: Plan, sources: Arrays | None, steps: Steps, targets: Arrays, confirm: Confirm | None, result: Any
    ) -> Any:
        """Push as :meth:`push` (no sources: the buffers), pull to the targets, return ``result`` as given. Collective.

        It pulls message by message where that pays and no target is another key's source. Without targets it only
        brings this rank the newest values.
        """
        if sources is None and self._all_fill_buffers(plan, targets):
            self._run(plan, None, steps, confirm, in_place=True)
            self._transport.fence()
            return result
        outs = self._early_outs(plan, sources, targets) if plan.streams else None
        self._run(plan, sources, steps, confirm, outs)
        if outs is None:
            self._transport.fence()
        if not outs:
            self.pull(plan, targets)
        return result

    def _early_outs(self, plan: Plan, sources: Arrays | None, targets: Arrays) -> Arrays | None:
        """Return the arrays to fill while later messages are sent: the targets, or () if that is unsafe. Return None if
        the push is of the buffers: then none is filled early. Local.

        It is None on all ranks alike; a rank decides for itself about ().
        """
        if sources is None:
            return None
        if not targets or not disjoint(groups_of(sources), groups_of(targets)):
            return ()
        return targets if are_plain(targets) else _flat_views(plan, targets)

    def _all_fill_buffers(self, plan: Plan, targets: Arrays) -> bool:
        """Return whether the targets of every rank are its push buffers. False, without asking, for small calls, and
        unless all ranks share memory. Collective.
        """
        if not (plan.streams and self._transport.shared):
            return False
        # Asked of all ranks: the owners fill the buffers of every rank, and one rank's wish alone must not decide.
        own = are_plain(targets) and self._values.are_buffers(plan, targets)
        return self._transport.agree(int(own)) and own

    # --- The stages of all messages

    def _run(
        self,
        plan: Plan,
        sources: Arrays | None,
        steps: Steps,
        confirm: Confirm | None,
        outs: Arrays | None = None,
        in_place: bool = False,
    ) -> None:
        """Pack, sum and update each message of a push, and count it. With ``outs``, even (), also give all ranks the
        new values, and fill these. The caller fences after it: until then other ranks may read the sources. Collective.

        :attr:`Plan.schedule` says when to reduce and when to update a message, so that later transfers run beside an
        update. Without sources it pushes the buffers; ``in_place`` fills them with the new values.
        """
        delivery = None if outs is None else self._delivery(plan, outs)
        streams = self.streams
        # Of messages in flight, in their order. Not list[...](): Python builds that type anew in each call.
        sums: list[tuple[Sequence[Array], Any]] = []
        compressed = None
        if self._compression is not None:
            assert sources is not None  # a codec packs the buffers, too: they come as arrays
            compressed = self._compression.start(plan, _layers(sources))
        for coming, ready in plan.schedule:
            if coming is not None:
                addends = self._reduce(coming, sources) if compressed is None else (compressed(coming),)
                sums.append((addends, streams.sent() if streams is not None else None))
            elif delivery is None and streams is not None:
                # The caller's stream may go on: no later stage reads the caller's arrays, updates read sums alone.
                streams.note_read()
            if ready is not None:
                addends, sent = sums.pop(0)
                if streams is not None:
                    streams.wait_for(sent)
                self._update(ready, addends, steps, addends if in_place else ())
                if delivery is not None:
                    delivery.add(ready)
        if delivery is not None:
            self._transport.fence()
            delivery.end()
        if self._whole:
            self._update_whole(plan, steps, confirm)
        self.count_push(plan, stale=delivery is None)

    def count_push(self, plan: Plan, stale: bool) -> None:
        """Count a push of each key; any row may be nonzero now; mark values stale or not, where they can be. Local."""
        for entry in plan.row_sparse:
            entry.nonzero = None
        # A memoryview changes one number in a quarter of the time that an array takes.
        table, rows = self._values.table, plan.rows
        (table.tally if type(rows) is int else table.counts)[rows] += 1
        if not self.current:
            table.stale[rows] = stale

    # --- Pack and reduce

    def _reduce(self, bucket: Bucket, sources: Arrays | None) -> Sequence[Array]:
        """Send a push's message, packed here or before; return addends, or the sum, of own elements. Collective."""
        if sources is None:
            assert bucket.buffer is not None
            if bucket.buffers:
                return bucket.buffers
            send = bucket.buffer
        elif self.prefetched is not None:
            send, self.prefetched = self.prefetched, None
        else:
            send = self._pack(bucket, sources)
        if self._everywhere:
            return self._transport.allreduce(send, bucket.total)
        if (owner := bucket.shard.owner) is not None:
            return self._transport.reduce(send, bucket.total, owner)
        return self._transport.reduce_scatter(send, bucket.total, bucket.shard.counts)

    def _pack(self, bucket: Bucket, sources: Arrays) -> Array:
        """Return this rank's message: packed in the send buffer, or a view of a caller's array. Local."""
        if bucket.direct and (whole := self._in_place(bucket, sources)) is not None:
            return whole
        slot = self._transport.slot
        send = bucket.sends[slot]
        # Keys between those of the call are in the message, too: what lies there must add nothing.
        if not bucket.gapless:
            send.fill(0)
        if type(sources[0]) is not tuple:
            given, (parts, bound) = sources[bucket.items] if bucket.items else cut(bucket, sources), bucket.slots[slot]
            if bound is None or not bound.take(given):
                self._copy(parts, given)
        else:  # casts may overflow, and numpy must not warn of it, or raise on one rank
            run_quietly(self._pack_groups, bucket, sources, send)
        return send

    def _pack_groups(self, bucket: Bucket, sources: Arrays, send: Array) -> None:
        """Write the sum of each key's list of arrays, or zeros for an empty list, to a message. Local."""
        targets, sums = list[Array](), list[Array]()
        for piece in bucket.pieces:
            arrays = [array[piece.begin : piece.end] for array in sources[piece.item]]
            if arrays:
                targets.append(send[piece.low : piece.high])
                sums.append(local_sum(arrays, bucket.value.dtype, self._in_pairs))
            else:  # a rank that has left join() brings none
                send[piece.low : piece.high].fill(0)
        self._copy(targets, sums)

    def _in_place(self, bucket: Bucket, sources: Arrays) -> Array | None:
        """Return this rank's message as a view of the caller's only array; None if it has to be packed. Local."""
        piece = bucket.pieces[0]
        given = sources[piece.item]
        (array, *others) = (given,) if are_plain(sources) else given or (None,)
        # Anything else needs a copy, by packing: a list is summed there, and a dtype cast.
        if array is None or others or array.dtype != bucket.value.dtype or not array.flags.c_contiguous:
            return None
        # ASSIGN makes the sum in the memory of the value: a source over that memory would be overwritten while other
        # ranks still read it.
        if self._memory.is_host and (
            not array.flags.aligned or (array.base is not None and np.may_share_memory(array, bucket.value))
        ):
            return None
        whole: Array = array.reshape(-1)[piece.begin : piece.end]
        return whole

    # --- Update

    def _update(
        self,
        bucket: Bucket,
        addends: Sequence[Array],
        steps: Steps,
        outs: Sequence[Array] = (),
        lane: Sequence[Update] | None = None,
    ) -> None:
        """Add up this rank's elements of a message; run the updater, unless it takes whole values; copy new values to
        outs. Make all updates, in threads where it pays, or only those of a ``lane``. Local.

        The ``outs`` may be the addends. Kernels that can, add and update in one loop.
        """
        updates = lane or (bucket.joint_updates if steps.uniform else bucket.updates)
        if self._team is not None and lane is None and updates and updates[-1].lane:
            run = partial(self._update, bucket, addends, steps, outs)
            self._team.run([partial(run, tuple(each)) for _, each in groupby(updates, attrgetter("lane"))])
            return
        # A transport whose library adds returns the total itself.
        summed = not updates or addends[0] is bucket.total
        for update in updates:
            if not summed:
                first, last, low, high = addends[0], addends[-1], update.low, update.high
                if high - low < first.size:
                    first, last = first[low:high], last[low:high]
                if update.add_and_run is not None:
                    if len(addends) > 2:
                        add(addends[:-1], low, high, update.total)
                        first = update.total
                    update.add_and_run(first, last, steps.each[update.item])
                elif len(addends) == 2 and first.dtype == update.total.dtype:
                    _add_two(first, last, update.total)
                else:
                    self._add(addends, low, high, update.total)
            if update.run is not None:
                items = update.items
                update.run(steps.each[update.item] if items is None else [steps.each[item] for item in items])
            for out in outs:
                out[update.low : update.high] = update.value

    def _update_whole(self, plan: Plan, steps: Steps, confirm: Confirm | None) -> None:
        """Update this rank's whole values; with ``confirm``, collective, on copies that replace them if no rank failed.

        A Python updater changes copies. They are stored once every rank knows that none raised: so a failed push
        changes nothing.
        """
        every = zip(plan.entries, plan.totals, steps.each, strict=True)
        owned = [(entry, total, step) for entry, total, step in every if total is not None]
        if plan.update_whole is not None:
            plan.update_whole([step for _, _, step in owned])
        elif confirm is not None:
            self.update_copies(owned, confirm)
        else:
            for entry, total, step in owned:
                self._updater.update(step, total, entry.value, entry.state)

    def update_copies(self, owned: Iterable[tuple[Entry, Any, Any]], confirm: Confirm) -> None:
        """Run the updater on copies of values and state. If no rank failed, write them back; else raise and change
        nothing. Collective.

        ``owned`` yields a value, its sum, whole or of rows, and its step. It may raise; so may the updater.
        """
        changed: list[tuple[Array, Array]] = []
        failure: BaseException | None = None
        try:
            for entry, total, step in owned:
                value, state = entry.value.copy(), {name: array.copy() for name, array in entry.state.items()}
                # Noted before the call: a function that raises leaves the copies half changed, and they are dropped.
                changed += [(entry.value, value), *((entry.state[name], array) for name, array in state.items())]
                try:
                    self._updater.update(step, total, value, state)
                except BaseException as error:
                    noted(error, f"updating key {entry.key!r}")
                    raise
        except BaseException as error:  # sys.exit in an updater, or Ctrl-C: the other ranks wait
            failure = error
        confirm(failure)
        # Nothing can fail any more: every rank has confirmed, and the arrays have the same shape.
        for stored, value in changed:
            np.copyto(stored, value)

    # --- Publish and unpack

    def republish(self, plan: Plan) -> None:
        """Give every rank the values that owners changed in place, and end with a fence. Forget the numbers of nonzero
        rows: any row may be nonzero now. Collective.
        """
        for entry in plan.row_sparse:
            entry.nonzero = None
        if not self.current:
            self.publish(plan)
        self._transport.fence()

    def publish(self, plan: Plan, outs: Arrays = ()) -> None:
        """Give every rank the owners' values of a plan's keys, not stale any more; copy them to any ``outs``, plain
        arrays. Collective.
        """
        delivery = self._delivery(plan, outs)
        with self._apart(plan.overlaps):
            for bucket in plan.buckets:
                delivery.add(bucket)
            delivery.end()
        self._values.table.stale[plan.rows] = False

    def _apart(self, overlaps: bool) -> AbstractContextManager[None]:
        """Return a context: inside, transfers run beside other work, if they can and ``overlaps`` is True. Local."""
        return self.streams.apart() if overlaps and self.streams is not None else nullcontext()

    def _delivery(self, plan: Plan, outs: Arrays) -> _Delivery:
        """Return a new relay of messages to ``outs``. Its add() is collective, end() between hosts, the rest local."""
        streams = self.streams if plan.overlaps else None
        # One behind, at least: the owners of the last message may still be updating it.
        return _Delivery(streams, self.deliver, partial(self.unpack, outs=outs), behind=1)

    def deliver(self, bucket: Bucket) -> None:
        """Give every rank the owners' values of a message; nothing if all have them. Collective."""
        if not self.current and (owner := bucket.shard.owner) is not None:
            self._transport.broadcast(bucket.value, owner)
        elif not self.current:
            self._transport.all_gather(bucket.value, bucket.shard.counts)

    def unpack(self, bucket: Bucket, outs: Arrays) -> None:
        """Copy a message's values to the callers' arrays: plain ones, or flat ones. Local."""
        if are_plain(outs):
            given, (parts, bound) = outs[bucket.items] if bucket.items else cut(bucket, outs), bucket.parts
            if bound is None or not bound.give(given):
                self._copy(given, parts)
            return
        for piece in bucket.pieces if outs else ():
            for array in outs[piece.item]:
                np.copyto(array[piece.begin : piece.end], bucket.value[piece.low : piece.high], casting="unsafe")

    def all_gather(self, memory: Array, owned: Sequence[Sequence[Array]]) -> None:
        """Send this rank's arrays, ``owned[rank]``, to all ranks, and fill each ``owned[r]`` with rank r's. Overwrite
        ``memory`` on the way. Collective.

        All are flat bytes, of the same sizes on every rank. They pass through ``memory``, a value's bytes, at least as
        many.
        """
        transport, rank = self._transport, self._transport.rank
        # Ranks that share memory need one message: a fence shows all of it.
        size = memory.size if transport.shared else max(transport.limit // transport.size, _SHORTEST_PART)

        def send(message: tuple[Array, _Pairs]) -> None:
            """Copy this rank's arrays to its part of a message, and exchange it: then it has all parts. Collective."""
            whole, pairs = message
            self._copy(*pairs[rank])
            if transport.shared:
                transport.fence()
            else:
                transport.all_gather(whole, [sum(map(len, parts)) for parts, _ in pairs])

        def unpack(message: tuple[Array, _Pairs]) -> None:
            """Copy the other ranks' parts of a message to this rank's arrays for them. Local."""
            _, pairs = message
            for parts, arrays in pairs[:rank] + pairs[rank + 1 :]:
                self._copy(arrays, parts)

        delivery = _Delivery(self.streams, send, unpack, behind=0)
        with self._apart(overlaps=True):
            for message in _cut_message(memory, owned, size):
                delivery.add(message)
            delivery.end()

    @contextmanager
    def uncounted(self, plan: Plan) -> Iterator[None]:
        """In a with block: let graph capture run calls, then restore the keys' update counts and stale flags. Local."""
        table = self._values.table
        counts, stale = table.counts[plan.rows].copy(), table.stale[plan.rows].copy()
        try:
            yield
        finally:
            table.counts[plan.rows], table.stale[plan.rows] = counts, stale


class TransferPipeline(Pipeline):
    """The :class:`Pipeline` of a transport that carries messages while others are packed, updated and unpacked."""

    def _run(self, plan: Plan, *arguments: Any, **options: Any) -> None:
        """Run a push as the base class does, transfers beside other work if the plan overlaps them. Collective."""
        with self._apart(plan.overlaps):
            super()._run(plan, *arguments, **options)


class _Delivery:
    """Sends messages to all ranks, and unpacks each one message later, or several.

    A message may be unpacked once its owners have updated it: the exchange of the next one shows that. On a GPU, and
    between hosts, the transfer runs meanwhile.
    """

    def __init__(
        self, streams: Transfers | None, send: Callable[[Any], None], unpack: Callable[[Any], None], behind: int
    ) -> None:
        """Send nothing yet; ``behind`` messages, or as many as ``streams`` carry, will wait to be unpacked. Local."""
        self._streams, self._send, self._unpack = streams, send, unpack
        self._behind = behind if streams is None else streams.ahead
        self._coming: deque[tuple[Any, Any]] = deque()

    def add(self, message: Any) -> None:
        """Send a message to all ranks; unpack the oldest one if enough are on their way. Collective."""
        self._send(message)
        self._coming.append((message, None if self._streams is None else self._streams.sent()))
        if len(self._coming) > self._behind:
            self._unpack_oldest()

    def end(self) -> None:
        """Unpack all messages still on their way, oldest first; wait for each. Between hosts collective, else local."""
        while self._coming:
            self._unpack_oldest()

    def _unpack_oldest(self) -> None:
        """Wait for the oldest message on its way, and unpack it. Between hosts collective, else local."""
        message, sent = self._coming.popleft()
        if self._streams is not None:
            self._streams.wait_for(sent)
        self._unpack(message)


def _cut_message(memory: Array, owned: Sequence[Sequence[Array]], size: int) -> Iterator[tuple[Array, _Pairs]]:
    """Yield each message with up to ``size`` bytes per rank: its memory; by rank a pair of parts and arrays. Local."""
    low = high = 0
    for chunks in zip_longest(*(_chunks(arrays, size) for arrays in owned), fillvalue=list[Array]()):
        pairs = []
        for chunk in chunks:
            ends = [*accumulate(map(len, chunk), initial=high)]
            pairs.append(([memory[begin:end] for begin, end in pairwise(ends)], chunk))
            high = ends[-1]
        yield memory[low:high], pairs
        low = high


def _chunks(arrays: Sequence[Array], size: int) -> Iterator[list[Array]]:
    """Yield parts of flat arrays in their order, in lists of ``size`` elements, the last one perhaps of fewer. Local.

    >>> [[part.tolist() for part in chunk] for chunk in _chunks([np.arange(3), np.arange(2)], 2)]
    [[[0, 1]], [[2], [0]], [[1]]]
    """
    chunk, room = list[Array](), size
    for array in arrays:
        while array.size:
            if not room:
                yield chunk
                chunk, room = [], size
            chunk.append(array[:room])
            room, array = room - chunk[-1].size, array[room:]
    if chunk:
        yield chunk


def are_plain(arrays: Arrays) -> bool:
    """Return whether each key has one plain array, not a tuple, as :data:`Arrays` says; False without keys. Local."""
    return len(arrays) > 0 and type(arrays[0]) is not tuple


def groups_of(arrays: Arrays) -> Sequence[Sequence[Array]]:
    """Return each key's arrays as a sequence: a tuple of one for a plain array. No copies. Local."""
    return [(array,) for array in arrays] if are_plain(arrays) else arrays


def cut(bucket: Bucket, sources: Arrays) -> Sequence[Array]:
    """Return the parts of plain, contiguous arrays that a bucket holds, as views in the pieces' shapes. Local."""
    return [
        sources[item] if sources[item].shape == shape else sources[item].reshape(-1)[begin:end]
        for (item, begin, end, _, _), shape in zip(bucket.pieces, bucket.shapes, strict=True)
    ]


def _layers(sources: Arrays) -> Layers:
    """Return for each position in the keys' lists, all equally long, the flat array of each key there. Local."""
    return [[array.reshape(-1) for array in sources]] if are_plain(sources) else list(zip(*sources, strict=True))


def _flat_views(plan: Plan, groups: Sequence[Sequence[Array]]) -> Sequence[Sequence[Array]]:
    """Return flat views of the arrays to fill; without a value's own view, as it is filled already. Local."""
    pairs = zip(plan.entries, groups, strict=True)
    return [tuple(array.reshape(-1) for array in group if array is not entry.view) for entry, group in pairs]


def _copy_in_lanes(team: Team, targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy as :func:`_copy` does, by the team's threads if the arrays are long, in all and on average. Local."""
    if sum(map(attrgetter("nbytes"), targets)) < max(SHARED_OUT, CUT_BYTES * len(targets)):
        _copy(targets, sources)
    else:
        team.run([partial(_copy, *lane) for lane in deal(targets, sources, team.size)])


def _copy(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy each source to its target, of the same shape and dtype. Local.

    It stands here, so that a call stays in this file.
    """
    if len(targets) == 1:  # zip takes longer to begin than a copy
        targets[0][...] = sources[0]
    else:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source
