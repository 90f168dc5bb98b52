"""Whole chunks of a checkpoint for each writer, where a rank owns only some KiB of each chunk.

Of many ranks on several hosts, 32 to 63 own a part of each MiB of a value. Writes of their parts would be as short, and
hosts would change the same pages and stripes of the file. So the chunks are dealt to ranks, spread over all hosts, and
the owners send each writer the elements of its chunks. The writer copies them to memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import numpy as np

from ..engine.exchange import Exchange
from ..engine.spans import cut
from ..protocols import Array, Carries
from .chunks import Piece, cut_windows
from .extents import list_extents
from .header import CHUNK, Header

FEWEST = 64
"""From so many ranks on, saves gather chunks, if MPI carries messages between two ranks."""


class Gathering:
    """Brings this rank the chunks that it writes of each window of a save."""

    def __init__(self, exchange: Exchange, header: Header, allocate: Callable[[int], Array], keeps: bool) -> None:
        """Allocate memory for this rank's chunks of a window, or if it ``keeps`` them of all windows. Local."""
        self._exchange, self._rank = exchange, exchange.transport.rank
        self._extents = list(list_extents(header, exchange.values.table.find(header.keys)))
        self._end = header.nbytes_of_arrays
        self.windows = [window for window, _ in cut_windows(header.nbytes)]
        counts = [self._writers(window).count(self._rank) for window in self.windows]
        room = allocate((sum(counts) if keeps else max(counts, default=0)) * CHUNK)
        self._rows = cycle(room.reshape(-1, CHUNK))

    def prepare(self, window: slice, pieces: list[Piece]) -> Callable[[], object]:
        """Append this rank's chunks of the next window to ``pieces``, not yet filled; return a collective function to
        fill them. Call it for all windows in their order. Local.
        """
        placement, transport, writers = self._exchange.placement, self._exchange.transport, self._writers(window)
        rows = {number: next(self._rows) for number, each in enumerate(writers, window.start) if each == self._rank}
        sends, receives = list[tuple[int, Array]](), list[tuple[int, Array]]()
        for extent in self._extents:
            first, start, size = extent.low, extent.begin, extent.find(0, 0).itemsize
            last = start + (extent.high - first) * size
            for low, high in cut(max(start, window.start * CHUNK), min(last, window.stop * CHUNK), CHUNK):
                writer, row = writers[low // CHUNK - window.start], rows.get(low // CHUNK)
                # Outwards to whole elements: a complex number may reach into the next chunk.
                element, after = first + (low - start) // size, first - (start - high) // size
                shares = extent.block.grid.shares(placement, element, after)
                for count, owner in [(after - element, writer)] if placement.everywhere else shares:
                    if owner == self._rank or row is not None:
                        at = start + (element - first) * size
                        begin, end = max(at, low), min(at + count * size, high)
                        if row is not None:
                            receives.append((owner, row[begin % CHUNK :][: end - begin]))
                        if owner == self._rank:
                            # As bytes, since some dtypes have no buffer.
                            own = transport.memory.to_host(extent.find(element, element + count)).view(np.uint8)
                            sends.append((writer, own[begin - at : end - at]))
                    element += count
        # All ranks go through the same parts: so two ranks list the messages between them in the same order.
        assert isinstance(transport.control, Carries)
        pieces += [Piece(number * CHUNK, row[: self._end - number * CHUNK].data) for number, row in rows.items()]
        return partial(transport.control.carry, sends, receives)

    def _writers(self, window: slice) -> list[int]:
        """List the writing rank of each chunk of arrays in a window; chunks are spread, with turns by window. Local."""
        count = max(min(window.stop, -(-self._end // CHUNK)) - window.start, 0)
        turn, size = window.start // (window.stop - window.start), self._exchange.transport.size
        return [(number * size // count + turn) % size for number in range(count)]
