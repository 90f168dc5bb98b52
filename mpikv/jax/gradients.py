"""Gradients as means over ranks: in place of ``jax.value_and_grad``, or before an optimizer of optax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax

from ..errors import TransportUnavailable
from ..store.kvstore import KVStore
from .exchange import pushpull, refuse


def value_and_grad(
    f: Callable[..., Any], kv: KVStore, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function, collective, that computes the value and the gradient of ``f`` as means over ranks.

    Local; each call of the function is collective, as :func:`pushpull`. Value and gradient travel in one exchange. If
    all ranks have equally many examples and ``f`` is a mean over them, the result is that of one process with all
    examples. It may be called in ``jax.jit``. If ``f`` raises on one rank, every rank raises.

    No rank compares the arguments of ``f``. Begin with parameters from :func:`broadcast`, or ranks train different
    models.

    Args:
        f: a function that returns a number, as for ``jax.value_and_grad``, the same on every rank. Ranks compare its
            name, ``f.__qualname__``.
        kv: as in :func:`pushpull`. Compression of the store applies to the value, too.
        argnums: the arguments to differentiate by, as in ``jax.value_and_grad``.
        has_aux: whether ``f`` returns a pair. The second item is returned unchanged, as this rank's own.

    Returns:
        A function of the arguments of ``f`` that returns ``(value, gradient)``, or ``((value, aux), gradient)``.

    Raises:
        ConfigError, ValueMismatch, RankMismatch, PeerFailed: the function does, as :func:`pushpull`.

    Example:
        >>> import mpikv.jax, jax.numpy as jnp
        >>> kv = mpikv.create("allreduce")
        >>> mpikv.jax.value_and_grad(lambda w, x: (w * x).sum(), kv)(jnp.ones(2), 3.0)
        (Array(6., dtype=float32), Array([3., 3.], dtype=float32))
    """
    local = jax.value_and_grad(f, argnums, has_aux)
    # Ranks could not tell apart two functions of the same parameters by their trees; the name tells them apart.
    exchange = partial(pushpull, kv, average=True, name=str(getattr(f, "__qualname__", "")))

    @wraps(f)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        """Return value and gradient of ``f`` as means over ranks; an error of ``f`` is raised on all. Collective."""
        try:
            value, gradient = local(*args, **kwargs)
        except Exception as error:
            refuse(kv, error, "value_and_grad")
        if not has_aux:
            return exchange((value, gradient))
        value, aux = value
        value, gradient = exchange((value, gradient))
        return (value, aux), gradient

    return averaged


def all_reduce(kv: KVStore, *, name: str = "") -> Any:
    """Return a stateless transformation of optax; each of its updates, collective, returns means over ranks. Local.

    Local; each ``update`` is collective, as :func:`pushpull`, and may be called in ``jax.jit``. Chain it before an
    optimizer, and every rank makes the same step.

    Args:
        kv: as in :func:`pushpull`.
        name: as in :func:`pushpull`; two models with the same parameters need two names.

    Returns:
        An ``optax.GradientTransformation``.

    Raises:
        TransportUnavailable: optax is not installed.

    Example:
        >>> import mpikv.jax, jax.numpy as jnp, optax
        >>> optimizer = optax.chain(mpikv.jax.all_reduce(mpikv.create("allreduce")), optax.sgd(0.5))
        >>> updates, state = optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))
        >>> updates
        Array([-0.5, -0.5], dtype=float32)
    """
    try:
        import optax
    except ImportError as error:
        raise TransportUnavailable(
            f"all_reduce needs optax, which cannot be imported ({error}); pip install 'mpikv[jax]' installs it"
        ) from error
    return optax.stateless(lambda updates, params: pushpull(kv, updates, average=True, name=name))
