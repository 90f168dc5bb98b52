"""Error feedback: the encoding error of one push is added to the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np

from ..errors import ConfigError
from ..protocols import Array, Codec, ElementwiseCodec, Rounds, TensorCodec
from .options import SamePayloads, check_codec

_Inner = TypeVar("_Inner", bound=Codec)


# Named like a class: a program writes it where it may write a codec, and codecs are classes.
def ErrorFeedback(codec: Codec) -> Codec:  # noqa: N802
    """Return a new codec around this one: ``residual += gradient``, encode the residual, ``residual -= decoded``.
    ConfigError for a codec that has feedback.

    Nothing is lost, only late. Proofs of convergence for biased codecs need it (Karimireddy et al., "Error Feedback
    Fixes SignSGD and other Gradient Compression Schemes", 2019). It wraps any codec without feedback and uses only its
    contract.

    Raises:
        ConfigError: the codec has feedback.
        TypeError: it is no codec.

    Example:
        >>> import numpy as np
        >>> from mpikv.codecs import TwoBit
        >>> codec = ErrorFeedback(TwoBit(0.5))
        >>> gradient, residual = np.array([0.7, -0.6, 0.2, 0.5], np.float32), np.zeros(4, np.float32)
        >>> payload, total = np.empty(4, np.uint8), np.zeros(4, np.float32)
        >>> for _ in range(2):
        ...     codec.encode(gradient, payload, residual)
        ...     codec.decode_add(payload, total)
        >>> total, residual.round(1)
        (array([ 1., -1.,  0.,  1.], dtype=float32), array([ 0.4, -0.2,  0.4,  0. ], dtype=float32))
    """
    advice = "; mpikv.codecs.create() makes one of a name"
    check_codec(codec, "ErrorFeedback takes a codec (see mpikv.protocols)", advice)
    if codec.feedback:
        raise ConfigError(f"{codec.settings()} has error feedback already; pass the codec inside")
    return ElementwiseFeedback(codec) if codec.elementwise else ValueFeedback(codec)


class _Feedback(Generic[_Inner]):
    """The common part of codecs that add error feedback to another one."""

    feedback: ClassVar[Literal[True]] = True

    def __init__(self, codec: _Inner) -> None:
        """Keep the codec, unchecked."""
        self.codec = codec

    def settings(self) -> str:
        """Return the inner codec's settings and "with error feedback", as a text."""
        return f"{self.codec.settings()} with error feedback"

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"


class ElementwiseFeedback(_Feedback[ElementwiseCodec], SamePayloads):
    """An :class:`~mpikv.protocols.ElementwiseCodec` that adds error feedback to another one."""

    def __init__(self, codec: ElementwiseCodec) -> None:
        """Keep the codec, unchecked. Each thread allocates memory for decoded values at its first :meth:`encode`."""
        super().__init__(codec)
        # Of each thread, so a codec can work in several stores at once.
        self._own = threading.local()

    def encode(self, gradient: Array, payload: Array, residual: Array | None) -> None:
        """Add the gradient to the residual, in place; write its encoding to the payload; leave the encoding error in
        the residual.
        """
        assert residual is not None
        np.add(residual, gradient, out=residual)
        self.codec.encode(residual, payload, None)
        # What other ranks decode, not what was meant: rounding is part of the error that is kept.
        np.subtract(residual, self._read(payload, residual.size), out=residual)

    def decode_add(self, payload: Array, total: Array) -> None:
        """Add the decoded payload to ``total`` in place, as the inner codec does."""
        self.codec.decode_add(payload, total)

    def _read(self, payload: Array, count: int) -> Array:
        """Return the values that other ranks will decode, in memory that this thread's next call overwrites. Local."""
        # Kept at the size of the longest range: later pushes allocate nothing.
        kept: Array | None = getattr(self._own, "decoded", None)
        if kept is None or count > kept.size:
            kept = self._own.decoded = np.empty(count, np.float32)
        decoded = kept[:count]
        # The codec only adds; the last call's values are still here.
        decoded.fill(0)
        self.codec.decode_add(payload, decoded)
        return decoded


class ValueFeedback(_Feedback[TensorCodec]):
    """A :class:`~mpikv.protocols.TensorCodec` that adds error feedback to another one."""

    elementwise: ClassVar[Literal[False]] = False

    def state(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return the arrays that the inner codec keeps for a value of this shape."""
        return self.codec.state(shape)

    def exchange(
        self, gradient: Array, shape: tuple[int, ...], state: Mapping[str, Array], residual: Array | None
    ) -> Rounds:
        """Yield the exchanges of residual plus gradient; leave the encoding error in the residual; return the sum, and
        this rank's own term in it.

        The residual keeps the part that this rank's share of the sum lacks.
        """
        assert residual is not None
        np.add(residual, gradient, out=residual)
        # A copy: the codec may overwrite its gradient, and the residual is still needed.
        total, own = yield from self.codec.exchange(residual.copy(), shape, state, None)
        np.subtract(residual, own, out=residual)
        return total, own
