"""Several ranks on one GPU, where a test needs more ranks than the machine has GPUs."""

from __future__ import annotations

__all__ = ["sharing"]


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
