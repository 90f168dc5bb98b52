"""What ranks of other hosts say of those of theirs that are late.

A rank that has waited too long asks some ranks of each other host. Those that wait too answer with what the board of
their host says. Only ranks that wait look for these messages, beside the calls that they wait for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .process_group import ProcessGroup
from .runtime import present

__all__ = ["Answer", "Inquiry"]

_QUESTION, _ANSWER = 32103, 32104
# Of each host, so that many ranks on many hosts do not flood the network.
_MOST_ASKED = 4
# Seconds until a host has answered, and for how long what was found out about this one is answered again.
_PATIENCE, _FRESH = 1.0, 1.0

Report = Callable[[], "tuple[Sequence[int], str]"]


class Answer(NamedTuple):
    """What a host says."""

    late: tuple[int, ...]
    text: str


class Inquiry:
    """Asks the other hosts of a group, and answers for this one."""

    def __init__(self, group: ProcessGroup, report: Report, call: Callable[[], int]) -> None:
        """``report`` returns which ranks of this host are late, and what they do; ``call`` the number of this rank's
        call.
        """
        self._group, self._report, self._call = group, report, call
        hosts = zip(group.hosts, group.ranks_of_hosts, strict=True)
        self._others = [(name, ranks) for name, ranks in hosts if group.rank not in ranks]
        self._number = 0
        self._known, self._found = (-1, float("-inf")), Answer((), "")
        group.witness = self.answer

    def ask(self) -> None:
        """Ask all other hosts. Local."""
        self._number += 1
        for _, ranks in self._others:
            begin = self._group.rank % len(ranks)
            for rank in (*ranks[begin:], *ranks[:begin])[:_MOST_ASKED]:
                self._group.send_word(str(self._number).encode(), rank, _QUESTION)

    def answer(self) -> None:
        """Answer what other hosts have asked. Local."""
        while word := self._group.hear_word(_QUESTION):
            source, number = word
            self._group.send_word(json.dumps([int(number), *self.look()]).encode(), source, _ANSWER)

    def look(self) -> Answer:
        """Return what is to be said of this host."""
        now, call, (before, when) = present().now, self._call(), self._known
        # Of an earlier call, in which a question was found that came too late, it would be that nobody is late.
        if call != before or now() - when > _FRESH:
            late, text = self._report()
            self._found, self._known = Answer(tuple(map(int, late)), text), (call, now())
        return self._found

    def collect(self) -> list[Answer]:
        """Return what the hosts answer that were asked last; answer their questions meanwhile. Local."""
        heard: dict[int, Answer] = {}
        here = present()
        limit = here.now() + _PATIENCE
        while True:
            self.answer()
            while word := self._group.hear_word(_ANSWER):
                number, late, text = json.loads(word[1])
                if number == self._number:
                    heard[word[0]] = Answer(tuple(late), text)
            said = [next((heard[rank] for rank in ranks if rank in heard), None) for _, ranks in self._others]
            if None not in said or here.now() >= limit:
                return [one or _silence(*host) for one, host in zip(said, self._others, strict=True)]
            here.nap(0.005, limit)


def _silence(name: str, ranks: Sequence[int]) -> Answer:
    who = f"ranks {list(ranks)} are" if len(ranks) > 1 else f"rank {ranks[0]} is"
    return Answer((), f"nobody on host {name} answers: its {who} late or gone, or the network is cut")
