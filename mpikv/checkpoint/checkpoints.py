"""Calls that write and read checkpoints of a store, or of an optimizer's state that every rank has.

Every rank of a store writes and reads its own elements, straight from and to the store's memory; a save needs almost no
extra memory. Of many ranks on several hosts each writes whole chunks, which their owners send it. A Trainer with local
updates has the same state on all ranks: rank 0 writes it, and all read it. Each of the two loads the other's files.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from ..arrays.arrays import name_of
from ..cluster.agreement import Agreement
from ..cluster.calls import Call, PreparedCall
from ..engine.alltoallv import gather
from ..engine.arena import Block
from ..engine.exchange import Exchange
from ..engine.keys import Entry
from ..engine.placement import Owners
from ..engine.plan import digest
from ..engine.spans import Spans
from ..errors import CheckpointError, ConfigError, TransportError, Unsupported, brief, mark
from ..optimizers import Optimizer
from ..protocols import Array, Carries, Key, Updater
from .ahead import Ahead
from .chunks import Gather, Parts, Piece, cut_array, read_arrays, write_arrays, write_windows
from .compatibility import check_dumpable, describe_updater, find_states, find_values, slot_names, warn_of_other_mean
from .extents import list_extents
from .files import Draft, Reader, Source
from .gathering import FEWEST, Gathering
from .header import CHUNK, RESIDUALS, Header, Kind, check_writable, parse_dtype
from .program import Program, add_program, pack_state
from .residuals import pack_residuals, plan_residuals
from .saving import Copies, SaveWork, Span


class Checkpoints:
    """Prepares the checkpoint calls of one store, locally, and runs them, collectively."""

    def __init__(self, exchange: Exchange, agreement: Agreement, root: int, collective: Callable[..., Any]) -> None:
        """Open nothing. ``collective`` runs a call of the store, given its verb and the function that prepares it."""
        self._exchange, self._agreement, self._root, self._collective = exchange, agreement, root, collective
        self._transport, self._memory = exchange.transport.control, exchange.transport.memory
        self._copies = Copies(self._memory)
        self._saving: SaveWork | None = None

    # --- Save

    def save(self, path: Any, residuals: bool, wait: bool, state: Any) -> PreparedCall:
        """Pack ``state``; return (call, run) to save it and the store; Unsupported if a Trainer has weights. Local."""
        self._check_weights()
        return self.save_rest(path, bool(residuals), wait, {} if state is None else state)

    def save_rest(self, path: Any, residuals: bool, wait: bool, state: Any) -> PreparedCall:
        """Pack ``state`` now, or raise; return (call, run). Local; run() is collective, and saves it and the keys that
        hold no gradient sums.
        """
        updater = describe_updater(self._exchange.updater, ranks=self._transport.size)
        return self._prepare_save("save", path, updater, True, residuals, wait, pack_state(state))

    def save_states(self, path: Any, dump_optimizer: Any) -> PreparedCall:
        """Return (call, run) to save optimizer state, with options if ``dump_optimizer``; or raise. Local; run() is
        collective.
        """
        optimizer = self._get_optimizer()
        if dump_optimizer:
            check_dumpable(optimizer)
        updater = describe_updater(optimizer, bool(dump_optimizer), self._transport.size)
        return self._prepare_save("save_optimizer_states", path, updater, values=False)

    def _prepare_save(
        self,
        verb: str,
        path: Any,
        updater: Mapping[str, Any],
        values: bool,
        residuals: bool = False,
        wait: bool = True,
        packed: Mapping[str, Array] = MappingProxyType({}),
    ) -> PreparedCall:
        """Compile kernels; return (call, run); Unsupported if no file can hold the store. Local; run() is collective
        and returns None, or with ``wait=False`` a SaveWork.
        """
        path = os.fsdecode(path)
        self._exchange.check_slots()
        table = self._exchange.values.table
        # As lists: numpy's numbers one by one take ten times as long, and JSON refuses them.
        counts, earlier = table.counts.tolist(), table.earlier.tolist()
        facts = {
            key: (one.dtype, one.shape, counts[one.index], earlier[one.index], one.row_sparse)
            for key, one in self._entries().items()
        }
        header = _make_header(facts, self._exchange.updater, values, updater)
        others = [*["with residuals"] * residuals, *["wait=False"] * (not wait), *map("state of {!r}".format, packed)]
        call = _describe_call(verb, path, header, *others)
        return call, lambda: self._save(call, Draft(path), header, residuals, wait, packed)

    def _save(
        self, call: Call, draft: Draft, header: Header, residuals: bool, wait: bool, packed: Mapping[str, Array]
    ) -> SaveWork | None:
        """Write the file, return None; or if not ``wait`` copy arrays, start a thread, return SaveWork. Collective."""
        if residuals and self._exchange.compression is not None:
            left = self._agreement.run_together(call, pack_residuals, self._exchange, header)
            packed = {**packed, RESIDUALS: left}
        header, program = add_program(self._transport, header, packed)
        if packed:
            self._agreement.run_together(call, check_writable, header)
        pieces, gather = self._list_pieces(call, header, wait)
        windows = write_windows(draft, header, chain(pieces, program), gather)
        is_root = self._transport.rank == self._root
        if wait:
            self._run_parts(call, write_arrays(draft, header, windows, is_root))
            return None
        ahead = Ahead(windows)
        parts = write_arrays(draft, header, ahead, is_root)
        self._run_parts(call, parts, most=2)
        self._saving = SaveWork(call, parts, ahead, self._run_parts, self._collective)
        ahead.start()  # last: the thread would slow down the agreement before on a busy host
        return self._saving

    def _list_pieces(self, call: Call, header: Header, wait: bool) -> tuple[Iterable[Piece], Gather | None]:
        """Return (pieces to write, copied unless ``wait``; None). With many ranks and ``wait`` return ((), a function
        that adds pieces by window). Collective.
        """
        # The owners of whole values write long pieces anyway.
        cuts = not isinstance(self._exchange.placement, Owners)
        if cuts and self._transport.size >= FEWEST and isinstance(self._transport, Carries):
            allocate = partial(np.empty, dtype=np.uint8) if wait else self._copies.ensure_room
            make = partial(Gathering, self._exchange, header, allocate, keeps=not wait)
            gathering: Gathering = self._agreement.run_together(call, make)
            if wait:
                return (), gathering.prepare
            copies = list[Piece]()
            for window in gathering.windows:
                self._agreement.run_together(call, gathering.prepare, window, copies)()
            return copies, None
        spans = self._list_values(header, self._find_elements_to_write)
        if wait:
            return _cut_spans(spans, self._memory.to_host), None
        return self._agreement.run_together(call, self._copies.make, spans), None

    def finish(self) -> None:
        """If a save is pending, wait for all ranks' writes and rename the file, or raise its error. Collective.

        Raises:
            Exception: as :meth:`SaveWork.wait`.
        """
        if self._saving is not None and not self._saving.done:
            self._saving.wait()

    def end_save(self) -> Exception | None:
        """Finish the pending save and return its exception, or None; raise only if it is still pending. Collective.

        Raises:
            Exception: this call failed and the save is still pending, e.g. because other ranks made another call.
        """
        try:
            self.finish()
        except Exception as error:
            if self._saving is None or not self._saving.done:
                raise
            return error
        return None

    def give_up(self) -> None:
        """Wait for a pending save's present window, stop it, remove its file, and free the copies. Local."""
        if self._saving is not None:
            self._saving.give_up()
            self._saving = None
        self._copies.release()

    # --- Load

    def load(self, path: Any) -> PreparedCall:
        """Read a file's header, compile kernels; return (call, run), or raise if the file misfits the store. Local;
        run() is collective, reads values, replaces updater and counts, and returns the program's state.
        """
        self._check_weights()
        return self._prepare_load("load", *find_values(path, self._entries(), self._exchange.updater))

    def load_states(self, path: Any) -> PreparedCall:
        """Read a file's header, compile kernels; return (call, run), or raise if the file misfits the store. Local;
        run() is collective, reads optimizer state, and replaces optimizer and counts; values stay.
        """
        optimizer = self._get_optimizer()
        return self._prepare_load("load_optimizer_states", *find_states(path, self._entries(), optimizer))

    def load_rest(self, path: Any) -> PreparedCall:
        """Read the header of a :meth:`save_rest` file; give the store's optimizer its options at once; return (call,
        run). Local; run() is collective, and loads the rest.
        """
        source, updater = find_values(path, self._entries(), self._exchange.updater)
        if isinstance(present := self._exchange.updater, Optimizer) and isinstance(updater, Optimizer):
            present.take_options(updater)
            updater = present
        return self._prepare_load("load", source, updater)

    def _entries(self) -> dict[Key, Entry]:
        """Return the entries by key, without those that hold sums of gradients. Local."""
        return {entry.key: entry for entry in self._exchange.values.table.list_lasting()}

    def _prepare_load(self, verb: str, source: Source, updater: Updater) -> PreparedCall:
        """Set the updater's rank count, compile its kernels; return (call, run). Local; run() is collective."""
        self._exchange.place_updater(updater, {parse_dtype(one.dtype) for one in source.header.kinds})
        call = _describe_call(verb, source.path, source.header, _describe_sums(source))
        return call, lambda: self._load(call, source, updater)

    def _load(self, call: Call, source: Source, updater: Updater) -> dict[str, Any]:
        """Read the file into the store, adopt its updater and counts, and return the program's state. Collective."""
        # A new store has nothing to lose, so it reads the file once; a known one verifies it first, and reads it twice.
        is_new = source.header.values and not self._entries()
        # The file was inspected before the call; the reader checks that it is still the same one.
        with closing(Reader(source)) as reader:
            self._agreement.run_together(call, reader.open)
            program = Program(source.header, self._transport.rank, self._transport.size)
            state: dict[str, Any] = (self._load_new if is_new else self._load_known)(call, reader, updater, program)
        # Last: counts say that the values are loaded, so they must not change if the load failed.
        self._set_counts(source.header)
        if self._transport.rank == self._root:
            warn_of_other_mean(source.header.updater, updater, self._transport.size)
        return state

    def _load_new(self, call: Call, reader: Reader, updater: Updater, program: Program) -> dict[str, Any]:
        """Load into a store without keys; return the program's state, or undo all and raise. Collective."""
        exchange, header = self._exchange, reader.source.header
        before = exchange.updater
        try:
            exchange.adopt(updater)
            # Arrays of one element each (strides of 0): they give shape and dtype, and take no memory.
            likes = [np.broadcast_to(np.zeros((), parse_dtype(one.dtype)), one.shape) for one in header.kinds]
            sparse = {key for key, kind in header.pairs if kind.row_sparse}
            exchange.values.add_keys(header.keys, [likes[number] for number in header.kind_of], sparse)
            self._read(call, reader, program)
            state: dict[str, Any]
            state, restore = self._agreement.run_together(call, self._decode, reader.source.header, program)
            restore()
            return state
        except BaseException:
            # The memory may hold a part of the file, and the caller may try another one.
            exchange.values.delete([key for key in header.keys if key in exchange.values.table])
            exchange.adopt(before)
            raise

    def _load_known(self, call: Call, reader: Reader, updater: Updater, program: Program) -> dict[str, Any]:
        """Verify a file, read it over known keys, where a failure ends the store; return program state. Collective."""
        own = chain(self._deal_chunks(reader.source.header), program.own)
        self._run_parts(call, read_arrays(reader, own, program.shared))
        # Residuals may find no memory on one rank: that must come before the first value changes.
        state: dict[str, Any]
        state, restore = self._agreement.run_together(call, self._decode, reader.source.header, program)
        self._exchange.adopt(updater, state_follows=True)
        # From here on a failure ends the store: some values are the file's, others are not. The exception must not
        # count as settled, although all ranks know of it; else the store would go on.
        try:
            self._read(call, reader)
            restore()
            return state
        except TransportError:
            raise
        except Exception as error:
            raise CheckpointError(f"{call}: the file was complete, but could not be read again: {error}") from error
        except BaseException as error:
            mark(error, "settled", False)
            raise

    def _deal_chunks(self, header: Header) -> Iterator[Piece]:
        """Yield pieces to read for this rank's share of the arrays, all over one buffer, to verify them only. Local."""
        # One buffer for all chunks: only their checksums count here.
        memory = np.empty(CHUNK, np.uint8).data
        end = header.nbytes_of_arrays
        for begin in range(self._transport.rank * CHUNK, end, self._transport.size * CHUNK):
            yield Piece(begin, memory[: end - begin])

    def _decode(self, header: Header, program: Program) -> tuple[dict[str, Any], Callable[[], object]]:
        """Return the program's state, and a function that sets compression residuals; allocate these now. Local."""
        state = program.decode(self._transport.rank == self._root)
        restore = plan_residuals(self._exchange, header, state.pop(RESIDUALS, None)) if header.values else bool
        return state, restore

    def _read(self, call: Call, reader: Reader, program: Program | None = None) -> None:
        """Read this rank's values and optimizer state into the store; give all ranks the values. Collective.

        With a ``program``, read its state, too, and compare checksums; without, only check that the file is the one
        verified before.
        """
        self._run_parts(call, self._read_parts(reader, program))
        self._exchange.pipeline.republish(self._exchange.values.plan(reader.source.header.keys))

    def _read_parts(self, reader: Reader, program: Program | None) -> Parts:
        """Read this rank's values and state in parts, GPU arrays last; yield sums to xor after each. Collective."""
        header, copies = reader.source.header, list[tuple[Array, Array]]()

        def on_host(array: Array) -> Array:
            """Return this array if it is on the host, else a new one there, noted in ``copies`` for a copy back."""
            if self._memory.is_host:
                return array
            copies.append((array, np.empty(array.shape, array.dtype)))
            return copies[-1][1]

        own, shared = ([], []) if program is None else (program.own, program.shared)
        values = _cut_spans(self._list_values(header, self._exchange.values.planner.owned), on_host)
        (shared if self._exchange.placement.everywhere else own).extend(values)
        yield from read_arrays(reader, own, shared, checks=program is not None)
        self._memory.copy([array for array, _ in copies], [copy for _, copy in copies])

    def _set_counts(self, header: Header) -> None:
        """Set the update counts of the file's keys to those saved; for a file of states, versions stay. Local."""
        table = self._exchange.values.table
        rows, kind_of = [entry.index for entry in table.find(header.keys)], np.array(header.kind_of, np.intp)
        updates, earlier = np.array([[kind.updates, kind.earlier] for kind in header.kinds], np.int64).reshape(-1, 2).T
        # A file of states alone says nothing of the values, so their versions stay.
        versions = updates[kind_of] + earlier[kind_of] if header.values else table.counts[rows] + table.earlier[rows]
        table.counts[rows] = updates[kind_of]
        table.earlier[rows] = versions - updates[kind_of]

    # --- What a rank has of the file

    def _find_elements_to_write(self, block: Block) -> Spans:
        """Return ranges of a block's elements, those that this rank writes; of a replicated block its share. Local."""
        if not self._exchange.placement.everywhere:
            return self._exchange.values.planner.owned(block)
        # Every rank has a replicated value. Each writes a part: one rank's disk would be the bottleneck.
        size, ranks, rank = block.values.size, self._transport.size, self._transport.rank
        return Spans.join([(size * rank // ranks, size * (rank + 1) // ranks)])

    def _list_values(self, header: Header, elements: Callable[[Block], Spans]) -> Iterator[Span]:
        """Yield views of this rank's values and state, with offsets in the file's arrays, of chosen elements. Local.

        ``elements`` returns those of a block.
        """
        entries = self._exchange.values.table.find(header.keys)
        mine = {block: elements(block) for block in self._exchange.values.blocks}
        for extent in list_extents(header, entries):
            for low, high in mine[extent.block].within(extent.low, extent.high):
                array = extent.find(low, high)
                yield Span(extent.begin + (low - extent.low) * array.itemsize, array)

    # --- Together with the other ranks

    def _run_parts(self, call: Call, parts: Parts, most: float = math.inf) -> None:
        """Run ``most`` parts, or all; after each, xor ranks' numbers in place, or raise if one failed. Collective."""
        try:
            while (sums := self._agreement.run_together(call, next, parts, None)) is not None:
                if callable(sums):
                    sums()
                elif sums.size:  # replaced by the exclusive or of all ranks' sums
                    np.bitwise_xor.reduce(gather(self._transport, sums), out=sums)
                most -= 1
                if not most:
                    return
        except BaseException:
            parts.close()  # left early by an error, the generator closes its file and removes the draft
            raise

    # --- Checks

    def _check_weights(self) -> None:
        """Raise Unsupported if values are a Trainer's sums of gradients: its weights are elsewhere. Local."""
        summed = self._exchange.values.table.summed
        if (key := next((name for name in summed if not isinstance(summed[name], str)), None)) is not None:
            raise Unsupported(
                f"the value of {key!r} is a sum of gradients, not a weight: a Trainer with update_on_kvstore=False "
                "keeps the weights and the optimizer's state itself; save its parameters as arrays and its state by "
                "trainer.save_states(path), or use update_on_kvstore=True to keep all of it in the store; if the "
                "Trainer is gone, delete its keys"
            )

    def _get_optimizer(self) -> Optimizer:
        """Return the store's optimizer; ConfigError if it has none. Local."""
        updater = self._exchange.updater
        if not isinstance(updater, Optimizer):
            raise ConfigError("the store has no optimizer and so no state; call set_optimizer first")
        return updater


def _make_header(
    facts: Mapping[Key, tuple[Any, ...]], updater: Updater, values: bool, described: Mapping[str, Any]
) -> Header:
    """Return the header of a file with these keys; Unsupported if none can be. ``updater`` gives the names of states,
    ``described`` is written as the updater; ``values``: the file has values, too. Local.

    ``facts`` are each key's dtype, shape, updates, earlier updates, and whether it is row-sparse.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    kind_of = tuple([numbers.setdefault(one, len(numbers)) for one in facts.values()])
    kinds = tuple(
        Kind(name_of(dtype), shape, updates, earlier, slot_names(updater.slots(dtype)), row_sparse)
        for dtype, shape, updates, earlier, row_sparse in numbers
    )
    header = Header(tuple(facts), kinds, kind_of, values, described)
    check_writable(header)
    return header


def _describe_call(verb: str, path: str, header: Header, *others: str) -> Call:
    """Return the Call of a save or load, for ranks to compare: its verb, path, contents and options. Local."""
    texts = [f"path {path!r}", _describe(header), *others]
    return Call(
        verb, digest("\n".join([verb, *texts])), repr(path), describe=lambda: [texts[0], *header.parts, *texts[1:]]
    )


def _cut_spans(spans: Iterable[Span], on_host: Callable[[Array], Array]) -> Iterator[Piece]:
    """Yield the pieces of each array, cut at chunks' edges: views of the array that ``on_host`` returns. Local."""
    for begin, array in spans:
        yield from cut_array(begin, on_host(array))


def _describe(header: Header) -> str:
    """Return a text with the header's checksum, for ranks to compare. Local."""
    return f"contents {header.checksum:08x}"


def _describe_sums(source: Source) -> str:
    """Return a text with one checksum of all the file's chunk checksums, for ranks to compare. Local."""
    return f"checksums {zlib.crc32(source.sums.data):08x}"


# --- State that every rank has all of


@dataclass
class KeptState:
    """The state that an optimizer keeps for one value."""

    state: dict[str, Array]
    count: int = 0
    """Number of updates made."""


def save_states(
    path: Any, optimizer: Optimizer, values: Mapping[Key, Array], kept: Mapping[Key, KeptState], writes: bool
) -> Generator[str]:
    """Write states and settings to a file, on the rank with ``writes``, in parts; yield a text for ranks to compare
    before each. Collective.

    Collective: every rank runs the generator to its end. It yields a text before each slow part, as often on every
    rank. The caller compares the texts of all ranks, so that each learns of another's failure.

    Args:
        path: the same on every rank.
        optimizer: the owner of the state.
        values: give shapes and dtypes.
        kept: the state of each value, the same on every rank.
        writes: True on the one rank that writes the file; on the others the generator only yields.

    Raises:
        OSError, CheckpointError: the file cannot be written.
        Unsupported: no reader would accept the file.
    """
    path = os.fsdecode(path)
    facts = {key: (value.dtype, value.shape, kept[key].count, 0, False) for key, value in values.items()}
    header = _make_header(facts, optimizer, False, describe_updater(optimizer))
    text = f"{brief(repr(path), 300)}, {_describe(header)}"
    yield text
    draft = Draft(path)
    windows = write_windows(draft, header, _cut_states(header, kept) if writes else ())
    with closing(write_arrays(draft, header, windows, creates=writes, attaches=False)) as parts:
        for _ in parts:  # the sums are those of one rank
            yield text


def load_states(
    path: Any, present: Optimizer, values: Mapping[Key, Array]
) -> Generator[str, None, tuple[Optimizer, dict[Key, KeptState]]]:
    """Read states into new arrays in parts, yield a text to compare before each; return optimizer, states. Collective.

    Run it as :func:`save_states`.

    Args:
        path: the same on every rank; each rank reads the whole file.
        present: the current optimizer. It stays, unless the file has one of its kind with all settings.
        values: give keys, shapes and dtypes; the file must have the same.

    Returns:
        The optimizer to use, and the state of each value in numpy arrays. Other ranks may not have finished
        reading.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: it is damaged, or of another optimizer.
        ValueMismatch: it has other keys.
    """
    source, optimizer = find_states(path, values, present, "Trainer")
    text = f"{brief(repr(source.path), 300)}, {_describe(source.header)}, {_describe_sums(source)}"
    yield text
    kept = dict[Key, KeptState]()
    for key, kind in source.header.pairs:
        state = {slot: np.empty(kind.shape, parse_dtype(dtype)) for slot, dtype in kind.state.items()}
        kept[key] = KeptState(state, kind.updates)
    with closing(Reader(source)) as reader:
        reader.open()
        for _ in read_arrays(reader, own=(), shared=_cut_states(source.header, kept)):
            yield text
    return optimizer, kept


def _cut_states(header: Header, kept: Mapping[Key, KeptState]) -> Iterator[Piece]:
    """Yield the pieces of all state arrays, in the order of the file: views of their memory. Local."""
    for column in header.columns:
        for item, begin in zip(column.items.tolist(), column.edges.tolist(), strict=False):
            yield from cut_array(begin, kept[header.keys[item]].state[column.slot])
