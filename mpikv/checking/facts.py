"""What the ranks compare of a collective call of mpi4py: a tuple for each verb, from the arguments of the call.

A fact is a root, a word, or a kind and a count of elements. MPI asks for equal ones on all ranks. Each rank works out
its own from its buffers, as mpi4py does, so the same call has the same facts whether a count is written or found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import name_of
from ..cluster.calls import UNKNOWN
from ..cluster.mpi_library import load_mpi

MPI: Any = load_mpi()

Fact: TypeAlias = Any
"""A hashable value: None where the ranks need not agree."""
Facts: TypeAlias = tuple[Fact, ...]

_NAMES = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC")
# The kinds of MPI's datatypes without gaps, as asking MPI for one takes microseconds. Others may be freed.
_KINDS = {
    datatype.handle: np.dtype(datatype.typestr)
    for datatype in vars(MPI).values()
    if isinstance(datatype, MPI.Datatype)
    and datatype != MPI.DATATYPE_NULL
    and datatype.is_predefined
    and datatype.size == datatype.extent == np.dtype(datatype.typestr).itemsize
}
_OPS = {getattr(MPI, name).handle: name.lower() for name in _NAMES}
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, BufferError, ArithmeticError, MPI.Exception)


def text_of(fact: Fact) -> str:
    """Return a fact in words."""
    if isinstance(fact, tuple):
        kind, count = fact
        return f"{text_of(kind)}[{count}]"
    if isinstance(fact, (int, np.integer)):
        return f"root {fact}"
    return name_of(fact) if isinstance(fact, np.dtype) else str(fact)


def _block(message: Any, blocks: int = 1) -> Fact:
    """Return kind and number of the elements of a block of a message, in one of mpi4py's forms for buffers."""
    if type(message) is np.ndarray:
        return message.dtype, message.size // blocks
    if message is None or message is MPI.IN_PLACE:
        return None
    try:
        base, each, count, whole = _unpack(message, vector=False)
        return base, each * (whole // blocks if count is None else int(count))
    except _MISTAKES:
        return UNKNOWN  # mpi4py raises the error, on this rank


def _kind(message: Any) -> Fact:
    """Return the kind alone, where each rank may have a count of its own."""
    fact = _block(message)
    return fact[0] if isinstance(fact, tuple) else fact


def _counts(message: Any, size: int) -> tuple[Fact, list[int]]:
    """Return kind and numbers of the elements of a message that has a number for each rank."""
    try:
        base, each, counts, whole = _unpack(message, vector=True)
        if counts is None:
            counts = [whole // size + (rank < whole % size) for rank in range(size)]
        return base, [each * int(count) for count in ([counts] * size if isinstance(counts, int) else counts)]
    except _MISTAKES:
        return UNKNOWN, []


def _unpack(message: Any, vector: bool) -> tuple[Fact, int, Any, int]:
    """Return the basic kind of a message's elements, how many of these an element has, the count, or counts, that the
    message names, else None, and the elements that its buffer has.
    """
    buffer, *rest = message if isinstance(message, (list, tuple)) else (message,)
    datatype = rest.pop() if rest and isinstance(rest[-1], (MPI.Datatype, str)) else None
    count = rest[0] if rest else None
    # A pair of counts and displacements.
    if len(rest) == 1 and isinstance(count, tuple if vector else (list, tuple)):
        count = count[0]
    if not hasattr(buffer, "nbytes") and buffer is not None and buffer is not MPI.BOTTOM:
        buffer = memoryview(buffer)
    nbytes = getattr(buffer, "nbytes", 0)
    if datatype is None:
        dtype = buffer.dtype if hasattr(buffer, "dtype") else np.dtype(buffer.format)
        return dtype, 1, count, nbytes // dtype.itemsize
    datatype = MPI._typedict[datatype] if isinstance(datatype, str) else datatype
    if (known := _KINDS.get(datatype.handle)) is not None:
        return known, 1, count, nbytes // known.itemsize
    bases = _bases_of(datatype)
    if len(bases) > 1:
        return "bytes", datatype.size, count, nbytes // datatype.extent
    (base,) = bases
    return base, datatype.size // base.itemsize, count, nbytes // datatype.extent


def _bases_of(datatype: Any) -> set[np.dtype[Any]]:
    """Return the predefined kinds that a datatype is made of."""
    if datatype.is_predefined:
        return {np.dtype(datatype.typestr)}
    inner, _, made_of = datatype.decode()
    return set().union(*map(_bases_of, made_of.get("datatypes") or [inner]))


def _pair(send: Fact, receive: Fact) -> Fact:
    """Return the fact of two parts that must be alike; None stands for a part that the rank does not have."""
    if send is None or receive is None or send == receive:
        return receive if send is None else send
    return UNKNOWN if UNKNOWN in (send, receive) else f"sends {text_of(send)}, receives {text_of(receive)}"


def _op(op: Any) -> str:
    # An operation of the program has no name that other ranks know.
    return _OPS.get(getattr(op, "handle", None), "an operation of the program")


def _bcast(comm: Any, buf: Any, root: int = 0) -> Facts:
    return root, _block(buf)


def _gather(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_block(sendbuf), _block(recvbuf, comm.size) if comm.rank == root else None)


def _scatter(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_block(sendbuf, comm.size) if comm.rank == root else None, _block(recvbuf))


def _gatherv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_kind(sendbuf), _counts(recvbuf, 1)[0] if comm.rank == root else None)


def _scatterv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
    return root, _pair(_counts(sendbuf, 1)[0] if comm.rank == root else None, _kind(recvbuf))


def _allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    return (_pair(_block(sendbuf), _block(recvbuf, comm.size)),)


def _allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    (kind, counts), send = _counts(recvbuf, comm.size), _block(sendbuf)
    fits = send in (None, UNKNOWN) or kind == UNKNOWN or send == (kind, counts[comm.rank])
    return kind, str(counts), "" if fits else f"sends {text_of(send)}"


def _alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    return (_pair(_block(sendbuf, comm.size), _block(recvbuf, comm.size)),)


def _reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Facts:
    return _op(op), root, _pair(_block(sendbuf), _block(recvbuf) if comm.rank == root else None)


def _allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Facts:
    return _op(op), _pair(_block(sendbuf), _block(recvbuf))


def _reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Facts:
    blocks = comm.size if sendbuf is MPI.IN_PLACE else 1
    return _op(op), _pair(_block(sendbuf, comm.size), _block(recvbuf, blocks))


def _reduce_scatter(comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Facts:
    whole = _block(recvbuf if sendbuf is MPI.IN_PLACE else sendbuf)
    return _op(op), whole, "" if recvcounts is None else str([int(count) for count in recvcounts])


def nothing(*_: Any, **__: Any) -> Facts:
    """Return no facts: the verb alone is compared."""
    return ()


def _rooted(comm: Any, obj: Any = None, root: int = 0) -> Facts:
    return (root,)


def _rooted_sum(comm: Any, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Facts:
    return _op(op), root


def _object_sum(comm: Any, sendobj: Any, op: Any = MPI.SUM) -> Facts:
    return (_op(op),)


BUFFERS: dict[str, Callable[..., Facts]] = {"Scan": _allreduce, "Exscan": _allreduce}
"""The facts of each collective of buffers. Each has a nonblocking form of the same arguments."""
BUFFERS |= {"Alltoallv": nothing, "Alltoallw": nothing, "Barrier": nothing}
for _facts in (_bcast, _gather, _gatherv, _scatter, _scatterv, _allgather, _allgatherv, _alltoall, _reduce, _allreduce):
    BUFFERS[_facts.__name__[1:].capitalize()] = _facts
BUFFERS |= {"Reduce_scatter": _reduce_scatter, "Reduce_scatter_block": _reduce_scatter_block}

OBJECTS: dict[str, Callable[..., Facts]] = {
    **dict.fromkeys(("bcast", "gather", "scatter"), _rooted),
    **dict.fromkeys(("allgather", "alltoall"), nothing),
    **dict.fromkeys(("allreduce", "scan", "exscan"), _object_sum),
    "reduce": _rooted_sum,
}
"""The facts of each collective of objects."""
