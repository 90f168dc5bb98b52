"""What a store may be given around a codec, which is no codec itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import Unsupported
from ..protocols import Codec
from .casts import Bfloat16, Float16
from .options import checked

__all__ = ["Auto", "CompressedPull"]


@dataclass(frozen=True)
class Auto:
    """What a store is given to choose by measurement: the codec, or no compression. It is no codec itself."""

    codec: Codec

    def __post_init__(self) -> None:
        checked(self.codec, "Auto takes a codec (see mpikv.protocols)", "; mpikv.codecs.create() makes one of a name")

    def settings(self) -> str:
        """Describe what may be chosen."""
        return f"auto({self.codec.settings()})"


@dataclass(frozen=True)
class CompressedPull:
    """What a store is given to pack what it pulls as well as what it pushes. It is no codec itself.

    Raises:
        Unsupported: the codec is not ``fp16`` or ``bf16``.

    Example:
        >>> from mpikv import codecs
        >>> codecs.create({"type": "bf16", "compress_pull": True})
        CompressedPull(codec=ErrorFeedback(Bfloat16()))
    """

    codec: Codec

    def __post_init__(self) -> None:
        checked(self.codec, "CompressedPull takes a codec (see mpikv.protocols)")
        if not isinstance(_innermost(self.codec), (Float16, Bfloat16)):
            raise Unsupported(
                f"compress_pull is for fp16 and bf16, not for {self.codec.settings()}: its threshold or number of "
                "elements fits gradients, not changes of values, and pulled values would be far from the owners'; "
                "leave it out, or choose fp16 or bf16"
            )

    @property
    def cast(self) -> Float16 | Bfloat16:
        """What packs without feedback."""
        cast: Float16 | Bfloat16 = _innermost(self.codec)
        return cast

    def settings(self) -> str:
        """Describe the codec, and that it is for both directions."""
        return f"{self.codec.settings()} in both directions"


def _innermost(codec: Any) -> Any:
    while (inside := getattr(codec, "codec", None)) is not None:
        codec = inside
    return codec
