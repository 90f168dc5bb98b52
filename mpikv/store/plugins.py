"""The surface of every store, and the registry where :func:`mpikv.create` finds stores of other packages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

from ..cluster.process_group import ProcessGroup
from ..errors import ConfigError, Unsupported
from ..protocols import Key

GROUP = "mpikv.stores"
"""The group of entry points in which an installed package names its stores."""

_Kind = TypeVar("_Kind", bound="type[KVStoreBase]")
_Store = TypeVar("_Store", bound="KVStoreBase")
# In the class, ``type`` is its property.
_Registry: TypeAlias = "dict[str, type[KVStoreBase]]"


class KVStoreBase:
    """The calls of a store, under MXNet's names. Subclass it for a store of your own.

    A :class:`mpikv.Trainer` needs :meth:`broadcast` and :meth:`pushpull`; a store that :meth:`is_capable` of
    ``optimizer`` needs :meth:`set_optimizer`, too. It passes lists of keys and of arrays. A method that a subclass
    leaves out raises ``Unsupported``.

    Example:
        >>> import mpikv, numpy as np
        >>> @mpikv.KVStoreBase.register
        ... class Alone(mpikv.KVStoreBase):
        ...     def broadcast(self, key, value=None, out=None, priority=0):
        ...         for array, target in zip(value, out):
        ...             np.copyto(target, array)
        ...     pushpull = broadcast  # the sum over one rank
        >>> weights = {"w": np.ones(2)}
        >>> trainer = mpikv.Trainer(weights, "sgd", {"learning_rate": 0.5}, kvstore="alone")
        >>> trainer.set_grads({"w": np.ones(2)})
        >>> trainer.step(1)
        >>> weights
        {'w': array([0.5, 0.5])}
    """

    OPTIMIZER = "optimizer"
    """The capability of running an optimizer where values are stored."""
    kv_registry: ClassVar[_Registry] = {}
    """The registered classes by their names in lower case."""
    _in_rounds = True
    """Whether an update is made by the sum over ranks."""

    @staticmethod
    def register(kind: _Kind) -> _Kind:
        """Register a class for :func:`mpikv.create` by its name in lower case, in place of an earlier one, with a
        warning. Return the class. Local. A decorator.

        :func:`mpikv.create` calls the class with the arguments that it was given itself. A name that is known is given
        to the new class, with a warning. An installed package need not be imported: the entry point
        ``[project.entry-points."mpikv.stores"]`` of that name is looked up.
        """
        name = kind.__name__.lower()
        # A warning, no error: a notebook may run the cell of a class again.
        if KVStoreBase.kv_registry.get(name, kind) is not kind:
            warnings.warn(f"the store {name!r} is now {kind!r} and was {KVStoreBase.kv_registry[name]!r}", stacklevel=2)
        KVStoreBase.kv_registry[name] = kind
        return kind

    @property
    def type(self) -> str:
        """The name of the store: its class's in lower case, unless a subclass says another."""
        return type(self).__name__.lower()

    @property
    def rank(self) -> int:
        """This process's number among the ranks; 0 unless a subclass says another."""
        return 0

    @property
    def num_workers(self) -> int:
        """The number of ranks; 1 unless a subclass says another."""
        return 1

    @property
    def _joining(self) -> bool:
        """False; an override says whether the store is in a block of ``join``. Local."""
        return False

    @property
    def _assigns(self) -> bool:
        """True; an override says whether a push replaces the value by the sum, as without an updater. Local."""
        return True

    def _update_count(self, key: Key) -> int:
        """Return 0; an override returns how many updates the present updater has made to a value. Local."""
        return 0

    def _only_sums(self, keys: Sequence[Key], owner: object) -> None:
        """Do nothing; an override notes that the keys hold a step's sums, and that ``owner`` has the weights. Local."""

    @property
    def optimizer(self) -> Any:
        """The optimizer that was set; None unless a subclass has one. Local."""
        return None

    def keys(self) -> Sequence[Key]:
        """Return the keys that have a stored value; none unless a subclass stores some. Local."""
        return ()

    def __bool__(self) -> bool:
        """True, also of a store without keys, whose length is 0."""
        return True

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability, as :attr:`OPTIMIZER`; False unless overridden. Local."""
        return False

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Fill ``out``, else ``value``, with the root's value; Unsupported unless overridden. Collective."""
        self._cannot("broadcast")

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Fill ``out``, else ``value``, with the sum or updated value; Unsupported unless overridden. Collective."""
        self._cannot("pushpull")

    def set_optimizer(self, optimizer: Any, **arguments: Any) -> None:
        """Set the optimizer that runs where values are stored; Unsupported unless overridden. Collective."""
        self._cannot("set_optimizer")

    def delete(self, key: Any) -> None:
        """Remove keys and their values; Unsupported unless overridden. Collective.

        A Trainer with frozen integers calls it.
        """
        self._cannot("delete")

    def set_gradient_compression(self, compression: Any) -> None:
        """Set the codec that compresses pushed gradients; Unsupported unless overridden. Collective."""
        self._cannot("set_gradient_compression")

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        """Write the state of the optimizer to a file; Unsupported unless overridden. Collective."""
        self._cannot("save_optimizer_states")

    def load_optimizer_states(self, fname: Any) -> None:
        """Restore the state from a :meth:`save_optimizer_states` file; Unsupported unless overridden. Collective."""
        self._cannot("load_optimizer_states")

    def raise_on_all_ranks(self, error: Exception, verb: str = "raise_on_all_ranks") -> NoReturn:
        """Raise the error here; an override also has the other ranks' next call raise PeerFailed. Collective."""
        raise error

    def check_equal(self, text: str, verb: str = "check_equal") -> None:
        """Do nothing; an override compares the text with the other ranks', and raises if they differ. Collective."""

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank passed True; Unsupported for several ranks unless overridden. Collective."""
        if self.num_workers > 1:
            self._cannot("any_rank")
        return flag

    def close(self) -> None:
        """End the store; do nothing unless overridden. Collective."""

    def __enter__(self: _Store) -> _Store:
        return self

    def __exit__(self, *failure: object) -> None:
        """Close the store, unless an error ends the block."""
        if failure[0] is None:
            self.close()

    def _cannot(self, verb: str) -> NoReturn:
        """Raise Unsupported: the store has no such call. Local."""
        raise Unsupported(f"{verb}: the store {self.type!r} has no such call")


class RankedStore(KVStoreBase):
    """The facts of a store of a group of ranks."""

    _group: ProcessGroup
    _type: str
    _root: int

    @property
    def rank(self) -> int:
        """This process's number among the ranks of the store, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size

    num_workers = size
    """The number of ranks, under MXNet's name."""

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host, from 0."""
        return self._group.local_rank

    @property
    def type(self) -> str:
        """The name that was given to :func:`mpikv.create`, in lower case."""
        return self._type

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root: its values count at ``init``, ``set`` and ``broadcast``."""
        return self._group.rank == self._root


def plugin(name: str) -> type[KVStoreBase] | None:
    """Return the store's class of a lower-case name: a registered one, or an installed package's, imported and
    registered now; else None. ConfigError if that fails. Local.
    """
    # Registered classes first: a program may replace the store of an installed package.
    if name not in KVStoreBase.kv_registry:
        from importlib.metadata import entry_points  # takes longer to import than all of this package

        for entry in entry_points(group=GROUP):
            if entry.name.lower() == name:
                # Kept: finding the packages takes longer than making a store.
                KVStoreBase.kv_registry[name] = _load(entry)
    return KVStoreBase.kv_registry.get(name)


def _load(entry: Any) -> type[KVStoreBase]:
    """Import and return the store's class of an entry point; ConfigError if that fails, or it is no KVStoreBase."""
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(f"the store {entry.name!r}, which is {entry.value!r}, cannot be loaded: {error!r}") from error
    if not isinstance(kind, type) or not issubclass(kind, KVStoreBase):
        raise ConfigError(f"the store {entry.name!r}, which is {entry.value!r}, is no subclass of mpikv.KVStoreBase")
    return kind
