"""Checkpoints: a store, or the state of its optimizer, in one file that any number of ranks can load.

``header`` is the format, ``files`` the file system, ``extents`` where values lie in memory and in the file, ``chunks``
what is written, read and summed at once, ``ahead`` and ``saving`` a save that the ranks do not wait for,
``compatibility`` what a file is held against, ``residuals`` what compression adds, and ``checkpoints`` the calls. It
imports ``engine`` and ``cluster``. It changes no value before all ranks have found the file good.
"""

from __future__ import annotations

from .checkpoints import Checkpoints, KeptState, load_states, save_states
from .compatibility import is_dumpable
from .files import Source, inspect
from .header import Kind
from .saving import SaveWork

__all__ = [
    "Checkpoints",
    "KeptState",
    "Kind",
    "SaveWork",
    "Source",
    "inspect",
    "is_dumpable",
    "load_states",
    "save_states",
]
