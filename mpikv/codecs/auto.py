"""A codec that is used where it saves time."""

from __future__ import annotations

from dataclasses import dataclass

from ..typing import Codec

__all__ = ["Auto"]


@dataclass(frozen=True)
class Auto:
    """What a store is given to choose by measurement: the codec, or no compression. It is no codec itself."""

    codec: Codec

    def settings(self) -> str:
        """Describe what may be chosen."""
        return f"auto({self.codec.settings()})"
