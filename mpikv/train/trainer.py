"""A training step in one call, in the shape of Gluon's Trainer: sum the gradients over ranks, update the weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType
from typing import Any, TypeVar

from ..arrays.arrays import castable
from ..checkpoint.checkpoints import KeptState, load_states, save_states
from ..checkpoint.compatibility import describe_updater, is_dumpable, restore_updater
from ..cluster.tracebacks import hidden_from_pytest, hiding_frames
from ..config import updates_on_kvstore
from ..creation import check_name, create
from ..engine.keys import flatten
from ..errors import Closed, ConfigError, KeyAlreadyInitialized, StaleGradient, Unsupported, ValueMismatch, a_kind
from ..keep.state import ObjectState
from ..optimizers import Optimizer
from ..options import check_names, check_number, check_switch
from ..protocols import Array, Key
from ..store.plugins import KVStoreBase
from ..verbs.arguments import optimizer_of
from .array_location import locate_target
from .local_update import LocalUpdate, can_update, place_state, restart_master
from .loss_scaling import LossScaler
from .parameter import Parameter, first_names, name_parameters

__tracebackhide__ = hidden_from_pytest

Result = TypeVar("Result")


class Trainer:
    """Updates named weights on all ranks by the sum of their gradients.

    Every rank makes one with the same arguments, gives a gradient to each parameter, and calls :meth:`step`, or
    :meth:`allreduce_grads` and :meth:`update`. The constructor is local. :meth:`start`, or else the first step, makes
    the store and gives every rank the root's weights. After each step the weights are the same on all ranks, in the
    given arrays.

    Weights lie on the host or on a GPU; a gradient lies on its weight's device. The store may keep its values
    elsewhere, and copies arrays then. Work on arrays of a GPU is queued on the current stream.

    Args:
        params: a dict of names and arrays, nested if you like (its keys are joined with ``/``), or of
            :class:`Parameter`, with more options. The keys of the store are the names, in sorted order. An array or a
            Parameter with several names is one parameter. Arrays over exactly the same memory are one, too.
        optimizer: an object of :mod:`mpikv.optimizers`, or the name of one.
        optimizer_params: for a name, its arguments.
        kvstore: the name of a store, made and owned by the Trainer; or a store without other users (no other Trainer,
            no ``set_optimizer``). Trainers with ``update_on_kvstore=False`` and names of their own may share one.
        compression_params: the argument of the store's ``set_gradient_compression``.
        update_on_kvstore: True: the store updates each weight once, at its owner. False: the store only sums, and each
            rank updates all weights; the program may change gradients in between. None: the variable
            MXNET_UPDATE_ON_KVSTORE (0 or 1, 1 by default) decides, if the store can update.
        loss_scaler: as :class:`mpikv.LossScaler`.
        average: True: take the mean over ranks in place of the sum, for any number of ranks, also after a restart with
            another number. None: the optimizer's option ``average`` decides.
        resume: True: continue from the weights, the optimizer and the counts of ``kvstore``, a store after ``load``.
            ``optimizer`` must be of the same kind; the store's options replace its own.

    Raises:
        ConfigError: an option is unknown or bad, or there are no parameters.
        ValueMismatch: parameters share some, but not all, of their memory.
        TransportUnavailable, Unsupported: this process cannot make the named store.
        TypeError: ``params`` is no dict, a parameter is no writable array, or a name is no str.

    Example (one rank; on n ranks with the same gradients, each step is n times as large):
        >>> import mpikv, numpy as np
        >>> params = {"w": np.ones(2), "b": np.zeros(1)}
        >>> trainer = mpikv.Trainer(params, "sgd", {"learning_rate": 0.5})
        >>> trainer.set_grads({"w": np.full(2, 4.0), "b": np.ones(1)})  # sums over this rank's part of the batch
        >>> trainer.step(batch_size=4)
        >>> params
        {'w': array([0.5, 0.5]), 'b': array([-0.125])}
        >>> trainer.close()
    """

    @hiding_frames
    def __init__(
        self,
        params: Mapping[str, Any],
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
        *,
        loss_scaler: LossScaler | None = None,
        average: bool | None = None,
        resume: bool = False,
    ) -> None:
        # In sorted order: the keys of a call, and so the bits of a step, do not depend on the dict's order.
        self._named = name_parameters(params)
        self._own = first_names(self._named)
        self._average = average
        given = {} if average is None else {"average": average}
        self._optimizer: Optimizer = optimizer_of(optimizer, {**(optimizer_params or {}), **given})
        self.scale = self._optimizer.rescale_grad
        """Factor of all gradients besides the batch size; at first the optimizer's ``rescale_grad``."""
        if not isinstance(kvstore, (str, KVStoreBase)):
            raise TypeError(
                f"kvstore is a store or the name of one, not {a_kind(kvstore)}; "
                "for this rank alone: mpikv.create(comm=MPI.COMM_SELF)"
            )
        if isinstance(kvstore, str):
            check_name(kvstore)
        if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
            raise ConfigError(f"update_on_kvstore={update_on_kvstore!r} is neither True, False nor None")
        if check_switch("resume", resume) and (isinstance(kvstore, str) or update_on_kvstore is False):
            raise ConfigError(
                "resume=True continues from a store that was loaded and updates: kv.load(path), then "
                "Trainer(..., kvstore=kv, resume=True) without update_on_kvstore"
            )
        self._kvstore: Any = None if isinstance(kvstore, str) else kvstore
        self._makes = kvstore if isinstance(kvstore, str) else ""
        self._compression, self._wanted = compression_params, update_on_kvstore
        self._scaler, self._resume = loss_scaler, bool(resume)
        self._started = self._shown = False
        self._on_store = True
        self._updates = 0
        self._token = object()  # marks the optimizer as this Trainer's; a reference to self would keep it alive
        self._broken = ""
        # The rest serves local updates.
        self._local = LocalUpdate()
        self._agreed = ""

    # --- Facts

    @property
    def params(self) -> Mapping[str, Parameter]:
        """The parameters by all of their names. Read-only."""
        return MappingProxyType(self._named)

    @property
    def kvstore(self) -> Any:
        """The store, or None before one has been made."""
        return self._kvstore

    @property
    def update_on_kvstore(self) -> bool | None:
        """Whether the store updates the weights; None if :meth:`start` has to decide."""
        return self._on_store if self._started else self._wanted

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. If the store updates, it is the store's present one, marked as this Trainer's; ConfigError if
        that is no optimizer. Local.

        If the store updates, it is the store's: another one after :meth:`mpikv.KVStore.load`. Set its options at any
        time, on every rank alike. ``rescale_grad`` is the exception: set :attr:`scale` instead.

        Raises:
            ConfigError: the store has another updater by now, which is no optimizer.
        """
        if self._shown:
            found = self._kvstore.optimizer
            if found is None:
                raise ConfigError("the store was given an updater in place of the Trainer's; make a new Trainer")
            self._optimizer = found
            found._user = self._token
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update, without the factors of single parameters."""
        return self.optimizer.rate(self._updates + 1)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next update on. Local; call it on every rank. The next step compares it.

        Raises:
            ConfigError: a schedule gives the rate, or the argument is no rate.
        """
        self.optimizer.learning_rate = learning_rate

    def __repr__(self) -> str:
        where = {True: "on the store", False: "on each rank", None: "not started"}
        return f"<mpikv.Trainer {len(self._own)} parameters {self._optimizer!r} {where[self.update_on_kvstore]}>"

    # --- Gradients

    def set_grads(self, gradients: Mapping[str, Any]) -> None:
        """Give gradients to parameters, as ``trainer.params[name].grad = gradient`` does. Local.

        Args:
            gradients: a dict of names and arrays, in the form of ``params``. The gradients of several names of one
                parameter are added.

        Raises:
            ConfigError: a name is unknown.
            ValueMismatch, TypeError: as in :attr:`Parameter.grad`. Gradients before it in the dict are set.
        """
        names, arrays = flatten(gradients)
        given: dict[Parameter, list[Any]] = {}
        for name, array in zip(names, arrays, strict=True):
            given.setdefault(self._parameter(name), []).append(array)
        for parameter, several in given.items():
            if len(several) == 1:
                parameter.grad = several[0]
            else:
                parameter.set_sum(several)

    def zero_grad(self) -> None:
        """Discard all gradients; those of ``grad_req="add"`` start anew. Local."""
        for parameter in self._own.values():
            parameter.zero_grad()

    # --- Collective

    def start(self) -> None:
        """Once: make or set up the store; overwrite all ranks' weights by the root's, or a resumed store's. Collective.

        Without this call the first step does it, after each rank has computed gradients from its own weights.
        Collective. A second call has no effect. A store with an optimizer does not keep frozen parameters of integers,
        since no optimizer updates them: no checkpoint has them, and a load leaves them as they are.

        Raises:
            ConfigError: the store cannot update, but was asked to; it has an updater already; or, with ``resume``, it
                lacks such an optimizer, or some of the parameters.
            KeyAlreadyInitialized: the store has values under these names already.
            Unsupported: the store does not compress, or works asynchronously, or a dtype cannot be updated.
            RankMismatch: ranks have different parameters or settings.
        """
        if self._started:
            return
        # Not in the constructor, which is local: making a store is collective.
        if self._kvstore is None:
            self._kvstore = create(self._makes)
        store = self._kvstore
        self._on_store = self._attempt("start", self._decide_where)
        if self._compression is not None:
            store.set_gradient_compression(self._compression)
        scales = self._scaler is not None
        store.check_equal(f"update_on_kvstore={self._on_store}, loss_scaler={scales}, resume={self._resume}")
        stored = self._stored()
        if self._resume:
            # The argument of this Trainer counts, not the option of the job that saved.
            self._restore_average()
            store.pull(list(stored), out=_weights(stored))
            self._count_updates()
        else:
            # Frozen integers: every rank gets the root's, and no store updates them.
            if apart := {name: one for name, one in self._own.items() if name not in stored}:
                self._broadcast(apart)
                store.delete(list(apart))
            if self._on_store:
                store.set_optimizer(self._optimizer)
            self._broadcast(stored)
        if not self._on_store:
            store._only_sums(list(stored), self._token)
        # A store of another package may keep its optimizer to itself; then the Trainer shows its own.
        self._shown = self._on_store and store.optimizer is not None
        self._started = True
        if self._shown:
            self.optimizer._user = self._token

    def _broadcast(self, parameters: Mapping[str, Parameter]) -> None:
        """Overwrite these parameters by the root's weights, and let the store keep them. Collective."""
        weights = _weights(parameters)
        self._kvstore.broadcast(list(parameters), weights, out=weights)

    def _restore_average(self) -> None:
        """Set the optimizer's ``average`` to the Trainer's argument, if one was given. Local."""
        if self._average is not None:
            self.optimizer.average = self._average

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over ranks; update weights by the sum, times ``rescale_grad / batch_size``. Collective.

        With ``average=True`` the sum is divided by the number of ranks, otherwise never. If each gradient is a sum over
        its rank's part of a batch, pass the ``batch_size`` of all ranks together: the step then uses the mean. A
        program written for one rank passes the size of its own part, and its steps are ``size`` times as large: give it
        ``average=True``.

        Args:
            batch_size: a number above 0, the same on every rank. It may change between steps.
            ignore_stale_grad: leave out parameters without a new gradient since the last update instead of raising.
                They must be the same on every rank. If only some ranks have a gradient, the others contribute zeros.

        Raises:
            StaleGradient: a parameter has no new gradient since the last update; the other ranks raise PeerFailed.
            ConfigError: ``batch_size`` is no number above 0.
            ValueMismatch: a gradient does not fit its weight.
            RankMismatch: ranks have different batch sizes, settings, or parameters with a new gradient.
            Unsupported: in a block of :meth:`mpikv.KVStore.join`, unless the store updates and there is no
                ``loss_scaler``: ranks outside of the block would make no update.
            Closed: an update failed on this rank alone, and its weights differ since; make a new Trainer.
        """
        self.start()
        # The options of the step hold inside of the block only, also if the step raises.
        with ExitStack() as settings:
            ready = self._attempt("step", self._begin_update, settings, batch_size, ignore_stale_grad)
            if not self._on_store:
                steps = self._prepare_steps("step", ready)
                self._reduce("step", ready)
                self._update("step", ready, steps)
            elif not self._record_overflow("step", ready):
                self._kvstore.pushpull(list(ready), _gradients(ready), out=_weights(ready))
                self._updates += 1
        for parameter in ready.values():
            parameter.mark_used()

    def allreduce_grads(self) -> None:
        """Overwrite new gradients by sums over ranks: the first half of a step, :meth:`update` the second. Collective.

        Raises:
            Unsupported: the store updates the weights; make the Trainer with ``update_on_kvstore=False``.
            ConfigError: gradients are sums already.
            ValueMismatch: a gradient does not fit its weight, or is the gradient of another parameter as well.
            TypeError: a gradient is read-only.
            RankMismatch: ranks have new gradients of different parameters.
            Closed: as in :meth:`step`.

        With a ``loss_scaler``: if a gradient of one rank overflows, it becomes nan on all, and the update is skipped.
        """
        self.start()
        self._attempt("allreduce_grads", self._check_halves, "allreduce_grads")
        self._reduce("allreduce_grads", self._fresh())

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights by the sums of :meth:`allreduce_grads`. Arguments as in :meth:`step`. Collective.

        Collective: ranks compare their settings; then each rank updates by itself.

        Raises:
            ConfigError: a gradient was set after its sum; or the optimizer has changed and needs other state.
            Unsupported, StaleGradient, Closed: as in :meth:`allreduce_grads` and :meth:`step`.
            RankMismatch: settings of the optimizer differ between ranks. No weight has changed.
        """
        self.start()
        self._attempt("update", self._check_halves, "update")
        with ExitStack() as settings:
            ready = self._attempt("update", self._begin_update, settings, batch_size, ignore_stale_grad)
            self._attempt("update", _check_summed, ready)
            steps = self._prepare_steps("update", ready)
            # No sum follows here: without a comparison, nobody would notice other parameters or a failure of a rank.
            self._kvstore.check_equal(f"update {list(ready)} after {self._updates} updates")
            self._update("update", ready, steps)
        for parameter in ready.values():
            parameter.mark_used()

    def set_data(self, values: Mapping[str, Any]) -> None:
        """Overwrite weights and float32 masters by the root's ``values``, on all ranks and in the store. Collective.

        A weight written by hand loses the change in the next step, if the store updates or the optimizer
        keeps a float32 master.

        Args:
            values: a dict of names and arrays, the same names on every rank.

        Raises:
            ConfigError: a name is unknown.
            ValueMismatch: a shape or a dtype does not fit.
            Unsupported: a frozen parameter of integers, which the store does not keep.
        """
        self.start()
        given = self._attempt("set_data", self._name_values, values)
        targets = {name: self._own[name] for name in given}
        self._kvstore.broadcast(list(given), list(given.values()), out=_weights(targets))
        for name, parameter in targets.items():
            if name in self._local.states:
                restart_master(self._local.states[name], parameter)

    def save_states(self, fname: Any) -> None:
        """Write the optimizer's state, update counts, and settings if a file can hold them, to a file. Collective.

        Collective; the same path on every rank. The file has no weights: save them as arrays, or, if the store updates,
        save everything by :meth:`mpikv.KVStore.save`. Nor has it :attr:`scale`, the parameters' own factors, a
        ``loss_scaler``, or the residuals of compression. The format is that of
        :meth:`mpikv.KVStore.save_optimizer_states`. The whole file takes its place in one step. Any number of ranks can
        load it, with either ``update_on_kvstore``. With local updates all ranks have the same state, and rank 0 writes
        its own.

        Args:
            fname: a str, bytes or ``os.PathLike``.

        Raises:
            OSError: the file cannot be written; the other ranks raise ``PeerFailed``.
            CheckpointError: another store is being saved to the path.
            Unsupported: the store updates and cannot save, or no reader would accept the file.
            RankMismatch: ranks gave other paths, or have other settings.

        Example:
            >>> import mpikv, numpy as np, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "trainer.states")
            >>> options = {"learning_rate": 1.0, "momentum": 0.5}
            >>> weights = {"w": np.zeros(2)}
            >>> with mpikv.Trainer(weights, "sgd", options, update_on_kvstore=False) as trainer:
            ...     trainer.set_grads({"w": np.ones(2)})
            ...     trainer.step(1)
            ...     trainer.save_states(path)
            >>> with mpikv.Trainer(weights, "sgd", options) as trainer:
            ...     trainer.load_states(path)
            ...     trainer.set_grads({"w": np.zeros(2)})
            ...     trainer.step(1)
            ...     weights
            {'w': array([-1.5, -1.5])}
        """
        self.start()
        if self._on_store:
            dumps = self._attempt("save_states", lambda: is_dumpable(self.optimizer))
            self._kvstore.save_optimizer_states(fname, dumps)
        else:
            self._run_together("save_states", self._save(fname))

    def load_states(self, fname: Any) -> None:
        """Restore optimizer state, counts and settings from a :meth:`save_states` file; weights stay. Collective.

        With ``multi_precision`` the float32 masters belong to the state, and the next step starts from them.

        Collective; the same path on every rank. The Trainer must have the same parameters and an optimizer of the same
        kind. If the file has settings, :attr:`optimizer` becomes a new object with these; a Trainer's own ``average``
        stays. All ranks load the whole file, or none does.

        Raises:
            OSError: the file cannot be read; the other ranks raise ``PeerFailed``.
            CheckpointError: it is damaged, or holds the state of another optimizer.
            ValueMismatch: it has other parameters.
            RankMismatch: ranks see different files.

        Example: see :meth:`save_states`.
        """
        self.start()
        if self._on_store:
            self._kvstore.load_optimizer_states(fname)
            self._count_updates()
        else:
            self._run_together("load_states", self._load(fname))
        self._restore_average()

    def steps(self, total: int, *, path: Any = None, save_every: float = 600.0, **kept: Any) -> Iterator[int]:
        """Start; have the store keep the Trainer for restarts and ``path``; return its iterator over steps. Collective.

        It keeps the weights, the optimizer and its state, and the ``loss_scaler``; ``kept`` names other objects that a
        step changes, as :meth:`mpikv.KVStore.keep`. For several Trainers on a store, call their
        :meth:`start`, pass them to the store's ``keep``, and use its :meth:`mpikv.KVStore.steps`.

        Raises:
            Unsupported: the store has no ``steps``, as one without values.
            Exception: as :meth:`start`, and ``keep`` and ``steps`` of the store.

        Example:
            >>> import mpikv, numpy as np
            >>> params = {"w": np.ones(2)}
            >>> trainer = mpikv.Trainer(params, "sgd", {"learning_rate": 0.5})
            >>> for step in trainer.steps(3):
            ...     trainer.set_grads({"w": params["w"].copy()})
            ...     trainer.step(1)
            >>> params
            {'w': array([0.125, 0.125])}
        """
        self.start()
        store = self._kvstore
        if not hasattr(store, "steps"):
            raise Unsupported(
                f"the store {store.type!r} has no steps(); use 'dist_sync', or give the Trainer to a store's keep()"
            )
        store.keep(trainer=self, **kept)
        return iter(store.steps(total, path=path, save_every=save_every))

    def object_state(self) -> ObjectState:
        """Return the functions by which :meth:`mpikv.KVStore.keep` reads and restores this Trainer. Local."""
        return ObjectState(self._state, self._take_state, self._token, self._pull_trained)

    def _state(self) -> dict[str, Any]:
        """Return weights, counts and state that the store lacks: a host's own arrays, copies of a GPU's. Local.

        Raises:
            ConfigError: the Trainer has not started.
        """
        if not self._started:
            raise ConfigError("a kept Trainer has not started; call its start() before kv.steps")
        optimizer, states = self.optimizer, self._local.states
        kept = {name: self._local.state_on_host(optimizer, name, self._own[str(name)]) for name in states}
        weights = {name: one for name, one in self._own.items() if not self._is_pulled(name)}
        return {
            "updates": self._updates,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "optimizer": None if self._on_store else describe_updater(optimizer),
            # Also those that are not trained, as running means.
            "weights": {name: one.gpu.download(one.data) if one.gpu else one.data for name, one in weights.items()},
            "states": {name: (one.count, one.state) for name, one in kept.items()},
        }

    def _take_state(self, state: Mapping[str, Any]) -> None:
        """Overwrite counts, loss scale, and weights, optimizer options and state that no store has, by a result of
        :meth:`_state`. Local.
        """
        self._updates = state["updates"]
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        if state["optimizer"] is not None:
            self.optimizer.take_options(restore_updater(state["optimizer"], self.optimizer))
        for name, weight in state["weights"].items():
            own = self._own[name]
            was, now = (f"{array.dtype.name}{list(array.shape)}" for array in (weight, own.data))
            if weight.shape != own.data.shape or not castable(weight.dtype, own.data.dtype):
                raise ValueMismatch(f"the kept weight {name!r} was {was}, and is {now} now; give it as it was")
            own.memory.copy((own.data,), (own.gpu.upload(weight) if own.gpu else weight,))
        self._local.states = {
            name: place_state(KeptState(arrays, count), self._own[name])
            for name, (count, arrays) in state["states"].items()
        }

    def _is_pulled(self, name: str) -> bool:
        """Return whether the store updates this parameter, so that its weight is pulled, not kept here. Local."""
        return self._on_store and self._own[name].grad_req != "null"

    def _pull_trained(self) -> None:
        """Overwrite the weights that the store updates by its values. Collective."""
        if pulled := {name: one for name, one in self._own.items() if self._is_pulled(name)}:
            self._kvstore.pull(list(pulled), out=_weights(pulled))

    def close(self) -> None:
        """Close the store if the Trainer has made it. Collective, idempotent; ``with`` and the exit call it, too."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        """Return this Trainer; it need not have started."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Close the store if the Trainer has made it. Collective; after an error local, and it ends the store here."""
        if self._makes and self._kvstore is not None:
            self._kvstore.__exit__(*failure)

    # --- What can be wrong on this rank

    def _attempt(self, verb: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return a function's result; if it raises, raise here, and on others in their next call. Collective then."""
        try:
            return function(*arguments)
        except Exception as error:
            store: KVStoreBase = self._kvstore
            store.raise_on_all_ranks(error, verb)

    def _decide_where(self) -> bool:
        """Return whether the store updates; raise if it is unusable; ``resume`` adopts the store's optimizer. Local."""
        store = self._kvstore
        if not store._in_rounds:
            raise Unsupported(
                f"the store {store.type!r} updates with one rank's gradient, and the owner does not know the batch "
                "size; push gradients divided by the batch size, or use 'dist_sync'"
            )
        capable = store.is_capable(KVStoreBase.OPTIMIZER)
        if self._wanted and not capable:
            raise ConfigError(f"update_on_kvstore=True, and the store {store.type!r} has no optimizer; leave it None")
        on_store = capable and (updates_on_kvstore() if self._wanted is None else self._wanted)
        present, known = store.optimizer, self._own.keys() & set(store.keys())
        # An optimizer holds rescale_grad for one user: two Trainers would set it by turns.
        is_free = present is None or present._user in (None, self._token)
        if self._resume and not on_store:
            raise ConfigError(
                "resume=True continues from a store that updates, and this one does not: it has no optimizer, or "
                "MXNET_UPDATE_ON_KVSTORE=0 is set; use another store, or unset the variable"
            )
        if self._resume:
            self._adopt_optimizer(present if is_free else None, known)
        elif known:
            raise KeyAlreadyInitialized(
                f"the store has a value of {min(known)!r} already; give each Trainer a store, or names, of its own; "
                "to continue from a store that was loaded, pass resume=True"
            )
        elif not store._assigns and not (present is self._optimizer and is_free):
            raise ConfigError("the store has an updater already; give each Trainer a store of its own")
        return bool(on_store)

    def _adopt_optimizer(self, present: Any, known: Container[str]) -> None:
        """Adopt a loaded store's optimizer; ConfigError if of another kind, or if parameters are not stored. Local."""
        if type(present) is not type(self._optimizer):
            raise ConfigError(
                f"resume=True: the optimizer of the store, {present!r}, is not of the kind of {self._optimizer!r}, or "
                "another Trainer's; load the store first, and name its optimizer"
            )
        if missing := [name for name in self._stored() if name not in known]:
            raise ConfigError(f"resume=True: the store has only some of the parameters: {missing[0]!r} is missing")
        self._optimizer = present

    def _stored(self) -> dict[str, Parameter]:
        """Return by name the parameters that the store keeps, in a dict not to be changed: all, or with an optimizer
        there, without frozen ones of dtypes that it cannot update. May log a warning once. Local.

        Such dtypes are integers, as of counts of batches.
        """
        if not self._on_store:
            return self._own
        optimizer = self._optimizer
        return {name: one for name, one in self._own.items() if one.grad_req != "null" or can_update(optimizer, one)}

    def _count_updates(self) -> None:
        """Set the number of updates to the largest count of the store's optimizer. Local; waits for pending calls."""
        self._updates = max(map(self._kvstore._update_count, self._stored()), default=0)

    def _begin_update(self, settings: ExitStack, batch_size: float, ignore_stale_grad: bool) -> dict[str, Parameter]:
        """Set the optimizer's options until ``settings`` closes; return parameters with new gradients, or raise. Local.

        It may raise StaleGradient.
        """
        self._check_usable()
        optimizer = self.optimizer
        # Each time: the store's optimizer is another object after a load.
        optimizer.sums_over(self._kvstore.num_workers)
        scale = self.scale / check_number("batch_size", batch_size, "(0, inf)")
        scale /= 1.0 if self._scaler is None else self._scaler.loss_scale
        settings.enter_context(optimizer.having(rescale_grad=scale, **self._factors(optimizer)))
        fresh = self._fresh()
        # In all parameters, before any is used: a step changes all weights or none.
        stale = [name for name, one in self._own.items() if one.grad_req != "null" and name not in fresh]
        if stale and not ignore_stale_grad:
            several = f"s {stale[0]!r} and {len(stale) - 1} more were" if len(stale) > 1 else f" {stale[0]!r} was"
            raise StaleGradient(
                f"parameter{several} given no gradient since the last update; "
                "set parameter.grad before each step, or pass ignore_stale_grad=True to leave them as they are"
            )
        return fresh

    def _fresh(self) -> dict[str, Parameter]:
        """Return by first names the trained parameters with a new gradient. Local."""
        trained = ((name, one) for name, one in self._own.items() if one.grad_req != "null")
        return {name: one for name, one in trained if one.fresh and one.grad is not None}

    def _check_usable(self) -> None:
        """Raise Closed after a failed update here, and Unsupported in a block of join that allows no update. Local."""
        if self._broken:
            raise Closed(f"{self._broken}: this rank's weights may now differ from the others'; make a new Trainer")
        if self._kvstore._joining and (not self._on_store or self._scaler is not None):
            raise Unsupported(
                "in join() a Trainer needs a store that updates, and no loss_scaler: "
                "ranks that have left the block would not make the updates"
            )

    def _check_halves(self, verb: str) -> None:
        """Raise Unsupported if this Trainer cannot reduce and update in two calls; Closed after a failed one. Local."""
        self._check_usable()
        if self._on_store:
            raise Unsupported(f"the store updates the weights, in step(); for {verb}() pass update_on_kvstore=False")

    def _check_sums(self, parameters: Mapping[str, Parameter]) -> None:
        """Raise if gradients cannot be summed in place: the store updates, or one is a sum, shared, or unfit. Local."""
        if not self._kvstore._assigns:
            raise ConfigError("the store was given an updater, which would take the gradients; set it to None")
        first: dict[int, str] = {}
        for name, parameter in parameters.items():
            if parameter.summed:
                text = f"the gradient of {name!r} is the sum over ranks already; call update() or zero_grad() next"
                raise ConfigError(text)
            assert parameter.grad is not None
            if not castable(parameter.grad.dtype, parameter.data.dtype):
                raise ValueMismatch(
                    f"the gradient of {name!r} is {parameter.grad.dtype}, its weight {parameter.data.dtype}"
                )
            locate_target(parameter.grad)
            if (other := first.setdefault(id(parameter.grad), name)) != name:
                raise ValueMismatch(
                    f"parameters {other!r} and {name!r} share one array as their gradient; give one of them a copy"
                )

    def _factors(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's ``lr_mult`` and ``wd_mult`` with parameters' own factors, each only if there are any.
        Local.
        """
        options: dict[str, Any] = {}
        for option in ("lr_mult", "wd_mult"):
            own = {name: factor for name, one in self._own.items() if (factor := getattr(one, option)) is not None}
            if own:
                options[option] = {**getattr(optimizer, option), **own}
        return options

    def _name_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by the first names of their parameters; Unsupported if the store does not keep one. Local."""
        first = {parameter: name for name, parameter in self._own.items()}
        # In one order on all ranks, whatever the order of their dicts.
        pairs = sorted(zip(*flatten(values), strict=True), key=lambda pair: str(pair[0]))
        given = {first[self._parameter(name)]: array for name, array in pairs}
        if apart := sorted(given.keys() - self._stored().keys()):
            raise Unsupported(f"the store does not keep {apart[0]!r}; write into parameter.data, on every rank")
        return given

    def _parameter(self, name: Any) -> Parameter:
        """Return the parameter of a name; raise ConfigError for an unknown one. Local."""
        check_names("parameter", [name], self._named)
        return self._named[name]

    # --- The two halves, where the store only sums

    def _reduce(self, verb: str, ready: Mapping[str, Parameter]) -> None:
        """Replace gradients in place by sums over ranks, or by NaN if a scaler finds an overflow; mark as sums.
        Collective.
        """
        self._attempt(verb, self._check_sums, ready)
        if self._scaler is not None and self._any_overflow(verb, ready):
            # A codec would refuse inf and nan, on one rank only; and the sum would not be finite either.
            # NaN on all ranks: update() finds it on each, and leaves this step out.
            for parameter in ready.values():
                parameter.poison()
        else:
            gradients = _gradients(ready)
            self._kvstore.pushpull(list(ready), gradients, out=gradients)
        # After the call: gradients of a failed sum must not pass for sums.
        for parameter in ready.values():
            parameter.summed = True

    def _prepare_steps(self, verb: str, ready: Mapping[str, Parameter]) -> list[Any]:
        """Make or check states, compare changed settings, return the steps in order. Collective if settings changed."""
        # Different optimizers would drive the ranks apart for ever: so the ranks compare them after each change.
        steps = self._attempt(verb, self._local.prepare, self.optimizer, ready)
        text = self.optimizer.settings()
        if self.optimizer.opaque:
            text += f" steps {list(dict.fromkeys(steps))}"
        if text != self._agreed:
            self._kvstore.check_equal(f"{text} after {self._updates} updates")
            self._agreed = text
        return steps

    def _update(self, verb: str, ready: Mapping[str, Parameter], steps: Sequence[Any]) -> None:
        """Update weights here unless a gradient overflows; failure ends the Trainer's use. Collective with a scaler."""
        if self._record_overflow(verb, ready):
            return
        try:
            self._local.run(self.optimizer, ready, steps)
        except BaseException as error:
            # The other ranks do not wait for this one: they learn of the failure in their next call.
            self._broken = f"an earlier {verb} failed here alone ({error!r})"
            raise
        self._updates += 1

    def _record_overflow(self, verb: str, ready: Mapping[str, Parameter]) -> bool:
        """Return whether any rank's gradient has inf or NaN; adapt the scale. Collective with a scaler; else just
        False.
        """
        if self._scaler is None:
            return False
        overflow = self._any_overflow(verb, ready)
        self._scaler.record(overflow)
        return overflow

    def _any_overflow(self, verb: str, ready: Mapping[str, Parameter]) -> bool:
        """Return whether a gradient of any rank holds an inf or a nan. Collective."""
        assert self._scaler is not None
        return bool(self._kvstore.any_rank(self._attempt(verb, self._scaler.has_overflow, list(ready.values()))))

    # --- State that is saved here

    def _run_together(self, verb: str, parts: Generator[str]) -> None:
        """Run a generator on all ranks; all raise if a part fails on one, or yields other texts. Collective."""
        with closing(parts):
            while (text := self._attempt(verb, next, parts, "")) != "":
                self._kvstore.check_equal(text, verb)

    def _save(self, fname: Any) -> Generator[str]:
        """Write the parameters' state on rank 0, in parts; yield a text to compare before each. Collective."""
        self._check_usable()
        optimizer, weights = self.optimizer, self._trainable()
        kept = {name: self._local.state_on_host(optimizer, name, self._own[str(name)]) for name in weights}
        # All ranks have the same state: one of them writes it.
        yield from save_states(fname, optimizer, weights, kept, writes=self._kvstore.rank == 0)

    def _load(self, fname: Any) -> Generator[str]:
        """Read the parameters' state, in parts; yield a text to compare before each; adopt it last. Collective."""
        self._check_usable()
        optimizer, kept = yield from load_states(fname, self.optimizer, self._trainable())
        states = {name: place_state(one, self._own[str(name)]) for name, one in kept.items()}
        # The ranks agree once more here: no rank may adopt the state before all have it.
        yield "all of it was read, and there was room for it"
        # Compared anew at the next step: the loaded settings may differ from those that ranks have agreed on.
        optimizer._user, self._agreed = self._token, ""
        self._optimizer, self._local.states = optimizer, states
        self._updates = max((one.count for one in states.values()), default=0)

    def _trainable(self) -> dict[Key, Array]:
        """Return by name the weights that the optimizer can update; only these have state. Local."""
        return {name: one.data for name, one in self._own.items() if can_update(self.optimizer, one)}


def _weights(parameters: Mapping[str, Parameter]) -> list[Array]:
    """Return the parameters' weights, the arrays themselves. Local."""
    return [parameter.data for parameter in parameters.values()]


def _gradients(parameters: Mapping[str, Parameter]) -> list[Array | None]:
    """Return the parameters' gradients, the arrays themselves; None where there is none. Local."""
    return [parameter.grad for parameter in parameters.values()]


def _check_summed(parameters: Mapping[str, Parameter]) -> None:
    """Raise ConfigError if a gradient is not the sum over ranks. Local."""
    for name, parameter in parameters.items():
        if not parameter.summed:
            raise ConfigError(
                f"the gradient of {name!r} is not the sum over ranks; call allreduce_grads() first, "
                "and change it only in place before update(), as clip_global_norm and parameter.grad[...] *= 2 do"
            )
