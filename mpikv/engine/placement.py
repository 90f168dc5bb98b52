"""Where a value lives, and hence which collectives a push and a pull run.

===========  ==============================  ======================  ==========================
placement    a push                          a pull                  serves
===========  ==============================  ======================  ==========================
root         reduce; the root updates        broadcast               every updater
sharded      reduce-scatter; each rank       all-gather              element-wise updaters
             updates its shard
owners       reduce; each value's rank       broadcast               optimizers of whole values
             updates
replicated   allreduce; every rank updates   nothing                 optimizers and ASSIGN
===========  ==============================  ======================  ==========================

An optimizer of whole values turns ``sharded`` into *owners*. A message with values of several owners is then pushed by
a reduce-scatter and published by an all-gather. Where ranks share the memory of values, a replica per rank would be the
same memory several times over, so ``sharded`` takes the place of ``replicated``. Where all ranks share it, no placement
moves data in a pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..errors import Unsupported
from ..optimizers.updaters import Assign
from ..protocols import Placement, Shard, Transfers, Transport, Updater

# Shards begin at multiples of this many elements, so that two ranks never write to one cache line.
_ALIGNMENT = 64
# At least so many ranks own a part of a cell, and more than twice as many only if each has so many elements, 32 KiB of
# float32.
_FEWEST_OWNERS, _FEWEST = 32, 8192


class Sharded:
    """Each cell of a block's grid is cut into shards: one per rank, or of 64 or more on several hosts one for some."""

    name = "sharded"
    everywhere = False

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int], number: int) -> Shard:
        """Return how many of a cell's ``[start, stop)`` each rank owns, and this rank's range, less ``start``."""
        first, last = cell
        owners = self._owners(last - first, number)
        # Of the cell, not of the range: an element has the same owner whatever keys the call names.
        most = -(-(last - first) // (len(owners) * _ALIGNMENT)) * _ALIGNMENT
        counts = [0] * self._transport.size
        for part in range((start - first) // most, -(-(stop - first) // most)):
            counts[owners[part]] = min(first + (part + 1) * most, stop) - max(first + part * most, start)
        low = sum(counts[: self._transport.rank])
        return Shard(tuple(counts), low, low + counts[self._transport.rank])

    def _owners(self, elements: int, number: int) -> range:
        """Return the ranks that own a cell: all; of 64 or more on several hosts a part, by its ``number``. Local."""
        transport = self._transport
        if not isinstance(transport, Transfers):
            return range(transport.size)
        # Neither which ranks share a host nor how many do: with other hosts a commit of the same ranks is put back.
        stride = max(1, transport.size // max(_FEWEST_OWNERS, elements // _FEWEST))
        # Cells in flight together have owners that are far apart, most often on other hosts: so all hosts receive.
        ahead = min(transport.ahead, stride)
        return range((number % ahead * (stride // ahead) + number // ahead) % stride, transport.size, stride)


class Owners(Sharded):
    """Each value has one owner; the ranks own about equally much."""

    name = "owners"

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int], number: int) -> Shard:
        """Return how many of ``[start, stop)`` each rank owns, this rank's range, less ``start``, and the owner if one
        rank has all. Rank r owns from ``bounds[r]`` to ``bounds[r + 1]``; ``cell`` and ``number`` are not used.
        """
        # A message may hold values of several owners, and none of some.
        edges = [start, *(min(max(bound, start), stop) for bound in bounds[1:-1]), stop]
        low, high = edges[self._transport.rank : self._transport.rank + 2]
        counts = tuple(after - before for before, after in pairwise(edges))
        most = max(counts)
        return Shard(counts, low - start, high - start, counts.index(most) if most == sum(counts) else None)


class Root(Owners):
    """The root owns everything."""

    name = "root"

    def __init__(self, transport: Transport, root: int) -> None:
        super().__init__(transport)
        self._root = root

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int], number: int) -> Shard:
        """Return how many of ``[start, stop)`` each rank owns (the root all), and this rank's range, less ``start``."""
        others = self._transport.size - self._root - 1
        return super().shard(start, stop, cell, (start,) * (self._root + 1) + (stop,) * (others + 1), number)


class Replicated(Sharded):
    """Every rank owns everything and makes every update."""

    name = "replicated"
    everywhere = True

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int], number: int) -> Shard:
        """Return how many of ``[start, stop)`` each rank owns (each all), and this rank's range, less ``start``."""
        return Shard((stop - start,) * self._transport.size, 0, stop - start)


def place(name: str, transport: Transport, updater: Updater, root: int, compressed: bool = False) -> Placement:
    """Return the placement of that name, or a fitting one in its place, for an updater; raise if none fits. Local.

    ``auto`` takes ``root`` for a Python callable and ``sharded`` for optimizers: their time and state are divided by
    the number of ranks. ASSIGN computes nothing: it is ``replicated``, one exchange, but ``sharded`` between hosts, as
    then several messages are in flight. Where pushes are ``compressed`` it is ``replicated`` there, too, and only codes
    travel. ``owners`` serves every updater; the asynchronous store uses it, as its owners update independently.

    Raises:
        Unsupported: a callable must run once per key, on whole values; only ``root`` runs it so.
    """
    if name == "auto":
        # On all ranks alike: the updater has been compared.
        apart = isinstance(transport, Transfers) and transport.memory.is_host and not compressed
        name = "root" if updater.may_raise else "replicated" if isinstance(updater, Assign) and not apart else "sharded"
    if name == "root":
        return Root(transport, root)
    if name == "owners":
        return Owners(transport)
    if updater.may_raise:
        raise Unsupported(
            f"placement {name!r} cannot run a Python updater, which must be called once per key with whole values; "
            "use placement='root' or 'auto', or one of mpikv.optimizers"
        )
    assert name in ("sharded", "replicated"), name
    if name == "replicated" and transport.sharing_size == 1:
        return Replicated(transport)
    return Sharded(transport) if updater.elementwise else Owners(transport)
