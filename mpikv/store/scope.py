"""Names of one's own in a store that several parts of a program use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NoReturn

from ..cluster.tracebacks import hidden_from_pytest
from ..errors import ConfigError, Unsupported, a_kind
from ..options import naming_arguments
from ..protocols import Key
from ..verbs.renewed import contained
from .plugins import Wrapped

__tracebackhide__ = hidden_from_pytest

# Lists of keys that are remembered with their names in the store.
_MOST_LISTS = 1024


@naming_arguments
class Scope(Wrapped):
    """The keys of a store that begin with a name, without that name: made by :meth:`mpikv.KVStore.scope`.

    It has the store's ``init``, ``push``, ``pull``, ``pushpull``, ``row_sparse_pull``, ``broadcast``, ``set``,
    ``delete``, ``buffer``, ``view``, ``version``, ``keys``, ``barrier``, ``check_equal``, ``any_rank``,
    ``raise_on_all_ranks`` and ``scope``, and its facts ``type``, ``rank``, ``size``, ``num_workers``, ``local_rank``
    and ``is_root``, with the same rules; the rest, as ``save``, ``join`` and ``close``, is the store's. Keys are
    strings. ``"w"`` in the scope ``generator`` is the store's key ``generator/w``, and errors and updaters call it by
    that name. The store has one updater for all scopes: set it there. So a :class:`mpikv.Trainer` on a scope updates
    the weights itself. Closing the store ends it.

    Example:
        >>> import mpikv, numpy as np
        >>> kv = mpikv.create()
        >>> one, other = kv.scope("generator"), kv.scope("critic")
        >>> one.init("w", np.zeros(2))
        >>> other.init("w", np.ones(1))
        >>> one.push("w", np.full(2, 3.0))
        >>> one.pull("w"), other.pull("w")
        (array([3., 3.]), array([1.]))
        >>> kv.keys()
        ('generator/w', 'critic/w')
    """

    def __init__(self, store: Any, name: Any) -> None:
        """Local. Use :meth:`mpikv.KVStore.scope`."""
        if not isinstance(name, str) or not name or name != name.strip("/"):
            raise ConfigError(f"the name of a scope is a str that does not begin or end with '/', not {name!r}")
        super().__init__(store)
        self._prefix = prefix = f"{name}/"
        # A training passes the same long list in each step.
        self._names = lru_cache(_MOST_LISTS)(lambda keys: [prefix + key for key in keys])

    def scope(self, name: str) -> Scope:
        """Return a scope inside this one. Local."""
        return Scope(self._store, f"{self._prefix}{Scope(self._store, name)._prefix}"[:-1])

    def _where(self, name: str) -> str:
        return f"the store of this scope has {name!r}"

    def __repr__(self) -> str:
        return f"<mpikv.Scope {self._prefix[:-1]!r} of {self._store!r}>"

    # --- Facts

    def is_capable(self, capability: str) -> bool:
        """Return what the store can do, but for ``optimizer``, which is set on the store. Local."""
        return bool(self._store.is_capable(capability)) and capability.lower() != self.OPTIMIZER

    def keys(self) -> tuple[Key, ...]:
        """Return the keys of this scope. Local."""
        begin = len(self._prefix)
        return tuple(key[begin:] for key in self._store if isinstance(key, str) and key.startswith(self._prefix))

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._prefix + key in self._store

    def __len__(self) -> int:
        return len(self.keys())

    def version(self, key: Key) -> int:
        """As :meth:`mpikv.KVStore.version`. Local."""
        return int(self._store.version(self._named(key)))

    def _only_sums(self, keys: Sequence[Key], owner: object) -> None:
        self._store._only_sums(self._named(list(keys)), owner)

    def view(self, key: Any) -> Any:
        """As :meth:`mpikv.KVStore.view`. Local."""
        return self._store.view(self._named(key))

    # --- Verbs

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """As :meth:`mpikv.KVStore.init`. Collective."""
        self._store.init(self._checked("init", key), value, overwrite)

    def push(self, key: Any, value: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.push`. Collective."""
        return self._store.push(self._checked("push", key), value, priority, wait=wait)

    def pull(
        self, key: Any, out: Any = None, priority: Any = 0, ignore_sparse: bool = True, *, wait: bool = True
    ) -> Any:
        """As :meth:`mpikv.KVStore.pull`. Collective."""
        result = self._store.pull(self._checked("pull", key), out, priority, ignore_sparse, wait=wait)
        return self._inner(key, result, wait)

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.pushpull`. Collective."""
        named = self._checked("pushpull", key)
        outs = self._checked("pushpull", out) if isinstance(out, Mapping) else out
        result = self._store.pushpull(named, value, outs, priority, wait=wait)
        return self._inner(key, result, wait)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: Any = 0, row_ids: Any = None) -> Any:
        """As :meth:`mpikv.KVStore.row_sparse_pull`. Collective."""
        return self._store.row_sparse_pull(self._checked("row_sparse_pull", key), out, priority, row_ids)

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """As :meth:`mpikv.KVStore.broadcast`. Collective."""
        named = self._checked("broadcast", key)
        outs = self._checked("broadcast", out) if isinstance(out, Mapping) else out
        return self._inner(key, self._store.broadcast(named, value, outs, priority))

    def set(self, key: Any, value: Any = None) -> None:
        """As :meth:`mpikv.KVStore.set`. Collective."""
        self._store.set(self._checked("set", key), value)

    def delete(self, key: Any) -> None:
        """As :meth:`mpikv.KVStore.delete`. Collective."""
        self._store.delete(self._checked("delete", key))

    def buffer(self, key: Any) -> Any:
        """As :meth:`mpikv.KVStore.buffer`. Collective."""
        return self._store.buffer(self._checked("buffer", key))

    def _cannot(self, verb: str) -> NoReturn:
        self.raise_on_all_ranks(
            Unsupported(
                f"a store has one updater and one codec for all of its scopes; call {verb} on the store, not on a scope"
            ),
            verb,
        )

    # --- Keys

    def _checked(self, verb: str, key: Any) -> Any:
        """Return keys under their names in the store; tell the other ranks of bad ones."""
        try:
            return self._named(key)
        except TypeError as error:
            self.raise_on_all_ranks(error, verb)

    def _named(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._prefix + key
        # The store joins nested keys by "/" itself, so a dict is put into another one, and no name is copied.
        if isinstance(key, Mapping):
            return {self._prefix[:-1]: key}
        if not isinstance(key, (list, tuple)):
            raise TypeError(f"a key of a scope is a str, not {a_kind(key)}: {key!r}")
        # Item by item, so that the error names the one that is no key.
        if not all(isinstance(each, str) for each in key):
            return contained(key, [self._named(each) for each in key])
        return contained(key, self._names(tuple(key)))

    def _inner(self, key: Any, result: Any, wait: bool = True) -> Any:
        """Return the result for the caller of a verb: for a dict the dict itself, not the one around it."""
        if not isinstance(key, Mapping):
            return result
        inner = itemgetter(self._prefix[:-1])
        if wait:
            return inner(result)
        result.inner = inner
        return result
