"""The names of stores, and how a store is put together."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

from . import codecs
from .asynchronous import AsyncKVStore, bound_of, check_options
from .board import Board
from .config import OWN_AFFAIRS, Config, nccl_host, place_on_host, slice_bytes, visible_gpus, wants_slices
from .device import DeviceMemory
from .errors import (
    ConfigError,
    PeerFailed,
    RankMismatch,
    Stalled,
    TransportUnavailable,
    Unsupported,
    known_names,
    mark_repeated,
    notes,
)
from .gpu import find_gpu, find_nccl, gpu_of, has_cupy
from .kernels import find_kernels
from .memory import HostMemory
from .plugins import KVStoreBase, plugin
from .store import KVStore, let_gpus_queue, lost_stores, open_stores
from .storeless import AllReduce
from .tracebacks import hiding_frames
from .tracing import find_tracer
from .transports import open_transport
from .transports.device import open_device_transport
from .typing import GpuKernels, Transport
from .world import Group, connect, disown, end_job, fail_at_end, free_leftovers, last_seen, leave_mpi

__all__ = ["check_name", "create", "tell_unseen"]

_HOST = ("local", "local_update_cpu", "local_allreduce_cpu", "dist", "dist_sync")
_DIST = ("dist", "dist_sync")
_STORELESS = ("horovod", "byteps", "allreduce")
_DEVICE = ("device", "local_allreduce_device")
_NCCL = ("nccl", "dist_device_sync", "dist_sync_device")
# Where a message is a launch, it may be larger than any cache.
_BUCKET_OF_GPUS = 64 << 20
_PASSABLE = "p3"
_ASYNC = ("dist_async", "dist_async_device", "dist_device_async")
_NAMES = (_PASSABLE, *_HOST, *_STORELESS, *_DEVICE, *_ASYNC, *_NCCL, "teststore")


@hiding_frames
def create(
    name: str = "local",
    *,
    comm: Any = None,
    placement: str | None = None,
    root: int = 0,
    timeout: float | None = None,
    warn_after: float | None = None,
    check: bool | None = None,
    transport: str | None = None,
    bucket_bytes: int | None = None,
    deterministic: bool | None = None,
    kernels: str | None = None,
    compression: Any = None,
    staleness: int | None = None,
) -> KVStore:
    """Make a store.

    Collective over ``comm``: every rank calls it with the same arguments. The name says where sums are made; ``comm``
    says who takes part. Without a launcher it is a store of one rank and needs no MPI library.

    Args:
        name: ``local``, ``dist`` or ``dist_sync`` for sums on the host (``local_update_cpu`` and
            ``local_allreduce_cpu`` mean the same); ``nccl`` (``dist_device_sync``, ``dist_sync_device``) for sums on
            GPUs, one for each rank; ``device`` (``local_allreduce_device``) for the same where every rank has a GPU,
            else for ``dist_sync``;
            ``p3`` for a ``dist_sync`` of which calls with ``wait=False`` may be passed between two messages by more
            urgent ones on other keys, which the variable ``DMLC_PS_VAN_TYPE=p3`` makes of ``dist`` and ``dist_sync``;
            ``dist_async`` (``dist_async_device``, ``dist_device_async``) for an :class:`AsyncKVStore`;
            ``horovod``, ``byteps`` or ``allreduce`` for an :class:`AllReduce`, which keeps no values; or a registered
            :class:`KVStoreBase`, as ``teststore``. Case does not matter.
        comm: an ``mpi4py.MPI.Intracomm``, which is duplicated; None: all ranks of the launch. ``MPI.COMM_SELF``: a
            private store.
        placement: ``root``, ``sharded``, ``replicated`` or ``auto`` (the default), which looks at the updater.
        root: the rank whose values count at ``init`` and which runs Python updaters.
        timeout: seconds that a rank waits for another before it raises ``Stalled``. Default 60.
        warn_after: seconds after which a waiting rank logs whom it waits for. Default 5.
        check: False turns the comparison of calls off, for measurements. Default True.
        transport: ``shm``, ``hosts``, ``mpi``, ``local`` or ``auto`` (the default), which looks where the ranks are. On
            GPUs data travel by NCCL all the same, and it says by which of these the ranks agree.
        bucket_bytes: bytes of the largest message. Default 1 MiB, on GPUs 64 MiB; of ``p3``, four for each of the
            elements that ``MXNET_KVSTORE_SLICE_THRESHOLD`` says, 40000 by default.
        deterministic: True adds in a fixed order: a sum then has the same bits on every transport and placement, with
            any ``bucket_bytes``, alone or in a list of keys. A sum of a fixed number of arrays has them for any number
            of ranks that are a power of two and push lists of equally many, as in docs/performance.md; half precision
            excepted, whose lists are rounded before they are sent, and compression, which packs each rank's
            arrays by themselves. Default False, where ``mpi`` sums in an order of
            the MPI library's, and ``hosts`` each host first.
        kernels: ``numpy`` (the default), or ``numba``, which compiles the rules of most optimizers. The bits are the
            same. On GPUs they are always compiled, and ``nccl`` refuses ``numba``.
        compression: how pushes are compressed, as in :meth:`~mpikv.KVStore.set_gradient_compression`. Default None.
        staleness: for ``dist_async``: how many calls of push a rank may be ahead of another, from 0. Default None, any
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
    if (other := _plugin(name)) is not None:
        given = {
            "comm": comm,
            "placement": placement,
            "root": root or None,
            "timeout": timeout,
            "warn_after": warn_after,
            "check": check,
            "transport": transport,
            "bucket_bytes": bucket_bytes,
            "deterministic": deterministic,
            "kernels": kernels,
            "compression": compression,
            "staleness": staleness,
        }
        # It may be any KVStoreBase: who asks for one by its name knows which calls it has.
        return cast(KVStore, other(**{option: value for option, value in given.items() if value is not None}))
    settings, codec, compressing, tracer, passable = Config(), None, "None", None, False
    problem: Exception | None = None
    try:
        kind = _known(name)
        passable = kind == _PASSABLE or (kind in _DIST and wants_slices())
        given = {
            "placement": placement,
            "timeout": timeout,
            "warn_after": warn_after,
            "check": check,
            "transport": transport,
            "bucket_bytes": slice_bytes() if passable and bucket_bytes is None else bucket_bytes,
            "deterministic": deterministic,
            "kernels": kernels,
        }
        settings = Config.read(**given)
        tracer = find_tracer(settings.trace) if settings.trace else None
        if kind in _NCCL and settings.kernels != Config.kernels:
            asked = f"kernels={kernels!r}" if kernels is not None else f"MPIKV_KERNELS={settings.kernels}"
            raise Unsupported(f"{asked} is for stores on the host; on GPUs rules are always compiled: leave it out")
        find_kernels(settings.kernels)
        codec = codecs.create(compression)
        if kind in _ASYNC:
            check_options(settings, {**given, "compression": compression}, compression)
            staleness = bound_of(staleness)
        elif staleness is not None:
            raise ConfigError(f"staleness={staleness!r} is for 'dist_async'; store {name!r} updates in rounds")
        compressing = "None" if codec is None else codec.settings()  # any code, which may raise
    except Exception as error:
        problem = error
    group = connect(comm, settings)
    device, lacking = None, ""
    try:
        problem = problem or _bad_root(root, group) or _lacks_threads(name, group)
        if problem is None and kind in (*_DEVICE, *_NCCL):
            let_gpus_queue()  # a communicator is made by sums
            device, lacking, problem = _own_gpu(kind, group, settings)
        wanted = {"name": repr(name), "root": repr(root), **{key: repr(value) for key, value in vars(settings).items()}}
        for own in OWN_AFFAIRS:
            del wanted[own]
        wanted["compression"] = compressing
        wanted["passable"] = repr(passable)
        wanted["staleness"] = repr(staleness)
        own = f"{nccl_host()} {device.gpu.uuid}" if device is not None else ""
        told = _compare(group, wanted, problem, [lacking, own, device is not None or has_cupy()])
        if kind in _DEVICE:
            device = None if _lack(told) else device
            _say_where(name, device, _lack(told), expected=group.rank == 0 and any(cupy for *_, cupy in told))
        if device is not None and bucket_bytes is None and settings.bucket_bytes == Config.bucket_bytes:
            settings = replace(settings, bucket_bytes=_BUCKET_OF_GPUS)
        try:
            board = Board(group)
            mover, kernels_of_gpu = _mover(group, settings, device, board)
        except Exception as error:
            problem = error
        _compare(group, {}, problem)  # one host may have less memory than another
    except Exception:
        group.close()
        raise
    _prepare_endings()
    if device is not None:
        _end_before_cuda()
    if kind in _ASYNC:
        again = partial(create, staleness=staleness)
        store: KVStore = AsyncKVStore(
            group, board, mover, settings, name=kind, root=root, found=again, staleness=staleness
        )
    else:
        store = KVStore(
            *(group, board, mover, settings),
            name=kind,
            root=root,
            found=create,
            passable=passable,
            kernels=kernels_of_gpu,
        )
    if tracer is not None:
        tracer.watch(store)
    if codec is not None:
        try:
            store.set_gradient_compression(codec)
        except Exception:
            store.close()  # nobody else could
            raise
    if kind in _STORELESS:
        return cast(KVStore, AllReduce(store))
    return store


def _own_gpu(kind: str, group: Group, settings: Config) -> tuple[DeviceMemory | None, str, Exception | None]:
    """Return the memory of this rank's GPU; or None, and why there is none, which is an error where only a GPU will do.
    Local.

    A process has one GPU in all its stores, of whatever ranks they are: that of its number on its host.
    """
    try:
        if group.size > 1:
            find_nccl()
        place = place_on_host() or (group.local_rank, len(group.host_ranks))
        gpu = find_gpu(*place, sharing=settings.gpu_sharing, visible=visible_gpus())
        return DeviceMemory(gpu), "", None
    except Exception as error:  # whatever a driver makes of it: the other ranks wait to hear
        lacks = isinstance(error, TransportUnavailable) and kind in _DEVICE
        return None, str(error), None if lacks else error


def _lack(told: Sequence[Sequence[Any]]) -> str:
    """Return why ranks cannot all have a GPU of their own, given what each lacks and which it has; "" if they can."""
    gpus = [gpu for _, gpu, _ in told]
    twice = [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]
    return next((lack for lack, *_ in told if lack), f"ranks {twice} see the same GPU" if twice else "")


def _say_where(name: str, device: DeviceMemory | None, lack: str, expected: bool) -> None:
    """Log where a store is, as a warning where a GPU was ``expected`` and is not used."""
    where = device.gpu.name if device else f"the host, as a rank finds: {lack}"
    level = logging.WARNING if expected and device is None else logging.INFO
    logging.getLogger("mpikv").log(level, "store %r is on %s", name, where)


def _mover(
    group: Group, settings: Config, device: DeviceMemory | None, board: Board
) -> tuple[Transport, GpuKernels | None]:
    """Return the transport, and the kernels of its memory where that is a GPU's. Collective."""
    if device is None:
        return open_transport(group, settings, board.warn, HostMemory(gpu_of)), None
    from .cuda.kernels import CudaKernels

    nccl = find_nccl() if group.size > 1 else None
    return open_device_transport(group, settings, device, nccl, board.warn), CudaKernels()


def _compare(group: Group, wanted: Mapping[str, str], problem: Exception | None, own: Any = None) -> list[Any]:
    """Raise on every rank unless all want the same store and can have it; return what is each rank's ``own``."""
    text = json.dumps([wanted, problem and f"{type(problem).__name__}: {problem}", own])
    texts = group.gather(text)
    read = {text: json.loads(text) for text in set(texts)}  # most often one, of many ranks
    said = [read[text] for text in texts]
    where = f" [rank {group.rank}/{group.size}]" if group.size > 1 else ""
    if problem is not None:
        problem.args = (f"create: {problem}{where}",)
        failures = [failure for _, failure, _ in said]
        raise mark_repeated(problem, failures.index(failures[group.rank]) == group.rank)
    for rank, (other, failure, _) in enumerate(said):
        if failure:
            raise PeerFailed(f"create: rank {rank} raised {failure}{where}", rank)
        if other != (first := said[0][0]):
            differing = [
                f"{key} {first[key]} on rank 0, {other[key]} on rank {rank}"
                for key in first
                if first[key] != other[key]
            ]
            mismatch = RankMismatch(f"create: ranks disagree: {'; '.join(differing)}{where}")
            raise mark_repeated(mismatch, group.rank == 0)
    return [other for _, _, other in said]


def _bad_root(root: object, group: Group) -> Exception | None:
    if isinstance(root, int) and 0 <= root < group.size:
        return None
    return ConfigError(f"root={root!r} is not a rank from 0 to {group.size - 1}")


def _lacks_threads(name: Any, group: Group) -> Exception | None:
    if not isinstance(name, str) or name.lower() not in _ASYNC or group.threads:
        return None
    return Unsupported(f"store {name!r} needs MPI_THREAD_MULTIPLE, which this MPI was not started with")


def _plugin(name: Any) -> Callable[..., KVStoreBase] | None:
    """Return the class that was registered under a name, or that an installed package has for it."""
    kind = name.lower() if isinstance(name, str) else ""
    # Asking for packages takes milliseconds.
    return KVStoreBase.kv_registry.get(kind) if kind in ("", *_NAMES) else plugin(kind)


def check_name(name: str) -> None:
    """Raise what :func:`create` would raise for a name. Local."""
    if _plugin(name) is None:
        _known(name)


def _known(name: str) -> str:
    """Return the name in lower case if a store of that name can be made here."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    kind = name.lower()
    if kind not in _NAMES:
        raise ConfigError(known_names("store", name, _NAMES))
    return kind


def _close_all() -> None:
    """Close what is still open at the end of the program, while MPI still runs."""
    while stores := open_stores():
        store = stores[0]
        try:
            store.drain()
            store.close()
        except BaseException as error:  # sys.exit in an updater, too
            if isinstance(error, Stalled):
                logging.getLogger("mpikv").warning("a store could not be closed at exit: %s", error)
            else:
                _complain(error)
            store.abandon("the program has ended")
    for store in lost_stores():
        if (unseen := store.unseen()) is not None:
            _complain(unseen)
    # First to all, then wait: the ranks may have lost their stores in another order.
    farewells = [store.farewell() for store in lost_stores()]
    absent = last_seen([heard for heard, _ in farewells], max((seconds for _, seconds in farewells), default=0))
    if absent:
        why = f"ranks {absent} do not come to their end"
        logging.getLogger("mpikv").error("ending the job: %s", why)
        end_job(why)
    free_leftovers()
    leave_mpi()


def tell_unseen() -> None:
    """Print what calls with ``wait=False`` have raised and nobody has seen. Local. For a rank that is to end the job,
    and comes to no end of the program.
    """
    for store in (*open_stores(), *lost_stores()):
        if (unseen := store.unseen()) is not None:
            _tell(unseen)


def _complain(error: BaseException) -> None:
    """Print what nobody can catch any more, and have the process end with an exit status that tells of it."""
    _tell(error)
    fail_at_end()


def _tell(error: BaseException) -> None:
    text = "; ".join([repr(error), *notes(error)])
    sys.stderr.write(f"mpikv: at the end of the program: {text}\n")
    sys.stderr.flush()


def _end_in_child() -> None:
    """Mark the stores unusable in a forked child: neither MPI nor its shared memory survives a fork."""
    for store in open_stores().copy():
        store.abandon(
            "the store was made before a fork, which neither MPI nor CUDA survives; use it in the parent "
            "(see docs/mpi.md)"
        )
    lost_stores().clear()  # the parent's affair
    disown()


def _end_before_cuda() -> None:
    """Close stores before CuPy ends, which may have been imported after the first store was made."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)


@cache
def _prepare_endings() -> None:
    """Arrange for the ends of a process that has made a store. Called once MPI is loaded, so that MPI ends after it."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_end_in_child)
