"""Sums and means over ranks, and the root's values, of whole trees of arrays, in one call of a store.

For a traced tree, as in ``jax.jit``, JAX calls the host when the compiled function runs. The callback uses numpy alone:
a call of JAX inside of it could wait for its own thread.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ..arrays.arrays import aligned
from ..cluster.shutdown import fail_at_end
from ..errors import ConfigError, Unsupported, ValueMismatch, a_kind
from ..protocols import Array
from ..store.allreduce_store import AllReduce
from ..store.kvstore import KVStore
from ..store.plugins import KVStoreBase

Tree = TypeVar("Tree")

# Measured: JAX 0.7.0 aborts in XLA, 0.7.2 does not.
_COMPILES = (0, 7, 2)

_NO_DERIVATIVE = (
    "an exchange between ranks has no derivative; compute gradients first and exchange these, as "
    "mpikv.jax.value_and_grad does, or pass jax.lax.stop_gradient(tree) where the result is a constant"
)

_kinds: Any = WeakKeyDictionary()
"""For each store, the shape and dtype of each leaf's name in its last call."""

_outlines: Any = WeakKeyDictionary()
"""For each store, the outlines of its exchanged trees: a new outline takes long."""


def pushpull(kv: KVStore, tree: Tree, *, average: bool = False, name: str = "") -> Tree:
    """Return a new tree: the sum, or the mean, over ranks of each leaf. The store must have no updater. Collective.

    Collective: every rank calls it in the same order, with trees of the same structure, shapes and dtypes. Ranks
    compare all of these, and the name. **They cannot tell apart two calls with the same trees and name**: if one rank
    makes such calls in another order, the ranks sum different things. Give such calls different names.

    It may be called in ``jax.jit``: the exchange runs with the compiled function, in its place among the other
    exchanges. It cannot be differentiated or mapped by ``jax.vmap``; these raise ValueError. Compute gradients first
    and exchange them, as :func:`value_and_grad` does. ``jax.pmap`` and ``jax.shard_map`` of several devices cannot call
    it either, since each device would make a call.

    While a compiled function runs, its exchanges use the store. Before you call methods of the store yourself, wait for
    the result by ``jax.block_until_ready``. The functions of this module wait by themselves.

    Args:
        kv: ``mpikv.create("allreduce")``, or another store without an updater; it then keeps the sums, under keys that
            begin with ``jax/``.
        tree: any pytree of arrays and numbers, of dtypes that a store can sum, bfloat16 too. Half precision is summed
            in float32 and rounded once. JAX arrays on the host are read without a copy; those on other devices are
            copied to the host and back.
        average: whether to divide the sums by the number of ranks, in the leaf's dtype.
        name: distinguishes this call from others with equal trees; the same on every rank.

    Returns:
        A new tree of the same structure, shapes and dtypes, with arrays of JAX as leaves. Outside of ``jax.jit``, a
        leaf of numpy becomes a new array of numpy.

    Raises:
        ConfigError: the store has an updater, or makes no sums, e.g. ``dist_async``.
        Unsupported: it is called in ``jax.jit`` with JAX before 0.7.2, or in ``jax.pmap`` or ``jax.shard_map``.
        ValueMismatch: a leaf's dtype cannot be summed, or has no mean, as int32.
        TypeError: a leaf is no array and no number; ``name`` is no string.
        RankMismatch: ranks gave different trees, names, or values of ``average``.
        PeerFailed: another rank raised one of these.

    In ``jax.jit`` these may arrive as a ``jax.errors.JaxRuntimeError`` with the error's name and text. The store stays
    usable in either case.

    Example (one rank; on n ranks each leaf is n times as large):
        >>> import mpikv.jax, jax, jax.numpy as jnp
        >>> kv = mpikv.create("allreduce")
        >>> mpikv.jax.pushpull(kv, {"w": jnp.ones(2), "b": 1.0})
        {'b': Array(1., dtype=float32...), 'w': Array([1., 1.], dtype=float32)}
        >>> jax.jit(lambda x: mpikv.jax.pushpull(kv, 2 * x, average=True))(jnp.ones(2))
        Array([2., 2.], dtype=float32)
    """
    combined: Tree = _exchange(kv, tree, "pushpull", "mean" if average else "sum", name)
    return combined


def broadcast(kv: KVStore, tree: Tree, *, name: str = "") -> Tree:
    """Return a new tree with the root's values on every rank; the store may have an updater, and keeps no keys.
    Collective.

    Begin a training with it, for the same weights. It has the rules and errors of :func:`pushpull`, but takes any
    :class:`~mpikv.KVStore`. The leaves of other ranks give shapes and dtypes.

    Example:
        >>> import mpikv.jax, jax.numpy as jnp
        >>> mpikv.jax.broadcast(mpikv.create("allreduce"), [jnp.ones(2)])
        [Array([1., 1.], dtype=float32)]
    """
    combined: Tree = _exchange(kv, tree, "broadcast", "root", name)
    return combined


class _Outline:
    """The structure of a tree; the ranks of a store compare it."""

    def __init__(self, tree: Any, prefix: str) -> None:
        """Note a tree's nodes, and name its leaves, beginning with ``prefix``. Local."""
        self.prefix, self.agreed = prefix, False
        """``agreed``: all ranks have brought such a tree in one call."""
        self.nodes = list(_list_nodes(tree))
        """The path and the kind of each node. A leaf has the kind "", since its shape and dtype may change."""
        # The number makes names unique: a user's class may give two leaves the same path.
        paths = [path for path, kind in self.nodes if not kind]
        self.names = [f"{prefix}{place}{path}" for place, path in enumerate(paths)]
        """The names of its leaves in the store."""


def _exchange(kv: Any, tree: Any, verb: str, result: str, name: str) -> Any:
    """Return a new tree: of ``result`` "sum", "mean" or "root" over ranks; an error of one rank is raised on all. In
    jit return traced values at once: a callback exchanges when the compiled function runs. Collective.
    """
    _check_store(kv, verb)
    try:
        if verb == "pushpull" and not (kv._in_rounds and kv._assigns):
            raise ConfigError(
                f"the store {kv.type!r} has an updater or takes each rank's push by itself, so that it makes no sums; "
                "pass mpikv.create('allreduce')"
            )
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} is {a_kind(name)}, not a string")
        leaves, structure = jax.tree_util.tree_flatten(tree)
        prefix, known = f"jax/{result}/{name}{'/' * bool(name)}", _outlines.setdefault(kv, {})
        if (outline := known.get((prefix, structure))) is None:
            outline = known[prefix, structure] = _Outline(tree, prefix)
        arrays = np.ndarray, np.generic, jax.Array
        leaves = [leaf if isinstance(leaf, arrays) else jnp.asarray(leaf) for leaf in leaves]
        if result == "mean":
            for place, leaf in enumerate(leaves):
                if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                    raise ValueMismatch(
                        f"leaf {outline.names[place]!r} is {leaf.dtype}, which cannot hold a mean; take the sum, "
                        "average=False, or make it float32"
                    )
        if traced := _is_traced(leaves):
            _check_compiling()
        # A compiled function casts numpy's 64-bit numbers to 32 bits, as JAX does with its own.
        dtypes = [jnp.result_type(leaf) if traced else leaf.dtype for leaf in leaves]
    except Exception as error:
        refuse(kv, error, verb)
    # All that may be wrong with the tree was found above: a callback's error passes through XLA, which drops its type.
    call = partial(_call_store, kv, verb, outline, dtypes, kv.size if result == "mean" else 1)
    if traced:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return structure.unflatten(_call_when_compiled(kv, verb, call, shapes)(leaves))
    jax.effects_barrier()
    return structure.unflatten(_place_like(leaves, call(leaves)))


def _list_nodes(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, kind) of each node of a tree; a path has (0) for items of a tuple, [0] of a list. Local.

    >>> list(_list_nodes({"b": (1.0, None), "w": 2.0}))
    [('', 'a dict of 2'), ("['b']", 'a tuple of 2'), ("['b'](0)", ''), ("['b'](1)", 'None'), ("['w']", '')]
    """
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda one: one is not node)
    if children and not children[0][0]:  # a leaf has the empty path to itself
        yield path, ""
        return
    yield path, "None" if node is None else f"{a_kind(node)} of {len(children)}"
    for (entry,), child in children:
        index = getattr(entry, "idx", None) if isinstance(node, tuple) else None
        yield from _list_nodes(child, path + (str(entry) if index is None else f"({index})"))


def refuse(kv: KVStore, error: Exception, verb: str) -> NoReturn:
    """Raise an error of this rank on every rank, after a wait for compiled functions. Collective."""
    jax.effects_barrier()  # another thread may be in an exchange of a compiled function
    kv.raise_on_all_ranks(error, verb)


def _call_when_compiled(kv: KVStore, verb: str, call: Any, shapes: Sequence[Any]) -> Any:
    """Return a function of leaves by which compiled code runs ``call`` on the host; the exit waits for it. Local."""
    # atexit runs the last function first: so this one runs before the store closes, since the store came earlier.
    atexit.unregister(_await_compiled)
    atexit.register(_await_compiled)
    exchange: Any = jax.custom_jvp(lambda leaves: io_callback(call, shapes, leaves, ordered=True))
    # Raise on all ranks: a rank that differentiates alone must not leave the others waiting.
    exchange.defjvp(lambda values, tangents: refuse(kv, ValueError(_NO_DERIVATIVE), verb))
    return exchange


def _call_store(
    kv: Any, verb: str, outline: _Outline, dtypes: Sequence[Any], divisor: int, leaves: Sequence[Any]
) -> list[Array]:
    """Exchange leaves by a call of the store, and return new arrays, divided by ``divisor``. Collective; any thread."""
    names = outline.names
    try:
        arrays = [_on_host(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    except Exception as error:
        kv.raise_on_all_ranks(error, verb)
    _agree(kv, verb, outline, arrays)
    if not names:
        kv.check_equal("a tree without leaves", verb)
        return []
    outs = [aligned(array.shape, array.dtype) for array in arrays]
    getattr(kv, verb)(names, arrays, outs)
    if verb == "broadcast" and not isinstance(kv, AllReduce):
        # A broadcast leaves nothing in the store: the next one may have other shapes.
        kv.delete(names)
    if divisor > 1:
        for out in outs:
            np.divide(out, divisor, out=out)
    return outs


def _await_compiled() -> None:
    """Wait at the exit for compiled functions, so for other ranks; make the process fail if one has failed. Local."""
    try:
        jax.effects_barrier()
    except BaseException:
        fail_at_end()  # Python only prints an exception of an exit function, and would exit with 0
        raise


def _on_host(leaf: Any, dtype: Any) -> Array:
    """Return a leaf's numpy array on the host, uncopied if possible; ConfigError if JAX has changed its dtype. Local.

    >>> _on_host(np.ones(2, np.float32), np.dtype(np.float64))
    Traceback (most recent call last):
    mpikv.errors.ConfigError: JAX has made float32 of float64 in the thread that calls the store, as ...
    """
    array: Array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if array.dtype != dtype:
        raise ConfigError(
            f"JAX has made {array.dtype} of {dtype} in the thread that calls the store, as jax.enable_x64 holds in one "
            "thread alone; call jax.config.update('jax_enable_x64', True) at the beginning of the program"
        )
    return array


def _agree(kv: Any, verb: str, outline: _Outline, arrays: Sequence[Array]) -> None:
    """Compare a new tree, or new shapes, node by node; init keys if the store keeps any; do nothing for a known one.

    Collective if new, and so on all ranks or none.
    """
    # Without the comparison, the store would report different names of leaves, but not the node that differs.
    known = _kinds.setdefault(kv, {})
    kinds = {name: (array.shape, array.dtype) for name, array in zip(outline.names, arrays, strict=True)}
    changed = {name: kind for name, kind in kinds.items() if known.get(name) != kind}
    if outline.agreed and not changed:
        return
    leaves = (f"{array.dtype}{list(array.shape)}" for array in arrays)
    nodes = (f"{path or 'the tree'} is {kind or next(leaves)}" for path, kind in outline.nodes)
    kv.check_equal("\n".join(["a new tree or new shapes", f"its keys begin with {outline.prefix!r}", *nodes]), verb)
    outline.agreed = True
    if changed and verb == "pushpull" and not isinstance(kv, AllReduce):
        kv.init(list(changed), [np.zeros(*kind) for kind in changed.values()], overwrite=True)
    # Last: after a failed call the ranks compare again.
    known.update(changed)


def _check_store(kv: Any, verb: str) -> None:
    """Raise TypeError, on this rank alone, unless ``kv`` is a store. Local."""
    if not isinstance(kv, KVStoreBase):
        raise TypeError(f"{verb}: kv is {a_kind(kv)}, not a store; pass mpikv.create('allreduce')")


def _check_compiling() -> None:
    """Raise Unsupported if this JAX, or several devices of pmap or shard_map, cannot call the host. Local."""
    if jax.__version_info__ < _COMPILES:
        raise Unsupported(
            f"JAX {jax.__version__} ends the process where a compiled function has a product of matrices and a call of "
            "the host; take JAX 0.7.2 or newer, or exchange arrays outside of jax.jit"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if (devices := prod(mesh.shape[axis] for axis in mesh.manual_axes)) > 1:
        raise Unsupported(
            f"jax.pmap and jax.shard_map would call the host from each of {devices} devices, in no order, so that "
            "ranks add up different things; exchange arrays outside of them: jax.jit takes arrays that are spread over "
            "devices"
        )


def _is_traced(leaves: Sequence[Any]) -> bool:
    """Return whether JAX is tracing: a leaf is a tracer, or a new operation makes one. Local."""
    kind = jax.core.Tracer
    # All leaves may be constants of the function.
    return any(isinstance(leaf, kind) for leaf in leaves) or isinstance(jax.lax.neg(np.float32(0)), kind)


def _place_like(leaves: Sequence[Any], arrays: Sequence[Array]) -> list[Any]:
    """Return host arrays as arrays of each leaf's library, on its devices; JAX may take over their memory. Local."""
    # Older versions of JAX lack ``committed``.
    places = [
        leaf.sharding if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True) else None for leaf in leaves
    ]
    placed = jax.device_put(list(arrays), places)  # one call for all; it takes over aligned host memory without a copy
    return [
        array[()] if isinstance(leaf, np.generic) else array if isinstance(leaf, np.ndarray) else own
        for leaf, array, own in zip(leaves, arrays, placed, strict=True)
    ]
