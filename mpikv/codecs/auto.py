"""A codec that is used where it saves time."""

from __future__ import annotations

from dataclasses import dataclass

from ..typing import Codec
from .options import checked

__all__ = ["Auto"]


@dataclass(frozen=True)
class Auto:
    """What a store is given to choose by measurement: the codec, or no compression. It is no codec itself."""

    codec: Codec

    def __post_init__(self) -> None:
        checked(self.codec, "Auto takes a codec (see mpikv.typing)", "; mpikv.codecs.create() makes one of a name")

    def settings(self) -> str:
        """Describe what may be chosen."""
        return f"auto({self.codec.settings()})"
