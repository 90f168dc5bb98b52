"""What every rank must be able to do before any goes on."""

from __future__ import annotations

from collections.abc import Callable

from ..cluster.process_group import ProcessGroup
from ..errors import settled
from ..protocols import Array

__all__ = ["allocate_collectively"]


def allocate_collectively(
    group: ProcessGroup,
    agree: Callable[[int], bool],
    make: Callable[[int], Array],
    nbytes: int,
    take_back: Callable[[], None] = lambda: None,
    what: str = "values",
) -> Array:
    """Return the memory that ``make(nbytes)`` returns; where another rank has too little, ``take_back`` is called.
    Collective over the group, as ``agree`` is. ``what`` it is for, in words.

    Raises:
        MemoryError: on every rank, if it was raised on one.
    """
    memory, reason = None, ""
    try:
        memory = make(nbytes)
    except MemoryError as error:
        reason = str(error) or "the process cannot have more"
    if not agree(memory is not None) or memory is None:
        if memory is not None:
            take_back()
        short = {rank: why for rank, why in enumerate(group.gather(reason)) if why}
        text = f"{nbytes} bytes for {what} are needed and ranks {list(short)} have too little memory"
        raise settled(MemoryError(f"{text} ({next(iter(short.values()))})"))
    return memory
