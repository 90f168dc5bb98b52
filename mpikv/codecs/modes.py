"""What a store may be given around a codec, which is no codec itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocols import Codec
from .options import checked

__all__ = ["Auto"]


@dataclass(frozen=True)
class Auto:
    """What a store is given to choose by measurement: the codec, or no compression. It is no codec itself."""

    codec: Codec

    def __post_init__(self) -> None:
        checked(self.codec, "Auto takes a codec (see mpikv.protocols)", "; mpikv.codecs.create() makes one of a name")

    def settings(self) -> str:
        """Describe what may be chosen."""
        return f"auto({self.codec.settings()})"
