"""A group of cases, with what its report says beyond that of ``mpikv bench``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpikv.cli.bench.cases import Group


@dataclass(frozen=True)
class Work:
    """A group, and what is known of its cases, by their names."""

    group: Group
    floors: Mapping[str, int] = field(default_factory=dict)
    """Bytes per element that a case must move, over all ranks."""
    sums: frozenset[str] = frozenset()
    """The cases on GPUs that sum over ranks, where bandwidths are told."""
