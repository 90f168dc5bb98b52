"""How bytes move between ranks, and the choice of transport.

Here: one rank alone (``local``), shared memory with single copies between processes (``cma``), MPI, NCCL, and
``hierarchical``, which sums inside of each host first; requests to one rank (``rpc``), and messages between two ranks
(``mailbox``, on one host by ``rings``); the choice among them; the checks before NCCL is called and the thread that
watches it (``preflight``, ``watchdog``); a group of ranks without MPI (``meeting``). It imports ``memory``, and waits
as ``cluster.waiting`` does. It never sees a key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..cluster.process_group import ProcessGroup
from ..cluster.waiting import Waiting, Waits, Warn
from ..config import Config
from ..errors import Unsupported
from ..memory.device import DeviceMemory
from ..memory.host import HOST
from ..protocols import Group, Memory, Transport
from .local import LocalTransport
from .watchdog import Watchdog


def choose(group: Group, config: Config) -> tuple[str, str]:
    """Return (name, reason) of the transport for these ranks and settings; Unsupported if it cannot join them. Local.

    Raises:
        Unsupported: the transport of the settings cannot join these ranks.
    """
    asked = config.transport
    if asked == "local" and group.size > 1:
        raise Unsupported(f"transport 'local' is for one rank and there are {group.size}; use 'auto'")
    if group.size == 1:
        return "local", "one rank"
    hosts = len(group.hosts)
    where = f"ranks on {hosts} hosts"
    if asked == "shm" and not group.one_host:
        raise Unsupported(
            f"transport 'shm' needs all ranks on one host and they are on {hosts}; use 'auto' or 'hierarchical'"
        )
    # Refused, not replaced: whoever asks for a transport by name measures it, or relies on it.
    if asked == "hierarchical" and group.one_host:
        raise Unsupported("transport 'hierarchical' is for several hosts and all ranks are on one; use 'auto' or 'shm'")
    if asked == "hierarchical" and config.deterministic:
        raise Unsupported(
            "transport 'hierarchical' sums on each host first, and deterministic=True needs an order that does not "
            "depend on hosts; use 'auto' or 'mpi'"
        )
    if asked != "auto":
        return asked, "asked for"
    if group.one_host:
        return "shm", "all ranks on one host"
    # hierarchical adds up each host first, so the bits of a sum would depend on the grouping of ranks.
    if config.deterministic:
        return "mpi", f"{where}, with an order of addition that does not depend on hosts"
    return "hierarchical", where


def open_transport(
    group: Group, config: Config, warn: Warn | None = None, memory: Memory = HOST, waits: Waits | None = None
) -> Transport:
    """Open and return the transport that :func:`choose` names; ``warn`` hears of long waits. Collective.

    ``memory`` is the host's, as the transport's store sees it. ``waits`` replaces the usual way to wait.
    """
    name, _ = choose(group, config)
    waiting = waits or Waiting(config.timeout, config.warn_after, warn)
    if name == "local":
        return LocalTransport(config.bucket_bytes, memory)
    if name == "shm":
        from .shm import ShmTransport

        return ShmTransport(group, config.bucket_bytes, waiting, config.single_copy, memory=memory)
    if not isinstance(group, ProcessGroup):
        raise Unsupported(f"transport '{name}' needs MPI, which has not started these ranks; use 'auto' or 'shm'")
    if name == "hierarchical":
        from .hierarchical import HierarchicalTransport

        return HierarchicalTransport(group, config.bucket_bytes, waiting, memory=memory)
    from .mpi import MpiTransport

    return MpiTransport(group, config.bucket_bytes, waiting, gathers=config.deterministic, memory=memory)


def open_gpu_transport(
    group: ProcessGroup, config: Config, memory: DeviceMemory, nccl: Any, warn: Warn, control: Transport | None = None
) -> Transport:
    """Open and return the transport for the GPUs of these ranks, one each. Collective over the group.

    Args:
        group: the ranks.
        config: its ``transport`` names the host transport for agreement.
        memory: the memory of this rank's GPU.
        nccl: the module ``cupy.cuda.nccl``; unused with one rank.
        warn: reports long waits.
        control: an existing host transport for agreement; its waits are abortable. None opens a new one.

    Raises:
        TransportUnavailable: NCCL cannot join these GPUs.
    """
    waiting = Waiting(config.timeout, config.warn_after, warn)
    if group.size == 1:
        # No NCCL and no agreement: the watchdog drops arrays of finished work, and logs work that failed.
        watchdog = Watchdog(waiting, memory, memory.order.check, memory.order.fail, rank=0)
        return LocalTransport(config.bucket_bytes, memory, watchdog)
    from .nccl import NcclTransport
    from .requests import AbortableWaiting

    if control is None:
        # Agreement sends a few bytes: large GPU messages must not make the host's staging memory as large.
        own = replace(config, bucket_bytes=min(config.bucket_bytes, Config.bucket_bytes))
        control = open_transport(group, own, warn, waits=AbortableWaiting(group.find_end, waiting))
    return NcclTransport(group, config, control, memory, nccl, waiting)
