"""Errors of one rank's own work in a collective call: all ranks must learn of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import TransportError, is_settled

if TYPE_CHECKING:
    from ..store.kvstore import KVStore


@contextmanager
def raising_on_all(kv: KVStore, verb: str) -> Iterator[None]:
    """In a with block: raise its error on all ranks, on the others in their next call. Collective if it raises.

    An error of a store's call passes unchanged: all ranks know of it, or the store has ended.
    """
    try:
        yield
    except Exception as error:
        if is_settled(error) or isinstance(error, TransportError):
            raise
        kv.raise_on_all_ranks(error, verb)
