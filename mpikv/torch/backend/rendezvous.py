"""How the ranks of a process group find each other, and what they share then.

Ranks that an MPI launcher has started meet by MPI, also those of a part of them. PyTorch's Store only tells who is who:
nothing uses it later, as it ends with the rank that has it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...cluster.agreement import Agreement
from ...cluster.connecting import connect
from ...cluster.environment import launch_by_mpi
from ...cluster.mpi_library import start_mpi
from ...cluster.process_group import ProcessGroup
from ...cluster.status_board import StatusBoard
from ...cluster.waiting import Waiting, Warn
from ...config import Config
from ...errors import Stalled, Unsupported
from ...protocols import Transport
from ...transports import open_transport
from ...transports.requests import AbortableWaiting


class Deadline:
    """A :class:`~mpikv.cluster.waiting.Waits` with a deadline that each call may change, and that can be ended."""

    def __init__(self, timeout: float, warn_after: float) -> None:
        """Times are in seconds."""
        self.timeout, self._warn_after = timeout, warn_after
        self.warn: Warn | None = None
        self.ended = ""
        """Why no wait goes on."""

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return when ``ready()`` is true.

        Raises:
            Stalled: the deadline has passed, or no wait goes on.
        """

        def ready_or_ended() -> bool:
            if self.ended:
                raise Stalled(self.ended)
            return ready()

        Waiting(self.timeout, self._warn_after, self.warn).until(ready_or_ended, missing)


@dataclass
class Meeting:
    """What the ranks of a group share."""

    group: ProcessGroup
    board: StatusBoard
    transport: Transport
    agreement: Agreement
    deadline: Deadline

    def close(self) -> None:
        """Free all. Collective; ranks have agreed on it."""
        self.transport.close()  # it may wait, and warn by the board
        self.board.close()
        self.group.close()

    def abort(self, why: str) -> None:
        """Tell the other ranks that this one makes no more calls. Local."""
        self.deadline.ended = why
        self.board.give_up()
        self.group.announce_end(why)

    def unseen(self) -> None:
        """Return no error: PyTorch's program has seen all. For the end of a program whose ranks closed not together."""

    def announce_shutdown(self) -> tuple[Callable[[], list[int]], float]:
        """Tell the other ranks that this one ends. Local; for the end of a program.

        Returns:
            A function that lists the ranks that have not said the same yet, and the seconds they may take.
        """
        return self.group.announce_shutdown(), self.deadline.timeout


def open_group(store: Any, rank: int, size: int, timeout: float, name: str) -> Meeting:
    """Return the meeting of the ranks of a group. Collective over them. ``timeout`` is in seconds.

    Raises:
        Unsupported: nothing can join these ranks.
        Stalled: not all ranks have come.
    """
    config = Config.read(timeout=timeout)
    deadline = Deadline(timeout, config.warn_after)
    group = _join_by_mpi(store, rank, size, config, name)
    board = StatusBoard(group)
    deadline.warn = board.warn
    transport = open_transport(group, config, board.warn, waits=AbortableWaiting(group, deadline))
    return Meeting(group, board, transport, Agreement(transport, group, board, config.verify_calls), deadline)


def _join_by_mpi(store: Any, rank: int, size: int, config: Config, name: str) -> ProcessGroup:
    """Return the group of ranks that an MPI launcher has started. Collective."""
    launch = launch_by_mpi()
    words = exchange(store, rank, size, json.dumps(launch and launch.rank), config.timeout)
    ranks = [json.loads(word) for word in words]
    if size == 1:
        return ProcessGroup()
    if launch is None or None in ranks or len(set(ranks)) < size:
        raise Unsupported(
            f"the backend 'mpikv' joins ranks that MPI has started, and not all {size} of this group are; start the "
            f"program by  mpikv run -n {size} SCRIPT"
        )
    world = start_mpi(launch).COMM_WORLD
    if ranks == list(range(world.size)):
        return connect(None, config)
    # Collective over these ranks alone, as new_group is. The tag tells groups apart that threads make at once.
    part = world.Create_group(world.group.Incl(ranks), zlib.crc32(name.encode()) & 0x7FFF)
    try:
        return connect(part, config)
    finally:
        part.Free()


def exchange(store: Any, rank: int, size: int, word: str, timeout: float) -> list[str]:
    """Return the words of all ranks of a group, in rank order. Collective.

    Raises:
        Stalled: not all ranks have come within ``timeout`` seconds.
    """
    keys = [f"mpikv/{other}" for other in range(size)]
    store.set(keys[rank], word)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise Stalled(
            f"waited {timeout:g} s for ranks {missing}, which have not made the process group", missing
        ) from error
    return [store.get(key).decode() for key in keys]
