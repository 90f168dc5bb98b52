"""What the verbs make of their arguments: every check that one rank can make alone, what ranks compare, and the work.

The verbs are local. No value moves or changes before all ranks have agreed on the call that a method returns; what is
run then is collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from . import codecs
from .agreement import Agreement, Call, Said
from .arguments import (
    in_form,
    new_arrays,
    outs_of,
    plain,
    priorities,
    singles,
    sources,
    stand_in,
    targets,
    writable,
)
from .autotune import Choice, choose
from .codecs.hosted import HostRanges
from .errors import RankMismatch, Unsupported, ValueMismatch, is_unwritable, noted, settled
from .exchange import Arrays, Confirm, Exchange, Steps, are_plain
from .keys import Form, flatten, parse
from .optimizers import Optimizer
from .plan import Plan, describe, digest, label
from .publication import Cast
from .renewed import Renewed, answer
from .rowarguments import (
    Asked,
    Brought,
    Wanted,
    asked_of,
    asks_rows,
    brings_rows,
    brought,
    check_outs,
    deliver,
    fill,
    paired,
    single_rows,
    spare_of,
    wanted_of,
)
from .rows import Rows, check_updater
from .rowsparse import RowSparse
from .typing import Array, Codec, Key, Updater

__all__ = ["Calls", "Fixed", "Prepared", "given_to_fill"]

Prepared: TypeAlias = "tuple[Call, tuple[Any, ...]]"
"""What to compare with the other ranks, and what to run then: a function, which returns the verb's result, and its
arguments."""


class Fixed(NamedTuple):
    """The arguments of a pushpull that is made again and again, with lists of its own in place of dicts."""

    key: Any
    value: Any
    out: Any
    result: Any
    """What the caller of the pushpull expects."""


_NO_SPARE = np.empty(0, np.uint8)
_log = logging.getLogger("mpikv")
_COMPRESS = "set_gradient_compression"
# What a push adds to its description when it takes the buffers.
_BUFFERS = "from the buffers"
# What a call adds when it brings rows, and when it is given whole values for them.
_ROWS, _FOR_WHOLE = "rows", "rows, with whole arrays as out"
# And what it says when it adds none of these.
_WHOLE = "whole arrays"


class Calls:
    """Prepares the calls of one store."""

    def __init__(
        self,
        exchange: Exchange,
        rows: Rows,
        agreement: Agreement,
        rank: int,
        found: Callable[[Codec], Codec],
    ) -> None:
        """``found`` returns what does the work of a codec in the store's memory, or raises."""
        self._exchange, self._rows, self._agreement, self._rank = exchange, rows, agreement, rank
        self._found = found
        self._memory = exchange.transport.memory
        self.choice = Choice("None", "None")
        """How pushes are compressed, and why."""
        self.codec: Codec | codecs.BothDirections | None = None
        """What packs, as it was given: in this memory something else may do its work."""

    # --- Verbs

    def init(self, key: Any, value: Any, overwrite: bool) -> Prepared:
        form = parse(key, value)
        table = self._exchange.table
        table.check_kind(form.keys)
        if not overwrite:
            table.check_new(form.keys)
        if brings_rows(form.groups):
            rows = single_rows(form.keys, form.groups, self._memory)
            self._exchange.check_storable([each.values for each in rows])
            self._rows.load([each.dtype for each in rows])
            known = [name for name in form.keys if name in table]
            return self._valued("init", form, rows, f"{_ROWS}, overwrite {known}"), (self._rows.enter, form.keys, rows)
        arrays = singles(form, None, self._memory)
        self._exchange.check_storable(arrays)
        known = [name for name in form.keys if name in table]
        call = self._valued("init", form, arrays, f"{_WHOLE}, overwrite {known}")
        return call, (self._run_init, form.keys, self._exchange.set_apart(arrays))

    def push(self, key: Any, value: Any, priority: Any) -> Prepared:
        exchange = self._exchange
        plan, arrays = self._pushed(key, value)
        if isinstance(arrays, Brought):
            call, steps, confirm = self._update_of("push", plan, priority, _ROWS)
            return call, (self._rows.push, plan, arrays.rows, steps, confirm)
        if exchange.compression is not None:
            exchange.check_compressible(plan, arrays)
        if arrays is None:
            call, steps, confirm = self._update_of("push", plan, priority, _BUFFERS)
            return call, (exchange.push_buffers, plan, steps, confirm)
        arrays = exchange.added_up(plan, arrays)
        call, steps, confirm = self._update_of("push", plan, priority)
        exchange.stage(plan, arrays)
        return call, (exchange.push, plan, arrays, steps, confirm)

    def pull(self, key: Any, out: Any, ignore_sparse: Any, priority: Any) -> Prepared:
        given = out if out is not None or not isinstance(key, Mapping) else key
        if asks_rows(given):
            return self._pull_into_rows(key, given, ignore_sparse, priority)
        plan, arrays, result = self.pulled(key, out)
        return self._planned("pull", plan, priority), (self._run_pull, plan, arrays, result)

    def _pull_into_rows(self, key: Any, out: Any, ignore_sparse: Any, priority: Any) -> Prepared:
        """Prepare a pull that fills a :class:`RowSparse`, or leaves it as it is, and fills all else."""
        form = parse(key, None, "out") if out is key else outs_of(key, out, self.known(key).keys)
        plan = self._exchange.plan(form.keys)
        dense = [[each for each in group if type(each) is not RowSparse] for group in form.groups]
        sparse = [[each for each in group if type(each) is RowSparse] for group in form.groups]
        self._rows.load(plan.dtypes)
        for entry, rows in zip(plan.entries, sparse, strict=True):
            check_outs(entry, rows)
            if rows and ignore_sparse:
                _log.info("pull: a RowSparse out of key %r is left as it is; ignore_sparse=False fills it", entry.key)
        if ignore_sparse:
            sparse = []
        elif any(sparse):
            self._memory.order.check_new()
        arrays = self._targets_of(plan, dense)
        return self._planned("pull", plan, priority), (self._run_pull_into_rows, plan, arrays, sparse, out)

    def pushpull(self, key: Any, value: Any, out: Any, priority: Any) -> Prepared:
        exchange = self._exchange
        plan, arrays = self._pushed(key, value, filled=out is None)
        if isinstance(arrays, Brought):
            return self._pushpull_rows(plan, arrays.rows, key, value, out, priority)
        if exchange.compression is not None:
            exchange.check_compressible(plan, arrays)
        if arrays is None:
            return self._pushpull_buffers(plan, key, out, priority)
        if out is None and are_plain(arrays):
            filled, result = arrays, key if value is None else value
        else:
            filled, result = self.filled(plan, key, given_to_fill(key, value, out), out is None)
        arrays = exchange.added_up(plan, arrays)
        call, steps, confirm = self._update_of("pushpull", plan, priority)
        exchange.stage(plan, arrays)
        return call, (_run_for, result, exchange.pushpull, plan, arrays, steps, filled, confirm)

    def _pushpull_rows(
        self, plan: Plan, given: Sequence[RowSparse], key: Any, value: Any, out: Any, priority: Any
    ) -> Prepared:
        result = given_to_fill(key, value, out)
        groups = outs_of(key, result, plan.keys).groups
        rows = [[each for each in group if type(each) is RowSparse] for group in groups]
        if any(rows):
            self._memory.order.check_new()
        asked = [
            paired(entry, [each.indices for each in group], group)
            for entry, group in zip(plan.entries, rows, strict=True)
        ]
        arrays = [[each for each in group if type(each) is not RowSparse] for group in groups]
        whole: Arrays | None = self._targets_of(plan, arrays) if any(arrays) else None
        option = _ROWS if whole is None else _FOR_WHOLE
        call, steps, confirm = self._update_of("pushpull", plan, priority, option)
        pulled = self._wanted(plan, asked)
        return call, (_run_for, result, self._run_rows, plan, given, steps, confirm, whole, *pulled)

    def row_sparse_pull(self, key: Any, out: Any, priority: Any, row_ids: Any) -> Prepared:
        plan = self.known(key)
        self._rows.load(plan.dtypes)
        if self._exchange.packs_values:
            raise Unsupported(
                "rows are pulled as they are, and both_directions packs what is pulled; pull the whole value, or leave "
                "both_directions out of set_gradient_compression"
            )
        asked, result = asked_of(plan.entries, key, out, row_ids)
        for each in (each for group in asked for each in group if type(each.out) is not RowSparse):
            self._exchange.check_own(each.out)
        call, pulled = self._planned("row_sparse_pull", plan, priority), self._wanted(plan, asked)
        return call, (_run_for, result, self._pull_rows, plan, *pulled)

    def _pushpull_buffers(self, plan: Plan, key: Any, out: Any, priority: Any) -> Prepared:
        call, steps, confirm = self._update_of("pushpull", plan, priority, _BUFFERS)
        filled, result = ((), in_form(key, plan, plan.views)) if out is None else self.filled(plan, key, out)
        return call, (_run_for, result, self._exchange.pushpull_buffers, plan, steps, filled, confirm)

    def compile(self, key: Any, value: Any, out: Any) -> Prepared:
        """Prepare nothing but to know that a pushpull could be made; what is run returns its arguments, to be kept."""
        given = fixed(key, value, out)
        _, (_, result, *_) = self.pushpull(given.key, given.value, given.out, 0)  # finds all that is wrong with it
        if type(result) is Renewed:
            raise TypeError("each call fills the same arrays, of which one cannot be written; use pushpull, or numpy's")
        self._exchange.staged = None
        self._memory.order.cancel()  # nothing is to be filled
        return self._planned("compile", self.known(given.key)), (_run_for, given, _nothing)

    def bound(self, given: Fixed) -> tuple[Plan, Arrays | None, Arrays, Any]:
        """Return the plan of a pushpull, what it pushes, None for the buffers, what it fills, and what it returns. It
        brings no rows.
        """
        key, value, out, result = given
        plan, arrays = self._pushed(key, value)
        assert not isinstance(arrays, Brought)
        if arrays is not None:
            return plan, arrays, self.filled(plan, key, given_to_fill(key, value, out))[0], result
        filled = () if out is None else self.filled(plan, key, out)[0]
        return plan, None, filled, in_form(key, plan, plan.views) if out is None else result

    def again(self, plan: Plan) -> tuple[Call, Steps]:
        """Return what to compare before a pushpull of a plan is made once more, and the updater's steps. It does not
        compress, and has no updater function.
        """
        call, steps, _ = self._update_of("pushpull", plan, 0)
        return call, steps

    def buffer(self, key: Any) -> Prepared:
        plan = self.known(key)
        return self._planned("buffer", plan), (self._run_buffer, plan, key)

    def broadcast(self, key: Any, value: Any, out: Any, priority: Any) -> Prepared:
        form = parse(key, value)
        self._exchange.table.check_kind(form.keys)
        arrays = singles(form, self._exchange.table, self._memory)
        self._exchange.check_storable(arrays)
        table = self._exchange.table
        stored = [(a.shape, table[k].dtype if k in table else a.dtype) for k, a in zip(form.keys, arrays, strict=True)]
        if out is None and not self._memory.is_host and any(map(self._exchange.is_view, arrays)):
            raise TypeError("a value is a view of a stored one, which is not to be filled; pass out=, or a copy")
        fill = partial(self._places, key, form.keys, stored)
        outs, result = self._fillable(fill, given_to_fill(key, value, out), out is None)
        call = self._valued("broadcast", form, arrays, f"priority {priorities(priority, form.keys)}")
        return call, (self._run_broadcast, form.keys, self._exchange.set_apart(arrays), outs, result)

    def set(self, key: Any, value: Any) -> Prepared:
        form = parse(key, value)
        call = self._planned("set", self._exchange.plan(form.keys))
        arrays = self._exchange.set_apart(singles(form, self._exchange.table, self._memory))
        return call, (self._exchange.write, form.keys, arrays)

    def delete(self, key: Any) -> Prepared:
        keys = parse(key, None).keys
        return self._deletion(self._exchange.plan(keys)), (self._exchange.delete, keys)

    def updater(self, verb: str, make: Callable[[], Updater]) -> Prepared:
        """Prepare a change of the updater to what ``make`` returns."""
        updater = make()
        self._exchange.placed(updater)
        settings = updater.settings()
        call = Call(verb, digest(f"{verb} {settings}"), settings, describe=lambda: [settings])
        return call, (self._exchange.adopt, updater)

    def compression(self, compression: Any) -> Prepared:
        """Prepare a change of the codec to what is meant by ``compression``."""
        meant = codecs.create(compression)
        settings = "None" if meant is None else meant.settings()
        call = Call(_COMPRESS, digest(f"{_COMPRESS} {settings}"), settings, describe=lambda: [settings])
        if isinstance(meant, codecs.Auto):
            return call, (self._run_choice, meant, self._codec(meant.codec))
        if isinstance(meant, codecs.BothDirections):
            # What packs as a cast does knows its largest number, too.
            packing = cast("Cast", self._found(meant.cast))
            if not self._memory.is_host and packing is meant.cast:
                raise Unsupported(
                    f"compression {settings} has no CUDA kernel, which both_directions needs on a GPU (known: bf16, "
                    "fp16); use one of these, or leave both_directions out"
                )
            return call, (self._run_compression, meant, settings, self._codec(meant.codec), packing)
        return call, (self._run_compression, meant, settings, None if meant is None else self._codec(meant))

    def _codec(self, codec: Codec) -> Codec:
        """Return what does the work of a codec, whose payloads messages can hold."""
        self._exchange.check_codec(codec)
        found = self._found(codec)
        if self._memory.is_host or found is not codec:
            return found
        logging.getLogger("mpikv").warning(
            "compression %s does its work on the host: pushes wait for the GPU, and copy gradients and sums",
            codec.settings(),
        )
        return HostRanges(codec, self._memory) if codec.elementwise else codec

    def shadowed(self, said: Said, call: Call, until_done: ExitStack) -> Callable[[], None] | None:
        """Return what a rank without work does in a call of the others, which read its buffers once all know that it
        can.
        """
        if said.verb == "barrier":
            return None
        plan, nothing = self._exchange.plan(tuple(said.keys)), [()] * len(said.keys)
        if said.verb != "row_sparse_pull" and _ROWS not in said.parts:
            self._exchange.prepare(plan)
        if said.verb == "pull":
            self._check_same(said, self._described(plan))
            return lambda: self._exchange.pull(plan, nothing)
        if said.verb == "row_sparse_pull":
            self._rows.load(plan.dtypes)
            self._check_same(said, self._described(plan))
            nobody = self._wanted(plan, nothing)
            return lambda: self._pull_rows(plan, *nobody)
        steps, texts = self._exchange.steps(plan), [*self._settings(), *self._described(plan)]
        self._check_same(said, self._with_steps(Call(said.verb, 0, describe=lambda: texts), steps).describe())
        confirm = self._confirmation(call) if self._exchange.updater.fallible else None
        # Buffers of zeros are nothing, but not every code of zeros is.
        if _BUFFERS in said.parts and self._exchange.compression is None:
            until_done.enter_context(self._exchange.empty_buffers(plan))
            if said.verb == "push":
                return lambda: self._exchange.push_buffers(plan, steps, confirm)
            return lambda: self._exchange.pushpull_buffers(plan, steps, nothing, confirm)
        if _ROWS in said.parts or _FOR_WHOLE in said.parts:
            self._rows.load(plan.dtypes)
            given = brought(plan.entries, nothing, self._exchange.in_pairs, self._exchange.apart).rows
            if said.verb == "push":
                return lambda: self._rows.push(plan, given, steps, confirm)
            whole = nothing if _FOR_WHOLE in said.parts else None
            nobody = self._wanted(plan, nothing)
            return lambda: self._run_rows(plan, given, steps, confirm, whole, *nobody)
        kept = self._exchange.restoring(plan, confirm)
        if said.verb == "push":
            return lambda: self._exchange.push(plan, nothing, steps, kept)
        return lambda: self._exchange.pushpull(plan, nothing, steps, nothing, kept)

    # --- Keys and arrays

    def _check_same(self, said: Said, mine: Sequence[str]) -> None:
        """Raise if this rank's view of a call of the others, which it has left to them, is another than theirs."""
        if (differs := next((text for text in mine if text not in said.parts), None)) is not None:
            text = f"others call {said.text} with {list(said.parts)[:4]}; rank {self._rank}, which has left join(), has"
            raise RankMismatch(f"ranks disagree: {text} {differs}; nothing was changed")

    def known(self, key: Any) -> Plan:
        """Return the plan for keys, which bring no arrays."""
        if isinstance(key, Mapping):
            raise TypeError("a dict brings arrays with its keys, and none are asked for here; pass a list of its keys")
        return self._exchange.known(key) or self._exchange.plan(parse(key, None).keys)

    def pulled(self, key: Any, out: Any) -> tuple[Plan, Arrays, Any]:
        """Return the plan of what is to be pulled, the arrays to fill, and what the call returns."""
        plan = self._exchange.known(key)
        if plan is None and isinstance(key, Mapping):
            plan, out = self.known(flatten(key, out, "out")[0]), key
        plan = plan or self.known(key)
        if out is None:
            self._memory.order.check_new()
            out = new_arrays(key, plan, self._memory)
        return plan, *self.filled(plan, key, out)

    def _pushed(self, key: Any, value: Any, filled: bool = False) -> tuple[Plan, Arrays | Brought | None]:
        """Return the plan and what is to be pushed, and perhaps filled: arrays, rows, or None for the buffers."""
        plan = self._exchange.known(key)
        if plan is None and isinstance(key, Mapping):
            key, value = flatten(key, value)
            plan = self._exchange.known(key)
        # A push changes values bucket by bucket, which arrays over their memory are copied before.
        if (
            plan is not None
            and (arrays := plain(plan, key, value, filled)) is not None
            and (not (filled or len(plan.buckets) > 1) or self._exchange.lie_apart(arrays))
        ):
            return plan, arrays
        if value is not None:
            return self._sources(key, value)
        plan = plan or self.known(key)
        self._check_buffers(plan)
        return plan, None

    def _sources(self, key: Any, value: Any) -> tuple[Plan, Arrays | Brought]:
        """Return the plan and the arrays, or the rows, of any form."""
        form = parse(key, value)
        plan = self._exchange.plan(form.keys)
        if brings_rows(form.groups):
            check_updater(self._exchange)
            self._rows.load(plan.dtypes)
            return plan, brought(plan.entries, form.groups, self._exchange.in_pairs, self._exchange.apart)
        arrays = sources(plan.entries, form.groups)
        if len(plan.buckets) > 1:
            arrays = [tuple(map(self._exchange.apart, group)) for group in arrays]
        return plan, arrays

    def arrays_of(self, key: Any, value: Any) -> tuple[Plan, Arrays]:
        """Return the plan of what is to be pushed, and the flat arrays of any form, which brings no rows."""
        plan, arrays = self._sources(key, value)
        if isinstance(arrays, Brought):
            raise Unsupported("this store takes no RowSparse; push to_dense(), or use 'dist_sync'")
        return plan, arrays

    def _targets(self, plan: Plan, key: Any, out: Any) -> Arrays:
        """Return the arrays to fill, in any form."""
        if isinstance(key, Mapping) and isinstance(out, Mapping):
            key, out = flatten(out, what="out")
            if tuple(key) == plan.keys and (arrays := self._plain_targets(plan, key, out)) is not None:
                return arrays
        return self._targets_of(plan, outs_of(key, out, plan.keys).groups)

    def _plain_targets(self, plan: Plan, key: Any, out: Any) -> Arrays | None:
        """Return the arrays to fill if there is one for each key, which a value can be copied to as it is."""
        arrays = plain(plan, key, out, writable=True)
        return arrays if arrays is not None and self._exchange.lie_apart(arrays) else None

    def _targets_of(self, plan: Plan, groups: Sequence[Sequence[Any]]) -> list[tuple[Array, ...]]:
        """Return the arrays to fill of each key."""
        pairs = zip(plan.entries, targets(plan.entries, groups), strict=True)
        return [tuple(self._exchange.fillable(array, entry) for array in group) for entry, group in pairs]

    def _places(
        self, key: Any, keys: tuple[Key, ...], stored: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], out: Any
    ) -> list[tuple[Array, ...]]:
        """Return the arrays to fill with values of these shapes and dtypes, of keys that need not be known."""
        outs = [
            tuple(writable(array, name, shape, dtype, self._memory) for array in group)
            for name, (shape, dtype), group in zip(keys, stored, outs_of(key, out, keys).groups, strict=True)
        ]
        for array in (array for group in outs for array in group):
            self._exchange.check_own(array)
        return outs

    def _fillable(self, fill: Callable[[Any], Arrays], given: Any, implied: bool = False) -> tuple[Arrays, Any]:
        """Return the arrays to fill, which ``fill`` returns, and what the call returns: what was given to be filled,
        or, with arrays that cannot be written, a :class:`Renewed`.
        """
        try:
            return fill(given), given
        except TypeError as error:
            if not is_unwritable(error):
                raise
        self._memory.order.cancel()  # some were to be filled already
        renewed = Renewed(given, lambda array: stand_in(array, implied, self._memory))
        return fill(renewed.arrays), renewed

    def filled(self, plan: Plan, key: Any, given: Any, implied: bool = False) -> tuple[Arrays, Any]:
        """Return the arrays to fill, and what the call returns. ``implied``: they were given to be pushed."""
        if (arrays := self._plain_targets(plan, key, given)) is not None:
            return arrays, given
        return self._fillable(partial(self._targets, plan, key), given, implied)

    def _check_buffers(self, plan: Plan) -> None:
        if (key := self._exchange.unbuffered(plan)) is not None:
            raise ValueMismatch(f"no value for key {key!r}, and no buffer; pass one, or fill kv.buffer({key!r})")

    # --- What ranks compare

    def _planned(self, verb: str, plan: Plan, priority: Any = 0) -> Call:
        """Return what to compare with the other ranks before a plan is run that updates nothing."""
        call = plan.memo.get(verb)
        if call is None:
            if verb != "row_sparse_pull":
                plan.prepare()
            call = Call(verb, plan.digest ^ digest(verb), plan.label, plan.keys, lambda: self._described(plan))
            plan.memo[verb] = call
        return _prioritized(call, plan, priority)

    def _update_of(self, verb: str, plan: Plan, priority: Any, option: str = "") -> tuple[Call, Steps, Confirm | None]:
        """Return the call of a verb that updates, the updater's steps, and how ranks learn how the update went."""
        updater = self._exchange.updater
        revision, call, steps, confirm = plan.memo.get((verb, option), (None, None, None, None))
        if revision != updater.revision:
            if option != _ROWS:
                self._exchange.prepare(plan)
            token = plan.digest ^ digest(verb + option) ^ digest("\n".join(self._settings()))
            call = Call(verb, token, plan.label, plan.keys, lambda: self._described(plan, True, option))
            confirm = self._confirmation(call) if updater.fallible else None
            steps = None if updater.by_count else self._exchange.steps(plan)
            plan.memo[verb, option] = updater.revision, call, steps, confirm
        if steps is None:
            steps = self._exchange.steps(plan)
            call = self._with_steps(call, steps)
        if option not in (_ROWS, _FOR_WHOLE):
            confirm = self._exchange.restoring(plan, confirm)
        return _prioritized(call, plan, priority), steps, confirm

    def _deletion(self, plan: Plan) -> Call:
        """Return the call of what a plan is of. It keeps no plan, whose memory is to be given back in it."""
        texts = self._described(plan)
        return Call("delete", plan.digest ^ digest("delete"), plan.label, plan.keys, lambda: texts)

    def _described(self, plan: Plan, updates: bool = False, option: str = "") -> list[str]:
        texts = describe(plan.keys, plan.shapes, plan.dtypes)
        return [*self._settings(), *texts, option or _WHOLE] if updates else texts

    def _settings(self) -> list[str]:
        """Describe what decides how a value changes by what is pushed."""
        packed = [] if self.codec is None else [f"compression {self.codec.settings()}"]
        return [f"updater {self._exchange.updater.settings()}", *packed]

    def _with_steps(self, call: Call, steps: Steps) -> Call:
        """Add what a user's schedule returned to what is compared: two functions may differ and have the same name."""
        updater = self._exchange.updater
        if not isinstance(updater, Optimizer) or not updater.opaque:
            return call
        text = f"steps {list(dict.fromkeys(steps.each))}"
        return Call(call.verb, call.token ^ digest(text), call.label, call.keys, lambda: [*call.describe(), text])

    def _valued(self, verb: str, form: Form, arrays: Sequence[Array | RowSparse], option: str) -> Call:
        """Return the call of a verb that gives values to keys, which may be new."""
        texts = [*describe(form.keys, [a.shape for a in arrays], [a.dtype for a in arrays]), option]
        return Call(verb, digest("\n".join([verb, *texts])), label(form.keys), describe=lambda: texts)

    def _confirmation(self, call: Call) -> Confirm:
        return lambda failure: self._agreement.confirm(call, failure)

    # --- What is run once they agree

    def _run_init(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        self._exchange.enter(keys, arrays)
        self._exchange.write(keys, arrays)

    def _run_compression(
        self,
        meant: Codec | codecs.BothDirections | None,
        settings: str,
        working: Codec | None,
        packing: Cast | None = None,
    ) -> None:
        self._exchange.compress(working, packing)
        self.choice, self.codec = Choice(settings, settings), meant

    def _run_choice(self, meant: codecs.Auto, working: Codec) -> None:
        choice = choose(self._exchange.transport, self._exchange.placement, working, meant.settings())
        saves = choice.chosen != "None"
        self._exchange.compress(working if saves else None)
        self.choice, self.codec = choice, meant.codec if saves else None

    def _run_pull(self, plan: Plan, arrays: Arrays, result: Any) -> Any:
        self._exchange.pull(plan, arrays)
        return answer(result)

    def _run_pull_into_rows(
        self, plan: Plan, arrays: Arrays, sparse: Sequence[Sequence[RowSparse]], result: Any
    ) -> Any:
        self._exchange.pull(plan, arrays)
        for entry, group in zip(plan.entries, sparse, strict=True) if sparse else ():
            for rows in group:
                try:
                    fill(entry, rows)
                except MemoryError as error:
                    settled(error)  # the ranks have made their call, and each fills its own
                    raise
        return result

    def _wanted(self, plan: Plan, asked: Sequence[Sequence[Asked]]) -> tuple[Sequence[Wanted], Array]:
        """Return what :meth:`_pull_rows` is given, for which a GPU may have too little memory. Local."""
        every = [wanted_of(entry, group) for entry, group in zip(plan.entries, asked, strict=True)]
        if self._memory.is_host:
            return every, _NO_SPARE
        return every, self._memory.empty((spare_of(plan.entries, every),), _NO_SPARE.dtype)

    def _pull_rows(self, plan: Plan, every: Sequence[Wanted], spare: Array) -> None:
        if self._memory.is_host:
            self._fill_rows(plan, every)
            return
        with self._memory.workspace.over(spare):
            self._fill_rows(plan, every)

    def _fill_rows(self, plan: Plan, every: Sequence[Wanted]) -> None:
        self._rows.pull(plan, [(wanted.ids, wanted.rows) for wanted in every])
        for entry, wanted in zip(plan.entries, every, strict=True):
            deliver(entry, wanted)

    def _run_rows(
        self,
        plan: Plan,
        given: Sequence[RowSparse],
        steps: Steps,
        confirm: Confirm | None,
        whole: Arrays | None,
        every: Sequence[Wanted],
        spare: Array,
    ) -> None:
        """Push rows; then pull whole values, if they are wanted, and rows."""
        self._rows.push(plan, given, steps, confirm)
        self._exchange.transport.fence()
        if whole is not None:
            self._exchange.pull(plan, whole)
        try:
            self._pull_rows(plan, every, spare)
        except MemoryError as error:
            noted(error, "the rows were pushed, and not pulled")
            raise

    def _run_buffer(self, plan: Plan, key: Any) -> Any:
        self._exchange.add_buffers(plan)
        return in_form(key, plan, self._exchange.buffers(plan))

    def _run_broadcast(
        self, keys: tuple[Key, ...], arrays: Sequence[Array], outs: Sequence[Sequence[Array]], result: Any
    ) -> Any:
        new = [(key, array) for key, array in zip(keys, arrays, strict=True) if key not in self._exchange.table]
        self._exchange.enter([key for key, _ in new], [array for _, array in new])
        self._exchange.write(keys, arrays)
        self._exchange.pull(self._exchange.plan(keys), outs)
        return answer(result)


def _prioritized(call: Call, plan: Plan, priority: Any) -> Call:
    """Add priorities, which must be the same on all ranks, to what is compared."""
    if priority == 0 or not any(wishes := priorities(priority, plan.keys)):
        return call
    wish = f"priority {wishes}"
    return Call(call.verb, call.token ^ digest(wish), call.label, call.keys, lambda: [*call.describe(), wish])


def fixed(key: Any, value: Any, out: Any) -> Fixed:
    """Return the arguments of a pushpull as they are now, whatever becomes of lists and dicts."""
    if not isinstance(key, Mapping):
        return Fixed(_kept(key), _kept(value), _kept(out), value if out is None else out)
    names, arrays = flatten(key, value)
    if out is None:
        return Fixed(names, _kept(arrays), None, key)
    groups = outs_of(key, out, parse(names, arrays).keys).groups
    # One array by itself is what is looked at fastest.
    return Fixed(names, _kept(arrays), [group[0] if len(group) == 1 else list(group) for group in groups], out)


def _kept(given: Any) -> Any:
    return list(map(_kept, given)) if isinstance(given, (list, tuple)) else given


def _nothing() -> None:
    pass


def _run_for(result: Any, run: Callable[..., None], *arguments: Any) -> Any:
    run(*arguments)
    return answer(result)


def given_to_fill(key: Any, value: Any, out: Any) -> Any:
    """Return what a call that brings values fills: ``out``, or else what it was given."""
    return out if out is not None else key if isinstance(key, Mapping) else value
