"""The exchange of PyTorch's DistributedDataParallel and a fused update, without the rest of a training step, on
gloo.

PyTorch is optional: without it the case is left out. The timing misses DDP's strength in a real step: it hides the
exchange behind the backward pass.
"""

import os
import platform
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mpikv.protocols import Array

from .rules import Rule

# DDP's defaults, in bytes: a small bucket first, so that the first exchange begins early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


def gloo_problem(comm: Any) -> str:
    """Return why PyTorch's gloo cannot connect the ranks; empty if it can. Collective."""
    if not all(comm.allgather(find_spec("torch") is not None)):
        return "PyTorch is not installed"
    if len(set(comm.allgather(platform.node()))) > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        return "on several hosts GLOO_SOCKET_IFNAME must name their network"
    return "" if import_module("torch.distributed").is_gloo_available() else "this PyTorch has no gloo"


def torch_problem(comm: Any, rule: Rule) -> str:
    """Return why PyTorch cannot be compared; empty if it can. Collective."""
    if why := gloo_problem(comm):
        return why
    if rule.name == "lamb":
        return "PyTorch has no LAMB"
    torch = import_module("torch")
    try:
        _optimizer([torch.zeros(1)], rule, comm.size)
    except (RuntimeError, TypeError):
        return f"PyTorch {torch.__version__} has no fused {rule.title} for the CPU"
    return ""


def connect_torch(comm: Any, library: str) -> Any:
    """Connect the ranks of one host by a library of PyTorch; return its module ``distributed``. Collective."""
    # gloo takes the interface from this variable only; else it takes that of the host's name, or none.
    own_host = os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo") == "lo"
    master_address = comm.bcast("127.0.0.1" if own_host else os.environ["MASTER_ADDR"])
    distributed = import_module("torch.distributed")

    def store(port: int, *, master: bool) -> Any:
        return distributed.TCPStore(master_address, port, comm.size, master, wait_for_workers=False)

    # Port 0: the system chooses one that is free.
    own = store(0, master=True) if comm.rank == 0 else None
    port = comm.bcast(own.port if own else None)
    distributed.init_process_group(
        library, store=own or store(port, master=False), rank=comm.rank, world_size=comm.size
    )
    return distributed


_open: list[Any] = []


def open_group(comm: Any, library: str) -> Any:
    """Return a process group of PyTorch by one of its libraries, beside others that are open. Collective."""
    import_module("mpikv.torch_backend").register()
    if not _open:
        connect_torch(comm, "gloo")
    _open.append(import_module("torch.distributed").new_group(backend=library))
    return _open[-1]


def close_group(group: Any) -> None:
    """Close a process group of :func:`open_group`. Collective."""
    _open.remove(group)
    distributed = import_module("torch.distributed")
    distributed.destroy_process_group(*([group] if _open else []))


class TorchBuckets:
    """Gradients as views of flat buckets, in reverse order; an asynchronous all_reduce of each; a fused optimizer.

    Like DDP it averages. SGD's rate is multiplied by the number of ranks, and Adam's epsilon divided by it; so the mean
    has the same effect as the sum.
    """

    exact = False

    def __init__(self, comm: Any, gradients: Sequence[Array], rule: Rule) -> None:
        """Collective. gloo uses the loopback interface, and each rank one thread."""
        self._torch, self._size = import_module("torch"), comm.size
        self._torch.set_num_threads(1)
        self._distributed = connect_torch(comm, "gloo")
        self._weights = [self._torch.ones(gradient.shape) for gradient in gradients]
        self._buckets = self._fill_buckets(gradients)
        self._optimizer = _optimizer(self._weights, rule, comm.size)

    def _fill_buckets(self, gradients: Sequence[Array]) -> list[Any]:
        """Return the buckets, and make each gradient a view of its part."""
        buckets = []
        for members in _bucketed([gradient.nbytes for gradient in gradients]):
            bucket = self._torch.empty(sum(gradients[key].size for key in members))
            start = 0
            for key in members:
                weight = self._weights[key]
                weight.grad = bucket[start : start + weight.numel()].view(weight.shape)
                weight.grad.copy_(self._torch.from_numpy(gradients[key]))
                start += weight.numel()
            buckets.append(bucket)
        return buckets

    def step(self) -> None:
        # After the first step the buckets hold the mean; averaging again does not change it.
        works = [self._distributed.all_reduce(bucket, async_op=True) for bucket in self._buckets]
        for work, bucket in zip(works, self._buckets, strict=True):
            work.wait()
            bucket.div_(self._size)
        self._optimizer.step()

    def results(self) -> list[Array]:
        return [weight.numpy() for weight in self._weights]

    def close(self) -> None:
        self._distributed.destroy_process_group()


def _optimizer(weights: Sequence[Any], rule: Rule, size: int) -> Any:
    """Return a rule's fused optimizer; given means over ``size`` ranks, it updates as by their sums."""
    options, optimizers = rule.options, import_module("torch.optim")
    if rule.name == "sgd":
        rate = size * options["learning_rate"]
        return optimizers.SGD(weights, lr=rate, momentum=options["momentum"], fused=True)
    betas = options["beta1"], options["beta2"]
    epsilon = options["epsilon"] / size
    return optimizers.Adam(weights, lr=options["learning_rate"], betas=betas, eps=epsilon, fused=True)


def _bucketed(nbytes: Sequence[int]) -> list[list[int]]:
    """Return the keys of each bucket, from the last key to the first; a bucket ends when it is full.

    >>> _bucketed([30 << 20, 20 << 20, 10 << 20, 600_000, 600_000])
    [[4, 3], [2, 1], [0]]
    """
    buckets: list[list[int]] = []
    filled, room = 0, 0
    for key in reversed(range(len(nbytes))):
        if filled >= room:
            room = _BUCKET if buckets else _FIRST_BUCKET
            filled = 0
            buckets.append([])
        buckets[-1].append(key)
        filled += nbytes[key]
    return buckets
