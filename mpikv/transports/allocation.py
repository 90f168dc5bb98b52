"""Allocation that succeeds on every rank or on none, and memory of one rank that grows with its messages."""

from __future__ import annotations

from collections.abc import Callable

from ..arrays.arrays import zeros
from ..errors import mark
from ..protocols import Array, Group


def allocate_collectively(
    group: Group, agree: Callable[[int], bool], make: Callable[[int], Array], nbytes: int, what: str = "values"
) -> Array:
    """Return ``make(nbytes)``; if it raises MemoryError on one rank, raise that on all. Collective over the group.

    ``what`` names the purpose, for messages.

    Raises:
        MemoryError: on every rank, if one raised it.
    """
    # Not raised at once: the other ranks wait in agree for this one.
    memory, reason = None, ""
    try:
        memory = make(nbytes)
    except MemoryError as error:
        reason = str(error) or "the process cannot have more"
    if not agree(memory is not None) or memory is None:
        short = {rank: why for rank, why in enumerate(group.gather(reason)) if why}
        text = f"{nbytes} bytes for {what} are needed and ranks {list(short)} have too little memory"
        raise mark(MemoryError(f"{text} ({next(iter(short.values()))})"), "settled")
    return memory


class Growing:
    """Private memory for messages, at most twice as large as the largest needs."""

    def __init__(self) -> None:
        self._memory = zeros(0)

    def first(self, nbytes: int) -> Array:
        """Return the first ``nbytes`` of the memory, of any content; if that is too small, make it anew, of twice
        ``nbytes``.

        Arrays over the memory before keep it.
        """
        if nbytes > self._memory.size:
            # Twice as much: the memories before are then no larger together.
            self._memory = zeros(2 * nbytes)
        return self._memory[:nbytes]
