"""How the ranks of a process group find each other, and what they share then.

Ranks that an MPI launcher has started meet by MPI, also those of a part of them. Others, as torchrun's, must be on one
host, and load no MPI. PyTorch's Store only tells who is who: nothing uses it later, as it ends with the rank that has
it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from ...cluster.agreement import Agreement, compare_requests
from ...cluster.connecting import connect
from ...cluster.environment import launch_by_mpi
from ...cluster.mpi_library import start_mpi
from ...cluster.process_group import ProcessGroup
from ...cluster.runtime import present
from ...cluster.status_board import StatusBoard
from ...cluster.waiting import Waiting
from ...collectives.collectives import Collectives
from ...collectives.communicator import Communicator
from ...config import OWN_AFFAIRS, Config
from ...errors import ConfigError, RankMismatch, Stalled, TransportError, Unsupported, text_of
from ...protocols import Group
from ...transports import open_transport
from ...transports.cma import attach
from ...transports.mailbox import Mailbox
from ...transports.meeting import HostGroup
from ...transports.requests import AbortableWaiting
from ...transports.rings import Rings
from .tensors import combine

# Seconds between two looks whether processes have ended.
_PATIENCE = 0.25


class Meeting:
    """What the ranks of a group share."""

    def __init__(self, group: Group, config: Config, problem: Exception | None) -> None:
        """Compare settings; open transport, board and mailbox; raise on all ranks if one has a problem. Collective."""
        if not group.threads:
            problem = problem or Unsupported(
                "the backend 'mpikv' needs MPI_THREAD_MULTIPLE, since it calls MPI in several threads, and MPI was "
                "initialized without it; leave mpi4py.rc.thread_level as it is, or start the ranks by torchrun"
            )
        # The timeout is each rank's own in PyTorch, where set_timeout and each call may change it.
        wanted = {key: repr(value) for key, value in asdict(config).items() if key not in (*OWN_AFFAIRS, "timeout")}
        compare_requests(group, "init_process_group", wanted, problem)
        self._group, self._board = group, StatusBoard(group, config.report)
        self._own_end, self._due = "", -math.inf
        self.deadline = Waiting(config.timeout, config.warn_after, self._board.warn)
        waits = AbortableWaiting(self._find_end, self.deadline)
        self._transport = open_transport(group, config, self._board.warn, waits=waits)
        self.agreement = Agreement(self._transport.control, group, self._board)
        rings = Rings(group, attach(group) if config.single_copy else None) if group.one_host else None
        self.communicator = Communicator(Collectives(self._transport, combine=combine), self.agreement, group)
        self.mailbox = Mailbox(group, self._board, self.communicator.end, rings)

    def _find_end(self) -> str:
        """Return why a call will never complete: a rank gave up, or a process of this host ended; else "". Local."""
        if why := self._own_end or self._group.find_end():
            return why
        if (now := present().now()) < self._due:
            return ""
        self._due = now + _PATIENCE  # a look at processes takes longer than all else here
        return "; ".join(self._board.describe(self._board.gone()))

    def close(self) -> None:
        """End pending messages; free mailbox, transport, board and group. Collective, once the ranks have agreed."""
        self.mailbox.close()
        self._transport.close()  # it may wait, and warn by the board
        self._board.close()
        self._group.close()

    def abort(self, why: str) -> None:
        """End this rank's calls and messages, and tell the other ranks why. Local."""
        self._own_end = why
        self.mailbox.abort(why)
        self._board.give_up()
        self._group.announce_end(why)

    def unseen(self) -> None:
        """Return None: PyTorch's program has seen all errors. For the end of programs with ranks that closed apart."""

    def announce_shutdown(self) -> tuple[Callable[[], list[int]], float]:
        """Tell the other ranks that this one ends; return a function that lists the ranks yet to say so, and the
        seconds that they may take. Local; does not wait.
        """
        return self._group.announce_shutdown(), self.deadline.timeout


def exchange_texts(store: Any, rank: int, ranks: list[int], timeout: float, text: str) -> list[str]:
    """Send a text to a group's ranks by PyTorch's Store, and return the texts of all, in rank order. Collective.

    ``ranks`` are the numbers of the group's ranks among all, and ``timeout`` is in seconds.

    Raises:
        Stalled: not all ranks have come.
        TransportError: the store does not answer any more.
    """
    keys: list[str] = []
    try:
        # Counted in the store: torchrun's outlives a group, and a later group of the same name finds its texts.
        turn = store.add(f"mpikv/turn/{ranks[rank]}", 1)
        # By their numbers among all ranks, so that ranks with different lists of a group find each other's.
        keys = [f"mpikv/{turn}/{other}" for other in ranks]
        store.set(keys[rank], text)
        store.wait(keys, timedelta(seconds=timeout))
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        missing = _find_missing(store, ranks, keys)
        if not missing:
            raise TransportError(f"PyTorch's store fails: {text_of(error)}") from error
        who = f"waited {timeout:g} s for ranks {missing}, which have not made the process group"
        raise Stalled(f"{who} of ranks {ranks} [rank {rank}/{len(ranks)}]", missing) from error


def _find_missing(store: Any, ranks: Sequence[int], keys: Sequence[str]) -> list[int]:
    """Return the ranks whose keys PyTorch's Store lacks; none if it does not answer. Local."""
    try:
        return [rank for rank, key in zip(ranks, keys, strict=False) if not store.check([key])]
    except RuntimeError:  # the process that has the store has ended
        return []


def open_group(store: Any, rank: int, ranks: list[int], timeout: float, name: str) -> Meeting:
    """Connect a group's ranks, by MPI or shared memory, and return their :class:`Meeting`; may start MPI. Collective.

    ``timeout`` is in seconds. ``ranks`` are their numbers among all ranks.

    Raises:
        Unsupported: nothing can join these ranks.
        RankMismatch: ranks have different settings.
        Stalled: not all ranks have come.
    """
    config, problem = Config(timeout=timeout), None
    try:
        config = Config.read(timeout=timeout)
    except ConfigError as error:  # the other ranks wait to hear
        problem = error
    group = _join(partial(exchange_texts, store, rank, ranks, timeout), rank, ranks, config, name)
    try:
        return Meeting(group, config, problem)
    except Stalled:  # of ranks that would not come to a close either
        raise
    except Exception:
        group.close()
        raise


def _join(exchange: Callable[[str], list[str]], rank: int, ranks: list[int], config: Config, name: str) -> Group:
    """Return these ranks' group, by MPI if its launcher started them; raise if nothing can join them. Collective.

    ``exchange`` returns the texts of all ranks.
    """
    launch, size = launch_by_mpi(), len(ranks)
    fact = json.dumps([launch and launch.rank, ranks])
    of_mpi, lists = zip(*map(json.loads, exchange(fact)), strict=True)
    for other, theirs in zip(ranks, lists, strict=True):
        if theirs != ranks:
            raise RankMismatch(
                f"new_group: rank {ranks[rank]} makes a group of ranks {ranks}, and rank {other} one of "
                f"ranks {theirs}; every rank makes the same groups in the same order [rank {rank}/{size}]"
            )
    if size == 1:
        return ProcessGroup()
    if set(of_mpi) == {None}:
        return HostGroup(exchange, rank, size, config.timeout)
    if launch is None or None in of_mpi or len(set(of_mpi)) < size:
        raise Unsupported(
            f"MPI has started some of the {size} ranks of this group, and something else the others; start the program "
            f"by  mpikv run -n {size} SCRIPT"
        )
    world = start_mpi(launch).COMM_WORLD
    if of_mpi == (*range(world.size),):
        return connect(None, config)
    # Collective over these ranks alone, as new_group is. The tag tells groups apart that threads make at once.
    part = world.Create_group(world.group.Incl(of_mpi), zlib.crc32(name.encode()) & 0x7FFF)
    try:
        return connect(part, config)
    finally:
        part.Free()
