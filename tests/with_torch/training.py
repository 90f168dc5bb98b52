"""Models and data that every rank, and one process with the whole batch, makes alike. Importing it skips a module of
tests where torch is not installed.

The folder is not called torch: its parent is in ``sys.path``, where it would be found in place of the library.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from mpikv import PeerFailed

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install 'mpikv[torch]'")
attach: Any = pytest.importorskip("mpikv.torch", reason="mpikv.torch cannot be imported").attach
nn, optim, functional = torch.nn, torch.optim, torch.nn.functional

is_too_old = pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "abort"), reason="the backend 'mpikv' needs PyTorch 2.7"
)

ROWS = 12  # of a whole batch, divisible by all numbers of ranks


def network(seed: int = 0, dtype: Any = torch.float64) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step: int, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Return the whole batch of a step: its inputs and targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    draw = torch.randn(ROWS, 7, generator=generator, dtype=torch.float64).to(dtype)
    return draw[:, :4], draw[:, 4:]


def share(tensors: Any, kv: Any) -> tuple[Any, ...]:
    """Return this rank's rows of a batch, all of them where there is no store."""
    return tuple(tensors) if kv is None else tuple(tensor[kv.rank :: kv.size] for tensor in tensors)


def loss_of(model: Any, step: int, kv: Any = None) -> Any:
    first = next(iter(model.parameters()))
    inputs, targets = share(batch(step, first.dtype), kv)
    return (model(inputs) - targets).square().mean()


def train(model: Any, optimizer: Any, steps: Any, kv: Any = None) -> None:
    """Make these steps: with this rank's share, or those of one process."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, kv).backward()
        optimizer.step()


def sgd(model: Any, **options: Any) -> Any:
    return optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adam(model: Any) -> Any:
    return optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def attached_pair(
    kv: Any, make: Callable[[Any], Any] = sgd, steps: int = 0, model: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """Return a new model, or this one, its optimizer and their attachment, after so many steps."""
    model = model or network()
    optimizer = make(model)
    attached = attach(model, optimizer, kv=kv, **options)
    train(model, optimizer, range(steps), kv)
    return model, optimizer, attached


def is_last(kv: Any) -> bool:
    return kv.rank == kv.size - 1


def last_fails(
    kv: Any, kind: type[Exception], pattern: str, call: Callable[[], Any], others: Callable[[], Any] | None = None
) -> None:
    """Check that the last rank's call raises, and that the others learn of it in theirs, or in the same."""
    expected = kind if is_last(kv) else PeerFailed
    with pytest.raises(expected, match=pattern) as caught:
        (call if is_last(kv) or others is None else others)()
    assert type(caught.value) is expected


def assert_close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare tensors, modules by their states, or what holds such."""
    if isinstance(expected, nn.Module):
        found, expected = found.state_dict(), expected.state_dict()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_equal_over_ranks(kv: Any, *tensors: Any) -> None:
    """Compare this rank's bits with those of rank 0."""
    own = [tensor.detach().reshape(-1).to(torch.float64).tolist() for tensor in tensors]
    every = [own] if kv.comm is None else kv.comm.allgather(own)
    assert every == [every[0]] * kv.size


def check_trains(kv: Any, model: Any, optimizer: Any, make: Callable[[], Any] = network) -> None:
    """Train on, as one process that begins where the root is."""
    state = deepcopy([model.state_dict(), optimizer.state_dict()])
    model_state, optimizer_state = state if kv.comm is None else kv.comm.bcast(state, 0)
    alone = make()
    alone.load_state_dict(model_state)
    own = type(optimizer)(alone.parameters(), lr=0.1)
    own.load_state_dict(optimizer_state)
    train(model, optimizer, range(100, 103), kv)
    train(alone, own, range(100, 103))
    assert_close(model, alone)


def check_attaches(kv: Any) -> None:
    """Attach another model to the same store and train it."""
    model = network(7)
    optimizer = sgd(model)
    attached = attach(model, optimizer, kv=kv)
    check_trains(kv, model, optimizer)
    attached.detach()
