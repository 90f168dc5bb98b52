"""Codecs pack gradients for the wire: pure array code without ranks and keys. It imports ``arrays``.

``feedback`` adds the encoding error of a gradient to the next one. Each format rounds, clips and packs here by itself,
NaN and infinities included; ``bf16`` needs no package.

======== ========================================= ============================================
name     options                                   bytes for n elements of a float32 value
======== ========================================= ============================================
2bit     threshold=0.5                             n / 4
1bit     threshold=0.5                             n / 8
fp16                                               2 n
bf16                                               2 n
topk     ratio=0.01                                8 for each element sent
lowrank  rank=4, seed=0                            4 * rank * (rows + columns)
======== ========================================= ============================================

Every name is a codec with :func:`ErrorFeedback`, unless it is given ``error_feedback=False``.

>>> create({"type": "2bit", "threshold": 0.25})
ErrorFeedback(TwoBit(threshold=0.25))

**A codec of your own** has the methods of :class:`mpikv.protocols.ElementwiseCodec` or
:class:`mpikv.protocols.TensorCodec`. Pass it as an object, or register it under a name.
:class:`mpikv.testing.ElementwiseCodecContract` and :class:`mpikv.testing.TensorCodecContract` test it::

    @dataclass(frozen=True)
    class Signs:
        scale: float = 0.1
        elementwise = True
        feedback = False

        def settings(self):
            return f"signs(scale={self.scale!r})"

        def nbytes(self, count):
            return -(-count // 8)

        def encode(self, gradient, payload, residual=None):
            payload[:] = np.packbits(gradient >= 0)

        def decode_add(self, payload, total):
            total += self.scale * (2.0 * np.unpackbits(payload, count=total.size) - 1)

    mpikv.codecs.register("signs", Signs)
    kv.set_gradient_compression({"type": "signs", "scale": 0.05})
    kv.set_gradient_compression(mpikv.codecs.ErrorFeedback(Signs(0.05)))     # the same
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, known_names
from ..options import check_names, check_switch
from ..protocols import Codec
from ..protocols.codec import LARGEST
from .bits import OneBit, TwoBit
from .casts import Bfloat16, Float16
from .feedback import ErrorFeedback
from .lowrank import LowRank
from .options import check_codec
from .topk import TopK

__all__ = [
    "LARGEST",
    "Bfloat16",
    "ErrorFeedback",
    "Float16",
    "LowRank",
    "OneBit",
    "TopK",
    "TwoBit",
    "create",
    "register",
]

_KINDS: dict[str, Callable[..., Codec]] = {
    "2bit": TwoBit,
    "1bit": OneBit,
    "fp16": Float16,
    "bf16": Bfloat16,
    "topk": TopK,
    "lowrank": LowRank,
}
_WANTED = "compression is a name, a dict with a 'type', a codec (see mpikv.protocols) or None"


def register(name: str, kind: Callable[..., Codec]) -> None:
    """Register a codec for :func:`create`: ``kind(**options)`` makes one; ConfigError if the name is taken. Local.

    Call it on every rank.
    """
    # The same kind again is no error: a notebook may run its cell twice.
    if _KINDS.get(name, kind) is not kind:
        raise ConfigError(f"a codec {name!r} exists already; choose another name")
    _KINDS[name] = kind


def create(compression: Any) -> Codec | None:
    """Return the codec of a name, of a dict with a ``type`` and options, or itself; None for None; or ConfigError.

    Raises:
        ConfigError: a name or an option is unknown, or an option has a bad value.
        TypeError: ``compression`` is of another type.

    >>> create("topk")
    ErrorFeedback(TopK(ratio=0.01))
    >>> create({"type": "2bits"})
    Traceback (most recent call last):
    mpikv.errors.ConfigError: unknown compression '2bits' (known: 1bit, 2bit, bf16, ...); did you mean '2bit'?
    """
    if compression is None:
        return None
    if isinstance(compression, str):
        compression = {"type": compression}
    if not isinstance(compression, Mapping):
        return check_codec(compression, _WANTED)
    if "type" not in compression:
        raise ConfigError(f"compression {dict(compression)!r} has no 'type' (known: {', '.join(sorted(_KINDS))})")
    return _create_named(**compression)


# ``type`` is MXNet's name in the dict that is unpacked here.
def _create_named(type: object, error_feedback: object = True, **options: Any) -> Codec:  # noqa: A002
    """Return the codec of a name with these options, in error feedback by default, unless it has its own; ConfigError
    for an unknown name or option.
    """
    # A list or a dict has no hash, and is an unknown name like any other.
    kind = _KINDS.get(type) if isinstance(type, str) else None
    if kind is None:
        raise ConfigError(known_names("compression", type, _KINDS))
    check_switch("error_feedback", error_feedback)
    known = [*inspect.signature(kind).parameters, "error_feedback"]
    check_names(f"option of compression {type!r}", options, known)
    codec = check_codec(kind(**options), _WANTED)
    # A registered codec may bring feedback of its own; two would subtract the error twice.
    return ErrorFeedback(codec) if error_feedback and not codec.feedback else codec
