"""What a plan remembers of the calls that it served: how ranks compare them, and the updater's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from ..cluster.calls import Call

__all__ = ["Confirm", "Contribution", "Steps", "UpdateCall"]

Confirm: TypeAlias = "Callable[[BaseException | None], None]"
"""Tells the other ranks what an update raised here, if it did, and learns what it did there."""


class Steps(NamedTuple):
    """The updater's step for each key of a push."""

    each: Sequence[Any]
    uniform: bool
    """Whether they are all the same."""


class Contribution(str, Enum):
    """What a rank brings to an update, in the words that ranks that disagree are told."""

    WHOLE = "whole arrays"
    BUFFERS = "from the buffers"
    ROWS = "rows"
    ROWS_FOR_WHOLE = "rows, with whole arrays as out"


class UpdateCall(NamedTuple):
    """What a plan keeps for its next update by the same verb."""

    call: Call
    steps: Steps | None
    """The updater's steps; None where they change with each update."""
    confirm: Confirm | None
    """How ranks learn how the update went, where it may fail on one of them."""
    revision: int
    """That of the updater, whose settings all of this follows from."""
