"""What moves the arrays of GPUs: nothing for one rank, NCCL for more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import Config
from ..device import DeviceMemory
from ..process_group import ProcessGroup
from ..typing import Transport
from ..waiting import Waiting, Warn
from . import open_transport
from .heeding import Heeding
from .local import LocalTransport

__all__ = ["open_device_transport"]


def open_device_transport(
    group: ProcessGroup, config: Config, memory: DeviceMemory, nccl: Any, warn: Warn | None = None
) -> Transport:
    """Return the transport for the GPUs of these ranks, each of which brings its own. Collective over the group.

    Args:
        group: the ranks.
        config: ``transport`` is that by which ranks agree.
        memory: that of this rank's GPU.
        nccl: the module ``cupy.cuda.nccl``; of one rank anything.
        warn: is told of long waits.

    Raises:
        TransportUnavailable: NCCL cannot join these GPUs.
    """
    if group.size == 1:
        return LocalTransport(config.bucket_bytes, memory)
    from .nccl import NcclTransport

    own = min(config.bucket_bytes, Config.bucket_bytes)
    waiting = Waiting(config.timeout, config.warn_after, warn)
    control = open_transport(group, replace(config, bucket_bytes=own), warn, waits=Heeding(group, waiting))
    return NcclTransport(group, control, memory, nccl, config.bucket_bytes, waiting, gathers=config.deterministic)
