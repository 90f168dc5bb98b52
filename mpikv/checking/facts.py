"""What the ranks compare of a collective call of mpi4py: a tuple for each verb, from the arguments of the call.

A fact is a number, a word, or a kind and a count of elements. MPI asks for equal ones on all ranks. Each rank works out
its own from its buffers, as mpi4py does, so the same call has the same facts whether a count is written or found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import name_of
from ..cluster.calls import UNKNOWN
from ..cluster.mpi_library import load_mpi

MPI: Any = load_mpi()

Fact: TypeAlias = Any
"""A hashable value: None where the ranks need not agree."""
Facts: TypeAlias = tuple[Fact, ...]

_OPS = {
    getattr(MPI, name).handle: name.lower()
    for name in "SUM PROD MAX MIN LAND LOR LXOR BAND BOR BXOR MAXLOC MINLOC REPLACE NO_OP".split()
}
# An operation of the program has no name that other ranks know.
_OWN_OP = "an operation of the program"
_NO_BUFFER = (None, MPI.IN_PLACE)


def text_of(fact: Fact) -> str:
    """Return a fact in words."""
    if isinstance(fact, tuple):
        kind, count = fact
        return f"{kind if isinstance(kind, str) else name_of(kind)}[{count}]"
    return fact if isinstance(fact, str) else name_of(fact) if isinstance(fact, np.dtype) else str(fact)


def measure(message: Any, blocks: int = 1) -> Fact:
    """Return kind and number of the elements of a block of a message, in one of mpi4py's forms for buffers."""
    if type(message) is np.ndarray:
        return message.dtype, message.size // blocks
    try:
        buffer, kind, count = _unpack(message, vector=False)
        base, each, extent = _element(buffer, kind)
        return base, each * (_bytes_of(buffer) // extent // blocks if count is None else int(count))
    except (TypeError, ValueError, KeyError, AttributeError, BufferError, ZeroDivisionError, MPI.Exception):
        return UNKNOWN  # mpi4py raises the error, on this rank


def _measure_counts(message: Any, size: int) -> tuple[Fact, Sequence[int]]:
    """Return kind and numbers of the elements of a message with a number for each rank."""
    try:
        buffer, kind, counts = _unpack(message, vector=True)
        base, each, extent = _element(buffer, kind)
        if counts is None:
            whole = _bytes_of(buffer) // extent
            counts = [whole // size + (rank < whole % size) for rank in range(size)]
        elif isinstance(counts, int):
            counts = [counts] * size
        return base, [int(count) * each for count in counts]
    except (TypeError, ValueError, KeyError, AttributeError, BufferError, ZeroDivisionError, MPI.Exception):
        return UNKNOWN, ()


def _unpack(message: Any, vector: bool) -> tuple[Any, Any, Any]:
    """Return the buffer, the datatype and the count, or counts, that a message names; None for what it does not."""
    if not isinstance(message, (list, tuple)):
        return message, None, None
    buffer, *rest = message
    kind = rest.pop() if isinstance(rest[-1], (MPI.Datatype, str)) else None
    count = rest[0] if rest else None
    # A pair of counts and displacements.
    if len(rest) == 1 and isinstance(count, tuple if vector else (list, tuple)):
        count = count[0]
    return buffer, kind, count


def _element(buffer: Any, kind: Any) -> tuple[Fact, int, int]:
    """Return the basic kind of an element, how many of these it has, and the bytes from one element to the next."""
    if kind is None:
        dtype = buffer.dtype if hasattr(buffer, "dtype") else np.dtype(memoryview(buffer).format)
        return dtype, 1, dtype.itemsize
    datatype = MPI._typedict[kind] if isinstance(kind, str) else kind
    if datatype.is_predefined:
        return np.dtype(datatype.typestr), 1, datatype.extent
    base = _base_of(datatype)
    if base is None:
        return "bytes", datatype.size, datatype.extent
    return np.dtype(base.typestr), datatype.size // base.size, datatype.extent


def _base_of(datatype: Any) -> Any:
    """Return the one predefined datatype that another is made of; None if there are several."""
    if datatype.is_predefined:
        return datatype
    _, _, made_of = datatype.decode()
    inner = made_of.get("datatypes") or [datatype.decode()[0]]
    bases = [_base_of(one) for one in inner]
    return bases[0] if bases and all(base is not None and base == bases[0] for base in bases) else None


def _bytes_of(buffer: Any) -> int:
    return int(buffer.nbytes) if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes


def _pair(send: Fact, receive: Fact) -> Fact:
    """Return the fact of two parts that must be alike; None stands for a part that the rank does not have."""
    if send is None or receive is None or send == receive:
        return receive if send is None else send
    return UNKNOWN if UNKNOWN in (send, receive) else f"sends {text_of(send)}, receives {text_of(receive)}"


def _part(message: Any, blocks: int = 1) -> Fact:
    return None if message is None or message is MPI.IN_PLACE else measure(message, blocks)


def _op(op: Any) -> str:
    return _OPS.get(getattr(op, "handle", None), _OWN_OP)


def _nothing(*_: Any, **__: Any) -> Facts:
    return ()


def _bcast(comm: Any, buf: Any, root: int = 0) -> Facts:
    return root, measure(buf)


def _gather(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_part(sendbuf), _part(recvbuf, comm.size) if comm.rank == root else None)


def _scatter(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_part(sendbuf, comm.size) if comm.rank == root else None, _part(recvbuf))


def _kind(message: Any, vector: bool = False) -> Fact:
    """Return the kind alone, where each rank may have a count of its own."""
    if message is None or message is MPI.IN_PLACE:
        return None
    measured = _measure_counts(message, 1) if vector else measure(message)
    return measured if measured == UNKNOWN else measured[0]


def _gatherv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_kind(sendbuf), _kind(recvbuf, True) if comm.rank == root else None)


def _scatterv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_kind(sendbuf, True) if comm.rank == root else None, _kind(recvbuf))


def _allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    return (_pair(_part(sendbuf), _part(recvbuf, comm.size)),)


def _allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    kind, counts = _measure_counts(recvbuf, comm.size)
    send = _part(sendbuf)
    fits = send in (None, UNKNOWN) or kind == UNKNOWN or send == (kind, counts[comm.rank])
    return kind, str(list(counts)), "" if fits else f"sends {text_of(send)}"


def _alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    return (_pair(_part(sendbuf, comm.size), _part(recvbuf, comm.size)),)


def _alltoallv(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    return (_pair(_kind(sendbuf, True), _kind(recvbuf, True)),)


def _reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Facts:
    return _op(op), root, _pair(_part(sendbuf), _part(recvbuf) if comm.rank == root else None)


def _allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Facts:
    return _op(op), _pair(_part(sendbuf), _part(recvbuf))


def _reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Facts:
    in_place = sendbuf is MPI.IN_PLACE
    return _op(op), _pair(_part(sendbuf, comm.size), measure(recvbuf, comm.size if in_place else 1))


def _reduce_scatter(comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Facts:
    whole = measure(recvbuf if sendbuf is MPI.IN_PLACE else sendbuf)
    return _op(op), whole, "" if recvcounts is None else str([int(count) for count in recvcounts])


def _rooted(comm: Any, obj: Any = None, root: int = 0) -> Facts:
    return (root,)


def _rooted_sum(comm: Any, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Facts:
    return _op(op), root


def _object_sum(comm: Any, sendobj: Any, op: Any = MPI.SUM) -> Facts:
    return (_op(op),)


BUFFERS: dict[str, Callable[..., Facts]] = {
    "Barrier": _nothing,
    "Bcast": _bcast,
    "Gather": _gather,
    "Gatherv": _gatherv,
    "Scatter": _scatter,
    "Scatterv": _scatterv,
    "Allgather": _allgather,
    "Allgatherv": _allgatherv,
    "Alltoall": _alltoall,
    "Alltoallv": _alltoallv,
    "Alltoallw": _nothing,
    "Reduce": _reduce,
    "Allreduce": _allreduce,
    "Reduce_scatter_block": _reduce_scatter_block,
    "Reduce_scatter": _reduce_scatter,
    "Scan": _allreduce,
    "Exscan": _allreduce,
}
"""The facts of each collective of buffers. Each has a nonblocking form of the same arguments."""

OBJECTS: dict[str, Callable[..., Facts]] = {
    "bcast": _rooted,
    "gather": _rooted,
    "scatter": _rooted,
    "allgather": _nothing,
    "alltoall": _nothing,
    "reduce": _rooted_sum,
    "allreduce": _object_sum,
    "scan": _object_sum,
    "exscan": _object_sum,
}
"""The facts of each collective of objects."""
