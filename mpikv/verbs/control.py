"""``barrier``, ``check_equal``, ``any_rank``, ``command`` and ``group``: calls without values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..cluster.agreement import Agreement
from ..cluster.calls import Call, PreparedCall
from ..cluster.printing import log
from ..cluster.process_group import ProcessGroup
from ..engine.plan import digest
from ..errors import ConfigError, brief
from .comparison import text_call

# Characters of a command in a message.
_MOST_SHOWN = 80
_BARRIER, _NEXT, _VOTE = (
    Call(verb, digest(verb), shown) for verb, shown in (("barrier", ""), ("next", "wait=False"), ("any_rank", ""))
)


class ControlVerbs:
    """Prepares these calls of one store."""

    def __init__(self, agreement: Agreement, group: ProcessGroup, root: int) -> None:
        self._agreement, self._group, self._root = agreement, group, root
        self.controllers: dict[int, Callable[[Any], Any] | None] = {}
        """The functions that commands call at the root, by their numbers."""

    def barrier(self) -> PreparedCall:
        """Return (call, run): ranks meet where they compare the call, and run() does nothing. Local."""
        return _BARRIER, lambda: None  # comparing the calls is the barrier

    def check_equal(self, text: str, verb: str) -> PreparedCall:
        """Return (call, run): ranks compare the text with the call, and run() does nothing. Local."""
        return text_call(verb, text, text.partition("\n")[0]), lambda: None

    def any_rank(self, flag: bool) -> PreparedCall:
        """Return (call, run); run() returns whether any rank passed True. Local; run() is collective."""
        against = int(not flag)
        return _VOTE, lambda: not self._agreement.least(against)

    def mean(self, value: Any) -> PreparedCall:
        """Return (call, run) for the mean of all ranks' numbers, or of those by name. Local; run() is collective."""
        named = value if isinstance(value, Mapping) else {"": value}
        numbers, keys = [float(each) for each in named.values()], list(named)

        def run() -> Any:
            """Gather all ranks' numbers; return their means in the form of ``value``. Collective."""
            # Added in rank order, so that all ranks have the same bits.
            rows = map(json.loads, self._group.gather(json.dumps(numbers)))
            means = [sum(column) / self._group.size for column in zip(*rows, strict=True)]
            return dict(zip(keys, means, strict=True)) if named is value else means[0]

        return text_call("mean", str(keys), str(keys) if named is value else ""), run

    def least(self, queued: int) -> PreparedCall:
        """Return (call, run); run(), collective, returns the fewest calls that a rank queued with ``wait=False``."""
        return _NEXT, lambda: self._agreement.least(queued)

    def group(self, ranks: Sequence[int]) -> PreparedCall:
        """Return (call, run); run(), collective, makes a communicator of some ranks for the caller to free, and returns
        (ranks, communicator); other ranks get a null one. Local.

        Raises:
            ConfigError: something is no rank, is there twice, or nothing is there.
        """
        members, size = tuple(ranks), self._group.size
        if not members or len(set(members)) < len(members) or not set(members) <= set(range(size)):
            raise ConfigError(f"group: {list(members)} is not a list of some of the ranks from 0 to {size - 1}")
        text = str([int(rank) for rank in members])
        return text_call("group", text), lambda: (members, self._group.part(members))

    def command(self, head: Any, body: Any) -> PreparedCall:
        """Return (call, run) to call the root's controller of number ``head`` with a JSON body; its error is every
        rank's. Local; run() is collective.
        """
        text = json.dumps(body, sort_keys=True, allow_nan=False)
        whole = f"{check_head(head)}, {text}"
        call = text_call("command", whole, brief(whole, _MOST_SHOWN))
        return call, lambda: self._agreement.run_together(call, self._control, head, text)

    def _control(self, head: int, text: str) -> None:
        """At the root call the controller of a number, or log that there is none; elsewhere do nothing. Local."""
        if self._group.rank != self._root:
            return
        # Through JSON, at the root, too: a controller gets the same body whoever sends the command.
        if controller := self.controllers.get(head):
            controller(json.loads(text))
        else:
            log("command %d has no controller at the root, and does nothing", head)


def check_head(head: Any) -> int:
    """Return the number of a command as an int; raise TypeError if it is none, or negative. Local."""
    if not isinstance(head, (int, np.integer)) or isinstance(head, bool) or head < 0:
        raise TypeError(f"the number of a command is an int from 0, not {head!r}")
    return int(head)
