"""The common parts of codecs, and the check that an object is a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from ..protocols import Codec, ElementwiseCodec

# Elements per step: its temporary arrays stay in the cache. A multiple of 32: blocks are whole words of any payload.
BLOCK = 1 << 14

_METHODS: Mapping[Any, Sequence[str]] = {
    True: ("settings", "nbytes", "encode", "decode_add"),
    False: ("settings", "state", "exchange"),
}


class SamePayloads:
    """A part of an elementwise codec that does the work of another one by other means."""

    elementwise: ClassVar[Literal[True]] = True
    codec: ElementwiseCodec

    def settings(self) -> str:
        """Return the inner codec's own text, since both have the same payloads."""
        return self.codec.settings()

    def nbytes(self, count: int) -> int:
        """Return the payload's size in bytes for ``count`` elements, the inner codec's."""
        return self.codec.nbytes(count)

    def __repr__(self) -> str:
        return repr(self.codec)


def check_codec(codec: Any, wanted: str, advice: str = "") -> Codec:
    """Return the object itself; TypeError if it lacks an attribute or a method of a codec.

    ``wanted`` begins the error: the accepted values.

    >>> check_codec("2bit", "ErrorFeedback takes a codec")
    Traceback (most recent call last):
    TypeError: ErrorFeedback takes a codec, not '2bit'
    """
    methods = _METHODS.get(getattr(codec, "elementwise", None))
    missing = [name for name in methods or () if not callable(getattr(codec, name, None))]
    if isinstance(codec, type) or methods is None or missing or not isinstance(getattr(codec, "feedback", None), bool):
        lack = f" without {', '.join(missing)}" if missing else ""
        raise TypeError(f"{wanted}, not {codec!r}{lack}{advice}")
    # The checks above cover all that the type promises.
    return codec  # type: ignore[no-any-return]
