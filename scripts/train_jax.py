# /// script
# requires-python = ">=3.10"
# dependencies = ["jax", "mpikv", "numpy", "optax", "scikit-learn"]
#
# [tool.uv.sources]
# mpikv = { path = "..", editable = true }
# ///
"""Train a small network of JAX on scikit-learn's digits, with an optimizer of optax, on any number of ranks.

    python scripts/train_jax.py                                           one rank, no MPI library needed
    mpikv run -n 4 scripts/train_jax.py                                   four ranks, the same losses
    mpikv run -n 4 scripts/train_jax.py --checkpoint digits.npz           go on from the file where there is one

What to copy is `main`: the two lines with `mpikv.jax` make a program of one process one of many. Every rank takes its
part of every batch. Parts are of one size, so that the mean over ranks is the mean over the batch.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mpikv
import mpikv.jax

try:
    import jax
    import jax.numpy as jnp
    import optax
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"train_jax.py needs scikit-learn and optax ({error}):  pip install scikit-learn optax")


def load(seed: int) -> tuple[list[Any], list[Any]]:
    """Return images and labels to train with, and a random fifth of all for the test."""
    images, labels = load_digits(return_X_y=True)
    test, train = np.split(np.random.default_rng(seed).permutation(len(images)), [len(images) // 5])
    return [images[train] / 16, labels[train]], [images[test] / 16, labels[test]]


def initial(seed: int) -> dict[str, Any]:
    """Return the weights of a new network of 64, 128 and 10 units (He et al. 2015)."""
    one, other = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"w": jax.random.normal(one, (64, 128)) * np.sqrt(2 / 64), "b": jnp.zeros(128)},
        "output": {"w": jax.random.normal(other, (128, 10)) * np.sqrt(2 / 128), "b": jnp.zeros(10)},
    }


def loss(params: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    """Return the mean loss, and the share of right answers."""
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    scores = hidden @ params["output"]["w"] + params["output"]["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return losses.mean(), (scores.argmax(axis=1) == labels).mean()


def batches(data: list[Any], size: int, seed: tuple[int, int], kv: mpikv.KVStore) -> Iterator[list[Any]]:
    """Yield this rank's part of each batch of an epoch. The order is the same on every rank, because the seed is."""
    order = np.random.default_rng(seed).permutation(len(data[1]))
    for start in range(0, len(order) - size + 1, size):
        part = order[start : start + size][kv.rank :: kv.size]
        yield [array[part] for array in data]


def save(path: Path, tree: Any, epoch: int) -> None:
    """Write the leaves of a tree: to a draft first, so that a killed run leaves the old file or the new one."""
    draft = path.with_suffix(".draft.npz")
    np.savez(draft, *jax.tree.leaves(tree), epoch=epoch)
    draft.replace(path)


def restore(path: Path, tree: Any) -> tuple[Any, int]:
    """Return what `save` wrote, in the structure of a tree, and after how many epochs that was."""
    with np.load(path) as file:
        leaves = [file[f"arr_{number}"] for number in range(len(file.files) - 1)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves), int(file["epoch"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=60, help="images of all ranks, a multiple of their number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="a file NAME.npz to go on from, and to write after each epoch")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)  # rounding would depend on the number of ranks

    kv = mpikv.create("allreduce")
    if options.batch % kv.size:
        parser.error(f"--batch {options.batch} is no multiple of {kv.size}, the number of ranks")
    train, test = load(options.seed)
    params, optimizer, first = initial(options.seed), optax.adam(4e-3), 0
    state = optimizer.init(params)
    if options.checkpoint and options.checkpoint.exists():
        (params, state), first = restore(options.checkpoint, (params, state))
    params, state, first = mpikv.jax.broadcast(kv, (params, state, first))  # every rank begins with the root's
    averaged = mpikv.jax.value_and_grad(loss, kv, has_aux=True)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        (value, _), gradient = averaged(params, images, labels)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    for epoch in range(int(first), options.epochs):
        for images, labels in batches(train, options.batch, (options.seed, epoch), kv):
            params, state, value = step(params, state, images, labels)
        if kv.is_root:
            accuracy = loss(params, *test)[1]
            print(f"epoch {epoch + 1:2}  loss {value:.4f}  test accuracy {accuracy:.4f}", flush=True)
            if options.checkpoint:
                save(options.checkpoint, (params, state), epoch + 1)


if __name__ == "__main__":
    main()
