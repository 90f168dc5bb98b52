# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "scikit-learn", "torch"]
#
# [tool.uv.sources]
# mpikv = { path = "..", editable = true }
# ///
"""Train a small convolutional network of PyTorch on scikit-learn's handwritten digits, on any number of ranks.

    python scripts/train_torch.py                            one rank, no MPI library needed
    mpikv run -n 2 scripts/train_torch.py                    two ranks, the same loss and accuracy
    mpikv run -n 2 scripts/train_torch.py --update store     each rank updates its part of the weights
    mpikv run -n 3 scripts/train_torch.py --checkpoint digits.pt     goes on where the file ends, on any number of ranks

What to copy is `main`: a script of one process has all of it but `attach` and `sampler`. The sampler gives ranks their
parts of one order of the images, so that a step has the same images on any number of ranks.
The root alone evaluates and writes the file. With `--update store` the optimizer's `state_dict` is a call of all ranks.

The tensors are of float64 because rounding depends on the number of ranks, and training multiplies it.
"""

import argparse
import os
import sys

try:
    import torch
    from sklearn.datasets import load_digits
except ImportError as missing:
    sys.exit(f"train_torch.py needs PyTorch and scikit-learn ({missing}):  pip install torch scikit-learn")
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpikv.torch

BATCH = 60  # images per update, over all ranks
TRAINING = 1440  # of the 1,797 images, a whole number of batches


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return random 1,440 digits for the training, and the 357 others for the test."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINING], order[TRAINING:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    """Return a new network, with the same weights at every call."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def measure(model: nn.Module, dataset: TensorDataset) -> tuple[float, float]:
    """Return the mean loss and the share of right answers. Local: no rank waits for another."""
    images, labels = dataset.tensors
    with torch.no_grad():
        scores = model(images)
    return nn.functional.cross_entropy(scores, labels).item(), (scores.argmax(1) == labels).double().mean().item()


def main() -> None:
    """Train, and report on the root."""
    parser = argparse.ArgumentParser(description="Train a network of PyTorch on digits, on any number of ranks.")
    add = parser.add_argument
    add("--update", choices=("local", "store"), default="local", help="who updates the weights; default: local")
    add("--epochs", type=int, default=10, help="how many the training has, those of the checkpoint too; default: 10")
    add("--checkpoint", metavar="PATH", help="a file that is written after each epoch, and with which training goes on")
    options = parser.parse_args()

    train, test = load()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    attached = mpikv.torch.attach(model, optimizer, update=options.update)
    kv = attached.kv
    sampler = mpikv.torch.sampler(train, kv=kv)
    if BATCH % kv.size:
        sys.exit(f"train_torch.py: a batch of {BATCH} images cannot be divided among {kv.size} ranks")
    loader = DataLoader(train, batch_size=BATCH // kv.size, sampler=sampler)

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    begin = 0
    if options.checkpoint and kv.any_rank(kv.is_root and os.path.exists(options.checkpoint)):
        state = torch.load(options.checkpoint)  # on every rank
        begin = state["epoch"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)  # another order
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        schedule.step()
        if options.checkpoint:
            state = {"epoch": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}
            if kv.is_root:
                torch.save(state, f"{options.checkpoint}.new")
                os.replace(f"{options.checkpoint}.new", options.checkpoint)  # a kill leaves the old file or the new one
        if kv.is_root:
            loss, accuracy = measure(model, train)[0], measure(model, test)[1]
            print(f"epoch {epoch + 1:2}  loss {loss:.6f}  test accuracy {accuracy:.4f}", flush=True)
    attached.detach()


if __name__ == "__main__":
    main()
