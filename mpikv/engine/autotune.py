"""Whether a codec saves time on these ranks: measured on one message, over the transport of the store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ..arrays.arrays import add
from ..compute.kernels import NumpyKernels
from ..memory.host import HOST, private
from ..optimizers.updaters import CallableUpdater
from ..protocols import Codec, Placement, Transport
from .alltoallv import gather
from .arena import Block, Place
from .compression import check, compress
from .grid import Grid
from .keys import KeyTable
from .plan import Plan, Planner

__all__ = ["Choice", "choose", "probe"]

_MOST_BYTES = 64 << 20
# Of each kind, after one that finds memory and caches cold.
_TURNS = 9
# What a codec has to save, or the noise would choose.
_SAVED = 0.1


class Choice(NamedTuple):
    """What is used, and why."""

    asked: str
    """What was asked for: the settings of a codec, ``auto(...)`` or ``None``."""
    chosen: str
    """The settings of the codec that is used, or ``None``."""
    why: str = "asked for"
    seconds: Mapping[str, float] = {}
    """What :func:`probe` has measured. Empty where nothing was."""


def choose(transport: Transport, placement: Placement, codec: Codec, asked: str) -> Choice:
    """Return whether the codec saves time; the same on every rank. Collective.

    Raises:
        MemoryError: on every rank, if one has too little.
    """
    if transport.shared or transport.size == 1:
        return Choice(asked, "None", "the ranks share the memory of the values, so there are no messages")
    seconds = probe(transport, placement, codec)
    saves = seconds["with"] < (1 - _SAVED) * seconds["without"]
    why = f"a message took {seconds['without']:.2g} s without the codec and {seconds['with']:.2g} s with it"
    return Choice(asked, codec.settings() if saves else "None", why, seconds)


def probe(transport: Transport, placement: Placement, codec: Codec) -> dict[str, float]:
    """Return how many seconds the sum of a message takes on the slowest rank, ``with`` and ``without`` the codec.
    Collective.
    """
    plan, memory = _plan(transport, placement, codec), transport.memory
    (bucket,) = plan.buckets
    gradient = private(transport)(bucket.value.nbytes).view(bucket.value.dtype)
    memory.copy((gradient,), (np.random.default_rng(transport.rank).standard_normal(gradient.size, np.float32),))
    compression = compress(codec, transport, False)

    def send_plain() -> None:
        addends = bucket.reduce(gradient, bucket.total)
        if bucket.total.size and addends[0] is not bucket.total:
            add(addends, 0, bucket.total.size, bucket.total)

    def send_packed() -> None:
        check(codec, plan, [[gradient]], memory)
        compression.start(plan, [[gradient]])(bucket)

    times = [(_seconds(transport, send_plain), _seconds(transport, send_packed)) for _ in range(1 + _TURNS)]
    without, packed = gather(transport.control, np.median(times[1:], axis=0)).max(axis=0).tolist()
    return {"without": without, "with": packed}


def _plan(transport: Transport, placement: Placement, codec: Codec) -> Plan:
    """Return the plan of a push of one message, a square matrix, whose sum goes to memory of its own."""
    zeros, side = private(transport), math.isqrt(min(transport.limit, _MOST_BYTES) // 4)
    values = zeros(4 * side * side).view(np.float32)
    block = Block(
        0, values, Grid(values.size, values.size, (0,) + (values.size,) * transport.size), transport.memory, zeros
    )
    block.ensure_sums(zeros)
    if codec.feedback:
        block.ensure_residuals(1, zeros if codec.elementwise else HOST.zeros)
    entry = KeyTable().add("probe", (side, side), values.dtype, Place(block, 0, values.size))
    return Planner(transport, placement, CallableUpdater(print), NumpyKernels(), zeros(0)).plan([entry])


def _seconds(transport: Transport, run: Callable[[], None]) -> float:
    transport.memory.order.wait()  # a GPU has much to do yet when its calls return
    transport.agree(0)
    started = time.perf_counter()
    run()
    transport.memory.order.wait()
    return time.perf_counter() - started
