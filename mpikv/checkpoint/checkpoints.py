"""The collective calls that write and read checkpoints.

Every rank writes, and reads, the elements that it owns, straight from and to where they lie, so that next to no memory
is needed. All ranks go through the file together, a window at a time, and learn after each whether it went well on all:
nobody waits longer than a window takes, and a full disk is noticed by all when it is full.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..agreement import Agreement, Call
from ..calls import Prepared
from ..errors import CheckpointError, ConfigError, TransportError, Unsupported, unsettled
from ..exchange import Exchange
from ..optimizers import Optimizer
from ..plan import Bucket, Plan, digest
from ..typing import Array, Memory, Updater
from .contents import CHUNK, VALUE, Contents, Header, SavedKey, check_byte_order, check_readable, dtype_named
from .files import NONCE, Draft, Reader, Source
from .fits import check_keys, check_slots, found, restored_for_states, slot_names
from .pieces import Piece, check_sums, contributed, cut, read_pieces, spans, windows, write_pieces
from .residuals import Targets, held, make_room, positions_of, taken, targeted, whole, with_residuals
from .settings import check_dumpable, described, other_mean, restored

__all__ = ["Checkpoints"]


class _Room:
    """Arrays of the host to read what belongs into others, which are these themselves where they lie there."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arrays: list[Array] = []
        self._places: list[Array] = []

    def over(self, array: Array) -> Array:
        """Return an array of the host to fill in place of this one, which becomes zero where it is not filled."""
        if self._memory.on_host:
            return array
        self._places.append(array)
        self._arrays.append(np.zeros(array.shape, array.dtype))
        return self._arrays[-1]

    def empty(self) -> None:
        """Copy what they were filled with to where it belongs."""
        self._memory.copy(self._places, self._arrays)


class Checkpoints:
    """Prepares and runs the calls of one store."""

    def __init__(self, exchange: Exchange, agreement: Agreement, root: int) -> None:
        self._exchange, self._agreement, self._root = exchange, agreement, root
        self._transport, self._memory = exchange.transport.control, exchange.transport.memory

    # --- Save

    def save(self, path: Any, residuals: bool) -> Prepared:
        self._check_kept()
        updater = described(self._exchange.updater, ranks=self._transport.size)
        return self._saving("save", path, updater, values=True, residuals=bool(residuals))

    def save_states(self, path: Any, dump_optimizer: Any) -> Prepared:
        updater = self._optimizer()
        if dump_optimizer:
            check_dumpable(updater)
        saved = described(updater, bool(dump_optimizer), self._transport.size)
        return self._saving("save_optimizer_states", path, saved, values=False)

    def _saving(
        self, verb: str, path: Any, updater: Mapping[str, Any], values: bool, residuals: bool = False
    ) -> Prepared:
        check_byte_order()
        path = os.fsdecode(path)
        self._exchange.check_slots()
        contents = Contents(self._saved_keys(), values, updater)
        check_readable(contents)
        blank = _blank(contents)
        call = _call(verb, path, contents, *["with residuals"] * residuals)
        return call, (self._write, call, Draft(path), contents, len(blank), residuals)

    def _saved_keys(self) -> tuple[SavedKey, ...]:
        table, slots = self._exchange.table, self._exchange.updater.slots
        # By dtype, as there are few of them and many keys.
        names = {dtype: (dtype.name, slot_names(slots(dtype))) for dtype in {entry.dtype for entry in table.entries()}}
        counts, earlier = table.counts.tolist(), table.earlier.tolist()
        return tuple(
            SavedKey(
                entry.key,
                names[entry.dtype][0],
                entry.shape,
                counts[entry.index],
                earlier[entry.index],
                names[entry.dtype][1],
                entry.present is not None,
            )
            for entry in table.entries()
        )

    def _write(self, call: Call, draft: Draft, contents: Contents, start: int, residuals: bool) -> None:
        is_root = self._transport.rank == self._root
        extras: Sequence[Mapping[str, Array]] = ()
        if residuals and (more := with_residuals(self._exchange, contents)) is not contents:
            contents, extras = more, self._together(call, held, self._exchange, more)
            start = len(self._together(call, _checked_blank, contents))
        try:
            # By the name that the root has drawn the others know whether they see its file.
            nonce = np.zeros(NONCE, np.uint8)
            self._together(call, draft.create, nonce, only=is_root)
            self._transport.broadcast(nonce, self._root)
            self._together(call, draft.attach, nonce, only=not is_root)
            sums = np.zeros(contents.chunks, np.uint32)
            own_pieces = [*self._pieces(contents, self._divided, self._memory.to_host), *whole(contents, extras)]
            for chunks, (pieces,) in windows(contents.nbytes, own_pieces):
                own = self._together(call, write_pieces, draft, pieces, start)
                sums[chunks] = self._combined(contributed(own, pieces, chunks, contents.nbytes))
            self._together(call, draft.commit, contents, sums, only=is_root)
        finally:
            draft.close()
        if contents.values:
            # The file has the exact values: the run goes on with what it would go on with if it were loaded.
            self._exchange.give_exact()

    # --- Load

    def load(self, path: Any) -> Prepared:
        return self._found_together("load", self._load, path)

    def load_states(self, path: Any) -> Prepared:
        return self._found_together("load_optimizer_states", self._load_states, path)

    def _found_together(self, verb: str, prepare: Callable[[Any], Prepared], path: Any) -> Prepared:
        """Prepare; but where ranks do not tell each other of what that raises, leave it to where they do, as a file may
        be unreadable on one of them alone.
        """
        if self._agreement.check:
            return prepare(path)
        call = Call(verb, 0, repr(path))

        def run() -> None:
            _, (work, *arguments) = self._together(call, prepare, path)
            work(*arguments)

        return call, (run,)

    def _load(self, path: Any) -> Prepared:
        self._check_kept()
        source = found(path, values=True)
        contents, table = source.header.contents, self._exchange.table
        if len(table):
            check_keys(contents, table)
        updater = restored(contents.updater, self._exchange.updater)
        return self._loading("load", source, updater, self._load_known if len(table) else self._load_new)

    def _load_states(self, path: Any) -> Prepared:
        present = self._optimizer()
        source = found(path, values=False)
        contents = source.header.contents
        check_keys(contents, self._exchange.table)
        updater = restored_for_states(source, present)
        return self._loading("load_optimizer_states", source, updater, self._load_known)

    def _loading(self, verb: str, source: Source, updater: Updater, run: Callable[..., None]) -> Prepared:
        check_byte_order()
        contents = source.header.contents
        self._exchange.placed(updater, {dtype_named(one.dtype) for one in contents.keys})
        check_slots(source, updater)
        call = _call(verb, source.path, contents, f"checksums {zlib.crc32(source.header.sums.data):08x}")
        return call, (self._read_from, call, source, updater, run)

    def _read_from(self, call: Call, source: Source, updater: Updater, run: Callable[..., None]) -> None:
        reader = Reader(source)
        try:
            self._together(call, reader.open)
            run(call, reader, source.header, updater)
        finally:
            reader.close()
        contents = source.header.contents
        self._settle_counts(contents)
        warning = other_mean(contents.updater, updater, self._transport.size)
        if warning and self._transport.rank == self._root:
            logging.getLogger("mpikv").warning(warning)

    def _load_new(self, call: Call, reader: Reader, header: Header, updater: Updater) -> None:
        """Load into a store without keys, which has none again if the file turns out to be damaged."""
        exchange, keys = self._exchange, [one.key for one in header.contents.keys]
        before = exchange.updater
        try:
            exchange.adopt(updater)
            # Arrays of one element each, which say how much memory the values need.
            likes = [np.broadcast_to(np.zeros((), dtype_named(k.dtype)), k.shape) for k in header.contents.keys]
            exchange.enter(keys, likes, sparse={one.key for one in header.contents.keys if one.row_sparse})
            self._read_arrays(call, reader, header)
        except BaseException:
            exchange.delete([key for key in keys if key in exchange.table])
            exchange.adopt(before)
            raise

    def _load_known(self, call: Call, reader: Reader, header: Header, updater: Updater) -> None:
        """Load over keys that are there, once all ranks know that the file is whole."""
        self._verify(call, reader, header)
        if header.contents.values:
            self._together(call, make_room, self._exchange, header.contents)
        self._exchange.adopt(updater)
        # From here on a failure ends the store, as some of its values are the file's, and others are not. It is not
        # settled, then, although all ranks know of it.
        try:
            self._read_arrays(call, reader, header)
        except TransportError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{call}: the file was whole, and then could not be read again, or not be put in its place: {error}"
            ) from error
        except BaseException as error:
            unsettled(error)
            raise

    def _verify(self, call: Call, reader: Reader, header: Header) -> None:
        """Compare all checksums, each on one rank."""
        memory, size = np.empty(CHUNK, np.uint8).data, header.contents.nbytes

        def verify(chunks: range) -> None:
            for chunk in chunks:
                part = memory[: min(CHUNK, size - chunk * CHUNK)]
                reader.read(part, chunk * CHUNK)
                check_sums(np.array([zlib.crc32(part)], np.uint32), header, slice(chunk, chunk + 1))

        for begin, end in spans(size):
            mine = range(begin // CHUNK + self._transport.rank, -(-end // CHUNK), self._transport.size)
            self._together(call, verify, mine)

    def _read_arrays(self, call: Call, reader: Reader, header: Header) -> None:
        """Read what this rank owns to where it belongs; compare the checksums; give the values to all ranks."""
        contents = header.contents
        room = _Room(self._memory)
        targets: tuple[Targets, Targets] = (), ()
        if contents.values:
            # Those that are there belong to pushes that these values have not seen.
            self._exchange.drop_residuals(keeping=positions_of(self._exchange, contents))
            targets = self._together(call, taken, self._exchange, contents, room.over)
        own_pieces, common = (list(targeted(contents, each)) for each in targets)
        if self._transport.rank == 0:  # what all ranks read counts once
            own_pieces, common = own_pieces + common, []
        pieces = self._together(call, list, self._pieces(contents, _owned, room.over))
        for chunks, (values, own, others) in windows(contents.nbytes, pieces, own_pieces, common):
            sums = [
                contributed(self._together(call, read_pieces, reader, part), part, chunks, contents.nbytes)
                for part in (values, own, others)
            ]
            if self._exchange.placement.everywhere:  # this rank has read all values
                total = sums[0] ^ self._combined(sums[1])
            else:
                total = self._combined(sums[0] ^ sums[1])
            self._together(call, check_sums, total, header, chunks)
        self._together(call, room.empty)
        self._exchange.republish(self._plan(contents))

    def _settle_counts(self, contents: Contents) -> None:
        table = self._exchange.table
        for one in contents.keys:
            row = table[one.key].index
            # An optimizer's state says nothing of how many pushes these values have seen.
            earlier = one.earlier if contents.values else table.version(one.key) - one.updates
            table.counts[row], table.earlier[row] = one.updates, earlier

    # --- What a rank has of the file

    def _plan(self, contents: Contents) -> Plan:
        return self._exchange.plan(tuple(one.key for one in contents.keys))

    def _divided(self, bucket: Bucket) -> tuple[int, int]:
        """Return which elements of a bucket this rank writes: those it owns, or its part of what all own."""
        if not self._exchange.placement.everywhere:
            return _owned(bucket)
        size, ranks, rank = bucket.value.size, self._transport.size, self._transport.rank
        return size * rank // ranks, size * (rank + 1) // ranks

    def _pieces(
        self, contents: Contents, elements: Callable[[Bucket], tuple[int, int]], on_host: Callable[[Array], Array]
    ) -> Iterator[Piece]:
        """Yield what this rank has of the arrays, given its elements of a bucket, and what stands for them on the
        host.
        """
        plan = self._plan(contents)
        memory = [{VALUE: entry.updated, **entry.state} for entry in plan.entries]
        arrays: list[list[tuple[int, Array]]] = [[] for _ in plan.entries]
        for tensor in contents.tensors:
            if tensor.slot in memory[tensor.item]:
                arrays[tensor.item].append((tensor.begin, memory[tensor.item][tensor.slot].reshape(-1)))
        for bucket in plan.buckets:
            low, high = elements(bucket)
            for piece in bucket.pieces:
                first, last = (min(max(edge, piece.at), piece.until) - piece.at for edge in (low, high))
                for begin, array in arrays[piece.item]:
                    part = on_host(array[piece.begin + first : piece.begin + last])
                    yield from cut(begin + (piece.begin + first) * array.itemsize, part.view(np.uint8).data)

    # --- Together with the other ranks

    def _together(self, call: Call, work: Callable[..., Any], *arguments: Any, only: bool = True) -> Any:
        """Do what may fail on one rank alone, ``only`` where it is to be done; raise on every rank if it failed."""
        failure, result = None, None
        try:
            result = work(*arguments) if only else None
        except BaseException as error:  # Ctrl-C too: the other ranks wait
            failure = error
        self._agreement.confirm(call, failure)
        return result

    def _combined(self, sums: Array) -> Array:
        """Return the exclusive or of all ranks' sums."""
        everyone = np.zeros((self._transport.size, sums.size), np.uint32)
        everyone[self._transport.rank] = sums
        self._transport.all_gather(everyone.reshape(-1), [sums.size] * self._transport.size)
        combined: Array = np.bitwise_xor.reduce(everyone)
        return combined

    # --- Checks

    def _check_kept(self) -> None:
        """Raise where values are sums of gradients, while the weights and their state are elsewhere."""
        table = self._exchange.table
        if (key := next((one.key for one in table.entries() if table.summed[one.index]), None)) is not None:
            raise Unsupported(
                f"the value of {key!r} is a sum of gradients, for a Trainer with update_on_kvstore=False, which has "
                "the weights and the optimizer's state itself: save its parameters as arrays, and the state by "
                "trainer.save_states(path); with update_on_kvstore=True the store has all of it. Without the Trainer, "
                "delete its keys"
            )

    def _optimizer(self) -> Optimizer:
        updater = self._exchange.updater
        if not isinstance(updater, Optimizer):
            raise ConfigError("the store has no optimizer, whose state this is about; call set_optimizer first")
        return updater


def _blank(contents: Contents) -> bytes:
    """Return a header whose length says where the arrays begin."""
    return contents.header(np.zeros(contents.chunks, np.uint32))


def _checked_blank(contents: Contents) -> bytes:
    check_readable(contents)
    return _blank(contents)


def _owned(bucket: Bucket) -> tuple[int, int]:
    return bucket.share.low, bucket.share.high


def _call(verb: str, path: str, contents: Contents, *others: str) -> Call:
    texts = [f"path {path!r}", f"contents {contents.checksum:08x}", *others]
    return Call(
        verb, digest("\n".join([verb, *texts])), repr(path), describe=lambda: [texts[0], *contents.parts, *texts[1:]]
    )
