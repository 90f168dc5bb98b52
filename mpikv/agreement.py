"""What ranks compare before data move, and the board on which each writes what it is doing.

Every collective call of the store starts by comparing one number, a digest of the call. Only when all ranks passed the
same one do data move. Otherwise the ranks exchange texts and every one of them raises: the rank whose own arguments
were bad raises its own error, the others ``PeerFailed``; ranks that made different calls all raise the same
``RankMismatch``. Either way every rank has made the same number of steps, so the store can be used again.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NoReturn

from .errors import MPIKVError, PeerFailed, RankMismatch, Stalled
from .typing import Transport
from .world import Group

__all__ = ["Agreement", "Call"]

# No digest has this value.
_FAILED = (1 << 62) - 1


@dataclass(frozen=True, eq=False)
class Call:
    """One rank's view of a collective call."""

    verb: str
    token: int
    label: str = ""
    """The keys, shortened, for messages."""
    describe: Callable[[], Sequence[str]] = lambda: ()
    """All that the token was made of; asked for only when ranks disagree."""

    def __str__(self) -> str:
        return f"{self.verb}({self.label})"

    @cached_property
    def note(self) -> bytes:
        """The call's text for the board."""
        return str(self).encode()


class Agreement:
    """Compares the ranks' calls."""

    def __init__(self, transport: Transport, group: Group, check: bool) -> None:
        """Collective."""
        self._transport, self._group, self._check = transport, group, check
        self._board = Board(group)
        self.calls = 0

    def begin(self, call: Call) -> None:
        """Wait for every rank to make the same call. Also a fence.

        Raises:
            RankMismatch: ranks made different calls.
            PeerFailed: another rank raised before it could take part.
            Stalled: a rank did not come.
        """
        self.calls += 1
        self._board.write(self.calls, call.note)
        if not self._check:
            self._transport.fence()
        elif not self._agree(call, call.token):
            self._disagree(call, None)

    def refuse(self, call: Call, error: Exception) -> NoReturn:
        """Tell the other ranks that this one cannot make its call, and raise why."""
        self.calls += 1
        self._board.write(self.calls, call.note)
        raise self._failed(call, error)

    def confirm(self, call: Call, error: Exception | None) -> None:
        """Learn whether the owners' work, which some ranks did not do, went well; raise on all ranks if not."""
        if error is not None:
            raise self._failed(call, error)
        if not self._agree(call, call.token):
            self._disagree(call, None)

    def _failed(self, call: Call, error: Exception) -> Exception:
        if self._check and not self._agree(call, _FAILED):
            self._disagree(call, error)
        return self.at_rank(call.verb, error)

    def _agree(self, call: Call, token: int) -> bool:
        try:
            return self._transport.agree(token)
        except Stalled as stalled:
            raise self.at_rank(call.verb, Stalled(*self._stalled(call, stalled))) from None

    def _stalled(self, call: Call, stalled: Stalled) -> tuple[str, list[int]]:
        late = self._board.missing(self.calls)
        seen = [f"rank {rank} has not arrived, it began {last} last" for rank, last in late.items()]
        if len(self._group.host_ranks) < self._group.size:
            seen.append("ranks of other hosts cannot be seen from here")
        return f"{call}: {stalled}, in call #{self.calls}" + (f" ({'; '.join(seen)})" if seen else ""), list(late)

    def _disagree(self, call: Call, error: Exception | None) -> None:
        """Exchange what each rank has to say, and raise accordingly."""
        mine = {
            "call": str(call),
            "parts": list(call.describe()),
            "error": error and _told(error),
        }
        said = [json.loads(text) for text in self._group.gather(json.dumps(mine))]
        if error is not None:
            return
        for rank, other in enumerate(said):
            if other["error"]:
                text = f"{call}: rank {rank} raised {other['error']}; nothing was changed"
                raise self.at_rank(call.verb, PeerFailed(text, rank))
        raise self.at_rank(
            call.verb, RankMismatch(f"ranks disagree at call #{self.calls}: {_difference(said)}; nothing was changed")
        )

    def close(self) -> None:
        """Let go of the shared memory."""
        self._board.close()

    def at_rank(self, verb: str, error: Exception) -> Exception:
        """Add the verb and this rank to the error's message."""
        text = str(error)
        text = text if text.startswith(verb) else f"{verb}: {text}"
        where = f" [rank {self._group.rank}/{self._group.size}]" if self._group.size > 1 else ""
        text = text if text.endswith(where) else text + where
        if isinstance(error, (MPIKVError, TypeError, ValueError, IndexError)):
            error.args = (text,)
        return error


def _told(error: Exception) -> str:
    """Return what other ranks are told of an error; of one that is not ours, with the place where it was raised."""
    if isinstance(error, MPIKVError) or error.__traceback__ is None:
        return f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {last.name}, {last.filename}:{last.lineno})"


def _difference(said: Sequence[dict[str, Any]]) -> str:
    """Show the call of the first rank beside the first call that differs from it."""
    first = said[0]
    other = next(o for o in said if (o["call"], o["parts"]) != (first["call"], first["parts"]))
    where = ""
    if other["call"] == first["call"]:
        sides = zip_longest(first["parts"], other["parts"], fillvalue="nothing")
        where = next(f" (item {at}: {left}, {right})" for at, (left, right) in enumerate(sides) if left != right)
    like = [r for r, o in enumerate(said) if (o["call"], o["parts"]) == (other["call"], other["parts"])]
    return f"rank 0 calls {first['call']}; {_ranks(like)} {other['call']}{where}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"


class Board:
    """What each rank of this host does, in shared memory; only its owner writes a slot, so there are no locks.

    A slot is 24 words of 8 bytes: the number of the last call begun, the length of its text, the text.
    """

    _WORDS = 24
    _HEAD = 16

    def __init__(self, group: Group) -> None:
        """Collective."""
        self._ranks, self._size = group.host_ranks, group.size
        nbytes = 8 * self._WORDS
        board = group.share(nbytes * len(self._ranks))
        self._slots = [board[i * nbytes : (i + 1) * nbytes].data for i in range(len(self._ranks))]
        self._text = self._slots[group.local_rank]
        self._head = self._text[: self._HEAD].cast("q")
        self._longest = nbytes - self._HEAD

    def write(self, number: int, text: bytes) -> None:
        """Say that this rank has begun call ``number``."""
        length = min(len(text), self._longest)
        self._text[self._HEAD : self._HEAD + length] = text[:length]
        self._head[1] = length
        self._head[0] = number

    def missing(self, number: int) -> dict[int, str]:
        """Return the ranks of this host that have not begun call ``number``, and what each began last."""
        late = {}
        for rank, slot in zip(self._ranks, self._slots, strict=True):
            last, length = slot[: self._HEAD].cast("q")
            if last < number:
                text = bytes(slot[self._HEAD : self._HEAD + length]).decode(errors="replace")
                late[rank] = f"call #{last} {text}" if last else "no call at all"
        return late

    def close(self) -> None:
        """Let go of the shared memory."""
        self._head.release()
        for slot in self._slots:
            slot.release()
