"""What compressed pushes have left out, in a checkpoint: a part of the program's state, of each rank's own.

So it returns to as many ranks, with the same codec. In any other store compression starts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cluster.printing import log
from ..engine.compression import ensure_residuals
from ..engine.exchange import Exchange
from ..errors import CheckpointError
from ..protocols import Array
from .header import RESIDUALS, Header
from .trees import pack, reading


def pack_residuals(exchange: Exchange, header: Header) -> Array:
    """Return this rank's residuals, and the codec's state of values, as an array of bytes, copied. Local."""
    assert exchange.compression is not None
    entries, transport = exchange.values.table.find(header.keys), exchange.transport
    tree = {
        "codec": exchange.compression.codec.settings(),
        # With its number the state of no two ranks is the same: each rank gets its own back.
        "rank": [transport.rank, transport.size],
        "left": [list(map(transport.memory.to_host, entry.residuals())) for entry in entries],
        "kept": [entry.codec_state for entry in entries],
    }
    return pack(tree, RESIDUALS)


def plan_residuals(exchange: Exchange, header: Header, found: Any) -> Callable[[], object]:
    """Allocate residuals; return a function to set those ``found``, or to drop all if it is None, or codec or ranks
    differ. Local.

    Raises:
        CheckpointError: what was found is none.
        MemoryError: there is too little memory; no content has changed.
    """
    values, transport = exchange.values, exchange.transport
    codec = None if exchange.compression is None else exchange.compression.codec
    if found is None:
        return values.drop_residuals
    with reading(RESIDUALS):
        if codec is None or found["codec"] != codec.settings() or found["rank"] != [transport.rank, transport.size]:
            if transport.rank == 0:
                log(
                    "the checkpoint has the residuals of %d ranks with compression %s, and this store has %d with %s: "
                    "they are dropped, and residuals start at zero",
                    *(found["rank"][1], found["codec"], transport.size, "none" if codec is None else codec.settings()),
                )
            return values.drop_residuals
        entries, pairs = values.table.find(header.keys), list[tuple[Array, Array]]()
        for entry, arrays in zip(entries, found["left"], strict=True):
            ensure_residuals(codec, entry.place.block, len(arrays))
            pairs += zip(entry.residuals(), arrays, strict=False)
        kept = list(zip(entries, map(dict, found["kept"]), strict=True))
        if any(target.shape != array.shape for target, array in pairs):
            raise CheckpointError("they are of other lengths than the values")

    def restore() -> None:
        """Drop all residuals and codec state of the store, then set those that were found. Local."""
        values.drop_residuals(keeps_memory=True)
        transport.memory.copy([target for target, _ in pairs], [array for _, array in pairs])
        for entry, state in kept:
            entry.codec_state.update(state)

    return restore
