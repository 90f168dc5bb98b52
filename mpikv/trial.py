"""Whether a codec saves time on these ranks: found by pushes with and without it, over the transport of the store.

The trial has a table of its own and changes no value of the store. Its memory, some messages' worth, is given back
when it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .exchange import Arrays, Exchange
from .memory import private
from .plan import Plan
from .typing import Array, Codec

__all__ = ["Choice", "asked_for", "choose"]

# Bytes of a trial's value, a matrix that is nearly square: about four messages, and not more than this.
_MESSAGES, _MOST_BYTES = 4, 4 << 20
# There, what is as small as on the host takes as long as the launches do, however much travels.
_MOST_BYTES_OF_GPUS = 64 << 20
# Pushes of each kind, after one that finds memory and caches cold.
_TURNS = 5
# What a codec has to save, or the noise would choose.
_SAVED = 0.1


class Choice(NamedTuple):
    """What is used, and why."""

    asked: str
    """What was asked for: the settings of a codec, ``auto(...)`` or ``None``."""
    chosen: str
    """The settings of the codec that is used, or ``None``."""
    why: str
    seconds: Mapping[str, float]
    """What a push took in the trial, on the slowest rank: ``with`` and ``without`` the codec. Empty without a trial."""


def asked_for(settings: str) -> Choice:
    """Return the choice that needs no trial."""
    return Choice(settings, settings, "asked for", {})


def choose(exchange: Exchange, codec: Codec, asked: str) -> tuple[Codec | None, Choice]:
    """Return the codec, or None if it does not save time with the present placement; the same on every rank.

    Collective.

    Raises:
        MemoryError: on every rank, if one has too little.
    """
    most = _MOST_BYTES if exchange.transport.memory.on_host else _MOST_BYTES_OF_GPUS
    size = min(_MESSAGES * exchange.transport.limit, most) // 4
    rows = math.isqrt(size)
    gradient = np.random.default_rng(exchange.transport.rank).standard_normal((rows, size // rows), np.float32)
    without = _Pushes(exchange, None, gradient)
    try:
        using = _Pushes(exchange, codec, gradient)
    except MemoryError:
        without.end()
        raise
    times = [(without.push(), using.push()) for _ in range(1 + _TURNS)][1:]
    slowest = _slowest(exchange, np.median(times, axis=0))
    for pushes in (without, using):
        pushes.end()
    seconds = {"without": float(slowest[0]), "with": float(slowest[1])}
    chosen = codec if slowest[1] < (1 - _SAVED) * slowest[0] else None
    why = f"a push of {gradient.nbytes} bytes took {slowest[0]:.2g} s without the codec and {slowest[1]:.2g} s with it"
    return chosen, Choice(asked, "None" if chosen is None else chosen.settings(), why, seconds)


class _Pushes:
    """Pushes of one value, compressed or not, beside a store. Collective."""

    def __init__(self, exchange: Exchange, codec: Codec | None, gradient: Array) -> None:
        self.exchange = exchange.beside()
        self.exchange.enter(["trial"], [gradient])
        self._gradient: Arrays = [gradient]
        try:
            self.exchange.compress(codec)
            self._plan: Plan = self.exchange.plan(("trial",))
            # A push takes its memory before the ranks agree on it, and here they have.
            if codec is not None:
                self.exchange.make_residuals(self._plan)
            memory = exchange.transport.memory
            if not memory.on_host:
                there = private(exchange.transport)(gradient.nbytes).view(gradient.dtype)
                memory.copy((there,), (gradient.reshape(-1),))
                self._gradient = [(there,)]
        except MemoryError:
            self.end()
            raise

    def push(self) -> float:
        """Return how many seconds a push takes."""
        exchange, plan = self.exchange, self._plan
        memory = exchange.transport.memory
        memory.wait()  # a GPU has much to do yet when its calls return
        exchange.transport.agree(0)
        started = time.perf_counter()
        if exchange.compression is not None:
            exchange.check_compressible(plan, self._gradient)
        exchange.push(plan, self._gradient, exchange.steps(plan), None)
        memory.wait()
        return time.perf_counter() - started

    def end(self) -> None:
        """Give the memory back."""
        self.exchange.compress(None)
        self.exchange.delete(["trial"])
        self.exchange.close()


def _slowest(exchange: Exchange, mine: Array) -> Array:
    """Return the largest of the ranks' numbers."""
    transport = exchange.transport.control
    numbers = np.empty((transport.size, mine.size))
    numbers[transport.rank] = mine
    transport.all_gather(numbers.reshape(-1), [mine.size] * transport.size)
    slowest: Array = numbers.max(axis=0)
    return slowest
