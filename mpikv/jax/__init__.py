"""Training with JAX: sums and means of gradients over ranks. The functions change nothing in place, and run in ``jit``.

A script of one process needs three lines, and ``mpikv run -n 4 train.py`` to start it::

    kv = mpikv.create("allreduce")
    params = mpikv.jax.broadcast(kv, params)                                      # the root's, on every rank
    loss, grads = mpikv.jax.value_and_grad(loss_of_batch, kv)(params, batch)      # in place of jax.value_and_grad

In ``jax.jit`` a callback on the host exchanges the arrays.
"""

from ..errors import TransportUnavailable

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise TransportUnavailable(
        f"mpikv.jax needs JAX, which cannot be imported ({error}); pip install 'mpikv[jax]' installs it"
    ) from error

from .exchange import broadcast, pushpull
from .gradients import all_reduce, value_and_grad

__all__ = ["all_reduce", "broadcast", "pushpull", "value_and_grad"]
