"""Launches of a kernel over many arrays, each cut into parts: a block of the GPU has a part."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from .loading import argument_dtype, kernel

MOST = 127
"""The most pairs of one launch."""
THREADS = 256

Facts: TypeAlias = "list[tuple[int, int, int]]"
"""Source address, target address and size of each pair; the kernel defines the unit of the size."""


class _Arguments(threading.local):
    """Memory for the argument of a launch, one per thread; a launch copies it before it returns."""

    def __init__(self) -> None:
        """Make this thread's argument, at its first use; it holds no pairs yet. Local."""
        self.pairs = np.zeros(1, argument_dtype("copies.cu", "Pairs"))
        columns = self.pairs.view(np.int64)[: 4 * MOST].reshape(4, MOST)
        self.facts, self.ends = columns[:3], columns[3]
        self.count, self.number = self.pairs["count"], self.pairs["number"]


_arguments = _Arguments()


def new_facts() -> defaultdict[str, Facts]:
    """Return an empty collection of pairs by the C++ name of their kernel, for :func:`launch_parts`."""
    return defaultdict(list)


def launch_parts(source: str, kernels: Mapping[str, Facts], part: int, number: float = 0.0, blocks: int = 1) -> None:
    """Queue each kernel over its pairs of addresses, on the current stream: one launch for up to 127 pairs. Local.

    Args:
        source: the file of the kernels.
        kernels: the pairs by the C++ name of a kernel. Pairs of size 0 have no part.
        part: the size of a part; the last one of a pair may be shorter.
        number: the kernels' own number, such as a factor.
        blocks: the blocks per part.

    Raises:
        TransportUnavailable: the kernels cannot be compiled here.
    """
    arguments = _arguments
    for expression, facts in kernels.items():
        run = kernel(source, expression)
        for low in range(0, len(facts), MOST):
            some = facts[low : low + MOST]
            pairs, ends = arguments.facts[:, : len(some)], arguments.ends[: len(some)]
            pairs[:] = np.array(some, np.int64).T
            # Parts per pair, rounded up, then their running sum: a block finds its pair by a search in it.
            np.add(pairs[2], part - 1, out=ends)
            np.floor_divide(ends, part, out=ends)
            if parts := int(np.add.accumulate(ends, out=ends)[-1]):
                arguments.count[0], arguments.number[0] = len(some), number
                run((blocks * parts,), (THREADS,), (arguments.pairs,))
