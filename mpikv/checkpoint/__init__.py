"""Checkpoints: a store, or the state of its optimizer, in one file that any number of ranks can load.

``checksums`` and ``contents`` are the format, ``settings`` what a file holds of an updater, ``files`` the file system,
and ``checkpoints`` the collective calls that put them together.
"""

from __future__ import annotations

from .checkpoints import Checkpoints
from .contents import Header, SavedKey
from .files import Source, inspect

__all__ = ["Checkpoints", "Header", "SavedKey", "Source", "inspect"]
