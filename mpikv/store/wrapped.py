"""The base of stores made of another store: they share its facts, and its calls without values."""

from __future__ import annotations

from typing import Any, NoReturn

from ..cluster.tracebacks import hiding_frames
from ..errors import a_kind
from .plugins import KVStoreBase


class Wrapped(KVStoreBase):
    """A store that is made of a :class:`mpikv.KVStore`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> NoReturn:
        known = not name.startswith("_") and hasattr(type(self._store), name)
        where = f"; {self._where(name)}" if known else ""
        raise AttributeError(f"{a_kind(self)} has no {name!r}{where}", name=name, obj=self)

    def _where(self, name: str) -> str:
        """Say where something is that this store has not, and the one that it is made of has."""
        return f"the store that mpikv.create('dist_sync') makes has {name!r}"

    @property
    def type(self) -> str:
        """The name that was given to :func:`mpikv.create`, in lower case."""
        return str(self._store.type)

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        return int(self._store.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self._store.size)

    @property
    def num_workers(self) -> int:
        """The number of ranks, under MXNet's name."""
        return int(self._store.size)

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host, from 0."""
        return int(self._store.local_rank)

    @property
    def is_root(self) -> bool:
        """Whether this rank's values count where the root's do."""
        return bool(self._store.is_root)

    @property
    def _assigns(self) -> bool:
        """Whether a push replaces the value by the sum, as without an updater. Local."""
        return bool(self._store._assigns)

    @property
    def _in_rounds(self) -> bool:
        """Whether an update is made by the sum over ranks. Local."""
        return bool(self._store._in_rounds)

    @property
    def _joining(self) -> bool:
        """Whether the store is in a block of ``join``. Local."""
        return bool(self._store._joining)

    def barrier(self) -> None:
        """As :meth:`mpikv.KVStore.barrier`. Collective."""
        self._store.barrier()

    _barrier = barrier

    def check_equal(self, text: str, verb: str = "check_equal") -> None:
        """As :meth:`mpikv.KVStore.check_equal`. Collective."""
        self._store.check_equal(text, verb)

    def any_rank(self, flag: bool) -> bool:
        """As :meth:`mpikv.KVStore.any_rank`. Collective."""
        return bool(self._store.any_rank(flag))

    @hiding_frames
    def raise_on_all_ranks(self, error: Exception, verb: str = "raise_on_all_ranks") -> NoReturn:
        """As :meth:`mpikv.KVStore.raise_on_all_ranks`. Collective."""
        self._store.raise_on_all_ranks(error, verb)
        raise error  # never reached: the call has raised it
