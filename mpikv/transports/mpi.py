"""Ranks of any hosts: MPI's own collectives over host memory.

Messages are at most a bucket: both widespread libraries slow down threefold on larger ones, since they then allocate
temporary memory in every call. Sums that MPI cannot make, or makes by other rules than :mod:`mpikv.protocols`, are made
in a wider type.

Every call is MPI's nonblocking one and a wait of ours. The wait gives up the core and has a deadline. At the size of a
bucket that costs nothing measurable; on small messages it costs some microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator, zeros
from ..cluster.calls import ANY
from ..cluster.process_group import ProcessGroup
from ..cluster.waiting import Waits
from ..memory.host import HOST
from ..protocols import Array, Memory
from .allocation import Growing, allocate_collectively
from .requests import Requests
from .unshared import Unshared

# The tag of messages between two ranks. 1 to 3 are those of failures and of several hosts.
_CARRIED = 4


class Tickets:
    """Tokens of ranks on any hosts, numbered from 1; MPI compares them."""

    def __init__(self, group: ProcessGroup, waiting: Requests) -> None:
        """Prepare to compare tokens of the group's ranks by MPI. Local."""
        self._group, self.waiting, self._posted = group, waiting, 0
        self.early = 0
        """The number of the next agreement's token, if that is posted already."""
        self._sent: dict[int, tuple[Any, Any]] = {}

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Post a token, unless one is posted (``early``), and wait for all ranks; return whether all tokens but ANY are
        equal. Collective.
        """
        number, self.early = self.early or self.post(token), 0
        return self.meet(number)

    def post(self, token: int) -> int:
        """Start to compare a token over ranks, without waiting; return its number, for :meth:`meet`. Local."""
        self._posted += 1
        # All tokens are equal exactly if the largest is the smallest. One maximum of (token, -token) finds both.
        words = np.array([token, -token] if token != ANY else [-1 << 62, -1 << 62])
        comm, mpi = self._group.comm, self._group.mpi
        with self._group.translated("agree"):
            self._sent[self._posted] = comm.Iallreduce(mpi.IN_PLACE, words, mpi.MAX), words
        return self._posted

    def are_here(self, number: int) -> bool:
        """Return whether every rank has posted its token of this number. Local; MPI goes on with its messages."""
        return bool(self._sent[number][0].Test())

    def meet(self, number: int) -> bool:
        """Wait until every rank has posted its token of this number; return whether all but ANY are equal. Once per
        number. Collective.

        Raises:
            Stalled: a rank did not come, or has given up.
        """
        self.waiting.complete(self._sent[number][0])
        largest, opposite = self._sent.pop(number)[1].tolist()
        # The reduction ends also if others gave up waiting for this rank: only their notice tells.
        self.waiting.check()
        return bool(largest <= -opposite)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill each rank's part of ``buffer`` on every rank, all of one size, in place. Collective."""
        self.waiting.complete(self._group.comm.Iallgather(self._group.mpi.IN_PLACE, buffer))

    def close(self) -> None:
        """Release nothing: a transport whose ranks agree by these does not own them. Local."""


class MpiTransport(Unshared):
    """The transport for ranks on several hosts."""

    name = "mpi"

    def __init__(
        self, group: ProcessGroup, limit: int, waiting: Waits, *, gathers: bool = False, memory: Memory = HOST
    ) -> None:
        """Allocate this rank's memory for messages of at most ``limit`` bytes. Local; the group stays the caller's.

        With ``gathers`` the library only carries: sums return every rank's elements, and the caller adds them in its
        own order. On n ranks a reduce_scatter then receives as much as before, the other sums n times as much.
        """
        self.memory = memory
        self.rank, self.size, self.limit = group.rank, group.size, limit
        self._mpi, self._group, self._comm = group.mpi, group, group.comm
        self._requests = Requests(group, waiting)
        self.send_buffers: tuple[Array, ...] = (zeros(limit),)
        self.slot = 0
        self._gathers = gathers
        # For the exchanges without a sum in the library.
        self._gathered = Growing()
        # Unwritten pages take no memory. int8 is summed as int32: a message becomes four times as large.
        self._wide = zeros(4 * limit), zeros(4 * limit)
        self._tickets = Tickets(group, self._requests)

    @property
    def control(self) -> MpiTransport:
        """The transport by which ranks agree: this one."""
        return self

    def allocate(self, nbytes: int) -> Array:
        """Return zeros of this rank alone; MemoryError on all ranks if one has too little memory. Collective."""
        return allocate_collectively(self._group, self.agree, partial(zeros, huge_pages=True), nbytes)

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Sum every rank's ``send`` at the root; return (recv,) there, or all terms if MPI only carries; elsewhere ()
        or empty arrays. Collective.
        """
        if self._gathers:
            return self.all_to_all(send, [send.size if rank == root else 0 for rank in range(self.size)])
        received = recv if self.rank == root else None
        return self._sum("reduce", send, received, lambda *arrays, op: self._comm.Ireduce(*arrays, op, root))

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        """Sum every rank's ``send`` at every rank; return (recv,), or all terms if MPI only carries. Collective."""
        if self._gathers:
            return self.all_to_all(send, None)
        return self._sum("allreduce", send, recv, lambda *arrays, op: self._comm.Iallreduce(*arrays, op))

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        """Return (recv,), filled with this rank's part of the sum of every ``send``; or all ranks' parts for the caller
        to add, if MPI only carries or the numbers are half precision. Collective.
        """
        # A sum of half precision is made in float32, and would move twice the bytes.
        if self._gathers or accumulator(send.dtype) != send.dtype:
            return self.all_to_all(send, counts)
        return self._sum(
            "reduce_scatter", send, recv, lambda *arrays, op: self._comm.Ireduce_scatter(*arrays, counts, op)
        )

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Send rank r the r-th part, of ``counts[r]`` elements, or with ``counts`` None everything; return an array
        from each rank, valid until the next exchange. All ranks pass the same ``counts``. Collective.
        """
        if counts is None:
            nbytes, starts = [send.nbytes] * self.size, [0] * self.size
        else:
            nbytes, starts = _lay_out(counts, send.itemsize)
        mine = nbytes[self.rank]
        received = self._gathered.first(self.size * mine)
        with self._group.translated("alltoall"):
            # As bytes: MPI knows no half precision, and an exchange needs no type.
            self._requests.complete(
                self._comm.Ialltoallv(
                    [send.view(np.uint8), (nbytes, starts), self._mpi.BYTE],
                    [received, ([mine] * self.size, [rank * mine for rank in range(self.size)]), self._mpi.BYTE],
                )
            )
        return [part.view(send.dtype) for part in received.reshape(self.size, mine)]

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill each rank's part of ``buffer`` on every rank, in place. Collective."""
        nbytes, starts = _lay_out(counts, buffer.itemsize)
        parts = [buffer.view(np.uint8), (nbytes, starts), self._mpi.BYTE]
        with self._group.translated("all_gather"):
            self._requests.complete(self._comm.Iallgatherv(self._mpi.IN_PLACE, parts))

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to every rank's, in messages of the limit, in place. Collective."""
        whole = buffer.view(np.uint8)
        with self._group.translated("broadcast"):
            for begin in range(0, whole.size, self.limit):
                self._requests.complete(self._comm.Ibcast(whole[begin : begin + self.limit], root))

    def carry(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
        """Send arrays to ranks, and receive arrays from ranks, each list in order; wait for all. Collective."""
        with self._group.translated("carry"), self._requests.started() as started:
            # Receives first, as between hosts.
            started.extend(self._comm.Irecv(memory, rank, _CARRIED) for rank, memory in receives)
            started.extend(self._comm.Isend(memory, rank, _CARRIED) for rank, memory in sends)
        self._requests.complete(*started)

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether all tokens but ANY are equal; wait for all ranks. Collective."""
        return self._tickets.agree(token)

    def close(self) -> None:
        """Release the memory of messages; the communicator stays open, as it is the group's. Local."""
        self._comm = None
        self.send_buffers, self._gathered, self._wide = (zeros(0),), Growing(), (zeros(0), zeros(0))

    def _sum(self, name: str, send: Array, recv: Array | None, start: Callable[..., Any]) -> Sequence[Array]:
        """Start MPI's sum by ``start``, in a wider dtype where it needs one, and wait; return (recv,), filled, or () if
        ``recv`` is None. Collective.
        """
        # Open MPI's sums of short integers saturate, and must wrap.
        is_short = send.dtype.kind in "iu" and send.dtype.itemsize < 4
        dtype = np.dtype(f"{send.dtype.kind}4") if is_short else accumulator(send.dtype)
        wide_send, wide_recv = send, recv
        if dtype != send.dtype:
            wide_send = self._wide[0].view(dtype)[: send.size]
            np.copyto(wide_send, send)
        if recv is not None and recv.dtype != dtype:
            wide_recv = self._wide[1].view(dtype)[: recv.size]
        # Booleans add up by or; MPI refuses a sum of them.
        operation = self._mpi.LOR if dtype == np.bool_ else self._mpi.SUM
        with self._group.translated(name):
            self._requests.complete(start(wide_send, wide_recv, op=operation))
        if recv is not None and wide_recv is not None and wide_recv is not recv:
            np.copyto(recv, wide_recv, casting="unsafe")
        return () if recv is None else (recv,)


def _lay_out(counts: Sequence[int], itemsize: int) -> tuple[list[int], list[int]]:
    """Return two lists: the bytes of each rank's elements, and their offsets side by side. Local."""
    nbytes = [count * itemsize for count in counts]
    return nbytes, [0, *accumulate(nbytes[:-1])]
