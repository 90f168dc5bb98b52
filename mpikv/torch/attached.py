"""``attach``, and the object it returns: a model with gradients averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch

from ..codecs import create as create_codec
from ..creation import create
from ..errors import ConfigError, Unsupported, a_kind
from ..keep.state import ObjectState
from ..store.kvstore import KVStore, open_stores
from .backward import BackwardSync
from .calls import mean_loss, raising_on_all
from .checks import OWNER, check_model, check_options, check_parameter
from .comparison import describe_tensors, settings_of
from .generators import RandomState
from .model_buffers import ModelBuffers
from .sharded import ShardedStep
from .tensors import tensors_of
from .weights import Weights, copy_from, fill_from_root


def attach(
    model: Any,
    optimizer: Any = None,
    *,
    kv: KVStore | None = None,
    update: Literal["local", "store"] = "local",
    compression: Any = None,
    bucket_bytes: int = 25 << 20,
    buffers: Literal["root", "each"] = "root",
) -> Attached:
    """Give all ranks the root's weights, and make every ``backward()`` average the gradients over ranks. Collective.

    Collective: call it after making model and optimizer, and before the first step. Parameters and buffers of every
    rank become the root's. From then on the ranks call ``backward()`` and ``optimizer.step()`` equally often. When
    ``backward()`` returns, each ``parameter.grad`` is the mean over ranks. With equally many examples on every rank,
    clipping, scaling and the step see the gradients of one process with the whole batch. The forward pass is
    unchanged: a rank may evaluate by itself.

    The exchange of a bucket begins when backward has computed its last gradient. If all ranks are on one host and
    backward uses all of its cores, all gradients are exchanged at the end; that is faster there. A gradient of some
    ranks only counts as zero on the others; a gradient of no rank stays None. Gradients lie in memory of the store. If
    the closure of a step returns a loss, the optimizer and the caller receive the mean over ranks.

    Args:
        model: a ``torch.nn.Module``, the same on every rank, with its tensors on the host.
        optimizer: a ``torch.optim.Optimizer`` of the model's parameters, or a list of them. None: only average
            gradients. From a wrapper, such as Accelerate's, its ``optimizer`` is taken.
        kv: a store without an updater and without compression; its ranks take part, and it stays the caller's. None: a
            new store of all ranks of the launch. It is closed at the end of the program, or by a later call of
            ``attach`` after every rank has dropped the model.
        update: ``local``: every rank updates all weights and has the whole state of the optimizer. ``store``: each rank
            updates its part, keeps the state of that part alone, and sends the new weights to the others. This moves
            half as many bytes again. ``optimizer.state_dict()`` is collective then, and has the whole state. Hooks
            of the optimizer's own step see the parts.
        compression: as in :meth:`mpikv.KVStore.set_gradient_compression`, for gradients alone. They must be finite:
            with a ``GradScaler``, a backward with overflowing gradients raises ``NotFinite`` on every rank. A rank in
            another call of ``kv`` than the others' backward is found at the deadline, by ``Stalled``.
        bucket_bytes: bytes of gradients per call, after a first, smaller call. If all ranks are on one host and one has
            no spare core for such calls, one call at the end of backward moves all.
        buffers: ``root``: after each backward every rank's buffers, such as the running means of batch normalization,
            become the root's. ``each``: each rank keeps its own.

    Returns:
        The attachment, with ``no_sync``, ``join``, ``add``, ``statistics`` and ``detach``.

    Raises:
        ConfigError: an option has a bad value; a parameter is attached already, or is not the model's; the optimizer
            has made a step before.
        Unsupported: the optimizer cannot run on parts of the weights; a tensor is not on the host, or is sparse.
        RankMismatch: ranks have different models or options.
        PeerFailed: another rank raised one of these, or an error of its model or optimizer. Then no rank is attached.

    Later calls raise these on every rank, too, for: ranks in different passes, a sparse gradient, a parameter with a
    new device, dtype or shape, and a step with gradients that were not exchanged. The ranks compare the settings of
    optimizers here, and passes, steps and settings in each backward. They compare weights and loaded optimizer states
    in the first backward after a rank has changed or loaded some. ``detach`` and the close of the store compare all of
    these once more.

    The attachment lives as long as the model's parameters or the optimizer. After the model is dropped, its memory in
    the store is freed by the next ``attach`` on the store, or when the store closes.

    Example:
        >>> import mpikv.torch, torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> attached = mpikv.torch.attach(model, optimizer)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
        >>> optimizer.step()
        >>> attached.detach()
    """
    if kv is not None and not isinstance(kv, KVStore):
        raise TypeError(f"attach: kv is {a_kind(kv)}; pass mpikv.create(), without another name, or leave kv out")
    options = _Options(update, compression, bucket_bytes, buffers)
    return Attached(create() if kv is None else kv, kv is None, model, optimizer, options)


class _Options(NamedTuple):
    """The options of :func:`attach`."""

    update: str
    compression: Any
    bucket_bytes: int
    buffers: str


class Attached:
    """A model with gradients averaged over the ranks of a store. :func:`attach` makes it."""

    def __init__(self, kv: KVStore, own: bool, model: Any, optimizer: Any, options: _Options) -> None:
        """Attach the model, on all ranks or on none; ``own``: its end closes ``kv``. Collective; for :func:`attach`."""
        self.kv = kv
        """The store: its rank, its size and its other facts."""
        self._model, self._options = model, options
        given = [] if optimizer is None else optimizer
        self._optimizers = [*map(_unwrap, given if isinstance(given, (list, tuple)) else [given])]
        self._ending = ExitStack()
        """The steps that undo the attachment, as far as it has got."""
        # Registered first, so that it is undone last: hooks and weights go before the store's memory.
        self._remains = _Remains(self, own)
        self._ending.callback(self._remains.free)
        try:
            with raising_on_all(kv, "attach"):
                _free_dropped(self._remains)
                named = self._agree()
                self._prepare()
                self._watch(named)
                kv.barrier()  # attached on all ranks, or on none
        except Exception:
            with suppress(Exception):  # the store may have ended; its error would hide the first one
                self._ending.close()
            raise
        kv.before_close.append(self._remains)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Have a copy or pickle of a parameter hold None in place of the attachment. Local."""
        return type(None), ()

    def _agree(self) -> dict[str, Any]:
        """Check and compare options and models; fill tensors with the root's; return the model's parameters by name.
        Collective.

        The check comes before the first meeting, and raises here alone. So it relies on the caller's
        :func:`raising_on_all`.
        """
        kv, model, optimizers = self.kv, self._model, self._optimizers
        update, compression, bucket_bytes, buffers = self._options
        check_options(kv, update, buffers, bucket_bytes)
        codec = create_codec(compression)
        check_model(model, optimizers, update == "store", codec is not None)
        packing = None if codec is None else codec.settings()
        options = f"update={update}, bucket_bytes={bucket_bytes}, buffers={buffers}, compression={packing}"
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        named = dict(model.named_parameters())
        of_model, of_optimizers = describe_tensors(model), settings_of(optimizers, named)
        kv.check_equal("\n".join([f"{options}, optimizer={kinds or None}", *of_model]), "attach")
        kv.check_equal("\n".join(["settings", *of_optimizers]), "attach")
        fill_from_root(kv, "*attach/", tensors_of(model))
        return named

    def _prepare(self) -> None:
        """Make objects for passes and steps; hook the optimizers; register how each is undone. Collective."""
        kv, ending, optimizers = self.kv, self._ending, self._optimizers
        update, compression, bucket_bytes, buffers = self._options
        self._sums = kv
        if compression is not None:
            # A store of its own: buffers, losses and the census must not be compressed.
            sums = kv.group(range(kv.size))
            assert sums is not None  # as this rank is one of them
            self._sums = self._remains.sums = sums
            sums.set_gradient_compression(compression)
        prefix = self._remains.prefix
        model_buffers = ModelBuffers(kv, prefix, self._model) if buffers == "root" else None
        weights = Weights(kv, prefix, optimizers)
        ending.callback(weights.release)
        limit = None if kv.any_rank(not _has_spare_core(kv)) else bucket_bytes
        self._sync = BackwardSync(kv, self._sums, prefix, limit, model_buffers, weights)
        ending.callback(self._sync.release)
        self._stepped = {id(one): 0 for one in optimizers}
        before, after = map(torch.compiler.disable, (self._before_step, lambda *_: weights.accept()))
        for one in optimizers:
            ending.callback(one.register_step_pre_hook(before).remove)
            ending.callback(one.register_step_post_hook(after).remove)
        self._sharded: list[ShardedStep] = []
        for one in optimizers if update == "store" else []:
            sharded = ShardedStep(kv, prefix, one, self._sync, self._check_before_shards)
            ending.callback(sharded.release)
            self._sharded.append(sharded)

    def __repr__(self) -> str:
        return (
            f"<mpikv.torch.Attached {type(self._model).__name__} rank {self.kv.rank}/{self.kv.size} "
            f"update={self._options.update} {len(self._sync.gradients)} parameters>"
        )

    def add(self, name: str, parameter: Any) -> None:
        """Attach a parameter that the model got later: take the root's values, average its gradients. Collective.

        As of a new layer, or one made trainable. Its gradients are averaged from the next backward on. Before this
        call, give it to its optimizer by ``add_param_group``. Buffers of a new layer stay each rank's own;
        :func:`mpikv.torch.broadcast` makes them equal once.

        Raises:
            ConfigError: it is attached already, or frozen.
            Unsupported: it is not on the host, or cannot be compressed.
            RankMismatch: ranks gave different names, shapes or dtypes.
            PeerFailed: another rank raised one of these.
        """
        self._sync.complete()
        with raising_on_all(self.kv, "add"):
            if name in {gradient.name for gradient in self._sync.gradients}:
                raise ConfigError(f"add: a parameter {name!r} is attached already; give this one another name")
            if not parameter.requires_grad or not parameter.numel():
                raise ConfigError(f"add: {name!r} is frozen or empty, and has no gradient; call requires_grad_() first")
            check_parameter(name, parameter, self._sums is not self.kv)
            fill_from_root(self.kv, "*attach/", {name: parameter})
            self._watch({name: parameter})

    def _watch(self, named: dict[str, Any]) -> None:
        """Hook trained parameters, set their owner, divide them if sharded; watch all. Collective if sharded."""
        trained = [(name, one) for name, one in named.items() if one.requires_grad and one.numel()]
        for sharded in self._sharded:
            members = {parameter for group in sharded.optimizer.param_groups for parameter in group["params"]}
            sharded.divide((name, one) for name, one in trained if one in members)
        self._sync.watch(trained)
        self._sync.weights.watch(named.items())
        for _, one in trained:
            setattr(one, OWNER, self)
            self._ending.callback(vars(one).pop, OWNER, None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In a with block: keep gradients on their rank, e.g. in all but the last backward of a step. Local.

        The next backward outside of the block averages their sums.

        Example:
            >>> import mpikv.torch, torch
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> attached = mpikv.torch.attach(model)
            >>> with attached.no_sync():
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> model.weight.grad
            tensor([[2., 2.]])
        """
        before, self._sync.paused = self._sync.paused, True
        try:
            yield
        finally:
            self._sync.paused = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """In a with block: let ranks have unequal numbers of batches; then copy the state of one with most. Unsupported
        with ``update="store"``, or with compression. Collective.

        Collective: every rank enters. A rank that leaves takes part in the others' sums with zeros; the mean is still
        over all ranks. After all have left, every rank has the weights, buffers and optimizer state of a rank with the
        most steps. Schedules of learning rates and a ``GradScaler`` are not copied: step them outside of the block, or
        the ranks' rates and scales differ afterwards. With ``buffers="each"`` each rank keeps its buffers. Gradients
        are exchanged without overlap in the block. One model joins at a time: nested blocks of two attached models end
        in ``Stalled``.

        Raises:
            Unsupported: with ``update="store"``, since a rank that has left would have to go on updating; or with
                ``compression``.
        """
        if self._sharded or self._sums is not self.kv:
            self.kv.raise_on_all_ranks(
                Unsupported(
                    "join needs update='local' and no compression; or give all ranks equally many batches, as "
                    "mpikv.torch.sampler does"
                ),
                "join",
            )
        sync = self._sync
        sync.complete()
        # Now: making buckets is collective, and later some ranks may have left the block.
        unsettled = [gradient for gradient in reversed(sync.gradients) if gradient.buffer is None]
        if unsettled:
            sync.make_buckets(unsettled)
        before, sync.blocking = sync.blocking, True
        try:
            with self.kv.join():
                yield
            if self.kv.comm is not None:
                with raising_on_all(self.kv, "join"):
                    self._catch_up()
        finally:
            sync.blocking = before

    def _catch_up(self) -> None:
        """Overwrite buffers, and after unequal passes all state, by those of a rank with most passes. Collective."""
        kv, sync, model = self.kv, self._sync, self._model
        kv.barrier()  # with the store's deadline: MPI's allgather would wait for a missing rank for ever
        numbers = kv.comm.allgather((sync.number, sync.steps, sync.made))
        leader, differ = numbers.index(max(numbers)), min(numbers) != max(numbers)
        # Each rank kept its own buffers in the block, so copy them even after equally many passes.
        buffers = model.buffers() if self._options.buffers == "root" else ()
        copy_from(kv, leader, buffers, model.parameters() if differ else (), self._optimizers if differ else ())
        sync.number, sync.steps, sync.made = numbers[leader]
        sync.note_met()
        sync.weights.forget()

    def steps(self, total: int, *, path: Any = None, save_every: float = 600.0, **kept: Any) -> Iterator[int]:
        """Have the store keep model and optimizers; return the iterator of :meth:`mpikv.KVStore.steps`. Collective.

        It keeps model and optimizers, and PyTorch's, numpy's and Python's own generators. ``kept`` names
        other objects that a step changes: ``scheduler=scheduler, scaler=scaler``. Each rank keeps its own copies. With
        ``compression``, the parts of gradients not yet sent are lost in a restart. With ``update="store"``
        or ``buffers="each"``, ``path`` serves as many ranks as have saved it.

        Example:
            >>> import mpikv.torch, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            >>> attached = mpikv.torch.attach(model, optimizer)
            >>> for step in attached.steps(3):
            ...     optimizer.zero_grad()
            ...     model(torch.ones(1, 2)).sum().backward()
            ...     optimizer.step()
            >>> attached.detach()
        """
        self.kv.keep(attached=self, random=RandomState(), **kept)
        return self.kv.steps(total, path=path, save_every=save_every)

    def object_state(self) -> ObjectState:
        """Return an :class:`ObjectState` that gets and sets model and optimizers, for ``KVStore.keep``. Local."""
        return ObjectState(self._state, self._take_state, self._remains.prefix)

    def _state(self) -> dict[str, Any]:
        """Return the state dicts of model and optimizers, of sharded ones this rank's part; not copied. Local."""
        # A whole state of shards would be a collective call.
        of_optimizers = [one.part_state() for one in self._sharded] or [one.state_dict() for one in self._optimizers]
        return {"model": self._model.state_dict(), "optimizers": of_optimizers}

    def _take_state(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`_state` into the model and its optimizers, or shards. Local."""
        self._model.load_state_dict(state["model"])
        takers = [one.take_part_state for one in self._sharded] or [one.load_state_dict for one in self._optimizers]
        for take, each in zip(takers, state["optimizers"], strict=True):
            take(each)

    def detach(self) -> None:
        """Compare ranks, and raise if they differ; else end the averaging: remove hooks, copy gradients out of the
        store, free its keys, or close a store made by :func:`attach`. Collective.

        Idempotent. The ranks compare their numbers of passes and
        steps, and their weights unless a rank has changed its own since the last step. The end of the program, or of
        the store, makes the same comparison.

        Raises:
            RankMismatch: they differ. A second call detaches nevertheless.
        """
        self._sync.complete()
        if self._remains in self.kv.before_close:
            self.kv.before_close.remove(self._remains)
            self._sync.check_end("detach")
        self._ending.close()

    def statistics(self) -> dict[str, Any]:
        """Return a dict: number of passes, bytes of each bucket, seconds that ends of passes have waited. Local.

        ``passes``: exchanged backward passes of this rank; ``bucket_bytes``: the bytes of each bucket, in the order of
        sending; ``seconds_waited``: the time that ends of passes have waited for other ranks and for sums.
        """
        sync = self._sync
        return {
            "passes": sync.passes,
            "bucket_bytes": [bucket.nbytes for bucket in sync.buckets],
            "seconds_waited": sync.seconds_waited,
        }

    def _before_step(self, optimizer: Any, arguments: Sequence[Any], options: Any) -> Any:
        """In a hook before a step: count it, and raise on all ranks unless gradients were exchanged; return None.
        With a closure only count, and return new (arguments, options) with one that checks. Collective without closure.
        """
        sync = self._sync
        self._refuse_in_backward()
        sync.complete()
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")  # the first is the optimizer
        if closure is not None:  # backward runs inside of it, later
            self._stepped[id(optimizer)] = sync.passes
            sync.note_step(optimizer)
            rest = {name: value for name, value in options.items() if name != "closure"}
            return (optimizer, partial(self._run_closure, optimizer, closure), *arguments[2:]), rest
        if not self._sharded:  # a sharded step has checked before: now shards stand in for the parameters
            self._check_gradients(optimizer)
        if self._stepped[id(optimizer)] == sync.passes and not sync.blocking:
            sync.next_store.check_equal("optimizer.step without a backward since the last one", "optimizer.step")
        self._stepped[id(optimizer)] = sync.passes
        sync.note_step(optimizer)
        return None

    def _run_closure(self, optimizer: Any, closure: Any) -> Any:
        """Run a closure; raise on all ranks unless its gradients were exchanged; return its mean loss. Collective."""
        self._sync.weights.accept()  # LBFGS changes weights between its calls of the closure
        loss = closure()
        self._sync.complete()
        self._check_gradients(optimizer)
        return mean_loss(self.kv, loss)

    def _refuse_in_backward(self) -> None:
        """Raise Unsupported on every rank if this thread is in a backward. Local otherwise."""
        if torch._C._current_graph_task_id() != -1:
            self._sync.forbid("optimizer.step was called in a hook of a backward; call it when backward has returned")

    def _check_before_shards(self, optimizer: Any) -> None:
        """Before a sharded step: raise on all ranks in a backward, or if a gradient was not exchanged. Collective."""
        self._refuse_in_backward()
        self._sync.complete()
        self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Any) -> None:
        """Raise ConfigError on every rank if a gradient of the step was not exchanged. Local otherwise."""
        if why := self._sync.why_local or self._find_kept_back(optimizer):
            self._sync.next_store.raise_on_all_ranks(ConfigError(why), "optimizer.step")

    def _find_kept_back(self, optimizer: Any) -> str:
        """Return a message about a gradient of the step that was not exchanged; "" if there is none. Local."""
        sync = self._sync
        is_new = self._stepped[id(optimizer)] != sync.passes  # the user may change exchanged gradients before a step
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            gradient = sync.watched.get(parameter)
            exchanged = gradient is not None and (is_new or parameter.grad is gradient.buffer)
            if parameter.grad is not None and parameter.numel() and not exchanged:
                own = (repr(name) for name, one in self._model.named_parameters() if one is parameter)
                strange = f"a parameter of shape {tuple(parameter.shape)}, which the model does not have,"
                return (
                    f"the gradient of {next(own, strange)} was not exchanged; compute it by backward, or call "
                    "attached.add(name, parameter) for a parameter that is new, or was frozen"
                )
        return ""


class _Remains:
    """An attachment's memory in its store. It holds no reference to the model, since the store keeps it to the end."""

    def __init__(self, attached: Attached, own: bool) -> None:
        """Refer to an attachment weakly; ``own``: its store was made for it, and :meth:`free` closes that. Local."""
        self.kv, self.own, self.attached = attached.kv, own, ref(attached)
        self.number = -1
        """Number of the attachment in its store, or among the stores made by attach, from 0 on; the same on every rank.
        -1 before it has one: :meth:`free` must not touch the keys of another."""
        self.sums: KVStore | None = None
        """The store of compressed gradients."""

    @property
    def prefix(self) -> str:
        """The beginning of this attachment's keys in its store."""
        return f"torch{self.number}/"

    def __call__(self) -> None:
        """As the store closes: raise RankMismatch if ranks differ, unless one has dropped its model. Collective."""
        sync = None if (attached := self.attached()) is None else attached._sync
        # First, as garbage collection runs at different times: another rank may have its model still.
        if not self.kv.any_rank(sync is None) and sync is not None:
            sync.complete()
            sync.check_end("close")

    def is_dropped(self) -> bool:
        """Return whether this rank has dropped the model; of attach's own store, all models on it. Local."""
        ends = [one for one in self.kv.before_close if isinstance(one, _Remains)] if self.own else [self]
        return all(one.attached() is None for one in ends)

    def free(self) -> None:
        """Close the attachment's own stores; from a caller's store delete its keys. Collective."""
        if self.sums is not None:
            self.sums.close()
        if self.own:
            self.kv.close()
        elif keys := [key for key in map(str, self.kv.keys()) if key.startswith(self.prefix)]:
            self.kv.delete(keys)


def _free_dropped(new: _Remains) -> None:
    """Free keys or own stores of models that every rank has dropped; set ``new.number``, alike on all. Collective."""
    kv = new.kv
    stores = open_stores() if new.own else [kv]
    listed = [one for store in stores for one in store.before_close if isinstance(one, _Remains)]
    known = {one.number: one for one in listed if one.own or not new.own}
    dropped = {number for number, one in known.items() if one.own == new.own and one.is_dropped()}
    mine = (dropped, max(known, default=-1))
    kv.barrier()  # with the store's deadline: MPI's allgather would wait for a missing rank for ever
    every = [mine] if kv.comm is None else kv.comm.allgather(mine)
    for number in sorted(set.intersection(*(numbers for numbers, _ in every))):
        known[number].kv.before_close.remove(known[number])
        known[number].free()
    new.number = 1 + max(last for _, last in every)


def _unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer in a wrapper, such as Accelerate's or Lightning's, else the object itself. Local."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _has_spare_core(kv: KVStore) -> bool:
    """Return whether a rank has more cores than backward uses, one for the store's thread; or ranks are on several
    hosts. Local.
    """
    group = kv._group
    return not group.one_host or group.host_cores // len(group.host_ranks) > torch.get_num_threads()
