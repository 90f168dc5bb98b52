"""A collective call of the store, its report to the other ranks, and its note on the status board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ..protocols import Key

JOINED = (1 << 62) - 2
"""The token of a rank that has run out of work; no digest."""
ANY = -1
"""The token of a call that its rank cannot describe: it meets any other; no digest."""
NOTE_BYTES = 160
"""Bytes of a call's text on the board."""


def note(text: str) -> bytes:
    """Return a text's first 160 bytes, padded with zeros, as the status board stores it."""
    return text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")


def text_of_note(noted: bytes) -> str:
    """Return the text of a status board's note, without the zeros after it."""
    return noted.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True, eq=False)
class Call:
    """One rank's view of a collective call."""

    verb: str
    token: int
    label: str = ""
    """The keys, shortened, for messages."""
    keys: tuple[Key, ...] = ()
    describe: Callable[[], Sequence[str]] = lambda: ()
    """Returns the texts that the token was made of. Called only when ranks disagree."""
    contribution: str = ""
    """The kind of arrays that this rank brings to an update."""
    note: bytes = field(init=False)
    """The call as the board takes it."""

    def __str__(self) -> str:
        return f"{self.verb}({self.label})"

    def __post_init__(self) -> None:
        """Make the note of the verb and the keys, once for all uses."""
        object.__setattr__(self, "note", note(str(self)))


PreparedCall: TypeAlias = tuple[Call, Callable[[], Any]]
"""A call without a mistake on this rank: the :class:`Call` that ranks compare, and the function that makes the call
once they agree and returns the caller's result."""


class CallReport(NamedTuple):
    """A rank's report to the others when not all have made the same call."""

    text: str
    """The call; at the end of the program, the one before it."""
    verb: str
    place: str
    """The line of the program that makes the call, or ""."""
    keys: Sequence[Key]
    token: int
    contribution: str
    parts: Sequence[str]
    error: str
