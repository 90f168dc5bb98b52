"""What the ranks compare of a collective call of mpi4py: a tuple for each verb, from the arguments of the call.

A fact is a root, a word, or a kind and a count of elements. MPI asks for equal ones on all ranks. Each rank works out
its own from its buffers, as mpi4py does, so the same call has the same facts whether a count is written or found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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


def _kinds(message: Any, _: int) -> Fact:
    return _counts(message, 1)[0]


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
    if (known := _plain_kinds().get(datatype.handle)) is not None:
        return known, 1, count, nbytes // known.itemsize
    bases = _bases_of(datatype)
    if len(bases) > 1:
        return "bytes", datatype.size, count, nbytes // datatype.extent
    (base,) = bases
    return base, datatype.size // base.itemsize, count, nbytes // datatype.extent


@cache
def _plain_kinds() -> dict[int, np.dtype[Any]]:
    """Return the kinds of MPI's own datatypes without gaps, by their handles. Asking MPI for one takes microseconds."""
    own = [one for one in vars(MPI).values() if isinstance(one, MPI.Datatype) and one != MPI.DATATYPE_NULL]
    kinds = {one.handle: np.dtype(one.typestr) for one in own if one.is_predefined}
    return {one.handle: kinds[one.handle] for one in own if one.size == one.extent == kinds[one.handle].itemsize}


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


def _at_root(comm: Any, root: int, message: Any, measured: Callable[..., Fact], blocks: int = 1) -> Fact:
    """Return a fact of a message that MPI looks at on the root alone."""
    return measured(message, blocks) if comm.rank == root else None


def _allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    (kind, counts), send = _counts(recvbuf, comm.size), _block(sendbuf)
    fits = send in (None, UNKNOWN) or kind == UNKNOWN or send == (kind, counts[comm.rank])
    return kind, str(counts), "" if fits else f"sends {text_of(send)}"


def _reduce_scatter(comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Facts:
    whole = _block(recvbuf if sendbuf is MPI.IN_PLACE else sendbuf)
    return _op(op), whole, "" if recvcounts is None else str([int(count) for count in recvcounts])


def _reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Facts:
    blocks = comm.size if sendbuf is MPI.IN_PLACE else 1
    return _op(op), _pair(_block(sendbuf, comm.size), _block(recvbuf, blocks))


def nothing(*_: Any, **__: Any) -> Facts:
    """Return no facts: the verb alone is compared."""
    return ()


# The names of arguments are mpi4py's: programs pass them by name.
BUFFERS: dict[str, Callable[..., Facts]] = {
    "Barrier": nothing,
    "Bcast": lambda c, buf, root=0: (root, _block(buf)),
    "Gather": lambda c, sendbuf, recvbuf, root=0: (
        root, _pair(_block(sendbuf), _at_root(c, root, recvbuf, _block, c.size))),
    "Scatter": lambda c, sendbuf, recvbuf, root=0: (
        root, _pair(_at_root(c, root, sendbuf, _block, c.size), _block(recvbuf))),
    "Gatherv": lambda c, sendbuf, recvbuf, root=0: (root, _pair(_kind(sendbuf), _at_root(c, root, recvbuf, _kinds))),
    "Scatterv": lambda c, sendbuf, recvbuf, root=0: (root, _pair(_at_root(c, root, sendbuf, _kinds), _kind(recvbuf))),
    "Allgather": lambda c, sendbuf, recvbuf: (_pair(_block(sendbuf), _block(recvbuf, c.size)),),
    "Allgatherv": _allgatherv,
    "Alltoall": lambda c, sendbuf, recvbuf: (_pair(_block(sendbuf, c.size), _block(recvbuf, c.size)),),
    "Alltoallv": nothing,
    "Alltoallw": nothing,
    "Reduce": lambda c, sendbuf, recvbuf, op=MPI.SUM, root=0: (
        _op(op), root, _pair(_block(sendbuf), _at_root(c, root, recvbuf, _block))),
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter_block,
    **dict.fromkeys(
        ("Allreduce", "Scan", "Exscan"),
        lambda c, sendbuf, recvbuf, op=MPI.SUM: (_op(op), _pair(_block(sendbuf), _block(recvbuf)))),
}  # fmt: skip
"""The facts of each collective of buffers. Each has a nonblocking form of the same arguments."""

OBJECTS: dict[str, Callable[..., Facts]] = {
    **dict.fromkeys(("bcast", "gather", "scatter"), lambda c, obj=None, root=0, sendobj=None: (root,)),
    **dict.fromkeys(("allgather", "alltoall"), nothing),
    **dict.fromkeys(("allreduce", "scan", "exscan"), lambda c, sendobj, op=MPI.SUM: (_op(op),)),
    "reduce": lambda c, sendobj, op=MPI.SUM, root=0: (_op(op), root),
}
"""The facts of each collective of objects."""
