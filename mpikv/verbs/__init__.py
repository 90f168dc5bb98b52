"""Checks the arguments of a call, describes it for the other ranks, and prepares its run.

A verb finds all that is wrong with this rank's arguments, and returns a :class:`~mpikv.cluster.calls.PreparedCall`:
the description that ranks compare, and the function to run once they agree. No value moves or changes before that. The
store lets calls in and handles failures; verbs know neither.
"""

from __future__ import annotations

from ..cluster.agreement import Agreement
from ..engine.exchange import Exchange
from ..memory.device import DeviceMemory
from ..sparse.rows import Rows
from .comparison import Comparison
from .operands import GpuOperands, Operands
from .push_pull import PushPull
from .rows import RowVerbs
from .settings import SettingVerbs
from .values import ValueVerbs


class Verbs:
    """The verbs of one store, by their families."""

    def __init__(self, exchange: Exchange, rows: Rows, agreement: Agreement) -> None:
        self.exchange, self.agreement = exchange, agreement
        memory = exchange.transport.memory
        self.operands = Operands(exchange, rows)
        if isinstance(memory, DeviceMemory):
            self.operands = GpuOperands(exchange, rows, memory)
        self.comparison = Comparison(exchange, agreement)
        parts = exchange, self.operands, self.comparison
        self.values = ValueVerbs(*parts, rows)
        self.rows = RowVerbs(*parts, rows)
        self.push_pull = PushPull(*parts, self.rows)
        self.settings = SettingVerbs(exchange)

    def give_up(self) -> None:
        """Discard a prepared call that will not run: its packed message, and the arrays noted to be filled. Local."""
        # It lies in the send buffer, and the next push would send it.
        self.exchange.pipeline.prefetched = None
        self.exchange.transport.memory.order.cancel()
