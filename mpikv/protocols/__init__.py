"""The seams of mpikv: what a transport, a placement, an updater, kernels and a codec promise to the store.

Each is a Protocol: a class that has these attributes is one, and subclassing is never needed. Every implementation is
held to its contract by a class in :mod:`mpikv.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Codec",
    "Event",
    "Gather",
    "Gpu",
    "GpuKernels",
    "Graph",
    "Issue",
    "Kernels",
    "Key",
    "Memory",
    "Placement",
    "RangeCodec",
    "Rounds",
    "Shard",
    "Slots",
    "StepTable",
    "Stream",
    "StreamOrder",
    "Sum",
    "Transport",
    "Updater",
    "ValueCodec",
    "Whole",
    "WholeKernels",
    "Workspace",
]

Array: TypeAlias = "npt.NDArray[Any]"
"""A numpy array; in a store whose :class:`Memory` is a GPU's, an array of that GPU, as CuPy's."""

Key: TypeAlias = "int | str"
"""The name of a stored value. One store holds keys of one type."""

Slots: TypeAlias = "Mapping[str, np.dtype[Any]]"
"""The optimizer state that one element of a value needs: the name and the dtype of each state array."""


class Workspace(Protocol):
    """Moves rows of arrays, by their numbers: the host's by numpy, a GPU's on the thread's present stream.

    On a GPU it may do so in memory that was taken beforehand.

    All methods are local. Tables and rows are arrays of one memory, in a GPU's contiguous; rows lie along their first
    dimension, and the others are alike. Numbers are int64 and in range: arrays of the host, or what :meth:`numbers`
    has made of one.
    """

    def over(self, memory: Array) -> AbstractContextManager[None]:
        """Return a block in which new arrays are parts of this one (uint8), as far as they fit, and memory for numbers
        is. On the host they are not, where memory is not scarce.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content."""
        ...

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ."""
        ...

    def clear(self, array: Array) -> None:
        """Fill an array with zeros."""
        ...

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        """Compile what moves and adds rows of values of this dtype, unless it is there.

        Raises:
            TransportUnavailable: nothing can be compiled here.
        """
        ...

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        """Return arrays of numbers of rows where they are used: what is used soon, or often, comes there at once."""
        ...

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        """Return the rows of these numbers, one after the other: ``out``, of the table's dtype, or a new array."""
        ...

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        """Copy rows, or zeros, to those of these numbers, each of which is there once, cast where the dtypes differ."""
        ...

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        """Add rows to those of these numbers, each of which is there once, in the dtype of the table: that of the rows,
        or what sums of it are made in.
        """
        ...

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        """Return sums of rows, each rounded once: the first of those of the numbers ``order[starts[0]:starts[1]]``, the
        last of those from ``order[starts[-1]]`` on. On a GPU they are made from the first to the last, on the host as
        numpy's ``add.reduceat`` does.
        """
        ...


class Memory(Protocol):
    """An allocator: where a store's arrays lie, the host's memory or a GPU's, and what copies them.

    All methods are local. Those that copy in a GPU's memory return before it is done; whatever comes after them on the
    store's stream finds it done.
    """

    is_host: bool

    @property
    def order(self) -> StreamOrder:
        """In what order calls and copies happen."""
        ...

    @property
    def workspace(self) -> Workspace:
        """What moves rows of its arrays. What it returns is the store's, where :meth:`StreamOrder.run` runs a call."""
        ...

    def zeros(self, nbytes: int) -> Array:
        """Return zeroed bytes (uint8), aligned to 64 bytes at least."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content, for a caller to keep."""
        ...

    def source(self, value: Any) -> Array:
        """Return an array of this memory to read ``value`` from, without a copy if it lies here.

        Raises:
            TypeError: not an array.
            Unsupported: it cannot be brought here.
        """
        ...

    def facts(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and the dtype of what :meth:`source` would return, and raise what it would."""
        ...

    def target(self, out: Any) -> Array:
        """Return an array that :meth:`copy` can write to, over the memory of ``out``.

        Raises:
            TypeError: not an array, or one that cannot be written.
            Unsupported: it lies where nothing of this memory can be copied to.
        """
        ...

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, of the same shape, cast where the dtypes differ. One of the two may be an
        array of the host, whatever this memory is.
        """
        ...

    def to_host(self, array: Array) -> Array:
        """Return a numpy array of the same content, complete: the array itself, or a copy."""
        ...

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array of floats whether an element is no number, or larger in size than the bound.

        On a GPU it waits until the present stream has computed them.
        """
        ...


class StreamOrder(Protocol):
    """In what order the calls of a store and the work of its callers happen. On the host each is done when it returns.

    All methods are local.
    """

    needed: bool
    """Whether what a call does has to be run by :meth:`run`."""

    @property
    def failed(self) -> bool:
        """Whether what was queued is known to have failed, so that nothing that follows can be right."""
        ...

    def begin(self) -> None:
        """Let what a call prepares come after what the stream had to do on which the call was issued, at that moment.

        Raises:
            Unsupported: no call can be made in the order of this thread's present stream.
            TransportError: the GPU has failed.
        """
        ...

    def check_new(self) -> None:
        """Raise Unsupported if whoever has issued the call that is prepared can be given no arrays of
        :meth:`Memory.empty`.
        """
        ...

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(*arguments)``, which is all that a call does to arrays, on the store's stream: after what
        the caller's stream has to do so far, and before what it is given next. The arguments live until it is done.
        """
        ...

    def cancel(self) -> None:
        """Take note that the call is not made for which arrays were prepared."""
        ...

    def issue(self) -> Issue | None:
        """Return a note of a call that this thread leaves to another; None where what it is given needs no order.

        Raises:
            Unsupported: as in :meth:`begin`.
        """
        ...

    def on_worker(self) -> AbstractContextManager[None]:
        """Return a context in which this thread makes calls that others have issued."""
        ...

    def rejoin(self) -> None:
        """Let what this thread's present stream is given next come after all calls of other threads so far."""
        ...

    def wait(self) -> None:
        """Wait until all that was queued is done."""
        ...

    def close(self) -> None:
        """Wait, give up what was recorded, and give back to the GPU what nothing uses any more. More can be queued."""
        ...

    def abandon(self, why: str) -> None:
        """End what is in flight, where it may wait for ranks that do not come; there tell the others why, unless that
        is "", as they may wait for this one. In a forked child, nothing.
        """
        ...


class Issue(Protocol):
    """A call that one thread has issued and another makes."""

    def run(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, which prepares the call and makes it, and keeps what that uses. In
        :meth:`StreamOrder.on_worker`.
        """
        ...

    def rejoin(self) -> None:
        """Let what this thread's present stream is given next come after the call, which was made."""
        ...


class Event(Protocol):
    """A point in the work of a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has come there. Never waits."""
        ...


class Stream(Protocol):
    """A queue of work of a GPU. As a context manager, the one to which this thread gives its work meanwhile."""

    handle: int
    """What NCCL is given: the address of the CUDA stream."""

    def record(self) -> Event:
        """Return the point behind all that was queued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is queued from now on begin after the event, which may be one of another stream. Returns at once."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""
        ...

    def begin_capture(self) -> None:
        """Have work that this thread gives to the stream recorded from now on, and not run.

        Until :meth:`end_capture` nobody may wait for the stream, ask for a point that is recorded meanwhile, or let it
        wait for another stream; and what is recorded must not take memory, or move pageable memory of the host.
        """
        ...

    def end_capture(self) -> Graph:
        """Return what was recorded; the stream runs again what it is given.

        Raises:
            TransportError: something was done meanwhile that cannot be recorded.
        """
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, *failure: object) -> None: ...


class Graph(Protocol):
    """Recorded work, with the addresses and arguments that it was given. It keeps no memory."""

    def launch(self) -> None:
        """Queue all of it on this thread's present stream, as one."""
        ...

    def close(self) -> None:
        """Give it up, which NCCL's communicator must find done when it ends. What is queued is done all the same.
        Idempotent.
        """
        ...


class Gpu(Protocol):
    """One GPU as far as a store needs it: CuPy's (``mpikv/compute/cuda/gpu.py``), or one that stands for it where there
    is none.

    Work goes to the thread's present stream. Arrays are those of one library, ``cupy.ndarray`` or a stand-in, which
    have ``shape``, ``dtype``, ``size``, ``nbytes``, ``itemsize``, ``strides``, ``reshape``, ``view(dtype)``,
    ``copy``, ``fill``, slices and ``array[...] = other``, and take part in numpy's functions; they have no
    ``flags.writeable``.
    """

    name: str
    """As ``cuda:0``."""
    uuid: str
    """The same for all processes that use this GPU, and for no other GPU."""

    def use(self) -> None:
        """Make this the GPU of the present thread, as it is of the one that made this object."""
        ...

    def stream(self) -> Stream:
        """Return a new stream of high priority, which does not wait for the default stream."""
        ...

    def current(self) -> Stream:
        """Return this thread's present stream."""
        ...

    def capturing(self) -> bool:
        """Return whether what that is given is recorded, and not run."""
        ...

    def zeros(self, nbytes: int) -> Array:
        """Return new zeroed bytes (uint8), aligned to 256 bytes.

        Raises:
            MemoryError: the GPU has too little.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content. Raises as :meth:`zeros`."""
        ...

    def release(self, stream: Stream) -> None:
        """Give back what memory was taken on a stream and is not in use: others than CuPy may need it."""
        ...

    def owns(self, value: object) -> bool:
        """Return whether this is an array of the library, on this GPU."""
        ...

    def adopt(self, value: Any, ordered: bool = False) -> Array:
        """Return an array over the memory of another library's array on this GPU (DLPack), ordered after its work.

        ``ordered``: what the library's present stream of this thread has to do by now need not come before, where that
        is what it knows.

        Raises:
            Unsupported: it lies on another device.
        """
        ...

    def upload(self, array: Array, out: Array | None = None) -> Array:
        """Return a copy of a numpy array, in ``out`` if that is given, of the same shape and dtype. What is copied may
        be changed when this returns.
        """
        ...

    def download(self, array: Array, out: Array) -> None:
        """Fill a numpy array of the same shape and dtype, and wait until it is filled."""
        ...

    def measure(self, arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> list[tuple[float, bool]]:
        """Return of each array, as it is when rounded to a dtype, the sum of its squares, which has the bits of the
        host's optimizers, and whether all its numbers are finite. Waits for it.

        Raises:
            Unsupported: an array, or one of ``dtypes``, is of no float.
        """
        ...

    def scale(self, arrays: Sequence[Array], factor: float) -> None:
        """Multiply arrays of floats in place, in float64, and round once."""
        ...

    def kernels(self) -> Kernels:
        """Return what runs the rules of optimizers on arrays of the library."""
        ...

    def address(self, array: Array) -> int:
        """Return where the first element lies."""
        ...

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ: one launch for many contiguous arrays."""
        ...

    def exceeding(self, arrays: Sequence[Array], bound: float, flags: Array) -> Sequence[bool]:
        """As :meth:`Memory.exceeding`, by one launch for many arrays of a dtype and one small copy to the host.
        ``flags`` is memory for the results: a byte for each array (uint8). It takes no other for contiguous arrays.
        """
        ...

    # Rows: as in a Workspace, whose numbers lie here.

    def clear(self, array: Array) -> None: ...

    def prepare_rows(self, dtype: np.dtype[Any]) -> None: ...

    def take_rows(self, table: Array, ids: Array, out: Array) -> None: ...

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None: ...

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None: ...

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array: ...


class Transport(Protocol):
    """Moves bytes between ranks.

    All methods are collective: every rank calls them in the same order with the same sizes. Arrays are
    one-dimensional, contiguous and of one dtype. A transport never sees a key, keeps no state of a value, and
    allocates nothing per call. ``send`` is never written. The library's errors leave as
    :class:`~mpikv.errors.TransportError`.

    The three sums return *terms*: arrays of the size of ``recv`` whose sum, from the first to the last, is what this
    rank receives. Where the transport's library adds, ``recv`` itself is the only one. Else they are where the terms
    lie, and ``recv`` was not used: where memory is seen by all ranks, where a library only carries, and where sums
    would travel wider than their terms, as those of half precision do. One transport may do either, as the dtype and
    the number of ranks have it. Terms come in rank order, or in one in which those of a host are added up, each in
    the dtype of ``send`` or of ``recv``; they may be read until the next sum. So whoever adds them can do it in pieces
    that stay in the cache. A rank that receives nothing gets anything.

    A rank's own term may be a view of its ``send``, which it must not change before it has added the terms, and where
    the transport :attr:`lends`, not before the next fence, agreement or exchange either.

    Sums are made in the dtype of ``recv``, which is the dtype of ``send`` or, for half precision, float32. The sum of
    booleans is their logical or; integers wrap.
    """

    name: str

    @property
    def memory(self) -> Memory:
        """Where all arrays lie that it is given and that it returns."""
        ...

    @property
    def control(self) -> Transport:
        """The transport of the same ranks that moves arrays of the host: this one, unless it moves a GPU's."""
        ...

    rank: int
    size: int
    shared: bool
    """Whether :meth:`allocate` returns the same memory to every rank, of which there are several. Then one rank's
    writes are seen by all after a fence."""
    neighbours: int
    """How many ranks share what :meth:`allocate` returns, this one included; the largest such number where it differs,
    so that it is the same on every rank. From 2 on, :meth:`reduce` and :meth:`reduce_scatter` return two terms or
    more, and ranks must not update the same elements."""
    place: int
    """This rank's number among those that share its allocated memory, from 0."""
    lends: bool
    """Whether other ranks may read a ``send`` that is not in the outbox where it lies, after the sum has returned."""
    limit: int
    """The largest message of :meth:`reduce`, :meth:`allreduce` and :meth:`reduce_scatter`, in bytes of ``send``."""

    @property
    def outboxes(self) -> tuple[Array, ...]:
        """Memory (uint8, ``limit`` bytes each) in which to prepare sends. Using it is never required; a sum, or an
        all_to_all, whose ``send`` is the beginning of the outbox whose turn it is saves a copy.
        """
        ...

    @property
    def turn(self) -> int:
        """The index of the outbox for the next sum or all_to_all, and only that one."""
        ...

    def allocate(self, nbytes: int) -> Array:
        """Return zeroed memory for values: ``nbytes`` of uint8, aligned to 64 bytes, owned by the transport until it
        closes, or reclaims it.

        Raises MemoryError on every rank if one has too little.
        """
        ...

    def reclaim(self) -> None:
        """Give back what was allocated and over which no rank has an array any more; what one still has stays."""
        ...

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Sum every rank's ``send`` at the root. ``recv`` is ignored on the other ranks."""
        ...

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        """Sum every rank's ``send`` at every rank, with the same bits on each."""
        ...

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        """Sum every rank's ``send``; rank r receives the r-th part, of ``counts[r]`` elements."""
        ...

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Pass bytes on: rank r receives the r-th part of every rank's ``send``, of ``counts[r]`` bytes.

        ``send`` is uint8, as long on every rank, and at most ``limit`` bytes. With ``counts`` None every rank receives
        all of every rank's.

        Returns what each rank sent to this one, in rank order, which may be read until the next exchange of data.
        """
        ...

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill ``buffer`` on every rank: its r-th part, of ``counts[r]`` elements, is rank r's. In place.

        It is the same range of allocated memory on every rank, or private memory on every rank. Of memory that
        neighbours share, nobody may still read what the last fence has shown.
        """
        ...

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to every rank's, in place. Of memory, see :meth:`all_gather`."""
        ...

    def fence(self, showing: bool = False) -> None:
        """Make what any rank wrote to allocated memory visible to the ranks that share it. ``showing`` as in
        :meth:`agree`.
        """
        ...

    def agree(self, token: int, showing: bool = False) -> bool:
        """Return whether every rank passed the same token, in [0, 2**62). Also a barrier and a fence.

        With ``showing``, the same on ranks of the same token, the outbox whose turn it is holds the ``send`` of the
        sum that comes next if all agree. Then that sum need not wait for the others once more.

        Raises :class:`~mpikv.errors.Stalled` on the ranks that wait when another does not come before the deadline.
        """
        ...

    def close(self) -> None:
        """Release all memory. Collective, idempotent."""
        ...


class Shard(NamedTuple):
    """This rank's elements of a contiguous range, and how many each of the others has."""

    counts: tuple[int, ...]
    """How many elements each rank owns, in rank order; all of them on every rank where values are replicated."""
    low: int
    high: int
    """The elements that this rank owns, which it updates: ``[low, high)``."""


class Placement(Protocol):
    """Decides which rank owns which element, hence which collectives a push and a pull run. Stateless."""

    name: str
    everywhere: bool
    """Whether a push leaves every rank with the newest value, so that publishing has nothing to do."""

    def shard(self, start: int, stop: int, grid: tuple[int, int], owner: int) -> Shard:
        """Return who owns the elements ``[start, stop)`` of a block, which lie in the cell ``grid`` of its bucket grid.

        ``owner`` is the rank that was given the block, for placements that keep values whole. An element's owner
        depends on its place in its block alone, never on the call, because its optimizer state lives with its owner.
        """
        ...

    def bind_reduce(self, shard: Shard) -> Callable[[Array, Array], Sequence[Array]]:
        """Return a function of ``send`` and ``total`` that sums a range over ranks: it returns the addends of the sum
        of the elements that this rank owns. The function is collective.

        Where the transport's library adds this sum, the only addend is ``total`` itself; else ``total`` was not used.
        """
        ...

    def bind_publish(self, shard: Shard, value: Array) -> Callable[[], None]:
        """Return a function that gives every rank the owners' values of a range, which lie in ``value``. The function
        is collective.
        """
        ...


class Updater(Protocol):
    """Changes a stored value by the sum of a push.

    An updater holds settings only; the state of a value is a dict of arrays that the store keeps beside the value and
    passes in.
    """

    elementwise: bool
    """True when each element of the result depends on the same element of the inputs alone, so that a value may be cut
    anywhere."""

    may_raise: bool
    """True when ``update`` may raise. The store then passes copies and keeps them when every rank knows that none
    raised."""

    @property
    def depends_on_count(self) -> bool:
        """Whether :meth:`step` may differ between counts of the same key."""
        ...

    assigns: bool
    """Whether the value just becomes the sum, which may then be made in its place: ``total`` is ``value``."""

    @property
    def by_key(self) -> bool:
        """Whether :meth:`step` may differ between keys of the same count."""
        ...

    revision: int
    """Changes whenever :meth:`settings` or a step may have changed, so that nothing is compared or computed twice."""

    def slots(self, dtype: np.dtype[Any]) -> Slots:
        """Return the state arrays that a value of this dtype needs. They start as zeros, ``master`` as a copy of the
        value.
        """
        ...

    def step(self, key: Key, count: int) -> Any:
        """Return all that depends on the key or on how often it was updated, ``count`` (1 at the first), for one
        update.

        Keys whose steps are equal may be updated by one call.
        """
        ...

    def update(self, step: Any, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Change ``value`` and ``state`` in place by ``total``, which may be overwritten.

        Element-wise updaters get flat ranges, others the whole value in its shape. ``total`` is float32 for
        half-precision values.
        """
        ...

    def bind(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return a function of a step that does what :meth:`update` does to these arrays.

        For element-wise updaters. It is made once and called often, with whatever the arrays then hold.
        """
        ...

    def settings(self) -> str:
        """Describe the updater so that two ranks' descriptions are equal exactly when their updates are."""
        ...


class Whole(NamedTuple):
    """A whole value that is to be updated: flat arrays, or in its shape."""

    total: Array
    value: Array
    state: Mapping[str, Array]


class Kernels(Protocol):
    """Runs the rules of element-wise updaters: in numpy, or as compiled code of the same bits."""

    @property
    def rules(self) -> Sequence[str]:
        """The names of the optimizers that have compiled code. All others run in numpy."""
        ...

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        """Compile what the updater, with its present options, needs for values of this dtype, unless it is there: what
        :meth:`bind_adding` needs, or else :meth:`bind`.
        """
        ...

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return what :meth:`Updater.bind` does. It heeds the options that the updater has when it is called."""
        ...

    def bind_adding(
        self, updater: Updater, value: Array, state: Mapping[str, Array]
    ) -> Callable[[Array, Array, Any], None] | None:
        """Return a function of two arrays and a step that does to their sum what :meth:`bind`'s does to ``total``, and
        does not write to them; or None where it gains nothing that the sum is not written to memory.

        The arrays are flat and contiguous, of the size and the dtype of the value.
        """
        ...


@runtime_checkable
class WholeKernels(Kernels, Protocol):
    """Kernels that update many whole values at once, for optimizers that are not element-wise."""

    def bind_whole(self, updater: Updater, wholes: Sequence[Whole]) -> Callable[[Sequence[Any]], None]:
        """Return a function of a step for each value that makes one update of each of them, as :meth:`Updater.update`
        does. It heeds the options that the updater has when it is called.
        """
        ...


class StepTable(Protocol):
    """Memory of a GPU for the steps of updates, which then are read when an update runs, not when it is queued."""

    rows: Sequence[Any]
    """What a function of :meth:`Kernels.bind` takes in place of a step."""

    def fits(self, step: Any) -> bool:
        """Return whether what was queued with a row is the update that this step asks for, but for its numbers."""
        ...

    def write(self, steps: Sequence[Any]) -> None:
        """Queue that the first rows be these steps, from the updates on that are queued next."""
        ...


@runtime_checkable
class GpuKernels(WholeKernels, Protocol):
    """What runs on a GPU."""

    def has_rule(self, updater: Updater) -> bool:
        """Return whether there is compiled code for an updater, which then is an optimizer. Others are Python."""
        ...

    def bind_ranges(
        self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array], ends: Sequence[int]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function of a step for each of some ranges, which follow one another and end at ``ends``, that makes
        one update of each: what functions that :meth:`bind` returns for each would do.
        """
        ...

    def codec(self, codec: Codec) -> Codec:
        """Return what does on arrays of the GPU what a codec does on the host's, with the same bits, compiled when this
        returns; or the codec itself, where there is no kernel for it.
        """
        ...

    def table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> StepTable:
        """Return memory for ``count`` steps of an optimizer with its present options, which has a rule, and compile its
        updates of values of these dtypes, which :meth:`prepare` was called for. Local.

        Raises:
            MemoryError: there is too little.
        """
        ...


class RangeCodec(Protocol):
    """Packs a gradient of which any range can be packed by itself, so that each owner is sent its own elements alone.

    Gradients are flat, float32, finite, and not above :data:`mpikv.codecs.LARGEST`. A codec holds settings only, which
    do not change: several stores may use one, in several threads. It must not raise in :meth:`encode` or
    :meth:`decode_add`: the ranks have agreed by then and wait for each other, so an exception ends the store.
    """

    @property
    def elementwise(self) -> Literal[True]:
        """What tells it from a :class:`ValueCodec`."""
        ...

    @property
    def feedback(self) -> bool:
        """Whether :meth:`encode` needs a residual, which the store keeps: a float32 of every element, at first zero."""
        ...

    def settings(self) -> str:
        """Describe the codec so that two ranks' descriptions are equal exactly when their payloads are."""
        ...

    def nbytes(self, count: int) -> int:
        """Return how many bytes the payload of ``count`` elements takes, whatever their values."""
        ...

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Write all bytes of the payload (uint8, aligned to 8 bytes, of :meth:`nbytes`). ``gradient`` is not written.

        With ``feedback``, the gradient and the residual together are encoded, and what the payload does not say of them
        is left in ``residual``; without, it is None.
        """
        ...

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add what the payload says to ``total``, flat and float32, which has as many elements as were encoded."""
        ...


class Sum(NamedTuple):
    """What a :class:`ValueCodec` yields to be sent the sum of an array over ranks, with the same bits on each."""

    array: Array
    """Flat, float32, of the same size on each rank."""


class Gather(NamedTuple):
    """What a :class:`ValueCodec` yields to be sent every rank's bytes, in rank order.

    A rank that owns nothing of the value may be sent none of them.
    """

    payload: Array
    """Flat, uint8, of the same size on each rank."""


Rounds: TypeAlias = "Generator[Sum | Gather, Any, tuple[Array, Array]]"
"""An exchange of one value. It returns two flat float32 arrays: the sum over ranks, as far as it was sent any, and what
of it is this rank's."""


class ValueCodec(Protocol):
    """Packs the gradient of a whole value, in one or several exchanges. For the rest as a :class:`RangeCodec`.

    Its arrays are the host's, where values lie on a GPU, too.
    """

    @property
    def elementwise(self) -> Literal[False]:
        """What tells it from a :class:`RangeCodec`."""
        ...

    @property
    def feedback(self) -> bool:
        """As :attr:`RangeCodec.feedback`."""
        ...

    def settings(self) -> str:
        """As :meth:`RangeCodec.settings`."""
        ...

    def state(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return what is to be kept for a value of this shape between exchanges, the same on every rank."""
        ...

    def exchange(
        self, gradient: Array, shape: tuple[int, ...], state: Mapping[str, Array], residual: Array | None
    ) -> Rounds:
        """Yield what has to move, which depends on the shape alone, and change ``state`` in place, on each rank alike.

        ``gradient`` is flat and may be overwritten. ``residual`` as in :meth:`RangeCodec.encode`.
        """
        ...


Codec: TypeAlias = "RangeCodec | ValueCodec"
"""What stands for a gradient on the wire. Pure array code: it knows no ranks and no keys."""
