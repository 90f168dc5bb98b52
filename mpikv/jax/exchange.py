"""Sums, means and the root's values of whole trees of arrays, in one call of a store.

Where a tree is traced, as in ``jax.jit``, JAX calls the host when the compiled function runs. The callback uses numpy
alone: a call of JAX inside of it could wait for the thread in which it runs.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar
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

__all__ = ["broadcast", "pushpull"]

Tree = TypeVar("Tree")

# Found by trying: 0.7.0 aborts in XLA, 0.7.2 does not.
_COMPILES = (0, 7, 2)

_known: Any = WeakKeyDictionary()
"""The shape and the dtype of each key that was made here, for each store that needs ``init``."""


def pushpull(kv: KVStore, tree: Tree, *, average: bool = False) -> Tree:
    """Return the sum, or the mean, over ranks of each leaf of a tree. The tree itself stays as it is.

    Collective: every rank calls it in the same order, with trees of the same structure, shapes and dtypes. Trees of
    other structures may follow. It may be called in ``jax.jit``, where the exchange takes place when the compiled
    function runs, and keeps its place among the others. It cannot be differentiated or mapped by ``jax.vmap``, which
    raise ValueError: exchange gradients that have been computed, as :func:`value_and_grad` does.

    While a compiled function runs, its exchanges use the store: before you call methods of the store yourself, wait for
    the result by ``jax.block_until_ready``. The functions of this module do so.

    Args:
        kv: ``mpikv.create("allreduce")``, or another store without an updater, which then also has the sums, under keys
            that begin with ``jax/``.
        tree: any pytree of arrays and numbers, of the dtypes that a store sums, bfloat16 too. Half precision is summed
            in float32 and rounded once. Arrays of JAX on the host are read without a copy; those of other devices are
            copied to the host and back.
        average: whether to divide the sums by the number of ranks, in the leaf's dtype.

    Returns:
        A new tree of the same structure, shapes and dtypes. Leaves are arrays of JAX, but where ``tree`` has those of
        numpy and nothing is compiled, new ones of numpy.

    Raises:
        ConfigError: the store has an updater, or makes no sums, as ``dist_async``.
        Unsupported: it is called in ``jax.jit`` with JAX before 0.7.2.
        ValueMismatch: a leaf's dtype cannot be summed, or has no mean, as int32.
        TypeError: a leaf is no array and no number.
        RankMismatch: ranks gave other trees, or other values of ``average``.
        PeerFailed: another rank raised one of these.

    Inside of ``jax.jit`` these may come as a ``jax.errors.JaxRuntimeError`` with the error's name and text.
    The store can be used again in either case.

    Example (one rank; on n ranks each leaf is n times as large):
        >>> import mpikv.jax, jax, jax.numpy as jnp
        >>> kv = mpikv.create("allreduce")
        >>> mpikv.jax.pushpull(kv, {"w": jnp.ones(2), "b": 1.0})
        {'b': Array(1., dtype=float32...), 'w': Array([1., 1.], dtype=float32)}
        >>> jax.jit(lambda x: mpikv.jax.pushpull(kv, 2 * x, average=True))(jnp.ones(2))
        Array([2., 2.], dtype=float32)
    """
    combined: Tree = _exchange(kv, tree, "pushpull", "mean" if average else "sum")
    return combined


def broadcast(kv: KVStore, tree: Tree) -> Tree:
    """Return the root's tree, on every rank. A training begins with it: all ranks then have the same weights.

    Collective, as :func:`pushpull`, whose rules and errors it has. The leaves of other ranks give shapes and dtypes.

    Example:
        >>> import mpikv.jax, jax.numpy as jnp
        >>> mpikv.jax.broadcast(mpikv.create("allreduce"), [jnp.ones(2)])
        [Array([1., 1.], dtype=float32)]
    """
    combined: Tree = _exchange(kv, tree, "broadcast", "root")
    return combined


def _exchange(kv: Any, tree: Any, verb: str, result: str) -> Any:
    """Return the ``result`` of all ranks' trees: their sum, mean, or the root's."""
    _check_store(kv, verb)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    # A place, as a class of the caller's own may give two leaves one path.
    names = [f"jax/{result}/{place}{jax.tree_util.keystr(path)}" for place, (path, _) in enumerate(pairs)]
    try:
        if verb == "pushpull":
            _check_sums(kv)
        leaves = [_as_array(leaf) for _, leaf in pairs]
        if result == "mean":
            for name, leaf in zip(names, leaves, strict=True):
                _check_mean(name, leaf)
        if traced := _is_traced(leaves):
            _check_compiling()
        # In a compiled function JAX makes 32-bit numbers of numpy's, too.
        dtypes = [jnp.result_type(leaf) if traced else leaf.dtype for leaf in leaves]
    except Exception as error:
        jax.effects_barrier()  # another thread may be in an exchange of a compiled function
        kv.raise_on_all_ranks(error, verb)
    call = partial(_call_store, kv, verb, names, dtypes, kv.size if result == "mean" else 1)
    if traced:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        # The last one that is registered is called first: before the store is closed, which was made earlier.
        atexit.unregister(_await_compiled)
        atexit.register(_await_compiled)
        return structure.unflatten(io_callback(call, shapes, leaves, ordered=True))
    jax.effects_barrier()
    return structure.unflatten(_like(leaves, call(leaves)))


def _call_store(
    kv: Any, verb: str, names: list[str], dtypes: Sequence[Any], divisor: int, leaves: Sequence[Any]
) -> list[Array]:
    """Exchange leaves on the host. Collective. JAX calls it too, from any thread."""
    if not names:
        kv.check_equal("a tree without leaves", verb)
        return []
    try:
        arrays = [_on_host(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    except Exception as error:
        kv.raise_on_all_ranks(error, verb)
    if verb == "pushpull" and not isinstance(kv, AllReduce):
        _make_room(kv, names, arrays)
    outs = [aligned(array.shape, array.dtype) for array in arrays]
    getattr(kv, verb)(names, arrays, outs)
    if verb == "broadcast":
        kv.delete(names)
    if divisor > 1:
        for out in outs:
            np.divide(out, divisor, out=out)
    return outs


def _await_compiled() -> None:
    """Let compiled functions end, which JAX may still run when the program has come to its end. Local."""
    try:
        jax.effects_barrier()
    except BaseException:
        fail_at_end()  # Python only prints what is raised here
        raise


def _on_host(leaf: Any, dtype: Any) -> Array:
    """Return the array of numpy over the memory of a leaf on the host, or over a copy of it.

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


def _make_room(kv: Any, names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Make keys for leaves that are new, or whose shape or dtype has changed. Collective."""
    known = _known.setdefault(kv, {})
    kinds = {name: (array.shape, array.dtype) for name, array in zip(names, arrays, strict=True)}
    changed = {name: kind for name, kind in kinds.items() if known.get(name) != kind}
    if changed:
        kv.init(list(changed), [np.zeros(*kind) for kind in changed.values()], overwrite=True)
        known.update(changed)


def _check_store(kv: Any, verb: str) -> None:
    if not isinstance(kv, KVStoreBase):
        raise TypeError(f"{verb}: kv is {a_kind(kv)}, not a store; pass mpikv.create('allreduce')")


def _check_sums(kv: Any) -> None:
    if not (kv._in_rounds and kv._assigns):
        raise ConfigError(
            f"the store {kv.type!r} has an updater or takes each rank's push by itself, so that it makes no sums; pass "
            "mpikv.create('allreduce')"
        )


def _check_compiling() -> None:
    if jax.__version_info__ < _COMPILES:
        raise Unsupported(
            f"JAX {jax.__version__} ends the process where a compiled function has a product of matrices and a call of "
            "the host; take JAX 0.7.2 or newer, or exchange arrays outside of jax.jit"
        )


def _check_mean(name: str, leaf: Any) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueMismatch(
            f"leaf {name!r} is {leaf.dtype}, which cannot hold a mean; take the sum, average=False, or make it float32"
        )


def _as_array(leaf: Any) -> Any:
    """Return an array of numpy or JAX; a number becomes one of JAX."""
    return leaf if isinstance(leaf, (np.ndarray, np.generic, jax.Array)) else jnp.asarray(leaf)


def _is_traced(leaves: Sequence[Any]) -> bool:
    """Return whether a function is being compiled, or a leaf stands for values that are not known yet."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return True
    return isinstance(jax.lax.neg(np.float32(0)), jax.core.Tracer)  # as leaves may be constants of the function


def _like(leaves: Sequence[Any], arrays: Sequence[Array]) -> list[Any]:
    """Return new arrays of the host as ones of the library, and on the devices, of each leaf."""
    # Older versions do not say whether an array is committed to its devices.
    places = [
        leaf.sharding if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True) else None for leaf in leaves
    ]
    placed = jax.device_put(list(arrays), places)  # in one call; it takes over memory of the host that is aligned
    return [
        array[()] if isinstance(leaf, np.generic) else array if isinstance(leaf, np.ndarray) else own
        for leaf, array, own in zip(leaves, arrays, placed, strict=True)
    ]
