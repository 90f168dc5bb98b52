"""Train a convolutional network in PyTorch on scikit-learn's handwritten digits, on any number of ranks.

    python scripts/train_torch.py                                     one process, no MPI library needed
    mpikv run -n 4 scripts/train_torch.py                             four ranks, the same batches
    mpikv run -n 4 scripts/train_torch.py --update store              each rank has a quarter of Adam's state
    mpikv run -n 2 scripts/train_torch.py --checkpoint digits.pt      saves each epoch, and goes on from the file if it
                                                                      is there, on any number of ranks

What makes it run on several ranks are `attach` and `sampler`; everything else is a script of one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mpikv
import mpikv.torch

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
except ImportError as error:
    sys.exit(f"train_torch.py needs torch and scikit-learn ({error}):  pip install torch scikit-learn")

BATCH = 48
"""Images per update, over all ranks: a number that 1, 2, 3 and 4 ranks share out evenly."""


def load(seed: int) -> tuple[Any, Any]:
    """Return the digits to train with, 1,440 of 1,797, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    inputs = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    targets = torch.tensor(labels)[order]
    train, test = slice(0, 30 * BATCH), slice(30 * BATCH, None)
    return torch.utils.data.TensorDataset(inputs[train], targets[train]), (inputs[test], targets[test])


def make_model() -> Any:
    """Return a network of two convolutions and two layers, 33,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 54), nn.ReLU(), nn.Linear(54, 10)),
    )


def train(options: argparse.Namespace) -> None:
    """Train, and report on the root."""
    torch.manual_seed(options.seed)
    dataset, test = load(options.seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    attached = mpikv.torch.attach(model, optimizer, update=options.update)
    sampler = mpikv.torch.sampler(dataset, seed=options.seed)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH // attached.kv.size, sampler=sampler)
    first = resume(options.checkpoint, model, optimizer) if options.checkpoint else 0
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        state = optimizer.state_dict()  # on every rank
        if attached.kv.is_root:
            print(f"epoch {epoch + 1:2}  loss {sum(losses) / len(losses):.4f}  {accuracy(model, test)}", flush=True)
            if options.checkpoint:
                save(options.checkpoint, {"model": model.state_dict(), "optimizer": state, "epochs": epoch + 1})
    if attached.kv.is_root:
        weights = sum(one.detach().double().abs().sum() for one in model.parameters())
        print(f"{accuracy(model, test)}, sum of weights {weights:.6f} (ranks {attached.kv.size})")


def accuracy(model: Any, test: tuple[Any, Any]) -> str:
    """Return the share of right answers. The root calls it alone."""
    images, labels = test
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    return f"test accuracy {right:.4f}"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint that is whole at any moment."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def resume(path: Path, model: Any, optimizer: Any) -> int:
    """Load a checkpoint if there is one, on every rank; return how many epochs it has."""
    if not path.exists():
        return 0
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epochs"])


def main() -> int:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", choices=("local", "store"), default="local", help="where weights are updated")
    parser.add_argument("--epochs", type=int, default=12, help="default: 12")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save each epoch; go on if the file is there")
    train(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
