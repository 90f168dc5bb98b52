"""What the ranks compare of a collective call of mpi4py: a tuple for each verb, from the arguments of the call.

A fact is a root, a word, or a kind and a count of elements. MPI asks for equal ones on all ranks. Each rank works out
its own from its buffers, as mpi4py does, so the same call has the same facts whether a count is written or found.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import is_array, lies_elsewhere, name_of
from ..cluster.calls import ANY, Call
from ..cluster.mpi_library import load_mpi, reads_gpus
from ..compute.cuda.gpu import DRIVER
from ..engine.plan import digest

MPI: Any = load_mpi()

Fact: TypeAlias = Any
"""A hashable value: None where the ranks need not agree."""
Facts: TypeAlias = tuple[Fact, ...]

_NAMES = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC")
_OPS = {getattr(MPI, name).handle: name.lower() for name in _NAMES}
_EMPTY = "no elements"
# How an argument tells all that facts follow from, by its type.
_SAME: dict[type, Any] = dict.fromkeys((int, str, type(None), type(MPI.IN_PLACE)), lambda value: value)
_TELLING: dict[type, Any] = {**_SAME, np.ndarray: attrgetter("dtype", "size"), MPI.Op: attrgetter("handle")}
HOST = {*map(type, (np.empty(0), memoryview(b""), b"", bytearray(), 0, None, MPI.SUM, MPI.IN_PLACE, MPI.Status()))}
"""Types of arguments that are no array of a GPU, without a look at them."""


class Unknown(TypeError):
    """This rank cannot tell a fact: its message is of a derived datatype, empty where counts differ, or a mistake."""


def make_call(verb: str, facts: Callable[..., Facts], given: Sequence[Any], named: Mapping[str, Any]) -> Call:
    """Return a :class:`Call` of the facts in these arguments, to compare; one to match any if unknown. Local."""
    try:
        return call_of(verb, facts(*given, **named))
    except Unknown:
        return call_of(verb, None)


def key_of(verb: str, values: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return a key to cache a call's facts by, on one communicator; None if an argument is of a type not known here."""
    key: list[Any] = [verb]
    try:
        for value in values:
            key.append(_TELLING[type(value)](value))  # noqa: PERF401 - a comprehension is slower
    except KeyError:
        return None
    return tuple(key)


@lru_cache(4096)
def call_of(verb: str, facts: Facts | None) -> Call:
    """Return a :class:`Call` that ranks compare by its verb and these facts; with None it matches any call. Cached."""
    if facts is None:
        return Call(verb, ANY, "?")
    # None by identity: numpy's float64 == None.
    parts = [text_of(fact) for fact in facts if fact is not None]
    label = ", ".join(parts)
    return Call(verb, digest(f"{verb}({label})"), label, describe=lambda: parts)


def text_of(fact: Fact) -> str:
    """Return a fact in words, as "root 0" or "float64[3]". Local."""
    if isinstance(fact, tuple):
        kind, count = fact
        return f"{name_of(kind)}[{count}]"
    if isinstance(fact, (int, np.integer)):
        return f"root {fact}"
    return name_of(fact) if isinstance(fact, np.dtype) else str(fact)


def _block(message: Any, blocks: int = 1) -> Fact:
    """Return dtype and count, or "no elements", of one of a message's equal blocks; None for None or IN_PLACE."""
    if message is None or message is MPI.IN_PLACE:
        return None
    kind, named, _, whole = unpack(message, vector=False)
    count = whole // blocks if named is None else int(named)
    return (kind, count) if count else _EMPTY  # of any kind: an empty list makes an array of float64


def _kind(message: Any) -> Fact:
    """Return a message's dtype without its count, as each rank may have its own; None if it has no elements. Local."""
    fact = _block(message)
    return fact[0] if isinstance(fact, tuple) else None


def counts_of(message: Any, size: int) -> tuple[Fact, list[int]]:
    """Return dtype, and a count for each rank, of a message; raise Unknown if this rank cannot tell. Local."""
    kind, counts, _, whole = unpack(message, vector=True)
    if counts is None:
        counts = [whole // size + (rank < whole % size) for rank in range(size)]
    return kind, [counts] * size if isinstance(counts, int) else list(map(int, counts))


def unpack(message: Any, vector: bool) -> tuple[Fact, Any, Any, int]:
    """Return a message's dtype, its own counts and displacements or None, and number of elements; or raise Unknown.

    The elements are those of the whole buffer.
    """
    try:
        buffer, *rest = message if isinstance(message, (list, tuple)) else (message,)
        datatype = rest.pop() if rest and isinstance(rest[-1], (MPI.Datatype, str)) else None
        # A pair of counts and displacements.
        if len(rest) == 1 and isinstance(rest[0], tuple if vector else (list, tuple)):
            rest = list(rest[0])
        count, displacements = [*rest, None, None][:2]
        if not hasattr(buffer, "nbytes") and buffer is not None and buffer is not MPI.BOTTOM:
            buffer = memoryview(buffer)
        if datatype is None:
            kind = getattr(buffer, "dtype", None) or buffer.format
            # PyTorch's kinds have other names: torch.float32.
            kind = kind if isinstance(kind, np.dtype) else np.dtype(str(kind).removeprefix("torch."))
        else:  # a derived one is not among them
            kind = _dtypes_by_handle()[(MPI._typedict[datatype] if isinstance(datatype, str) else datatype).handle]
        return kind, count, displacements, getattr(buffer, "nbytes", 0) // kind.itemsize
    except (TypeError, ValueError, LookupError, AttributeError, BufferError, ArithmeticError) as error:
        raise Unknown("a derived datatype, or no buffer") from error  # a mistake mpi4py names itself, on this rank


@cache
def _dtypes_by_handle() -> dict[int, np.dtype[Any]]:
    """Return a cached dict from the handle of each MPI datatype without gaps to numpy's dtype. Local.

    It is cached, since MPI is slow: do not change it.
    """
    kinds = dict[int, np.dtype[Any]]()
    for one in vars(MPI).values():
        if isinstance(one, MPI.Datatype) and one != MPI.DATATYPE_NULL:
            with suppress(MPI.Exception):  # a library may not have all, as Open MPI 4 without Fortran's
                if one.is_predefined and one.size == one.extent == (kind := np.dtype(one.typestr)).itemsize:
                    kinds[one.handle] = kind
    return kinds


def _pair(send: Fact, receive: Fact) -> Fact:
    """Return the fact a send and a receive share, or words for their difference; None stands for a part not there."""
    if send is None or receive is None or send == receive:
        return receive if send is None else send
    return f"sends {text_of(send)}, receives {text_of(receive)}"


def op_of(op: Any) -> str:
    """Return the name of an operation of MPI, as "sum"; one text for all operations of the program. Local."""
    # An operation of the program has no name that other ranks know.
    return _OPS.get(getattr(op, "handle", None), "an operation of the program")


def _rooted(gathers: bool, counted: bool) -> Callable[..., Facts]:
    """Return a function that finds the facts of a gather or scatter; ``counted``: all blocks have one count. Local.

    Each rank has one block, the root also a message of all; no other rank looks at that.
    """

    def facts(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Facts:
        """Return the root, and the dtype with or without a count; Unknown if this rank has nothing to tell it by."""
        own, whole = (sendbuf, recvbuf) if gathers else (recvbuf, sendbuf)
        one = _block(own) if counted else _kind(own)
        every = None
        if comm.rank == root and whole is not None:
            every = _block(whole, comm.size) if counted else counts_of(whole, comm.size)[0]
        if not counted and one is every is None:
            raise Unknown
        return root, _pair(one, every) if gathers else _pair(every, one)

    return facts


def _allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Facts:
    """Return the facts of an Allgatherv: dtype, all counts, and words if this rank sends another part than its own."""
    (kind, counts), send = counts_of(recvbuf, comm.size), _block(sendbuf)
    own = (kind, count) if (count := counts[comm.rank]) else _EMPTY
    return kind, str(counts), None if send is None or send == own else f"sends {text_of(send)}"


def on_gpus(messages: Sequence[Any]) -> list[Any]:
    """Return the buffers of messages that lie on a GPU; none if the MPI library can read them there. Local."""
    if HOST.issuperset(map(type, messages)):
        return []
    first = [one for each in messages for one in (each[:1] if isinstance(each, (list, tuple)) else (each,))]
    # PyTorch's arrays of the host have CUDA's interface, too.
    there = [x for x in first if (lies_elsewhere(x) if is_array(x) else hasattr(x, "__cuda_array_interface__"))]
    return [] if there and (reads_gpus() or not (any(map(is_array, there)) or _has_driver())) else there


def _has_driver() -> bool:
    """Return whether CUDA's driver is loaded. A process without it has no memory of a GPU. Local."""
    with suppress(OSError):
        return bool(ctypes.CDLL(DRIVER, os.RTLD_NOLOAD))
    return False


def nothing(*_: Any, **__: Any) -> Facts:
    """Return no facts: the verb alone is compared. Local."""
    return ()


# The names of arguments are mpi4py's: programs pass them by name.
BUFFERS: dict[str, Callable[..., Facts]] = {
    "Bcast": lambda c, buf, root=0: (root, _block(buf)),
    "Gather": _rooted(gathers=True, counted=True),
    "Scatter": _rooted(gathers=False, counted=True),
    "Gatherv": _rooted(gathers=True, counted=False),
    "Scatterv": _rooted(gathers=False, counted=False),
    "Allgather": lambda c, sendbuf, recvbuf: (_pair(_block(sendbuf), _block(recvbuf, c.size)),),
    "Allgatherv": _allgatherv,
    "Alltoall": lambda c, sendbuf, recvbuf: (_pair(_block(sendbuf, c.size), _block(recvbuf, c.size)),),
    "Reduce": lambda c, sendbuf, recvbuf, op=MPI.SUM, root=0: (
        op_of(op), root, _pair(_block(sendbuf), _block(recvbuf) if c.rank == root else None)),
    # Not the counts: without them mpi4py takes those of the buffers.
    "Reduce_scatter": lambda c, sendbuf, recvbuf, recvcounts=None, op=MPI.SUM: (
        op_of(op), _block(recvbuf if sendbuf is MPI.IN_PLACE else sendbuf)),
    "Reduce_scatter_block": lambda c, sendbuf, recvbuf, op=MPI.SUM: (
        op_of(op), _pair(_block(sendbuf, c.size), _block(recvbuf, c.size if sendbuf is MPI.IN_PLACE else 1))),
    **dict.fromkeys(("Barrier", "Alltoallv", "Alltoallw"), nothing),
    **dict.fromkeys(
        ("Allreduce", "Scan", "Exscan"),
        lambda c, sendbuf, recvbuf, op=MPI.SUM: (op_of(op), _pair(_block(sendbuf), _block(recvbuf)))),
}  # fmt: skip
"""The facts of each collective of buffers. Each has a nonblocking form of the same arguments."""

OBJECTS: dict[str, Callable[..., Facts]] = {
    **dict.fromkeys(("bcast", "gather", "scatter"), lambda c, obj=None, root=0, sendobj=None: (root,)),
    **dict.fromkeys(("allgather", "alltoall"), nothing),
    **dict.fromkeys(("allreduce", "scan", "exscan"), lambda c, sendobj, op=MPI.SUM: (op_of(op),)),
    "reduce": lambda c, sendobj, op=MPI.SUM, root=0: (op_of(op), root),
}
"""The facts of each collective of objects."""
