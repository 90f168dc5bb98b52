"""Records of calls that a plan keeps: how ranks compare them, and the updater's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from ..cluster.calls import Call

Confirm: TypeAlias = "Callable[[BaseException | None], None]"
"""Tells the other ranks the error of this rank's updater, or None; raises if the updater of any rank raised."""


# No NamedTuples: CPython 3.11 reads their attributes in three times as long, and each small push reads ten.


@dataclass(slots=True)
class Steps:
    """The updater's step for each key of a push."""

    each: Sequence[Any]
    uniform: bool
    """Whether they are all the same."""


class Contribution(str, Enum):
    """The kind of data that a rank brings to an update. An error shows these words where ranks disagree."""

    WHOLE = "whole arrays"
    BUFFERS = "from the buffers"
    ROWS = "rows"
    ROWS_FOR_WHOLE = "rows, with whole arrays as out"


@dataclass(frozen=True)
class UpdateCall:
    """A plan's cache for its next update by the same verb."""

    call: Call
    steps: Steps | None
    """The updater's steps; None where they change with each update."""
    confirm: Confirm | None
    """Makes ranks agree on the outcome; None where no updater may raise."""
    revision: int
    """The updater's revision when this was made: other settings make it stale."""
