"""The common part of all optimizers: settings, steps, and the walk over a value in blocks that fit the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator
from ..cluster.printing import log
from ..errors import ConfigError, Unsupported
from ..options import count, flag, number
from ..protocols import Array, Key, Slots, Updater
from .options import MULTIPLIERS, SCHEDULER, Multipliers, describe, rate, unknown_option

BLOCK = 1 << 16
"""Elements per block. A rule passes a dozen times over each of its arrays; all but the first pass find a block in the
cache."""
LANE_BLOCK = 2 * BLOCK
"""Elements per block where threads share out an update: they wait for each other between operations of numpy, and
longer blocks need fewer."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Step:
    """The numbers of one update that depend on the key or on its count of updates."""

    rate: float
    """Learning rate after the scheduler and the key's multiplier."""
    wd: float
    """Weight decay after the key's multiplier."""
    correction: tuple[float, ...] = ()
    """The result of :meth:`Optimizer.correction`."""

    def __str__(self) -> str:
        """Return the numbers as a text with all of their bits, for ranks to compare."""
        correction = f", correction {self.correction}" if self.correction else ""
        return f"learning rate {self.rate!r}, weight decay {self.wd!r}{correction}"


@dataclass(slots=True)
class Block:
    """Up to :data:`BLOCK` elements of all arrays of a rule, in one dtype. Views: a rule writes in place."""

    gradient: Array
    weight: Array
    state: list[Array]
    """One array per name of :attr:`Optimizer.states`, in that order."""
    spare: list[Array]
    """Scratch arrays of undefined content, :attr:`Optimizer.spares` of them."""
    stored: Array | None
    """The half-precision elements that ``weight`` stands for; None if ``weight`` itself is stored."""
    kept: bool
    """Whether ``weight`` is a float32 copy kept from update to update."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept the first object of a name, and that same object again; ConfigError for another one."""
        # ``block.weight -= term`` assigns, too, but the same array. Another one would be lost without a word.
        if getattr(self, name, value) is not value:
            raise ConfigError(
                f"a rule assigns another object to block.{name}, and the store would not change; write in place, "
                f"as block.{name}[:] = ..., or block.{name} -= ..."
            )
        object.__setattr__(self, name, value)

    def load(self) -> None:
        """Begin an update: copy the stored half-precision elements, if any, to ``weight``, unless it is kept."""
        if self.stored is not None and not self.kept:
            np.copyto(self.weight, self.stored)

    def store(self) -> None:
        """End an update: copy ``weight``, rounded, to the stored half-precision elements, if any."""
        if self.stored is not None:
            np.copyto(self.stored, self.weight, casting="unsafe")


@dataclass(kw_only=True, eq=False, repr=False)
class Optimizer:
    """The settings of every optimizer, and the shared parts of the :class:`~mpikv.protocols.Updater` contract.

    Options may be set at any time and hold from the next update; to set an unknown or bad one raises
    :class:`~mpikv.errors.ConfigError`. A rule gets its gradient ``g`` from the sum of a push by::

        g = clip(rescale_grad * sum, -clip_gradient, clip_gradient) + wd * weight

    Rules with a weight decay of their own (AdamW, FTRL, LAMB) omit the last term. With ``average`` the sum is first
    divided by the number of ranks.

    float32 and float64 values are computed in their dtype. float16 and bfloat16 ones are computed in float32, with
    float32 state, and rounded once per update. Two threads must not use one object at once: they would share its
    scratch memory.
    """

    elementwise = True
    """Whether the rule may be applied to any part of a value."""
    may_raise = False
    assigns = False
    coupled = True
    """Whether ``wd * weight`` is part of the gradient."""
    spares = 1
    """How many scratch arrays the rule needs."""

    rescale: float = field(init=False, default=1.0)
    """The factor of the sum: ``rescale_grad``, with ``average`` divided by the number of ranks. Read-only."""
    by_key: bool = field(init=False, default=False)
    """Whether keys of the same count may have different steps. Read-only."""
    opaque: bool = field(init=False, default=False)
    """Whether the rate comes from a user's function; :meth:`settings` has only its name. Read-only."""
    revision: int = field(init=False, default=0)
    """Changes with every change of an option, so derived results can be kept until then."""
    _changes: int = field(init=False, default=0)
    _user: object = field(init=False, default=None)
    _ranks: int = field(init=False, default=0)
    _warned: bool = field(init=False, default=False)
    _has_rate: bool = field(init=False, default=False)
    _had: tuple[int, Mapping[str, Any], Mapping[str, Any]] = field(init=False, default=(-1, {}, {}))
    _steps: dict[tuple[int, float, float], Step] = field(init=False, default_factory=dict)
    _scratch: dict[tuple[np.dtype[Any], tuple[int, int]], list[Array]] = field(init=False, default_factory=dict)
    _lane: tuple[int, int] = field(init=False, default=(0, BLOCK))

    # Before learning_rate: fields are assigned in this order, and the rate's check looks at the scheduler.
    lr_scheduler: Callable[[int], float] | None = field(default=None, metadata=SCHEDULER)
    """A pure function from the number of updates to the learning rate, such as those of :mod:`mpikv.schedules`. A
    callable without a ``repr`` of its own is described to other ranks by its name only."""
    learning_rate: float | None = rate(0.01)
    """In [0, inf). None: the optimizer's default, or, with a scheduler, the scheduler's rate. If both are given when
    the optimizer is made, it takes a copy of the scheduler with the rate as its ``base_lr``, and this is None."""
    wd: float = number(0.0, "[0, inf)")
    """Weight decay (L2 penalty), in [0, inf)."""
    rescale_grad: float = number(1.0, "(-inf, inf)")
    """Factor of the sum, often 1 / (batch size of all ranks)."""
    average: bool = flag(False)
    """Divide the sum by the number of all ranks of the store, also in ``join``, before ``rescale_grad``. A store of
    another size, as after a restart, divides by its own."""
    clip_gradient: float | None = number(None, "(0, inf)")
    """Bound of each element of the rescaled sum, in (0, inf); None: no bound."""
    lr_mult: Multipliers = field(default_factory=dict, metadata=MULTIPLIERS)
    """Factors of the learning rate by key; other keys have 1. Read-only: assign a new one."""
    wd_mult: Multipliers = field(default_factory=dict, metadata=MULTIPLIERS)
    """Factors of the weight decay by key; other keys have 1. Read-only: assign a new one."""
    multi_precision: bool = flag(False)
    """Keep a float32 copy (state ``master``) of float16 and bfloat16 values, so that small updates are not lost in
    rounding."""
    begin_num_update: int = count(0)
    """Updates made before this run: the scheduler is called with ``begin_num_update + count``. Bias corrections use
    ``count`` alone, because the state starts from zero."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and set an option, and take a new revision; ConfigError for an unknown option or a bad value."""
        if name.startswith("_") or name == "revision":  # bookkeeping, no option
            object.__setattr__(self, name, value)
            return
        option = self.__dataclass_fields__.get(name)
        if option is None or not option.init:
            raise ConfigError(unknown_option(type(self).__name__, name, self.options()))
        if check := option.metadata.get("check"):  # a plain field of a user's class has none
            value = check(f"{type(self).__name__}: {name}", value)
        if name == "learning_rate":
            if self.lr_scheduler is None:
                value = option.metadata["default"] if value is None else value
            elif value is not None:
                self._give_to_scheduler(value)
                value = None
            object.__setattr__(self, "_has_rate", True)
        object.__setattr__(self, name, value)
        if name == "lr_scheduler" and self._has_rate:
            self.learning_rate = None
        self._steps.clear()
        self._change()

    def _give_to_scheduler(self, value: float) -> None:
        """Replace the scheduler by a copy with the constructor's rate as ``base_lr``, or raise ConfigError; may log."""
        from ..schedules import Schedule, beginning_with

        scheduler, where = self.lr_scheduler, f"{type(self).__name__}: learning_rate={value!r}"
        before = getattr(scheduler, "base_lr", None)
        if self._has_rate:  # a later assignment, not an argument of the constructor
            raise ConfigError(
                f"{where} would not be used, because lr_scheduler gives the rate; "
                "set a new lr_scheduler with that base_lr, or set lr_scheduler = None first"
            )
        if before is None:
            raise ConfigError(
                f"{where} would not be used, because lr_scheduler gives the rate, and has no base_lr; leave one out"
            )
        if before == value:
            return
        object.__setattr__(self, "lr_scheduler", beginning_with(scheduler, value))
        if before != Schedule.base_lr:  # a base_lr of the user's own is lost
            log("%s replaces base_lr=%r of its lr_scheduler", where, before)

    def _change(self) -> None:
        """Take a new revision, which tells of a change of options, and compute derived attributes again."""
        # Revision goes back at the end of a having() block, _changes never: no number ever stands for two settings.
        self._changes += 1
        self.revision = self._changes
        self._derive()

    def _derive(self) -> None:
        """Compute ``rescale``, ``by_key`` and ``opaque`` again from the options and the number of ranks."""
        ranks = self._ranks or 1 if self.average else 1
        # The factors are missing while the first options are set.
        factors = getattr(self, "lr_mult", None) or getattr(self, "wd_mult", None)
        opaque = self.lr_scheduler is not None and type(self.lr_scheduler).__module__ != "mpikv.schedules"
        # Past __setattr__: derived attributes are no options, and must not count as a change.
        object.__setattr__(self, "rescale", self.rescale_grad / ranks)
        object.__setattr__(self, "by_key", bool(factors) or type(self).step is not Optimizer.step)
        object.__setattr__(self, "opaque", opaque)

    def sums_over(self, ranks: int) -> None:
        """Set how many ranks' gradients a sum has (0: none are summed), for ``average`` to divide by; raise if it
        cannot. Local.

        Raises:
            Unsupported: ``average`` is set, and there are no sums.
            ConfigError: ``average`` is set, and another store with another number of ranks uses the optimizer.
        """
        if self.average and ranks == 0:
            raise Unsupported(
                "average=True: a push to dist_async is one rank's gradient, and there is no sum to divide; leave it "
                "out, or use 'dist_sync', which sums"
            )
        if self.average and self._ranks not in (0, ranks):
            raise ConfigError(
                f"average=True: {self!r} divides by the {self._ranks} ranks of an earlier store, and this store has "
                f"{ranks}; give each store its own optimizer, for instance copy.copy(optimizer)"
            )
        self._ranks = ranks
        self._derive()

    @contextmanager
    def having(self, **options: Any) -> Iterator[None]:
        """In a with block: set other options; at its end, even by an error, restore them and the revision number.

        If somebody sets an option inside, the revision changes. If a block sets the same ones again, ranks see
        no change to compare.

        Example:
            >>> optimizer = Optimizer(rescale_grad=0.5)
            >>> with optimizer.having(rescale_grad=0.125):
            ...     optimizer.rescale_grad
            0.125
            >>> optimizer.rescale_grad
            0.5
        """
        outside = {name: getattr(self, name) for name in (*options, "revision")}
        inside: Mapping[str, Any] = {}
        try:
            # The same block again gets the revision of the last time, so plans made inside of it stay valid.
            if self._had[:2] == (self.revision, options):
                inside = self._had[2]
                self._restore(inside)
            else:
                for name, value in options.items():
                    if value != outside[name]:
                        setattr(self, name, value)
                inside = {name: getattr(self, name) for name in outside}
                self._had = outside["revision"], options, inside
            yield
        finally:
            changed = self.revision != inside.get("revision")  # somebody set an option inside of the block
            self._restore(outside)
            if changed:
                self._change()

    def _restore(self, options: Mapping[str, Any]) -> None:
        """Set options, and the revision if given, without a check; derive attributes again, and drop cached steps."""
        for name, value in options.items():
            object.__setattr__(self, name, value)
        self._derive()
        self._steps.clear()

    def take_options(self, other: Updater) -> None:
        """Overwrite all options by those of another optimizer of the same kind, unchecked; take a new revision."""
        assert isinstance(other, Optimizer)
        self._restore(other.chosen())
        self._change()

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Return the names of all options, sorted."""
        return tuple(sorted(name for name, option in cls.__dataclass_fields__.items() if option.init))

    def set_lr_mult(self, factors: Multipliers) -> None:
        """Replace all factors of the learning rate by key. Keys left out have 1; 0 freezes a key. ConfigError for a bad
        factor.
        """
        self.lr_mult = factors

    def set_wd_mult(self, factors: Multipliers) -> None:
        """Replace all factors of the weight decay by key. Keys left out have 1. ConfigError for a bad factor."""
        self.wd_mult = factors

    def rate(self, count: int) -> float:
        """Return the learning rate of update ``begin_num_update + count``, without the key's factor; ConfigError if the
        scheduler returns no rate.
        """
        if self.lr_scheduler is None:
            return self.learning_rate or 0.0
        number = self.begin_num_update + count
        given = self.lr_scheduler(number)
        # Checked here, on every rank before data move: a NaN rate would ruin the weights without an error.
        try:
            value = float(given)
        except (TypeError, ValueError):
            raise ConfigError(f"{self!r}: lr_scheduler({number}) returned {given!r}, which is not a number") from None
        if not 0 <= value < math.inf:
            raise ConfigError(f"{self!r}: lr_scheduler({number}) returned {value!r}, which is not a rate in [0, inf)")
        return value

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state arrays, each of the value's shape and zero at first."""
        return ()

    def correction(self, count: int) -> tuple[float, ...]:
        """Return a tuple of the rule's numbers that depend on a key's count of updates; here it is empty."""
        return ()

    def rule(self, step: Step, block: Block) -> None:
        """Change ``block.weight`` and ``block.state`` by ``block.gradient``, in place; Unsupported in Optimizer itself.

        A rule may overwrite all but ``step``.
        """
        raise Unsupported(f"{type(self).__name__} has no rule; define rule(step, block)")

    def slots(self, dtype: np.dtype[Any]) -> Slots:
        """Return a dict, name to dtype, of state arrays for values of this dtype, or raise Unsupported; may warn once.

        It warns if rounding may lose small updates.
        """
        dtype = np.dtype(dtype)
        precision = self._precision(dtype)
        # State of half-precision values is float32: averages of float16 squares would underflow below 6e-8.
        slots = dict.fromkeys(self.states, precision)
        if self.multi_precision and dtype != precision:
            slots["master"] = precision
        elif dtype != precision and not self._warned:
            self._warned = True
            log(
                "%s updates %s values, and their rounding loses small updates; set multi_precision=True for float32 "
                "copies, or store float32 values",
                *(type(self).__name__, dtype.name),
            )
        return slots

    @property
    def depends_on_count(self) -> bool:
        """Whether updates of the same key may have different steps."""
        own = any(getattr(type(self), name) is not getattr(Optimizer, name) for name in ("correction", "rate", "step"))
        return own or self.lr_scheduler is not None

    def step(self, key: Key, count: int) -> Step:
        """Return one update's numbers that depend on the key or its ``count``; ConfigError if a schedule's rate is bad.

        ``count`` is 1 at the first.

        Keys with the same multipliers and count get the same object.
        """
        lr_mult, wd_mult = self.lr_mult.get(key, 1.0), self.wd_mult.get(key, 1.0)
        step = self._steps.get((count, lr_mult, wd_mult))
        if step is None:
            # Counts only rise, so old steps are seldom needed again; the bound keeps a long run from growing.
            if len(self._steps) >= 256:
                self._steps.clear()
            step = Step(self.rate(count) * lr_mult, self.wd * wd_mult, tuple(map(float, self.correction(count))))
            self._steps[count, lr_mult, wd_mult] = step
        return step

    def update(self, step: Step, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Change ``value`` and ``state`` in place by the sum of a push, ``total``, which is overwritten."""
        # Diverging training makes inf and nan. A warning that is an error would leave the value half updated.
        with np.errstate(all="ignore"):
            self._bind_blocks(total, value, state)(step)

    def bind(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Step], None]:
        """Return a function of a step; each call updates these arrays, and may warn of overflows as numpy is set."""
        # On a GPU blocks are as large as the arrays, and each binding would keep scratch memory of that size.
        if type(self).update is not Optimizer.update or not isinstance(value, np.ndarray):
            return lambda step: self.update(step, total, value, state)
        return self._bind_blocks(total, value, state)

    @contextmanager
    def in_lane(self, lane: int, block: int) -> Iterator[None]:
        """In a with block: bind updates to scratch memory of thread ``lane``; they may run beside other lanes' updates.

        ``block`` is the most elements that they change at once.
        """
        self._lane = lane, block
        try:
            yield
        finally:
            self._lane = 0, BLOCK

    def _bind_blocks(self, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Step], None]:
        """Return a function of a step that runs ``prepare`` and the rule on all blocks of these arrays, in place."""
        blocks, prepare, rule = self.blocks(total, value, state), self.prepare, self.rule

        def run(step: Step) -> None:
            """Update all blocks in place, one after the other."""
            for block in blocks:
                block.load()
                prepare(step, block)
                rule(step, block)
                block.store()

        def run_one(step: Step) -> None:
            """Update the only block in place; its weight is the stored value itself."""
            prepare(step, only)
            rule(step, only)

        # Small values are the common case: one block without load and store saves a loop and two calls.
        if len(blocks) != 1 or blocks[0].stored is not None:
            return run
        (only,) = blocks
        return run_one

    def settings(self) -> str:
        """Return class and options as text for ranks to compare: alike options, alike text; functions only by name."""
        options = ", ".join(f"{name}={describe(value)}" for name, value in self.chosen().items())
        return f"{type(self).__name__}({options})"

    def chosen(self) -> dict[str, Any]:
        """Return a new dict of all options and their present values, sorted by name."""
        return {name: getattr(self, name) for name in self.options()}

    def prepare(self, step: Step, block: Block) -> None:
        """Turn the sum in ``block.gradient`` into the gradient, in place: scale, clip, add decay; overwrite a spare."""
        gradient = block.gradient
        if self.rescale != 1.0:
            np.multiply(gradient, self.rescale, out=gradient)
        if self.clip_gradient is not None:  # after the factor, before weight decay, as in MXNet
            np.clip(gradient, -self.clip_gradient, self.clip_gradient, out=gradient)
        if self.coupled and step.wd:
            decay = block.spare[0]
            np.multiply(block.weight, step.wd, out=decay)
            np.add(gradient, decay, out=gradient)

    def blocks(self, total: Array, value: Array, state: Mapping[str, Array]) -> list[Block]:
        """Return a list of Blocks, views of contiguous arrays. The caller loads, changes and stores one after the
        other: they share scratch arrays.

        Arrays of a GPU become one block: it has no cache to stay in.
        """
        precision = self._precision(value.dtype)
        kept = self.multi_precision and value.dtype != precision
        own = not kept and value.dtype == precision
        total, value = total.reshape(-1), value.reshape(-1)
        # One more than the rule's own: the widened weights of half precision.
        on_host, number = isinstance(value, np.ndarray), self.spares + 1
        length = self._lane[1] if on_host else max(value.size, 1)
        new = [] if on_host else [np.empty_like(value, dtype=precision) for _ in range(number)]
        spare = new or self.scratch(precision, number)
        # reshape(-1) of a contiguous array is a view: the rule writes to the store's own memory.
        weight = state["master"].reshape(-1) if kept else value
        blocks = []
        for start in range(0, value.size, length):
            part = slice(start, min(start + length, value.size))
            *spares, wide = (array[: part.stop - start] for array in spare[: self.spares + 1])
            blocks.append(
                Block(
                    gradient=total[part],
                    weight=weight[part] if own or kept else wide,
                    state=[state[name].reshape(-1)[part] for name in self.states],
                    spare=spares,
                    stored=None if own else value[part],
                    kept=kept,
                )
            )
        return blocks

    def scratch(self, dtype: np.dtype[Any], number: int) -> list[Array]:
        """Return at least ``number`` scratch arrays, a block long, made when first needed: the same ones for the same
        lane and dtype.
        """
        arrays = self._scratch.setdefault((dtype, self._lane), [])
        arrays += (np.empty(self._lane[1], dtype) for _ in range(number - len(arrays)))
        return arrays

    def _precision(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype to compute values in: float32 for halves, else their own; Unsupported for a non-float."""
        if dtype.name in _FLOATS:
            return accumulator(dtype)
        raise Unsupported(
            f"{type(self).__name__} cannot update values of {dtype.name} (known: float16, bfloat16, float32, float64); "
            "store the value in one of these, or use an updater function"
        )

    def __repr__(self) -> str:
        """Return the class and the options that differ from their defaults."""
        # By their texts: to compare arrays gives arrays.
        options = ((one, describe(getattr(self, one.name))) for one in fields(self) if one.init)
        changed = (f"{one.name}={now}" for one, now in options if now not in ("None", _describe_default(one)))
        return f"{type(self).__name__}({', '.join(changed)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy or pickle: the class and its options, no revision and no scratch memory."""
        # Read-only mappings cannot be pickled, and scratch must not be shared.
        options = self.chosen() | {"lr_mult": dict(self.lr_mult), "wd_mult": dict(self.wd_mult)}
        return partial(type(self), **options), ()


def _describe_default(option: Field[Any]) -> str:
    """Return the text of an option's default as :func:`~.options.describe` shows it once it is set. Local."""
    default = option.default if option.default_factory is MISSING else option.default_factory()
    default = option.metadata.get("default", default)
    return describe(option.metadata.get("check", lambda where, value: value)(option.name, default))
