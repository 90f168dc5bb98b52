"""The seam of codecs: what stands for a gradient on the wire."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from .arrays import Array

__all__ = ["LARGEST", "Codec", "ElementwiseCodec", "Gather", "Rounds", "Sum", "TensorCodec"]

LARGEST = 2.0**100
"""The largest magnitude of an element that may be compressed, about 1e30: a residual to which a hundred million of them
are added stays finite."""


class ElementwiseCodec(Protocol):
    """Packs a gradient of which any range can be packed by itself, so that each owner is sent its own elements alone.

    Gradients are flat, float32, finite, and not above :data:`mpikv.codecs.LARGEST`. A codec holds settings only, which
    do not change: several stores may use one, in several threads. It must not raise in :meth:`encode` or
    :meth:`decode_add`: the ranks have agreed by then and wait for each other, so an exception ends the store.
    """

    @property
    def elementwise(self) -> Literal[True]:
        """What tells it from a :class:`TensorCodec`."""

    @property
    def feedback(self) -> bool:
        """Whether :meth:`encode` needs a residual, which the store keeps: a float32 of every element, at first zero."""

    def settings(self) -> str:
        """Describe the codec so that two ranks' descriptions are equal exactly when their payloads are."""

    def nbytes(self, count: int) -> int:
        """Return how many bytes the payload of ``count`` elements takes, whatever their values."""

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Write all bytes of the payload (uint8, aligned to 8 bytes, of :meth:`nbytes`). ``gradient`` is not written.

        With ``feedback``, the gradient and the residual together are encoded, and what the payload does not say of them
        is left in ``residual``; without, it is None.
        """

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add what the payload says to ``total``, flat and float32, which has as many elements as were encoded."""


class Sum(NamedTuple):
    """What a :class:`TensorCodec` yields to be sent the sum of an array over ranks, with the same bits on each."""

    array: Array
    """Flat, float32, of the same size on each rank."""


class Gather(NamedTuple):
    """What a :class:`TensorCodec` yields to be sent every rank's bytes, in rank order.

    A rank that owns nothing of the value may be sent none of them.
    """

    payload: Array
    """Flat, uint8, of the same size on each rank."""


Rounds: TypeAlias = "Generator[Sum | Gather, Any, tuple[Array, Array]]"
"""An exchange of one value. It returns two flat float32 arrays: the sum over ranks, as far as it was sent any, and what
of it is this rank's."""


class TensorCodec(Protocol):
    """Packs the gradient of a whole value, in one or several exchanges. For the rest as a :class:`ElementwiseCodec`.

    Its arrays are the host's, where values lie on a GPU, too.
    """

    @property
    def elementwise(self) -> Literal[False]:
        """What tells it from a :class:`ElementwiseCodec`."""

    @property
    def feedback(self) -> bool:
        """As :attr:`ElementwiseCodec.feedback`."""

    def settings(self) -> str:
        """As :meth:`ElementwiseCodec.settings`."""

    def state(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return what is to be kept for a value of this shape between exchanges, the same on every rank."""

    def exchange(
        self, gradient: Array, shape: tuple[int, ...], state: Mapping[str, Array], residual: Array | None
    ) -> Rounds:
        """Yield what has to move, which depends on the shape alone, and change ``state`` in place, on each rank alike.

        ``gradient`` is flat and may be overwritten. ``residual`` as in :meth:`ElementwiseCodec.encode`.
        """


Codec: TypeAlias = "ElementwiseCodec | TensorCodec"
"""What stands for a gradient on the wire. Pure array code: it knows no ranks and no keys."""
