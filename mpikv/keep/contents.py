"""What of a store a commit holds on this rank: its elements of values and state, residuals, and counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from typing import Any

import numpy as np

from ..arrays.arrays import name_of
from ..checkpoint.compatibility import describe_updater, restore_updater
from ..checkpoint.header import VERSION
from ..checkpoint.trees import pack
from ..engine.arena import Block
from ..engine.compression import ensure_residuals
from ..engine.exchange import Exchange
from ..errors import Unsupported
from ..optimizers import Optimizer
from ..protocols import Array


def check_owners(exchange: Exchange, known: Set[object]) -> None:
    """Raise Unsupported if the store has sums of gradients whose owner is not among those ``known``. Local."""
    for key, owner in exchange.values.table.summed.items():
        if owner not in known:
            raise Unsupported(
                f"steps: {key!r} is a key of sums of gradients, whose owner, a Trainer or what mpikv.torch.attach "
                "returned, has the weights; call its steps(), or pass it to kv.keep before kv.steps"
            )


class Contents:
    """Collects the contents of one store, and puts them back. Local, unless marked *Collective*."""

    def __init__(self, exchange: Exchange, objects: Collection[str]) -> None:
        """Record the layout, and the blocks and rows of the store that a commit takes; Unsupported for values on a GPU.

        ``objects`` are the names of the program's kept objects.
        """
        if not exchange.transport.memory.is_host:
            raise Unsupported("commits hold no GPU's values; start without --restarts and --keep, and save checkpoints")
        self._exchange, self._objects, values = exchange, objects, exchange.values
        self._blocks, self._rows = list(values.blocks), [entry.index for entry in values.table.entries()]
        # Small values share a block, most of which may hold none.
        self._ends = dict[Block, int]()
        for entry in values.table.list_lasting():
            block, start, size = entry.place
            self._ends[block] = max(self._ends.get(block, 0), start + size)
        self.layout, self._identity = self._describe(), self._identify()
        """The texts that tell how the memory of the store is laid out; a commit fits only the same ones."""
        # Once, as there may be many.
        self._packed = pack(self.layout, "layout")

    def _describe(self) -> list[str]:
        """Return texts that describe all that a commit must fit: ranks, settings, and places of keys and blocks."""
        exchange = self._exchange
        updater, codec = exchange.updater, exchange.compression and exchange.compression.codec.settings()
        # Not its options, which a program may change in the loop.
        kind = type(updater).__name__ if isinstance(updater, Optimizer) else updater.settings()
        texts = [f"version {VERSION} of the format", f"{exchange.transport.size} ranks"]
        # The length of messages decides which elements a rank owns.
        texts += [f"transport {exchange.transport.name}", f"messages of {exchange.transport.limit} bytes"]
        texts += [f"placement {exchange.placement.name}", f"updater {kind}", f"compression {codec}"]
        for entry in self._exchange.values.table.list_lasting():
            form, place = f"{name_of(entry.dtype)}{list(entry.shape)}" + " of rows" * entry.row_sparse, entry.place
            where = f"at {place.start} of block {place.block.index}, row {entry.index}"
            texts.append(f"key {entry.key!r}: {form}, {where}")
        for block in self._ends:
            slots = {name: name_of(array.dtype) for name, array in block.state.items()}
            # The transport and the number of its first cell decide its owners, too.
            size, where = block.values.size, f"block {block.index} from cell {block.grid.number}"
            texts.append(f"{where}: {size} elements with the states {slots}")
        return texts + [f"the kept object {name!r}" for name in self._objects]

    def check_layout(self) -> None:
        """Raise Unsupported if the store's layout is not the recorded one any more."""
        # Cheap, as this precedes each commit: the planner is replaced with the updater, the placement and the codec.
        if (now := self._identify()) == self._identity:
            return
        if difference := find_difference(self.layout, self._describe()):
            raise Unsupported(
                f"the store changed in the loop, from {difference[0]} to {difference[1]}; a program that starts again "
                "has the store of the loop's begin, so make all keys, and set updater and compression, before kv.steps"
            )
        self._identity = now

    def _identify(self) -> tuple[object, ...]:
        """Return the store's planner and entries: as long as these are the same objects, so is the layout."""
        return self._exchange.values.planner, *self._exchange.values.table.list_lasting()

    def collect(self) -> dict[str, Any]:
        """Return a dict of this rank's part of the store; values, state and residuals are not copied. Local."""
        values = self._exchange.values
        return {
            "layout": self._packed,
            "updater": describe_updater(self._exchange.updater),
            "codec": [[entry.index, entry.codec_state] for entry in values.table.entries() if entry.codec_state],
            "residuals": [block.residuals for block in self._blocks],
            "counts": [values.table.counts[self._rows], values.table.earlier[self._rows]],
            "values": list(self._list_owned()),
        }

    def _list_owned(self) -> Iterator[Array]:
        """Yield this rank's elements of values and state, as views of the store's memory."""
        planner = self._exchange.values.planner
        for block, end in self._ends.items():
            for low, high in planner.owned(block).within(0, end):
                yield block.values[low:high]
                yield from block.state_of(low, high).values()

    def put_back(self, kept: dict[str, Any]) -> None:
        """Overwrite this rank's part of the store by a commit's, with residuals, counts and the optimizer's options;
        other ranks get its values by :meth:`publish`. Local.

        Raises:
            MemoryError: there is none for residuals; nothing was overwritten.
        """
        exchange, values = self._exchange, self._exchange.values
        for block, residuals in zip(self._blocks, kept["residuals"], strict=True):
            if exchange.compression is not None and residuals:
                ensure_residuals(exchange.compression.codec, block, len(residuals))
        # Those of pushes before the loop, of which the commit knows.
        values.drop_residuals(keeps_memory=True)
        for block, residuals in zip(self._blocks, kept["residuals"], strict=True):
            for residual, before in zip(block.residuals, residuals, strict=False):
                np.copyto(residual, before)
        entries = {entry.index: entry for entry in values.table.entries()}
        for index, arrays in kept["codec"]:
            entries[index].codec_state.update({name: array.copy() for name, array in arrays.items()})
        for array, before in zip(self._list_owned(), kept["values"], strict=True):
            np.copyto(array, before)
        values.table.counts[self._rows], values.table.earlier[self._rows] = kept["counts"]
        if isinstance(exchange.updater, Optimizer):
            exchange.updater.take_options(restore_updater(kept["updater"], exchange.updater))

    def publish(self) -> None:
        """Give every rank the values that their owners have put back. Collective."""
        if keys := tuple(entry.key for entry in self._exchange.values.table.list_lasting()):
            self._exchange.pipeline.republish(self._exchange.values.plan(keys))


def find_difference(before: Sequence[str], after: Sequence[str]) -> tuple[str, str] | None:
    """Return (first text only in ``before``, first only in ``after``), with "nothing" for a side without; None if both
    have the same texts. Local.

    Order is ignored. "nothing" stands in for one that is missing.

    >>> find_difference(["a", "b"], ["b"])
    ('a', 'nothing')
    """
    sides = ((before, set(after)), (after, set(before)))
    gone, new = (next((text for text in own if text not in others), "nothing") for own, others in sides)
    return None if gone == new else (gone, new)
