"""Versions of NCCL with known faults, and advice for each."""

from __future__ import annotations

from typing import NamedTuple

from ..transports.preflight import shown


class _Fault(NamedTuple):
    """A fault of some versions, in NCCL's numbering."""

    first: int
    last: int
    text: str


_NEWEST = 99999
_FAULTS = (
    _Fault(
        22803,
        22808,
        "PyTorch has passed over 2.28.3 to 2.28.8 for their faults (https://github.com/pytorch/pytorch/pull/166174)",
    ),
    _Fault(22902, 22902, "sums may hang, as in no later version (https://github.com/pytorch/pytorch/pull/174338)"),
    _Fault(
        23102,
        _NEWEST,
        "from 2.31.2 on a communicator is safely destroyed only after an abort (pytorch#194775, not tried here), so a "
        "program may hang in close()",
    ),
)


def faults_of(version: int, cuda: int) -> list[str]:
    """Return the known faults of a version of NCCL, each with the line that installs a version without it for this
    version of CUDA.

    >>> faults_of(22707, 13), len(faults_of(22808, 12)), len(faults_of(22809, 12))
    ([], 1, 0)
    """
    return [
        f"NCCL {shown(version)}: {fault.text}; pip install 'mpikv[cuda{cuda}]'"
        for fault in _FAULTS
        if fault.first <= version <= fault.last
    ]
