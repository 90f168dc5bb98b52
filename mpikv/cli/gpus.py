"""The parts of a GPU store on this machine, for reports."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compute.cuda.gpu import count_gpus, find_cupy, find_nccl
from ..errors import TransportUnavailable
from ..transports.preflight import shown
from .nccl_faults import faults_of


class Found(NamedTuple):
    """The parts of a GPU store that this process found."""

    cupy: str | None
    nccl: str | None
    devices: list[str]
    problems: list[str]
    """The error of each missing part."""
    warnings: list[str]
    """The known faults of present parts, each with advice."""


def survey(visible: str | None = None) -> Found:
    """Return the versions of CuPy and NCCL, the names of the GPUs, and missing parts. It makes nothing on a GPU."""
    try:
        cupy = find_cupy()
    except TransportUnavailable as error:
        return Found(None, None, [], [str(error)], [])
    nccl, devices, problems, faults = None, [], [], list[str]()
    try:
        number = find_nccl().get_version()
        faults = faults_of(number, cupy.cuda.runtime.runtimeGetVersion() // 1000)
        nccl = shown(number)
    except TransportUnavailable as error:
        problems.append(str(error))
    try:
        devices = [_name(cupy, ordinal) for ordinal in range(count_gpus(cupy, visible))]
    except TransportUnavailable as error:
        problems.append(str(error))
    return Found(cupy.__version__, nccl, devices, problems, faults)


def _name(cupy: Any, ordinal: int) -> str:
    name = cupy.cuda.runtime.getDeviceProperties(ordinal)["name"]
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
