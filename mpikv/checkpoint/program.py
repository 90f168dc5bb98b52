"""The program's own state in a checkpoint: ``save(path, state=...)`` takes it, and ``load`` returns it.

Each name's state is stored once if all ranks gave the same, as an epoch, and else for each rank, as a generator. So the
first kind returns to any number of ranks, and the second to as many as have saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from ..cluster.printing import log
from ..engine.alltoallv import gather
from ..errors import a_kind
from ..protocols import Array, Transport
from .chunks import Piece, cut_array
from .files import Source
from .header import RESIDUALS, Header
from .trees import pack, unpack


def pack_state(state: Any) -> dict[str, Array]:
    """Return a dict, by sorted names, of states as arrays of bytes; TypeError if no file can hold one. Local.

    Raises:
        TypeError: it is no dict of names, or no file can hold it.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) and name != RESIDUALS for name in state):
        raise TypeError(f'state is {a_kind(state)}, and not a dict of names of its own, as state={{"epoch": 3}}')
    return {name: pack(state[name], f"state[{name!r}]") for name in sorted(state)}


def add_program(transport: Transport, header: Header, packed: Mapping[str, Array]) -> tuple[Header, list[Piece]]:
    """Compare ranks' states by digests; return a new header with their sizes, and this rank's pieces to write.
    Collective.

    Rank 0 writes what is alike on all ranks.
    """
    if not packed:
        return header, []
    sizes = [blob.nbytes for blob in packed.values()]
    digests = [np.frombuffer(blake2b(blob.data, digest_size=8).digest(), np.int64)[0] for blob in packed.values()]
    table = gather(transport, np.array([sizes, digests], np.int64).reshape(-1)).reshape(transport.size, 2, -1)
    # One size where all ranks gave the same.
    columns = zip(packed, table[:, 0].T.tolist(), (table == table[0]).all(axis=(0, 1)), strict=True)
    program = {name: sizes[:1] if alike else sizes for name, sizes, alike in columns}
    header, pieces, rank = replace(header, program=program), list[Piece](), transport.rank
    for name, edges in header.blobs.items():
        if rank < len(edges) - 1:
            pieces += cut_array(int(edges[rank]), packed[name])
    return header, pieces


class Program:
    """Takes the state of a checkpoint. Local."""

    def __init__(self, header: Header, rank: int, size: int) -> None:
        """Allocate memory for the state that this rank takes, or only checks, and list the pieces to read into it."""
        self._own: dict[str, Array] = {}
        self._lost: list[str] = []
        self.own: list[Piece] = []
        """Pieces to read on this rank alone."""
        self.shared: list[Piece] = []
        """Pieces that every rank reads."""
        for name, edges in header.blobs.items():
            blobs = [np.empty(nbytes, np.uint8) for nbytes in header.program[name]]
            if len(blobs) == 1:
                self._own[name], self.shared = blobs[0], self.shared + cut_array(int(edges[0]), blobs[0])
            elif len(blobs) == size:
                self._own[name], self.own = blobs[rank], self.own + cut_array(int(edges[rank]), blobs[rank])
            else:
                self._lost.append(f"{name!r} of {len(blobs)} ranks")
                # Unused, but the checksums need all bytes.
                for begin, blob in list(zip(edges.tolist(), blobs, strict=False))[rank::size]:
                    self.own += cut_array(begin, blob)

    def decode(self, tells: bool) -> dict[str, Any]:
        """Return the state from the read bytes; ``tells``: log parts left out. CheckpointError for bad bytes. Local."""
        if self._lost and tells:
            log(
                "the checkpoint has a state for each rank under %s, and this store has another number of ranks: these "
                "are left out",
                ", ".join(self._lost),
            )
        return {name: unpack(blob, name) for name, blob in self._own.items()}


def peek(source: Source, name: str) -> Any:
    """Read and return the first rank's state of a name, with no checksum compared; None without it. Local.

    Raises:
        OSError, CheckpointError: it cannot be read.
    """
    if name not in source.header.blobs:
        return None
    nbytes, begin = source.header.program[name][0], source.start + int(source.header.blobs[name][0])
    return unpack(np.fromfile(source.path, np.uint8, nbytes, offset=begin), name)
