"""A process group of PyTorch: its calls, each with the facts that ranks compare before data move.

A method plans a call: the facts, the parts of the message, and a function that moves the data once ranks agree. What
:func:`_issued` makes of it issues the plan. A rank with a mistake tells the others, so that every rank raises.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, lru_cache, partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...cluster.calls import Call
from ...cluster.printing import log
from ...cluster.runtime import owned
from ...collectives.operations import Op
from ...engine.plan import digest
from ...errors import Closed, MPIKVError, Stalled, Unsupported, ValueMismatch, notes, text_of
from ...protocols import Array
from ...store.endings import prepare_endings
from ...store.kvstore import lost_stores
from ...transports.mailbox import Message
from .queue import Queue, Work
from .rendezvous import open_group
from .tensors import as_flat, check_kinds, check_movable, describe, join_parts, read, read_parts, reduction_of, split

# Seconds that a rank waits for its pending calls, and then for the other ranks, when it ends a group.
_PATIENCE = 5.0
_CLOSE = Call("close", digest("close"), "the process group")


class _Plan(NamedTuple):
    """A call without a mistake on this rank."""

    compared: tuple[Any, ...]
    """What all ranks pass alike."""
    run: Callable[[bool], object]
    """Moves the data; told whether the message is staged. Collective."""
    result: Any
    """The tensors that are filled, as PyTorch nests them."""
    message: Sequence[Array] = ()
    """The parts of the message, if it may be staged: the facts give its size."""
    put_back: Callable[[], object] = list
    """Copies what has arrived to the tensors that are not dense."""


def _issued(verb: str, operands: int) -> Callable[[Callable[..., _Plan]], Callable[..., Work]]:
    """Return a decorator that turns a method that plans a call into one that issues it and returns its Work. Local.

    PyTorch's options, if any, come after the operands.
    """

    def decorate(plan: Callable[..., _Plan]) -> Callable[..., Work]:
        """Return a method that tells operands from options, issues the plan, and returns its Work. Local."""

        @wraps(plan)
        def issue(group: MpikvProcessGroup, *given: Any, **named: Any) -> Work:
            """Plan the call, queue or make it, and return its Work. Collective."""
            _keep_dynamo_out()
            options = given[operands] if len(given) > operands else next(iter(named.values()), None)
            return group._issue(verb, plan, given[:operands], options)

        return issue

    return decorate


_kept_out = False


def _keep_dynamo_out() -> None:
    """If torch._dynamo is loaded by now, have torch.compile pass over this package, once. Local.

    Without, it compiles the calls of a compiled DDP's hooks, and fails at the group's attributes. Loading
    ``torch._dynamo`` takes a second, so wait until the program does.
    """
    global _kept_out
    if not _kept_out and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].trace_rules.add("mpikv")
        _kept_out = True


class MpikvProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # as Work
    """The group that ``init_process_group("mpikv")`` and ``new_group(backend="mpikv")`` return.

    Its calls are collective: every rank makes them in the same order. They return a :class:`~.queue.Work`.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False
    options = None

    def __init__(self, given: Any) -> None:
        """Connect a group's ranks, by PyTorch's ``DistributedBackendOptions``; the exit ends it. Collective."""
        self._rank, self._size = given.group_rank, given.group_size
        super().__init__(self._rank, self._size)
        self._name, self._timeout = given.group_id, given.timeout
        ranks = list(given.global_ranks_in_group)  # none for the group of all
        self._label = (f"ranks {ranks}",) if ranks else ()
        seconds = given.timeout.total_seconds()
        everyone = ranks or list(range(self._size))
        meeting = self._meeting = open_group(given.store, self._rank, everyone, seconds, given.group_id)
        self._communicator, self._collectives = meeting.communicator, meeting.communicator.collectives
        self._queue = Queue(f"mpikv {given.group_id}")
        self._process, self._why = os.getpid(), ""
        _open_groups().append(self)
        prepare_endings(on_gpu=False)
        _end_at_exit()

    def __repr__(self) -> str:
        return f"<mpikv process group {self._name!r} rank {self._rank}/{self._size}>"

    # --- The way of every call

    def _issue(self, verb: str, plan: Callable[..., _Plan], operands: Sequence[Any], options: Any) -> Work:
        """Plan a call; queue it, or make it now if the caller waits; return its Work. A mistake of one rank is not
        raised here: it becomes the error of the Work on every rank. Collective.
        """
        self._check_open(verb)
        mistake: Exception | None = None
        try:
            compared, run, result, message, put_back = plan(self, *operands, options)
            call = _describe_call(verb, *self._label, *compared)
        except Exception as error:
            result, call, mistake = None, Call(verb, 0, *self._label), error
        timeout = getattr(options, "timeout", None)
        # PyTorch's options say "no timeout of my own" by one below 0.
        seconds = (timeout if timeout and timeout > timedelta(0) else self._timeout).total_seconds()

        def make() -> None:
            """Make the call, or refuse it on all ranks after a mistake or an earlier, unseen error. Collective."""
            self._meeting.deadline.timeout = seconds
            error = self._queue.take_failure() or mistake
            if error is not None:
                self._communicator.refuse(call, error)
            self._communicator.call(call, run, *message)
            put_back()

        work = Work(call.__str__, result, self._queue)
        return self._queue.add(work, make, waits=not getattr(options, "asyncOp", True))

    def _check_open(self, verb: str) -> None:
        """Raise Closed in a forked child, or if the group has ended. Local."""
        if os.getpid() != self._process:
            raise Closed(f"{verb}: the process group was made before a fork, and belongs to the parent process")
        if self._why:
            raise Closed(f"{verb}: {self._why} [rank {self._rank}/{self._size}]")

    # --- Reductions

    @_issued("all_reduce", 1)
    def allreduce(self, tensors: Any, options: Any) -> _Plan:
        """Plan a reduction of each tensor, in place on every rank; the decorator issues it as a Work. Collective."""
        tensors, (op, factor) = _as_list(tensors), reduction_of(options)
        if tensors[0].layout == torch.sparse_coo:
            return self._plan_sparse(tensors[0], op, factor)
        check_kinds(op, tensors)
        arrays, put_back = as_flat(tensors, factor)
        run = partial(self._collectives.all_reduce_each, [(array, array) for array in arrays], op)
        return _Plan((op.value, *map(describe, tensors)), run, tensors, arrays, put_back)

    allreduce_coalesced = allreduce

    def _plan_sparse(self, tensor: Any, op: Op, factor: Any) -> _Plan:
        """Plan the sum of a sparse tensor in place: each rank gathers all rows, and adds those of one index. Local."""
        check_movable(tensor._values())
        if op is not Op.SUM or factor is not None:
            raise Unsupported(f"a sparse tensor has no {op.value} here, only a sum")

        def gather(rows: Any, numbers: Sequence[int]) -> Any:
            """Return a new tensor of all ranks' rows, ``numbers[r]`` of rank r, in rank order. Collective."""
            every = rows.new_empty((sum(numbers), *rows.shape[1:]))
            every.split(numbers)[self._rank].copy_(rows)
            width = read(rows.new_empty((1, *rows.shape[1:]))).size
            self._collectives.all_gather(read(every), [number * width for number in numbers])
            return every

        def run(_: bool) -> None:
            """Overwrite the tensor by the sum of all ranks'. Collective."""
            mine = tensor.detach().coalesce()
            numbers = np.zeros(self._size, np.int64)
            numbers[self._rank] = len(mine.values())
            self._collectives.all_gather(numbers, (1,) * self._size)
            indices, values = (gather(rows, numbers.tolist()) for rows in (mine.indices().t(), mine.values()))
            every = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
            with torch.no_grad():  # a detached sparse tensor would not pass on new indices
                tensor.copy_(every.coalesce())

        return _Plan(("sum", "sparse", tensor.sparse_dim(), describe(tensor)), run, [tensor])

    @_issued("reduce", 1)
    def reduce(self, tensors: Any, options: Any) -> _Plan:
        """Plan a reduction of a tensor, in place at the root; the decorator issues it as a Work. Collective."""
        tensors, (op, factor), root = _as_list(tensors), reduction_of(options), self._root(options)
        check_kinds(op, tensors)
        (array,), put_back = as_flat(tensors, factor)
        run = partial(self._collectives.reduce, array, op, root)
        facts = op.value, f"to {root}", describe(tensors[0])
        return _Plan(facts, run, tensors, [array], put_back if self._rank == root else list)

    @_issued("reduce_scatter", 2)
    def reduce_scatter(self, outs: Any, ins: Any, options: Any) -> _Plan:
        """Plan a reduction of all ranks' r-th parts to rank r's output; the decorator issues it as a Work. Collective.

        For one output or each of a list. The input of an output is a list of tensors, or one in equal parts.
        """
        if isinstance(outs, torch.Tensor):
            outs, ins = [outs], [ins]
        op, factor = reduction_of(options)
        check_kinds(op, [*outs, *(tensor for one in ins for tensor in _as_list(one))])
        kinds = [self._check_part(one, out) for one, out in zip(ins, outs, strict=True)]
        parts = [read_parts(one, self._size, factor) for one in ins]
        arrays, put_back = as_flat(outs)

        def run(staged: bool) -> None:
            """Fill each output with the reduction of its parts. Collective."""
            for array, sends in zip(arrays, parts, strict=True):
                self._collectives.reduce_scatter(sends, array, op, staged)

        return _Plan((op.value, *kinds), run, outs, parts[0] if len(parts) == 1 else (), put_back)

    reduce_scatter_single = _reduce_scatter_base = reduce_scatter
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter

    # --- Copies

    @_issued("broadcast", 1)
    def broadcast(self, tensors: Any, options: Any) -> _Plan:
        """Plan a copy of the root's tensor to every rank's; the decorator issues it as a Work. Collective."""
        tensors, root = _as_list(tensors), self._root(options)
        (array,), put_back = as_flat(tensors)
        run = partial(self._collectives.broadcast, array, root)
        return _Plan((f"from {root}", describe(tensors[0])), run, tensors, [array], put_back)

    @_issued("all_gather", 2)
    def allgather(self, outs: Any, ins: Any, options: Any) -> _Plan:
        """Plan a copy of every rank's input to all ranks' ``outs``; the decorator issues it as a Work. Collective.

        For one input or each of a list. The output of an input is a list of tensors, or one in equal parts.
        """
        if isinstance(ins, torch.Tensor):
            outs, ins = [outs], [ins]
        kinds = [self._check_part(out, tensor) for out, tensor in zip(outs, ins, strict=True)]
        targets = [join_parts(out, self._size) for out in outs]
        sends = [read(tensor) for tensor in ins]

        def run(staged: bool) -> None:
            """Fill each output with all ranks' inputs. Collective."""
            for (array, counts, put_back), send in zip(targets, sends, strict=True):
                own = split(array, counts)[self._rank]
                if own.ctypes.data != send.ctypes.data:  # FSDP passes the part itself
                    own[:] = send
                self._collectives.all_gather(array, counts, staged)
                put_back()

        alike = len(sends) == 1 and len(set(targets[0][1])) == 1
        return _Plan(tuple(kinds), run, outs, sends if alike else ())

    all_gather_single = _allgather_base = allgather
    all_gather_single_coalesced = allgather_into_tensor_coalesced = allgather

    def allgather_coalesced(self, outs: Any, ins: Any, options: Any = None) -> Work:
        """Issue copies of every rank's inputs to all; ``outs[r]`` lists rank r's; return the Work. Collective."""
        return self.allgather([list(row) for row in zip(*outs, strict=True)], ins, options)

    @_issued("gather", 2)
    def gather(self, outs: Any, ins: Any, options: Any) -> _Plan:
        """Plan a copy of every rank's tensor to the root; the decorator issues it as a Work. Collective."""
        root, send = self._root(options), read(ins[0])
        arrays, put_back = as_flat(self._one_each(outs[0]) if self._rank == root else [])
        run = partial(self._collectives.gather, send, arrays or None, root)
        return _Plan((f"to {root}", _kind(ins[0])), lambda _: run(), outs, put_back=put_back)

    @_issued("scatter", 2)
    def scatter(self, outs: Any, ins: Any, options: Any) -> _Plan:
        """Plan a copy of the root's r-th tensor to rank r; the decorator issues it as a Work. Collective."""
        root, ((array,), put_back) = self._root(options), as_flat(outs)
        sends = [read(one) for one in self._one_each(ins[0])] if self._rank == root else None
        run = partial(self._collectives.scatter, sends, array, root)
        return _Plan((f"from {root}", _kind(outs[0])), lambda _: run(), outs, put_back=put_back)

    @_issued("all_to_all", 2)
    def alltoall(self, outs: Any, ins: Any, options: Any) -> _Plan:
        """Plan a copy of this rank's tensor r to rank r, for each r; the decorator issues it as a Work. Collective."""
        return self._plan_all_to_all(outs, ins, outs)

    @_issued("all_to_all", 4)
    def all_to_all_single(self, out: Any, tensor: Any, out_rows: Any, in_rows: Any, options: Any) -> _Plan:
        """Plan a copy of this rank's r-th rows to rank r, for each r; the decorator issues it as a Work. Collective.

        Ranks get equally many rows by default.
        """
        return self._plan_all_to_all(self._cut(out, out_rows), self._cut(tensor, in_rows), [out])

    alltoall_base = all_to_all_single

    def _plan_all_to_all(self, outs: Sequence[Any], ins: Sequence[Any], result: Any) -> _Plan:
        """Plan an exchange of one tensor from each rank to each. Local; its run is collective."""
        arrays, put_back = as_flat(self._one_each(outs))
        sends = [read(one) for one in self._one_each(ins)]
        run = partial(self._collectives.all_to_all, sends, arrays)
        return _Plan((_kind(ins[0]),), lambda _: run(), result, put_back=put_back)

    def _cut(self, tensor: Any, rows: Sequence[int]) -> Any:
        """Return views of a tensor's rows, by default equally many a rank; ValueMismatch if some are left. Local."""
        rows = list(rows) or [len(tensor) // self._size] * self._size
        if sum(rows) != len(tensor):
            raise ValueMismatch(f"{describe(tensor)} cannot be cut into {rows} rows, one part for each rank")
        return tensor.split(rows)

    @_issued("barrier", 0)
    def barrier(self, options: Any) -> _Plan:
        """Plan a call that completes when every rank has made it; the decorator issues it as a Work. Collective."""
        return _Plan((), lambda staged: None, [])

    # --- Messages between two ranks, not in the order of the calls above

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        """Begin to send a tensor to one rank, and return its Work. Local."""
        work = self._message("send", tensors, f"to {to}", tag)
        return self._follow(work, self._meeting.mailbox.send(read(tensors[0]), to, tag, work.finish))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Begin to receive into a tensor from any rank, and return its Work. Local."""
        return self.recv(tensors, None, tag)

    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> Work:
        """Begin to receive into a tensor from one rank, or for None from any; return its Work. Local."""
        work = self._message("recv", tensors, "from any" if source is None else f"from {source}", tag)
        (array,), put_back = as_flat(tensors)

        def end(error: BaseException | None, source: int) -> None:
            """Copy what has arrived to the tensor, and complete the Work. Local."""
            if error is None:
                put_back()
            work.finish(error, source)

        return self._follow(work, self._meeting.mailbox.receive(array, source, tag, end))

    def _message(self, verb: str, tensors: Any, way: str, tag: int) -> Work:
        """Return the Work of a message that is not begun yet; raise if the group has ended. Local."""
        self._check_open(verb)
        self._communicator.check_usable()

        def text() -> str:
            """Return the message in words."""
            return f"{verb}({', '.join([*self._label, describe(tensors[0])])} {way}, tag {tag})"

        return Work(text, tensors, self._queue)

    def _follow(self, work: Work, message: Message) -> Work:
        """Let each later wait for ``work`` move its message, unless that has ended; return ``work`` now. Local."""
        if message.end is not None:
            work.help = partial(self._meeting.mailbox.wait, message, self._timeout.total_seconds())
        return work

    # --- Mistakes that every rank can make, and common facts

    def _check_part(self, whole: Any, part: Any) -> str:
        """Return dtype and sizes of ``whole`` as a text; ValueMismatch unless ``part`` is this rank's of it. Local."""
        if isinstance(whole, torch.Tensor):
            sizes, kinds = [whole.numel() // self._size] * self._size, {whole.dtype}
            fits = whole.numel() == part.numel() * self._size
        else:
            sizes, kinds = [one.numel() for one in whole], {one.dtype for one in whole}
            fits = len(sizes) == self._size and sizes[self._rank] == part.numel()
        if not fits or kinds != {part.dtype}:
            text = describe(whole) if isinstance(whole, torch.Tensor) else ", ".join(map(describe, whole))
            raise ValueMismatch(f"{describe(part)} is not this rank's part, of {self._size}, of {text}")
        return f"{str(part.dtype)[6:]}{sizes if len(set(sizes)) > 1 else f'[{sizes[0]}] each'}"

    def _one_each(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the list of tensors itself; ValueMismatch unless it has one for each rank."""
        if len(tensors) != self._size:
            raise ValueMismatch(f"a list of {len(tensors)} tensors for {self._size} ranks; pass one for each rank")
        return tensors

    def _root(self, options: Any) -> int:
        """Return the root that PyTorch's options name; ValueMismatch if it is no rank. Local."""
        root = options if isinstance(options, int) else getattr(options, "rootRank", 0)
        if not 0 <= root < self._size:
            raise ValueMismatch(f"the root {root} is none of {self._size} ranks")
        return int(root)

    # --- Facts that PyTorch asks for

    def name(self) -> str:
        """Return the name of the backend."""
        return "mpikv"

    # PyTorch, and its C++, look these up by names of their own.
    getBackendName = _get_backend_name = name  # noqa: N815

    # By these two C++ knows the group, and the property group_name.

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group."""
        return str(self._name)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of the group."""
        self._name = name

    def _get_backend(self, device: Any) -> Any:
        """Return this group itself: it is the backend for every device. Local."""
        return self

    @property
    def _device_types(self) -> list[Any]:
        """The devices of the tensors that the group takes: the CPU alone."""
        return [torch.device("cpu")]

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: the group has no memory of its own for tensors. Local."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later calls without one of their own. Local."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    # --- The end

    def shutdown(self) -> None:
        """End the group; free its memory if all ranks come within seconds, else tell them; log any unseen error.

        Collective, idempotent. It raises nothing for a rank that does not come.
        """
        if self._why or os.getpid() != self._process:
            return
        self._why = "the process group was destroyed"
        patience = min(_PATIENCE, self._timeout.total_seconds())
        try:
            if not self._queue.end(patience):
                raise Stalled(f"calls have not completed after {patience:g} s")
            self._meeting.deadline.timeout = patience
            self._communicator.call(_CLOSE, lambda staged: self._meeting.close())
        except MPIKVError as error:
            # A rank may come much later, or has ended: PyTorch's programs need not end together.
            self._give_up(f"it left the process group ({text_of(error)})")
        else:
            _open_groups().remove(self)
        if (unseen := self._queue.take_failure()) is not None:
            # Not raised: PyTorch would keep the group, and its other groups, open.
            log("%s: %s", type(unseen).__name__, "; ".join([text_of(unseen), *notes(unseen)]), level=logging.ERROR)

    def abort(self) -> None:
        """End the group on this rank alone, tell the others, and make a waiting call raise. Local; idempotent."""
        if not self._why:
            self._why = "the process group was aborted"
            self._give_up("it has aborted the process group")

    def _give_up(self, why: str) -> None:
        """End the group on this rank alone, tell the others why; the exit, not this call, waits for them. Local."""
        self._meeting.abort(why)
        # At its end this rank waits for the others, which may work on for as long as a call may take.
        self._meeting.deadline.timeout = self._timeout.total_seconds()
        lost_stores().append(self._meeting)
        _open_groups().remove(self)


@lru_cache(maxsize=4096)
def _describe_call(verb: str, *facts: object) -> Call:
    """Return a :class:`Call` of a verb and facts, with their hash, for ranks to compare; kept in a cache. Local."""
    texts = list(map(str, facts))
    text = ", ".join(texts)
    return Call(verb, digest(f"{verb} {text}"), text, describe=lambda: texts)


def _open_groups() -> list[MpikvProcessGroup]:
    """Return the list itself of this rank's groups that have not ended; callers change it. Local."""
    return owned("process groups")


@cache
def _end_at_exit() -> None:
    """Register, once, an exit function that ends open groups. After MPI is loaded, so that MPI ends later. Local."""
    atexit.register(_shut_down_all)


def _shut_down_all() -> None:
    """At the exit: end all groups that are still open, in the reverse order of their names. Collective."""
    # In PyTorch's own order, as some ranks may have destroyed them all by PyTorch's call.
    for group in sorted(_open_groups(), key=lambda one: one.group_name, reverse=True):
        group.shutdown()


def _as_list(tensors: Any) -> Sequence[Any]:
    """Return ``[tensor]`` for one tensor, and a list itself. Local."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _kind(tensor: Any) -> str:
    """Return the name of a tensor's dtype, without "torch.". Local."""
    return str(tensor.dtype)[6:]
