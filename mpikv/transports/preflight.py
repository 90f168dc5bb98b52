"""The needs of NCCL, checked on all ranks before its first call: NCCL itself would only wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..cluster.environment import nccl_host, nccl_settings
from ..cluster.process_group import ProcessGroup
from ..errors import TransportUnavailable, mark
from ..protocols import Gpu

# From 2.30 on NCCL can let ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE).
_SHARING = 23000


def preflight(group: ProcessGroup, gpu: Gpu, version: int) -> None:
    """Compare GPUs, versions and settings of all ranks; at a problem raise TransportUnavailable on all. Collective.

    Raises:
        TransportUnavailable: on every rank, with the first problem of any.
    """
    mine = {"host": nccl_host(), "gpu": gpu.uuid, "name": gpu.name, "version": version, "settings": nccl_settings()}
    every = [json.loads(text) for text in group.gather(json.dumps(mine))]
    if problem := _find_problem(every):  # the same on all ranks: they all have the same facts
        raise mark(TransportUnavailable(f"{problem}; 'dist_sync' sums on the host"), "settled")


def _find_problem(every: Sequence[dict[str, Any]]) -> str:
    """Return the first reason why NCCL would wait for ever with these facts, one dict per rank; "" without one."""
    versions = [rank["version"] for rank in every]
    if other := _first_other(versions):
        root, its = shown(versions[0]), shown(versions[other])
        return f"rank 0 has NCCL {root} and rank {other} has {its}; install one version on all hosts"
    settings = [rank["settings"] for rank in every]
    if other := _first_other(settings):
        return f"rank 0 has {settings[0]} and rank {other} has {settings[other]}; NCCL needs the same settings on all"
    if settings[0].get("NCCL_COMM_BLOCKING") == "0":
        return "NCCL_COMM_BLOCKING=0 makes NCCL's calls return before they have begun; unset it"
    # Versions and settings are equal by now, so the first rank's are those of all.
    may_share = settings[0].get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and versions[0] >= _SHARING
    seen: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(every):
        first = seen.setdefault((facts["host"], facts["gpu"]), rank)
        if first != rank and not may_share:
            return (
                f"ranks {first} and {rank} use one GPU, {facts['name']} ({facts['gpu']}) of host {facts['host']}; "
                "start at most one rank for each GPU (for tests: MPIKV_GPU_SHARING=1, without NCCL_HOSTID)"
            )
    return ""


def _first_other(values: Sequence[Any]) -> int:
    """Return the first rank with another value than rank 0; 0 if all are equal."""
    return next((place for place, value in enumerate(values) if value != values[0]), 0)


def shown(version: int) -> str:
    """Return the text of NCCL's version number, as 2.32.3 for 23203.

    >>> shown(23203)
    '2.32.3'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
