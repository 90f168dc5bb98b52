"""The seam of codecs: how a gradient is packed for the wire."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from .arrays import Array

LARGEST = 2.0**100
"""The largest magnitude of an element that may be compressed, about 1e30. A residual stays finite even after a hundred
million of them."""


class ElementwiseCodec(Protocol):
    """Packs a gradient element by element, so the store can send each owner the range of its own elements.

    Gradients are flat, float32, finite, and not above :data:`mpikv.codecs.LARGEST`. A codec holds settings only, and
    they do not change: several stores may use one, in several threads. It must not raise in :meth:`encode` or
    :meth:`decode_add`: the ranks have agreed by then and wait for each other, so an exception ends the store.
    """

    @property
    def elementwise(self) -> Literal[True]:
        """True; a :class:`TensorCodec` says False."""

    @property
    def feedback(self) -> bool:
        """Whether :meth:`encode` needs a residual. The store keeps it: a float32 for every element, at first zero."""

    def settings(self) -> str:
        """Return class and settings as text for ranks to compare; of equal texts, equal payloads. Local."""

    def nbytes(self, count: int) -> int:
        """Return the size in bytes of the payload of ``count`` elements. It must not depend on their values."""

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Encode the gradient into all bytes of the payload, and with ``feedback`` change the residual in place.

        The payload is uint8, aligned to 8 bytes, and :meth:`nbytes` long. ``gradient`` is read only. With ``feedback``,
        encode the sum of gradient and residual, and leave the encoding error in ``residual``. Without, it is None.
        """

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add the decoded payload to ``total`` in place: flat, float32, with as many elements as were encoded."""


class Sum(NamedTuple):
    """A :class:`TensorCodec` yields it to receive the sum of an array over ranks, with the same bits on each."""

    array: Array
    """Flat, float32, of the same size on each rank."""


class Gather(NamedTuple):
    """A :class:`TensorCodec` yields it to receive every rank's bytes, in rank order.

    A rank that owns nothing of the value may receive none of them.
    """

    payload: Array
    """Flat, uint8, of the same size on each rank."""


Rounds: TypeAlias = "Generator[Sum | Gather, Any, tuple[Array, Array]]"
"""An exchange of one value. It returns two flat float32 arrays: the sum over ranks, as far as this rank received it,
and this rank's own term in that sum."""


class TensorCodec(Protocol):
    """Packs the gradient of a whole value, in one or several exchanges. Otherwise like an :class:`ElementwiseCodec`.

    It works on host arrays, even if values lie on a GPU.
    """

    @property
    def elementwise(self) -> Literal[False]:
        """False; an :class:`ElementwiseCodec` says True."""

    @property
    def feedback(self) -> bool:
        """Whether :meth:`exchange` needs a residual, which the store keeps; as :attr:`ElementwiseCodec.feedback`."""

    def settings(self) -> str:
        """Return class and settings as text for ranks to compare; of equal texts, equal payloads. Local."""

    def state(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return a dict of new arrays to keep for a value of this shape between exchanges, alike on every rank."""

    def exchange(
        self, gradient: Array, shape: tuple[int, ...], state: Mapping[str, Array], residual: Array | None
    ) -> Rounds:
        """Yield arrays for the caller to sum or gather over ranks, and receive the results; change ``state`` in place,
        on each rank alike, and the residual. Return the sum, and this rank's own term in it.

        Their number and sizes depend on the shape alone. ``gradient`` is flat and may be overwritten. ``residual`` as
        in :meth:`ElementwiseCodec.encode`.
        """


Codec: TypeAlias = "ElementwiseCodec | TensorCodec"
"""Packs gradients for the wire. Pure array code: it knows no ranks and no keys."""
