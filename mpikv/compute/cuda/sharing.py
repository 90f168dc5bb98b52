"""What NCCL and CuPy must be told where several ranks use one GPU, for tests (``MPIKV_GPU_SHARING=1``)."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["share_gpus", "sharing"]

# By which somebody has chosen how ranks share, by the one or by the other.
_CHOSEN = ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE")


def sharing(rank: int) -> dict[str, str]:
    """Return the variables by which the ranks of one host can use one GPU, for this rank's environment.

    They count from the first call of NCCL and the import of CuPy on. NCCL refuses two ranks on one GPU, so each rank
    has a host name of its own here, and data pass through sockets, as between hosts: it shows what works, and nothing
    of how fast. NVIDIA does not support it (https://github.com/NVIDIA/nccl/issues/418).

    >>> sharing(1)["NCCL_HOSTID"]
    'mpikv-1'
    """
    return {
        "MPIKV_GPU_SHARING": "1",
        "NCCL_HOSTID": f"mpikv-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_DISABLE": "1",
        # A GPU runs the processes in turn: fewer steps that wait for each other halve the time of a sum.
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MAX_CTAS": "2",
        # What wants a GPU, or memory, for itself.
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "CUPY_GPU_MEMORY_LIMIT": "20%",
    }


def share_gpus(rank: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Set :func:`sharing`'s variables as far as they are not set; none if NCCL_HOSTID or NCCL_MULTI_RANK_GPU_ENABLE is,
    with which somebody has chosen how ranks share. Local.

    >>> environ = {"NCCL_PROTO": "LL"}
    >>> share_gpus(1, environ)
    >>> environ["NCCL_PROTO"], environ["NCCL_HOSTID"]
    ('LL', 'mpikv-1')
    """
    environ = os.environ if environ is None else environ
    if not any(name in environ for name in _CHOSEN):
        for name, value in sharing(rank).items():
            environ.setdefault(name, value)
