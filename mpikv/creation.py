"""``create``: from the name and options of a store to its memory, transport, placement and kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from .cluster.agreement import compare_requests
from .cluster.connecting import connect
from .cluster.environment import nccl_host, place_on_host, visible_gpus
from .cluster.printing import log
from .cluster.process_group import ProcessGroup, warn_once
from .cluster.status_board import StatusBoard
from .cluster.tracebacks import hiding_frames
from .cluster.waiting import Waiting
from .collectives.collectives import Collectives
from .compute.cuda.gpu import find_gpu, find_nccl, gpu_of, has_cupy
from .compute.cuda.sharing import share_gpus
from .compute.kernels import find_kernels
from .config import OWN_AFFAIRS, Config, sets_bucket_bytes, slice_bytes, unknown_variables, wants_slices
from .errors import ConfigError, MPIKVError, Stalled, TransportUnavailable, Unsupported, known_names
from .memory.device import DeviceMemory
from .memory.host import HostMemory
from .optimizers.updaters import check_outside
from .options import check_whole
from .protocols import Gpu, GpuKernels, Transport
from .store.allreduce_store import AllReduce
from .store.endings import prepare_endings
from .store.kvstore import KVStore, drain_gpu_stores
from .store.plugins import KVStoreBase, plugin
from .store.tracing import Tracer, open_tracer, traced
from .transports import open_gpu_transport, open_transport
from .transports.requests import AbortableWaiting


@dataclass(frozen=True)
class StoreKind:
    """The common features of the stores of some names."""

    names: tuple[str, ...]
    memory: Literal["host", "device", "any"] = "host"
    """The memory of values and sums: ``any`` is on GPUs where every rank has one, else on the host."""
    asynchronous: bool = False
    """Whether pushes are applied when they arrive."""
    storeless: bool = False
    """Whether it keeps no values."""
    sliced: bool = False
    """Whether messages are as large as MXNet's slices."""
    may_slice: bool = False
    """Whether a variable of MXNet's may ask for that."""


_KINDS = (
    StoreKind(("local", "local_update_cpu", "local_allreduce_cpu")),
    StoreKind(("dist", "dist_sync"), may_slice=True),
    StoreKind(("p3",), sliced=True),
    StoreKind(("horovod", "byteps", "allreduce"), storeless=True),
    StoreKind(("device", "local_allreduce_device"), memory="any"),
    StoreKind(("nccl", "dist_device_sync", "dist_sync_device"), memory="device"),
    StoreKind(("dist_async", "dist_async_device", "dist_device_async"), asynchronous=True),
)
_KIND_OF = {name: kind for kind in _KINDS for name in kind.names}
_NAMES = (*_KIND_OF, "teststore")
# On GPUs each message costs launches, and need not fit a cache. On one rank, which needs less memory for messages, they
# are twice as large.
_BUCKET_OF_GPUS = 64 << 20
# Where a rank has threads, so much of a message for each: it must be long beside the time that a thread takes to wake.
# The messages of a host's ranks take their bytes twice, of perhaps 64 MiB of shared memory in a container.
_BUCKET_OF_THREAD, _BUCKETS_OF_HOST, _MOST_THREADS = 4 << 20, 16 << 20, 8
# Sums in callers' arrays need messages for few dtypes alone, and the memory for these is eight times a message.
_BUCKET_OF_SUMS = 16 << 20


class _Request:
    """This rank's request, as far as its options are valid. Even with a ``problem`` it meets the other ranks, by the
    defaults of the rest, to tell them.
    """

    def __init__(self, name: Any, root: Any, options: Mapping[str, Any]) -> None:
        """Read the options, and open the trace file, if any; keep a fault as ``problem``, and raise nothing. Local."""
        self.name, self.root = name, root
        self.kind, self.settings = _KINDS[0], Config()
        self.sized = False
        """Whether the call, a variable or the kind of store says how long messages are."""
        self.staleness: int | None = None
        self.codec: Any = None
        self.facts: dict[str, str] = {}
        """The texts, by option, that must be the same on every rank."""
        self.tracer: Tracer | None = None
        self.problem: Exception | None = None
        """Why this rank cannot have the store."""
        try:
            _read_options(self, options)
        except Exception as error:
            # Noted, not raised: the others are on their way to the meeting, and would wait for this rank.
            self.problem = error


@dataclass(frozen=True)
class _Parts:
    """The parts of a store, once ranks have met."""

    group: ProcessGroup
    settings: Config
    board: StatusBoard
    transport: Transport
    kernels: GpuKernels | None
    """Those of the transport's memory, where that is a GPU's."""
    may_sum_on_gpus: bool
    """Whether a store without values may sum arrays of GPUs by NCCL: each rank has CuPy."""


@hiding_frames
def create(
    name: str = "local",
    *,
    comm: Any = None,
    placement: str | None = None,
    root: int = 0,
    timeout: float | None = None,
    warn_after: float | None = None,
    transport: str | None = None,
    bucket_bytes: int | None = None,
    deterministic: bool | None = None,
    native_halves: bool | None = None,
    kernels: str | None = None,
    check_finite: int | None = None,
    compression: Any = None,
    staleness: int | None = None,
) -> KVStore:
    """Return a new store, or what another package's registered class makes; may start MPI. Collective over ``comm``.

    Collective over ``comm``: every rank calls it with the same arguments. The name says where sums are made; ``comm``
    says who takes part. Without a launcher it is a store of one rank and needs no MPI library.

    Args:
        name: ``local``, ``dist`` or ``dist_sync`` for sums on the host (``local_update_cpu`` and
            ``local_allreduce_cpu`` mean the same); ``nccl`` (``dist_device_sync``, ``dist_sync_device``) for sums on
            GPUs, one for each rank; ``device`` (``local_allreduce_device``) for the same where every rank has a GPU,
            else for ``dist_sync``;
            ``p3`` for a ``dist_sync`` with messages as large as MXNet's slices; the variable ``DMLC_PS_VAN_TYPE=p3``
            turns ``dist`` and ``dist_sync`` into it;
            ``dist_async`` (``dist_async_device``, ``dist_device_async``) for an :class:`AsyncKVStore`;
            ``horovod``, ``byteps`` or ``allreduce`` for an :class:`AllReduce` without stored values; or a registered
            :class:`KVStoreBase`, as ``teststore``. Case does not matter.
        comm: an ``mpi4py.MPI.Intracomm``; the store duplicates it. None: all ranks of the launch. ``MPI.COMM_SELF``: a
            private store.
        placement: ``root``, ``sharded``, ``replicated`` or ``auto`` (the default): the updater decides.
        root: the rank that stores its values at ``init`` and runs Python updaters.
        timeout: seconds that a rank waits for another before it raises ``Stalled``. Default 60.
        warn_after: seconds until a waiting rank logs the ranks that it waits for. Default 5.
        transport: ``shm``, ``hierarchical``, ``mpi``, ``local`` or ``auto`` (the default): the hosts of ranks decide.
            On GPUs data travel by NCCL in any case, and the ranks agree by this transport.
        bucket_bytes: bytes of the largest message. Default 1 MiB, on one host where ranks have several cores up to 16
            MiB, on GPUs 64 MiB, on one GPU alone 128 MiB; of ``p3``, four for each of the elements that
            ``MXNET_KVSTORE_SLICE_THRESHOLD`` says, 40000 by default.
        deterministic: True adds in a fixed order: a sum then has the same bits on every transport and placement, with
            any ``bucket_bytes``, alone or in a list of keys. A sum of a fixed number of arrays has them for any number
            of ranks that are a power of two and push lists of equally many, as in
            docs/explanation/performance.md. Two cases are excepted: half precision, as lists are rounded before they
            are sent, and compression, as each rank's arrays are packed by themselves. Default False: the MPI library
            chooses the order on ``mpi``, and ``hierarchical`` sums each host first.
        native_halves: True has NCCL send and sum float16 and bfloat16 as they are, in half of the bytes. Default
            False: they travel as float32, are summed exactly so, and rounded once. The price of True: each addition on
            the way rounds, on n ranks up to n - 1 times, to 11 bits of float16 or 8 of bfloat16; a sum of float16
            beyond 65504 becomes infinite, though an optimizer would scale it down; and bits depend on NCCL's algorithm
            and on the number of ranks. Where an NVLink switch adds, NCCL rounds once. Of no effect where the host sums.
        kernels: ``numpy`` (the default) or ``numba``: it compiles the rules of most optimizers. The bits are the same.
            On GPUs rules are always compiled, and ``nccl`` refuses ``numba``.
        check_finite: 50 looks for NaN and infinity in what each rank brings to every 50th push, before it is summed.
            That rank raises ``NotFinite`` with the key and the element, the others ``PeerFailed``. Default 0: never.
        compression: the codec of pushes, as in :meth:`~mpikv.KVStore.set_gradient_compression`. Default None.
        staleness: for ``dist_async``: how many calls of push a rank may be ahead of another, from 1. Default None, any
            number.

    A default may be changed by the variable ``MPIKV_<ARGUMENT>``, as ``MPIKV_TIMEOUT=5``.

    Raises:
        ConfigError: the name or an option is unknown, or the launcher belongs to another MPI library.
        TransportUnavailable: an MPI library, a device, or numba where it was asked for, is missing.
        Unsupported: the store or the transport cannot be had here.
        RankMismatch: ranks asked for different stores.

    Example:
        >>> import mpikv
        >>> mpikv.create("dist_sync").type
        'dist_sync'
    """
    options = {option: value for option, value in dict(locals()).items() if option not in ("name", "comm", "root")}
    if (other := _find_plugin(name)) is not None:
        given = {"comm": comm, "root": root or None, **options}
        # It may be any KVStoreBase: who asks for one by its name knows which calls it has.
        return cast(KVStore, other(**{option: value for option, value in given.items() if value is not None}))
    check_outside("create")
    request = _Request(name, root, options)
    group = connect(comm, request.settings)
    if group.rank == 0:
        for text in unknown_variables():
            warn_once(text)
    try:
        parts = _rendezvous(request, group)
    except Stalled as error:  # of ranks that would not come to a close either
        error.args = (f"create: {error} [rank {group.rank}/{group.size}]",)
        raise
    except Exception:
        with suppress(MPIKVError):  # others that come too late hide no error of this rank
            group.close()
        raise
    prepare_endings(on_gpu=parts.kernels is not None)
    return _build(request, parts)


def check_name(name: str) -> None:
    """Raise the error of :func:`create` for an unknown name; may import a plugin. Local."""
    if _find_plugin(name) is None:
        _find_kind(name)


def _find_plugin(name: Any) -> Callable[..., KVStoreBase] | None:
    """Return the class of a store registered by a name, or of an installed package, imported now; else None. Local."""
    kind = name.lower() if isinstance(name, str) else ""
    # Asking for packages takes milliseconds.
    return KVStoreBase.kv_registry.get(kind) if kind in ("", *_NAMES) else plugin(kind)


def _find_kind(name: str) -> StoreKind:
    """Return the built-in kind of a store's name, in any case; ConfigError if unknown, TypeError if no str. Local."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    if name.lower() not in _KIND_OF:
        raise ConfigError(known_names("store", name, _NAMES))
    return _KIND_OF[name.lower()]


# --- This rank's request


def _read_options(request: _Request, options: Mapping[str, Any]) -> None:
    """Fill in the request by options and variables, and open the trace file, if any; raise the first fault. Local."""
    request.kind = kind = _find_kind(request.name)
    sliced = kind.sliced or (kind.may_slice and wants_slices())
    given = {option: value for option, value in options.items() if option not in ("compression", "staleness")}
    if sliced and given["bucket_bytes"] is None:
        given["bucket_bytes"] = slice_bytes()
    request.settings = settings = Config.read(**given)
    request.sized = given["bucket_bytes"] is not None or sets_bucket_bytes()
    request.tracer = open_tracer(settings.trace) if settings.trace else None
    if kind.memory == "device" and settings.kernels != Config.kernels:
        asked = f"kernels={given['kernels']!r}" if given["kernels"] else f"MPIKV_KERNELS={settings.kernels}"
        raise Unsupported(f"{asked} is for stores on the host; on GPUs rules are always compiled: leave it out")
    if settings.deterministic and settings.native_halves:
        raise Unsupported(
            "deterministic=True adds in a fixed order, and native_halves=True in NCCL's; leave one of them out"
        )
    if settings.check_finite and kind.storeless:
        raise Unsupported(f"check_finite: the store {request.name!r} has no such check; use 'dist_sync'")
    find_kernels(settings.kernels)
    if options["compression"] is not None:
        from . import codecs

        request.codec = codecs.create(options["compression"])
    staleness = options["staleness"]
    if kind.asynchronous:
        from .async_store.async_kvstore import check_options

        check_options(settings, options)
        if staleness == 0:
            raise ConfigError("staleness=0 lets no rank push ahead, as 'dist_sync' does; give a number from 1")
        request.staleness = None if staleness is None else check_whole("staleness", staleness, low=1)
    elif staleness is not None:
        raise ConfigError(f"staleness={staleness!r} is for 'dist_async'; store {request.name!r} is synchronous")
    own = {key: repr(getattr(request, key)) for key in ("name", "root", "staleness")}
    common = {key: repr(value) for key, value in vars(settings).items() if key not in OWN_AFFAIRS}
    compression = "None" if request.codec is None else request.codec.settings()  # any code, which may raise
    request.facts = {**own, **common, "compression": compression}


# --- The agreement of ranks


def _rendezvous(request: _Request, group: ProcessGroup) -> _Parts:
    """Compare requests, find GPUs, open and return a store's parts; raise on every rank if one fails. Collective."""
    settings, problem = request.settings, request.problem or _find_fault(request, group)
    device, lack = None, ""
    if problem is None and request.kind.memory != "host":
        drain_gpu_stores()  # a communicator is made by sums
        device, lack, problem = _find_device(request.kind, group, settings)
    # By host and uuid: ordinals are each process's own, as CUDA_VISIBLE_DEVICES numbers them anew.
    own = f"{nccl_host()} {device.gpu.uuid}" if device is not None else ""
    facts = [lack, own, device is not None or has_cupy(), _count_threads(request, group), request.sized]
    of_ranks = compare_requests(group, "create", request.facts, problem, facts)
    if request.kind.memory == "any":
        lack = _find_lack(of_ranks)
        device = None if lack else device
        expected = group.rank == 0 and any(cupy for _, _, cupy, *_ in of_ranks)
        where = device.gpu.name if device else f"the host, because a rank reports: {lack}"
        level = logging.WARNING if expected and device is None else logging.INFO
        log("store %r is on %s", request.name, where, level=level)
    settings = replace(settings, threads=min(threads for *_, threads, _ in of_ranks))
    if not any(sized for *_, sized in of_ranks):
        if device is not None:
            settings = replace(settings, bucket_bytes=_BUCKET_OF_GPUS << (group.size == 1))
        elif settings.threads > 1 and group.one_host:
            nbytes = min(_BUCKET_OF_THREAD * settings.threads, _BUCKETS_OF_HOST // group.size)
            settings = replace(settings, bucket_bytes=max(settings.bucket_bytes, nbytes // 64 * 64))
    try:
        board, waits = StatusBoard(group, settings.report), None
        if on_gpus := request.kind.storeless and all(cupy for _, _, cupy, *_ in of_ranks):
            # Ranks may later wait for GPUs.
            waiting = Waiting(settings.timeout, settings.warn_after, board.warn)
            waits = AbortableWaiting(group.find_end, waiting)
        if device is None:
            transport, kernels = open_transport(group, settings, board.warn, HostMemory(gpu_of), waits), None
        else:
            nccl = find_nccl() if group.size > 1 else None
            transport, kernels = open_gpu_transport(group, settings, device, nccl, board.warn), device.gpu.kernels()
        parts = _Parts(group, settings, board, transport, kernels, on_gpus)
    except Exception as error:
        problem = error
    compare_requests(group, "create", {}, problem)  # one host may have less memory than another
    return parts


def _count_threads(request: _Request, group: ProcessGroup) -> int:
    """Return how many host threads this rank gets: as set, or by its cores; 1 in async and storeless stores. Local."""
    if request.kind.asynchronous or request.kind.storeless:
        return 1
    # A launcher may bind a rank to cores, and ranks of a host may share some.
    cores = min(len(os.sched_getaffinity(0)), group.host_cores // len(group.host_ranks))
    return request.settings.threads or max(1, min(cores, _MOST_THREADS))


def _find_fault(request: _Request, group: ProcessGroup) -> Exception | None:
    """Return the error of a request that this group of ranks cannot serve, not raised; None if it can. Local."""
    if not isinstance(request.root, int) or not 0 <= request.root < group.size:
        return ConfigError(f"root={request.root!r} is not a rank from 0 to {group.size - 1}")
    if request.kind.asynchronous and not group.threads:
        return Unsupported(f"store {request.name!r} needs MPI_THREAD_MULTIPLE, and MPI was initialized without it")
    return None


def _find_device(
    kind: StoreKind, group: ProcessGroup, settings: Config
) -> tuple[DeviceMemory | None, str, Exception | None]:
    """Return the memory of this rank's GPU; or None, the reason, and an error if the store needs a GPU. Local.

    A process has one GPU in all its stores, of whatever ranks they are: that of its number on its host.
    """
    try:
        if group.size > 1:
            find_nccl()
        # The launcher's numbers: those of a smaller group would give two stores of a process different GPUs.
        place = place_on_host() or (group.local_rank, len(group.host_ranks))
        gpu = find_gpu(*place, sharing=settings.gpu_sharing, visible=visible_gpus())
        return DeviceMemory(gpu), "", None
    except Exception as error:  # whatever a driver makes of it: the other ranks wait to hear
        lacks = isinstance(error, TransportUnavailable) and kind.memory == "any"
        return None, str(error), None if lacks else error


def _find_lack(of_ranks: Sequence[Sequence[Any]]) -> str:
    """Return why ranks cannot all have a GPU each, "" if they can; ``of_ranks``: each rank's lack and GPU. Local."""
    gpus = [gpu for _, gpu, *_ in of_ranks]
    twice = [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]
    return next((lack for lack, *_ in of_ranks if lack), f"ranks {twice} see the same GPU" if twice else "")


# --- The store


def _build(request: _Request, parts: _Parts) -> KVStore:
    """Make a store and set its compression; close it and raise if the latter fails. Return it, inside an AllReduce if
    it keeps no values. Collective.
    """
    store = _make_store(request, parts)
    if request.codec is not None:
        try:
            store.set_gradient_compression(request.codec)
        except Exception:
            store.close()  # nobody else could
            raise
    if not request.kind.storeless:
        return store
    return cast(KVStore, AllReduce(store, partial(_open_gpus, parts) if parts.may_sum_on_gpus else None))


def _open_gpus(parts: _Parts, store: KVStore, gpu: Gpu) -> Collectives | None:
    """Open collectives of GPUs, to be closed with the store; log, and return None on all, if one cannot. Collective."""
    group, settings, lack = parts.group, parts.settings, ""
    if settings.bucket_bytes == Config.bucket_bytes:
        settings = replace(settings, bucket_bytes=_BUCKET_OF_SUMS)
    if settings.gpu_sharing:
        share_gpus(group.rank)
    try:
        nccl, memory = find_nccl() if group.size > 1 else None, DeviceMemory(gpu)
    except Exception as error:  # whatever a driver makes of it: the other ranks wait to hear
        lack = str(error)
    if not (lack := next(filter(None, group.gather(lack)), "")):
        drain_gpu_stores()  # a communicator is made by sums
        try:
            mover = open_gpu_transport(group, settings, memory, nccl, parts.board.warn, control=parts.transport)
            opened = Collectives(mover, settings.deterministic)
        except (TransportUnavailable, MemoryError) as error:  # every rank has it
            lack = str(error)
    if lack:
        level = logging.WARNING if group.rank == 0 else logging.INFO
        text = "store %r copies arrays of GPUs to the host, because a rank reports: %s"
        log(text, store.type, lack, level=level)
        return None
    here = parts.transport.memory
    assert isinstance(here, HostMemory)
    here.order.beside = memory.order
    store.before_free += [opened.close, mover.close]
    return opened


def _make_store(request: _Request, parts: _Parts) -> KVStore:
    """Return a new store of the request's class, with these parts. Collective."""
    name, root = request.name.lower(), request.root
    kind: type[KVStore] = KVStore
    options: dict[str, Any] = {"found": create, "kernels": parts.kernels}
    if request.kind.asynchronous:
        from .async_store.async_kvstore import AsyncKVStore

        kind = AsyncKVStore
        options = {"found": partial(create, staleness=request.staleness), "staleness": request.staleness}
    if request.tracer is not None:
        kind = traced(kind, request.tracer)
    return kind(parts.group, parts.board, parts.transport, parts.settings, name=name, root=root, **options)
