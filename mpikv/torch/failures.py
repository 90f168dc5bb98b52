"""Errors of what a rank does by itself in a collective call, of which the others have to be told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import TransportError, is_settled
from ..store.kvstore import KVStore

__all__ = ["raising_on_all"]


@contextmanager
def raising_on_all(kv: KVStore, verb: str) -> Iterator[None]:
    """Raise an error of the block on every rank: on those without it, in their next call. Collective where it raises.

    What a call of the store has raised is raised as it is: all ranks know of it, or the store has ended.
    """
    try:
        yield
    except Exception as error:
        if is_settled(error) or isinstance(error, TransportError):
            raise
        kv.raise_on_all_ranks(error, verb)
