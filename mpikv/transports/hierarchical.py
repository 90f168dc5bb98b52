"""Ranks of several hosts: sums through shared memory inside of each host, by messages between them.

The ranks of a host share one copy of the values. In a sum each rank exposes its contribution to the ranks of its host.
Each of them, as a *carrier*, adds up its host's contributions to some of the elements of other hosts, and sends the sum
to the owners there. An owner receives one array from each other host. Values return the same ways, straight from the
shared memory of one host into that of another. So each element crosses the network once for every host that needs it,
however many ranks a host has. :mod:`mpikv.transports.routes` computes who sends which elements.

Inside of :meth:`HierarchicalTransport.apart` an exchange returns while its messages between hosts are in flight. So
the network works while a rank packs, adds and updates other messages, and a delay is paid once. Two ranks start the
messages of one kind between them in the same order, and MPI matches them in that order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ..arrays.arrays import accumulator, add, zeros
from ..cluster.process_group import ProcessGroup
from ..cluster.shutdown import abandon
from ..cluster.waiting import Waits
from ..memory.host import HOST
from ..protocols import Array, Memory
from .allocation import Growing, allocate_collectively
from .mpi import MpiTransport
from .requests import Requests
from .routes import Route, routes_of
from .shm import ShmTransport

# The tags of sums and of values between hosts.
_SUM, _VALUES = 2, 3
# The most bytes of one message of Open MPI, which sends 64 KiB over TCP at once, its header included. Longer messages
# wait for answers of the receiver, which queue behind the receiver's own messages, and move only inside of both ranks'
# calls. MPICH gains nothing by pieces, and takes up to 1.9 times as long where the network is fast.
_PIECE = 60 << 10
# Messages in flight. More would hide longer delays, and take as much more memory on each rank.
_AHEAD = 4
# The same messages come again and again, and a look-up is faster than dividing them again.
_MOST_PREPARED = 4096
# What comes from one host begins at a multiple of so many bytes: in a cache line of its own.
_ROOM = 64


class _Sum(NamedTuple):
    """This rank's part of a sum once its host's contributions are known."""

    receives: tuple[tuple[Array, int], ...]
    """The memory of each piece to receive, and the rank that sends it."""
    parts: tuple[tuple[Route, Array], ...]
    """The memory of each sum that this rank makes for an owner on another host."""
    terms: tuple[Array, ...]


class _Flight(NamedTuple):
    """Messages of an exchange that may be in flight."""

    requests: list[Any]
    brings_values: bool
    """Whether the ranks of the host wait for each other's messages, too."""


class HierarchicalTransport:
    """The transport of ranks on several hosts."""

    name = "hierarchical"
    single_copy = False
    ahead = _AHEAD

    def __init__(self, group: ProcessGroup, limit: int, waiting: Waits, *, memory: Memory = HOST) -> None:
        """Open an MPI transport, and one of each host's shared memory, for messages of ``limit`` bytes. Collective."""
        self.memory = memory
        self.rank, self.size, self.limit = group.rank, group.size, limit
        self.shared = group.one_host
        self.sharing_size, self.sharing_rank = max(map(len, group.ranks_of_hosts)), group.local_rank
        self._group, self._comm = group, group.comm
        self._requests = Requests(group, waiting)
        self._piece = _PIECE if "Open MPI" in group.mpi.Get_library_version() else sys.maxsize
        # For exchanges without sums, and for arrays of this rank alone: both gain nothing from hosts.
        self._flat = MpiTransport(group, limit, waiting)
        # A prepared sum stores the addresses of all ranks' messages. So they must lie in the staging slots: no message
        # is "large", none is read in place. A slot is used again when its sum has arrived on every rank of the host: a
        # rank that fills it has met them after their updates of all messages but the last ``ahead``, and one more.
        slots = _AHEAD + 2
        self._inner = ShmTransport(group, limit, self._requests, single_copy=False, large=limit + 1, slots=slots)
        self.send_buffers = self._inner.send_buffers
        self._outgoing = [Growing() for _ in range(slots)]
        self._incoming = [Growing() for _ in range(slots)]
        self._is_apart, self._flying = False, dict[int, _Flight]()
        self._last: _Flight | None = None
        self._allocated: WeakValueDictionary[int, Array] = WeakValueDictionary()
        self._routes_of = lru_cache(_MOST_PREPARED)(partial(routes_of, self.rank, group.ranks_of_hosts))
        self._sums: dict[tuple[int, tuple[int, ...], np.dtype[Any]], _Sum] = {}

    @property
    def slot(self) -> int:
        """The index of the send buffer for the next sum or all_to_all."""
        return self._inner.slot

    @property
    def control(self) -> HierarchicalTransport:
        """The transport by which ranks agree: this one."""
        return self

    def allocate(self, nbytes: int) -> Array:
        """Return zeroed memory that each host's ranks share; MemoryError on all ranks if one is short. Collective."""
        # A rank that is alone on its host shares its memory with nobody, and /dev/shm may be small.
        make = self._group.allocate if self.sharing_size > 1 else partial(zeros, huge_pages=True)
        memory = allocate_collectively(self._group, self._flat.agree, make, nbytes)[:]
        assert isinstance(memory.base, np.ndarray)
        self._allocated[id(memory.base)] = memory.base
        return memory

    @property
    def _has_trees(self) -> bool:
        """Whether to use MPI's own reduce and broadcast: each host has one rank, and no :meth:`apart` is open. Local.

        In MPI's trees other ranks send a part of the messages. Apart, the sums of several messages would share
        ``recv``.
        """
        return self.sharing_size == 1 and not self._is_apart

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Return at the root arrays that add up to the sum, maybe (recv,), in :meth:`apart` filled later; elsewhere ()
        or empty ones. Collective.
        """
        if self._has_trees:
            self._inner.fence()  # as in allreduce
            return self._flat.reduce(send, recv, root)
        return self.reduce_scatter(send, recv, self._all_at(root, send.size))

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        """Fill ``recv`` with the sum of every rank's ``send``, on every rank, and return (recv,). Collective."""
        # Used where every rank has values of its own: such ranks are alone on their hosts. The fence uses up a
        # send_ready buffer: it was announced for this sum, and no later one may take it.
        self._inner.fence()
        return self._flat.allreduce(send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        """Send sums of this host's contributions to their owners; return arrays that add up to this rank's part, in
        :meth:`apart` filled later. ``recv`` is unused. Collective.
        """
        key = self._inner.slot, tuple(counts), send.dtype
        # An exchange, no sum: each rank of the host sees the others' whole contributions, and adds its part.
        rows = self._inner.allreduce(send, recv)
        work = self._sums.get(key) or self._divide_sum(key, rows)
        with self._messages("reduce_scatter") as started:
            # Receives first: a message that arrives before its receive is posted takes another copy inside of MPI.
            for memory, carrier in work.receives:
                started.append(self._comm.Irecv(memory, carrier, _SUM))
            for route, total in work.parts:
                if len(rows) > 1:
                    add(rows, route.low, route.high, total)
                for piece in self._pieces(total):
                    started.append(self._comm.Isend(piece, route.owner, _SUM))
        return work.terms

    # --- Messages in flight

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In a with block, exchanges may only post their messages; the caller passes each :meth:`sent` to
        :meth:`wait_for` before the end. Collective.
        """
        self._is_apart = True
        try:
            yield
            assert not self._flying, "messages that nobody has waited for"
        except BaseException:
            for flight in self._flying.values():
                abandon(flight.requests)
            raise
        finally:
            self._is_apart = False
            self._flying.clear()

    def sent(self) -> _Flight | None:
        """Return the latest exchange's messages, for :meth:`wait_for`, and forget them; None without any. Local."""
        flight, self._last = self._last, None
        return flight

    def wait_for(self, sent: _Flight | None) -> None:
        """Wait for a flight's messages and, if it brings values, for this host's ranks; no-op for None. Collective."""
        if sent is not None:
            self._requests.complete(*sent.requests)
            self._flying.pop(id(sent), None)
            if sent.brings_values:
                self._inner.fence()

    def note_read(self) -> None:
        """Do nothing: the caller waits for the whole call. Local."""

    @contextmanager
    def _messages(self, name: str, brings_values: bool = False) -> Iterator[list[Any]]:
        """In a with block, yield a list for MPI requests; then wait for them, unless in :meth:`apart`. Collective."""
        with self._group.translated(name):
            with self._requests.started() as started:
                yield started
            self._last = flight = _Flight(started, brings_values)
            if self._is_apart:
                self._flying[id(flight)] = flight
            else:
                self.wait_for(self.sent())

    # --- Other exchanges

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Send rank r the r-th part, of ``counts[r]`` elements, or with ``counts`` None everything; return an array
        from each rank, valid until the next exchange. All ranks pass the same ``counts``. Collective.
        """
        # Nothing is summed, so a step inside of the host would only add a copy. The fence as in allreduce.
        self._inner.fence()
        return self._flat.all_to_all(send, counts)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill each rank's part of ``buffer`` on every rank; inside of :meth:`apart` it may come later. Collective."""
        # Into private memory of several ranks of a host each element would have to come once for each of them.
        if not (self._is_shared(buffer) or (self._is_apart and self.sharing_size == 1)):
            self._flat.all_gather(buffer, counts)
            return
        self._send_values("all_gather", buffer.view(np.uint8), buffer.itemsize, tuple(counts), ends=True)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to every rank's; inside of :meth:`apart` it may come later. Collective."""
        if self._has_trees or not self._is_shared(buffer):
            self._flat.broadcast(buffer, root)
            return
        # In messages of the limit, as MPI allocates memory of its own for longer ones.
        whole = buffer.view(np.uint8)
        for begin in range(0, whole.size, self.limit):
            part, ends = whole[begin : begin + self.limit], begin + self.limit >= whole.size
            self._send_values("broadcast", part, 1, self._all_at(root, part.size), ends)

    def carry(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
        """Send arrays to ranks, and receive arrays from ranks, each list in order; wait for all. Collective."""
        self._flat.carry(sends, receives)

    def fence(self) -> None:
        """Wait for this host's ranks, so that their writes to shared memory are visible. Collective over the host."""
        self._inner.fence()

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether all tokens but ANY are equal; wait for all ranks. Also a fence of each host. Collective."""
        equal = self._flat.agree(token)
        # MPI orders messages, not other memory: the host needs its own barrier. It is agree, not fence, so a rank that
        # came late learns that the others on its host go on without it.
        return self._inner.agree(int(equal), send_ready and equal) and equal

    def close(self) -> None:
        """Drop all memory of messages, and close both transports below; waits for no rank. Collective, idempotent."""
        self._sums.clear()
        self._allocated.clear()
        self._inner.close()
        self._flat.close()
        self._comm, self.send_buffers, self._outgoing, self._incoming = None, (), [], []

    def _is_shared(self, buffer: Array) -> bool:
        """Return whether an array is a view of memory that :meth:`allocate` has returned. Local."""
        # By identity, as all views of an allocation have it as their base.
        return id(buffer.base) in self._allocated

    def _all_at(self, owner: int, count: int) -> tuple[int, ...]:
        """Return the counts of all ranks if one owns all elements. Local."""
        return (0,) * owner + (count,) + (0,) * (self.size - owner - 1)

    def _divide_sum(self, key: tuple[int, tuple[int, ...], np.dtype[Any]], rows: Sequence[Array]) -> _Sum:
        """Return how a sum is divided into messages, and their memory; keep that under ``key`` for later. Local.

        ``rows`` are the host's sends. A full table is emptied first.
        """
        # All at once: the order of use would cost every sum, and a full table is rare.
        if len(self._sums) >= _MOST_PREPARED:
            self._sums.clear()
        slot, counts, dtype = key
        wide, routes = accumulator(dtype), self._routes_of(counts)
        begin, count = sum(counts[: self.rank]), counts[self.rank]
        # Sums of half precision are twice as wide as their parts.
        elements = sum(route.high - route.low for route in routes.as_carrier) if len(rows) > 1 else 0
        outgoing, parts, used = self._outgoing[slot].first(elements * wide.itemsize).view(wide), [], 0
        for route in routes.as_carrier:
            # A rank that is alone on its host has nothing to add up.
            total = outgoing[used : used + route.high - route.low] if len(rows) > 1 else rows[0][route.low : route.high]
            parts.append((route, total))
            used += total.size
        # One array for each other host: its carriers fill disjoint parts of it.
        others = [host for host in self._group.ranks_of_hosts if self.rank not in host]
        kinds = [wide if len(host) > 1 else dtype for host in others]
        room = -(-count * wide.itemsize // _ROOM) * _ROOM
        memory = self._incoming[slot].first(len(others) * room).reshape(len(others), room)
        incoming = [row[: count * kind.itemsize].view(kind) for row, kind in zip(memory, kinds, strict=True)]
        sources = {rank: array for host, array in zip(others, incoming, strict=True) for rank in host}
        receives = tuple(
            (piece, route.carrier)
            for route in routes.as_owner
            for piece in self._pieces(sources[route.carrier][route.low - begin : route.high - begin])
        )
        own = [row[begin : begin + count] for row in rows]
        return self._sums.setdefault(key, _Sum(receives, tuple(parts), (*own, *incoming)))

    def _send_values(self, name: str, whole: Array, itemsize: int, counts: tuple[int, ...], ends: bool) -> None:
        """Send this rank's elements of ``whole``, shared memory as bytes, to the other hosts, and receive its share of
        theirs into it. Inside of :meth:`apart` it only posts the messages. Collective.

        ``ends``: the ranks of the host then wait for each other.
        """
        routes = self._routes_of(counts)
        with self._messages(name, brings_values=ends) as started:
            for route in routes.as_carrier:
                for piece in self._pieces(whole[route.low * itemsize : route.high * itemsize]):
                    started.append(self._comm.Irecv(piece, route.owner, _VALUES))
            for route in routes.as_owner:
                for piece in self._pieces(whole[route.low * itemsize : route.high * itemsize]):
                    started.append(self._comm.Isend(piece, route.carrier, _VALUES))

    def _pieces(self, memory: Array) -> list[Array]:
        """Return views of an array's bytes, each for one message of MPI; sender and receiver cut alike. Local."""
        whole = memory.view(np.uint8)
        return [whole[low : low + self._piece] for low in range(0, whole.size, self._piece)]
