"""``set_updater``, ``set_optimizer`` and ``set_gradient_compression``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..cluster.calls import PreparedCall
from ..cluster.printing import log
from ..engine.compression import check_payloads
from ..engine.exchange import Exchange
from ..errors import Unsupported, brief
from ..optimizers.updaters import Assign, CallableUpdater
from ..protocols import Array, Codec, Updater
from .arguments import optimizer_of, updater_function
from .comparison import text_call


class SettingVerbs:
    """Prepares these calls of one store."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._memory = exchange, exchange.transport.memory
        self.codec: Codec | None = None
        """The codec as the user set it: a GPU's store may run another implementation of it."""

    def set_updater(self, updater: Callable[[Any, Array, Array], Any] | None) -> PreparedCall:
        """Return (call, run) to set an updater function, or remove it; raise if unfit. Local; run() is collective."""
        new = Assign() if updater is None else CallableUpdater(updater_function(updater))
        return self._change_updater("set_updater", new)

    def set_optimizer(self, optimizer: Any, arguments: Mapping[str, Any]) -> PreparedCall:
        """Return (call, run) to set an optimizer; compile its kernels now, or raise. Rank 0 logs multipliers of unknown
        keys. Local; run() is collective.
        """
        new, table = optimizer_of(optimizer, arguments), self._exchange.values.table
        unknown = [key for key in {**new.lr_mult, **new.wd_mult} if key not in table]
        if unknown and len(table) and self._exchange.transport.rank == 0:
            text = "set_optimizer: lr_mult or wd_mult has the unknown keys %s: no effect before their init"
            log(text, brief(unknown))
        return self._change_updater("set_optimizer", new)

    def _change_updater(self, verb: str, updater: Updater) -> PreparedCall:
        """Return (call, run) to adopt an updater; compile its kernels now, or raise. Local; run() is collective."""
        # For its errors: a placement or a dtype that the updater cannot serve is found before ranks agree.
        self._exchange.place_updater(updater)
        return text_call(verb, updater.settings()), lambda: self._exchange.adopt(updater)

    def set_compression(self, compression: Any) -> PreparedCall:
        """Return (call, run) to change to a new codec, or stop for None; raise if unfit. Local; run() is collective."""
        from .. import codecs

        meant = codecs.create(compression)
        settings = "None" if meant is None else meant.settings()
        working = None if meant is None else self._implement(meant)
        return text_call("set_gradient_compression", settings), lambda: self._compress(meant, working)

    def _implement(self, codec: Codec) -> Codec:
        """Return the codec, or its compiled or GPU version. On a GPU a tensor codec without one runs on the host, and
        that is logged. Unsupported for an elementwise one without, or if messages are too small for it. Local.
        """
        check_payloads(codec, self._exchange.transport)
        # It has the same payloads as the codec, so ranks compare the codec's own settings.
        found = self._exchange.values.planner.kernels.codec(codec)
        if self._memory.is_host or found is not codec:
            return found
        if codec.elementwise:
            raise Unsupported(
                f"compression {codec.settings()} has no kernel for GPUs; make it a TensorCodec, which works on the host"
            )
        log("compression %s runs on the host: pushes wait for the GPU and copy gradients and sums", codec.settings())
        return codec

    def _compress(self, meant: Codec | None, working: Codec | None) -> None:
        """Compress pushes by ``working`` or stop (None); drop residuals; show ``meant`` as the codec. Collective."""
        # First what may fail: the codec is shown from then on.
        self._exchange.compress(working)
        self.codec = meant
