"""Transports that fail by plan, and a store over them, to test the view of the other ranks.

A seed draws each plan, so that a failure can be repeated. ``seed`` must be the same on every rank.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from ..cluster.connecting import connect
from ..cluster.status_board import StatusBoard
from ..config import Config
from ..creation import create
from ..errors import TransportError
from ..protocols import Transport
from ..store.kvstore import KVStore
from ..transports import open_transport
from .wrappers import Wrapper

__all__ = ["Dying", "Failing", "Slow", "store_over"]


class Slow(Wrapper):
    """Sleeps before about half of the calls, at different calls on each rank.

    Example:
        >>> from mpikv.transports.local import LocalTransport
        >>> transport = Slow(LocalTransport(4096), seed=1, longest=1e-3)
        >>> transport.agree(7)
        True
    """

    def __init__(self, transport: Transport, seed: int, longest: float) -> None:
        """``longest`` is in seconds."""
        super().__init__(transport)
        self._random, self._longest = random.Random(f"{seed} {transport.rank}"), longest

    def before(self, call: str) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.uniform(0, self._longest))


class Planned(Wrapper):
    """Acts on one rank, once, at a planned call."""

    def __init__(
        self, transport: Transport, seed: int = 0, *, rank: int | None = None, call: int | None = None, most: int = 20
    ) -> None:
        """Plan the rank, and the number of its call from 1 to ``most``; the seed draws them unless they are given."""
        super().__init__(transport)
        draw = random.Random(seed)
        drawn_rank, drawn_call = draw.randrange(transport.size), draw.randint(1, most)
        self.victim = drawn_rank if rank is None else rank
        """The rank that acts."""
        self.planned = drawn_call if call is None else call
        """The number of the planned call."""
        self.calls = 0

    def counts(self, call: str) -> bool:
        """Return whether calls with that name count."""
        return True

    def before(self, call: str) -> None:
        if not self.counts(call):
            return
        self.calls += 1
        if self.calls == self.planned and self.rank == self.victim:
            self.strike(call)

    def strike(self, call: str) -> None:
        """Run the planned act."""


class Failing(Planned):
    """Raises TransportError on one rank at its n-th call that moves data; the ranks have agreed on it before.

    Example:
        >>> import numpy as np
        >>> from mpikv.transports.local import LocalTransport
        >>> transport = Failing(LocalTransport(4096), rank=0, call=2)
        >>> transport.broadcast(np.ones(2), 0)
        >>> transport.broadcast(np.ones(2), 0)
        Traceback (most recent call last):
        mpikv.errors.TransportError: planned failure in broadcast, data call 2 of rank 0
    """

    def counts(self, call: str) -> bool:
        return call in self.data

    def strike(self, call: str) -> None:
        raise TransportError(f"planned failure in {call}, data call {self.calls} of rank {self.rank}")


class Dying(Planned):
    """Kills its own process, as the kernel does when memory runs out, at the n-th call of any kind on one rank."""

    def strike(self, call: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def store_over(wrap: Callable[[Transport], Transport], *, comm: Any = None, root: int = 0, **options: Any) -> KVStore:
    """Return a store over a wrapped transport. Collective.

    Close it: unlike one of :func:`mpikv.create`, it may not be closed at the end of the program. ``options`` are the
    fields of :class:`mpikv.config.Config`; nothing is read from the environment.

    Example:
        >>> import numpy as np
        >>> with store_over(lambda transport: Slow(transport, seed=0, longest=1e-3)) as kv:
        ...     kv.init("w", np.zeros(2))
        ...     kv.push("w", np.ones(2))
        ...     kv.pull("w")
        array([1., 1.])
    """
    config = Config(**options)
    group = connect(comm, config)
    board = StatusBoard(group)
    return KVStore(group, board, wrap(open_transport(group, config, board.warn)), config, found=create, root=root)
