"""Checkpoints: a store, or the state of its optimizer, in one file that any number of ranks can load.

``checksums`` and ``contents`` are the format, ``settings`` what a file holds of an updater, ``files`` the file system,
``pieces`` what is written and read at once, ``fits`` what a file is held against, and ``checkpoints`` the collective
calls of a store that put them together; ``states`` does so for state that every rank has all of.
"""

from __future__ import annotations

from .checkpoints import Checkpoints
from .contents import Header, SavedKey
from .files import Source, inspect
from .states import KeptState, is_dumpable, load_states, save_states

__all__ = [
    "Checkpoints",
    "Header",
    "KeptState",
    "SavedKey",
    "Source",
    "inspect",
    "is_dumpable",
    "load_states",
    "save_states",
]
