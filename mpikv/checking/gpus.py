"""Calls of a checked communicator on arrays of GPUs: NCCL moves them, as few MPI libraries read the memory of a GPU.

Loaded at the first such call. The ranks compare it as every call. It runs after the work on the current stream, and the
host waits for its end: as in MPI, the buffers are ready when a call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from ..arrays.arrays import is_array, name_of
from ..collectives.collectives import check_sizes
from ..compute.cuda.gpu import find_cupy, find_nccl, gpu_of
from ..compute.cuda.sharing import share_gpus
from ..errors import Unsupported
from ..memory.device import DeviceMemory
from ..protocols import Array
from ..transports.nccl import ALL_WIRES
from .check import Check
from .facts import BUFFERS, MPI, Facts, call_of, counts_of, make_call, on_gpus, op_of, text_of, unpack

_OPS = ("sum", "prod", "min", "max")
_ADVICE = "copy the array to the host, as by cupy.asnumpy"

Step: TypeAlias = "Callable[[Any], object]"
"""The part of a call that moves data, by a transport."""


class Gpus:
    """This rank's GPU, and the way to those of the other ranks."""

    def __init__(self, check: Check, value: Any) -> None:
        """Find the GPU of ``value``, import NCCL if there are several ranks, connect nothing yet; may set environment
        variables to share GPUs. Local.
        """
        self._check, self._rank, self._size = check, check.group.rank, check.group.size
        if check.config.gpu_sharing:
            share_gpus(self._rank)
        self._nccl = find_nccl() if self._size > 1 else None
        self._memory = DeviceMemory(gpu_of(_array(value)))
        self.order, self.mover = self._memory.order, cast(Any, None)
        self._read, self._fill = partial(self._parts, self._memory.source), partial(self._parts, self._memory.target)

    def _parts(self, take: Callable[[Any], Any], message: Any, blocks: int = 1, vector: bool = False) -> Any:
        """Return a list of ``blocks`` flat views of a message's array, as ``take`` returns that; with ``vector`` each
        has its own count. A mistake raises TypeError or ValueError. Local.
        """
        buffer = message[0] if isinstance(message, (list, tuple)) else message
        if not on_gpus((buffer,)):
            raise TypeError(f"one buffer lies on a GPU, and {type(buffer).__name__} does not; pass cupy.asarray(it)")
        (kind, counts, starts, whole), array = unpack(message, vector), take(_array(buffer))
        array = array if array.flags.c_contiguous else array.T  # in the order of the memory, as MPI's
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous; pass cupy.ascontiguousarray of it")
        flat = array.reshape(-1).view(kind)
        sizes = counts_of(message, blocks)[1] if vector else [whole // blocks if counts is None else counts] * blocks
        if starts is None or not vector:
            starts = [(starts or 0) + sum(sizes[:block]) for block in range(blocks)]
        parts = [flat[low : low + size] for low, size in zip(starts, sizes, strict=True)]
        if min(starts) < 0 or [part.size for part in parts] != sizes or (counts is None and sum(sizes) != whole):
            raise ValueError(f"{sizes} elements from {list(starts)} on are not in an array of {whole}")
        return parts

    # --- How a call becomes a step. Local; the names of arguments are mpi4py's

    def reduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: Any = None, scatters: bool = False) -> Step:
        """Return a function that reduces by a transport: to all, ``root`` or in blocks; Unsupported if NCCL cannot.

        Raises:
            Unsupported: NCCL has none of this kind.
        """
        name, in_place = op_of(op), sendbuf is None or sendbuf is MPI.IN_PLACE
        outs = self._fill(recvbuf) if root in (None, self._rank) else None
        [send] = outs if in_place and outs is not None else self._read(sendbuf)
        [out], wire, operation = outs or [send], ALL_WIRES.get(send.dtype.name), f"NCCL_{name.upper()}"
        # Of complex numbers NCCL adds the parts.
        if name not in _OPS or wire is None or not (wire.dtype == send.dtype.name or (wire.each, name) == (2, "sum")):
            raise Unsupported(f"NCCL has no {name} of {name_of(send.dtype)}; {_ADVICE}")
        if root is None and not scatters:
            return lambda mover: mover.allreduce(send, out, operation)
        counts = [send.size // self._size if scatters else send.size * (rank == root) for rank in range(self._size)]
        # In place MPI has the result at the beginning, and NCCL where the rank's block was.
        copies, part = scatters and in_place, out[: counts[self._rank]]
        return lambda mover: mover.reduce_scatter(send.copy() if copies else send, part, counts, operation)

    def broadcast(self, buf: Any, root: int = 0) -> Step:
        """Return a function that makes a broadcast by a transport. Local."""
        [array] = (self._read if self._rank == root else self._fill)(buf)
        return lambda mover: mover.broadcast(array, root)

    def gather(self, sendbuf: Any, recvbuf: Any, root: Any = 0, vector: bool = False, back: bool = False) -> Step:
        """Return a function that makes a gather by a transport, or ``back`` a scatter; root None: an allgather. Local.

        Each rank has one block; the root, or each rank if the root is None, has those of all.
        """
        one, every, read, fill = sendbuf, recvbuf, self._read, self._fill
        if back:
            one, every, read, fill = every, one, fill, read
        parts = fill(every, self._size, vector) if root in (None, self._rank) else None
        own = parts[self._rank] if parts and (one is None or one is MPI.IN_PLACE) else read(one)[0]
        alone = [own if root in (None, rank) else own[:0] for rank in range(self._size)]
        sides = alone, parts or [own[:0]] * self._size
        return partial(self._exchange, *(sides[::-1] if back else sides))

    def swap(self, sendbuf: Any, recvbuf: Any, vector: bool = False) -> Step:
        """Return a function that sends a block from each rank to each, by a transport. Local."""
        in_place, parts = sendbuf is None or sendbuf is MPI.IN_PLACE, self._fill(recvbuf, self._size, vector)
        return partial(self._exchange, None if in_place else self._read(sendbuf, self._size, vector), parts)

    # --- Collective

    def _exchange(self, sends: Sequence[Array] | None, receives: Sequence[Array], mover: Any) -> None:
        """Send each rank an array and receive one from each; ValueMismatch on all if sizes differ. Collective.

        Without ``sends`` it sends copies of ``receives``.
        """
        sends = sends or [part.copy() for part in receives]
        table = np.array([[[part.nbytes for part in parts] for parts in (sends, receives)]] * self._size)
        # Of other sizes NCCL would wait for ever, or write beyond an array.
        mover.control.all_gather(table.reshape(-1), [2 * self._size] * self._size)
        check_sizes(table[:, 0], table[:, 1].T)
        mover.exchange(sends, receives)

    def run(self, verb: str, step: Step) -> None:
        """Run an agreed step by the GPU transport, and wait until the GPU has ended it; the first run connects the
        GPUs. A failure on this rank alone ends the checks. Collective.

        It runs after the work on the current stream.
        """
        try:
            self.mover = self.mover or self._check.join_gpus(self._memory, self._nccl)
            self.order.run(step, self.mover)
            self.order.wait()
            self.order.check()  # aborted work ends, too
        except BaseException as error:
            self._check.end_unless_settled(verb, error)
            raise


def _array(value: Any) -> Any:
    """Return the value itself if it is an array with DLPack, else a CuPy array over its memory. Local."""
    return value if is_array(value) else find_cupy("arrays of GPUs").asarray(value)


_STEPS: dict[str, Callable[..., Step]] = {
    "Allreduce": Gpus.reduce,
    "Reduce": lambda gpus, sendbuf, recvbuf, op=MPI.SUM, root=0: gpus.reduce(sendbuf, recvbuf, op, root),
    "Reduce_scatter_block": partial(Gpus.reduce, scatters=True),
    "Bcast": Gpus.broadcast,
}
for _v in ("", "v"):
    _STEPS[f"Gather{_v}"] = partial(Gpus.gather, vector=bool(_v))
    _STEPS[f"Scatter{_v}"] = partial(Gpus.gather, vector=bool(_v), back=True)
    _STEPS[f"Allgather{_v}"] = partial(Gpus.gather, vector=bool(_v), root=None)
    _STEPS[f"Alltoall{_v}"] = partial(Gpus.swap, vector=bool(_v))


def call(verb: str, comm: Any, *given: Any, **named: Any) -> None:
    """Make a checked call on arrays of GPUs by NCCL; Unsupported if NCCL has none. Collective, if the call is."""
    check = comm.check
    try:
        if verb not in _STEPS:
            what = f"{_ADVICE}, or use what NCCL does: {', '.join(_STEPS)}"
            raise Unsupported(f"{verb}: an array lies on a GPU, and the MPI library is not CUDA-aware; {what}")
        gpus = check.gpus = check.gpus or Gpus(check, on_gpus((*given, *named.values()))[0])
        gpus.order.begin()
        step = _STEPS[verb](gpus, *given, **named)
        made = make_call(verb, partial(_facts_of, verb), (comm, *given), named)
    except Exception as problem:
        if verb in BUFFERS:
            check.begin(call_of(verb, None), problem)
        raise  # at once, where the ranks do not compare the call
    check.begin(made)
    try:
        gpus.run(verb, step)
    finally:
        check.leave()


def _facts_of(verb: str, comm: Any, *given: Any, **named: Any) -> Facts:
    """Return the facts of a call on GPUs; ValueError if a send fits no receive, or a root is no rank. Local."""
    facts = *BUFFERS[verb](comm, *given, **named), "on GPUs"
    for fact in facts:
        if str(fact).startswith("sends ") or (isinstance(fact, int) and not 0 <= fact < comm.size):
            raise ValueError(f"wrong arguments: {text_of(fact)}")
    return facts
