"""Settings of NCCL and CuPy for several ranks on one GPU, for tests (``MPIKV_GPU_SHARING=1``)."""

from __future__ import annotations

import os

# If one of these is set, the user has chosen how ranks share a GPU.
_CHOSEN = ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE")


def sharing(rank: int) -> dict[str, str]:
    """Return the environment variables that let the ranks of one host use one GPU, for this rank. Local.

    NCCL reads them in its first call, and CuPy when it is imported. NCCL refuses two ranks on one GPU. So each rank
    gets a host name of its own, and data pass through sockets, as between hosts. This shows correctness, not speed.
    NVIDIA does not support it (https://github.com/NVIDIA/nccl/issues/418).

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
        # A GPU time-slices its processes: fewer steps that wait for each other halve the time of a sum.
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MAX_CTAS": "2",
        # Features that need a GPU or its memory for one process.
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "CUPY_GPU_MEMORY_LIMIT": "20%",
    }


def share_gpus(rank: int) -> None:
    """Set the variables of :func:`sharing` that are unset, or none if the user has set NCCL_HOSTID or
    NCCL_MULTI_RANK_GPU_ENABLE. Local.
    """
    if not any(name in os.environ for name in _CHOSEN):
        for name, value in sharing(rank).items():
            os.environ.setdefault(name, value)
