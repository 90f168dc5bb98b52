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
        """Tell the other ranks that this one ends; return a function that lists those that did not, and a limit. Local.

        Returns:
            A function that lists the ranks that have not said the same yet, and the seconds they may take.
        """
        return self._group.announce_shutdown(), self.deadline.timeout


class StoreTexts:
    """Texts of ranks that share PyTorch's Store."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, names: Sequence[int]) -> None:
        """Refer to PyTorch's Store; ``timeout`` in seconds; ``names``: the ranks' numbers among all. Local."""
        self._store, self._rank, self._size, self._timeout, self.names = store, rank, size, timeout, names

    def exchange(self, text: str) -> list[str]:
        """Send a text to all ranks, and return the texts of all, in rank order. Collective.

        Raises:
            Stalled: not all ranks have come.
            TransportError: the store does not answer any more.
        """
        keys: list[str] = []
        try:
            # Counted in the store: torchrun's outlives a group, and a later group of the same name finds its texts.
            turn = self._store.add(f"mpikv/turn/{self.names[self._rank]}", 1)
            # By their numbers among all ranks, so that ranks with different lists of a group find each other's.
            keys = [f"mpikv/{turn}/{name}" for name in self.names]
            self._store.set(keys[self._rank], text)
            self._store.wait(keys, timedelta(seconds=self._timeout))
            return [self._store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise self._explain(keys, error) from error

    def _explain(self, keys: Sequence[str], error: RuntimeError) -> TransportError:
        """Return the error to raise: Stalled if the store lacks texts of ranks, TransportError if it fails. Local."""
        try:
            missing = [rank for rank, key in zip(self.names, keys, strict=False) if not self._store.check([key])]
        except RuntimeError:  # the process that has the store has ended
            missing = []
        if not missing:
            return TransportError(f"PyTorch's store fails: {text_of(error)}")
        who = f"waited {self._timeout:g} s for ranks {missing}, which have not made the process group"
        return Stalled(f"{who} of ranks {list(self.names)} [rank {self._rank}/{self._size}]", missing)


def open_group(store: Any, rank: int, size: int, timeout: float, name: str, ranks: Sequence[int]) -> Meeting:
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
    group = _join(StoreTexts(store, rank, size, timeout, ranks), rank, size, config, name)
    try:
        return Meeting(group, config, problem)
    except Stalled:  # of ranks that would not come to a close either
        raise
    except Exception:
        group.close()
        raise


def _join(texts: StoreTexts, rank: int, size: int, config: Config, name: str) -> Group:
    """Return these ranks' group, by MPI if its launcher started them; raise if nothing can join them. Collective."""
    launch = launch_by_mpi()
    fact = json.dumps([launch and launch.rank, [*texts.names]])
    ranks, lists = zip(*map(json.loads, texts.exchange(fact)), strict=True)
    for other, theirs in zip(texts.names, lists, strict=True):
        if theirs != [*texts.names]:
            raise RankMismatch(
                f"new_group: rank {texts.names[rank]} makes a group of ranks {[*texts.names]}, and rank {other} one of "
                f"ranks {theirs}; every rank makes the same groups in the same order [rank {rank}/{size}]"
            )
    if size == 1:
        return ProcessGroup()
    if set(ranks) == {None}:
        return HostGroup(texts.exchange, rank, size, config.timeout)
    if launch is None or None in ranks or len(set(ranks)) < size:
        raise Unsupported(
            f"MPI has started some of the {size} ranks of this group, and something else the others; start the program "
            f"by  mpikv run -n {size} SCRIPT"
        )
    world = start_mpi(launch).COMM_WORLD
    if ranks == (*range(world.size),):
        return connect(None, config)
    # Collective over these ranks alone, as new_group is. The tag tells groups apart that threads make at once.
    part = world.Create_group(world.group.Incl(ranks), zlib.crc32(name.encode()) & 0x7FFF)
    try:
        return connect(part, config)
    finally:
        part.Free()
