# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy", "scikit-learn"]
#
# [tool.uv.sources]
# mpikv = { path = "..", editable = true }
# ///
"""Tell malignant from benign tumours by logistic regression, with an update rule written in Python.

    python scripts/train_cancer.py                        one rank, no MPI library needed
    mpikv run -n 4 scripts/train_cancer.py                four ranks, the same accuracy
    mpikv run -n 4 scripts/train_cancer.py --verify       the weights beside those of one process

Every rank has a part of scikit-learn's breast-cancer data and pushes its part of the gradient. The rule, which is
gradient descent with Nesterov's momentum and a penalty on large weights, is a function that runs at the root alone,
once per key and push. The problem is convex, so one process must find the same weights but for rounding.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpikv

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = "dict[str, Array]"

RATE, MOMENTUM, PENALTY = 0.2, 0.9, 0.01
MOST_DIFFERENCE = 1e-12


class Tumours(NamedTuple):
    """30 measures of each tumour, in standard deviations from the mean, and whether it is benign (1) or not (0)."""

    measures: Array
    benign: Array
    test_measures: Array
    test_benign: Array


def load(seed: int) -> Tumours:
    """Return the 569 tumours, a random 171 of them for the test."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        sys.exit(f"train_cancer.py needs scikit-learn ({error}):  pip install scikit-learn")
    measures, benign = load_breast_cancer(return_X_y=True)
    test, train = np.split(np.random.default_rng(seed).permutation(len(benign)), [171])
    measures = (measures - measures[train].mean(axis=0)) / measures[train].std(axis=0)
    return Tumours(measures[train], benign[train], measures[test], benign[test])


def probability(params: Arrays, measures: Array) -> Array:
    """Return how likely each tumour is benign."""
    return 1 / (1 + np.exp(-(measures @ params["weight"] + params["bias"])))


def gradients(params: Arrays, measures: Array, benign: Array, count: int) -> Arrays:
    """Return these tumours' part of the gradient of the mean loss over ``count`` tumours."""
    error = (probability(params, measures) - benign) / count
    return {"weight": error @ measures, "bias": error.sum(keepdims=True)}


def initial() -> Arrays:
    """Return the weights to start from."""
    return {"weight": np.zeros(30), "bias": np.zeros(1)}


def train(kv: mpikv.KVStore, tumours: Tumours, steps: int) -> Arrays:
    """Train on all ranks; return the weights, which are the same on each."""
    params, velocity = initial(), initial()
    kv.broadcast(params)  # every rank starts from the root's weights

    @kv.updater
    def descend(key: str, gradient: Array, stored: Array) -> None:
        penalty = PENALTY if key == "weight" else 0.0
        change = RATE * (gradient + penalty * stored)
        velocity[key] = MOMENTUM * velocity[key] - change
        stored += MOMENTUM * velocity[key] - change

    mine = slice(kv.rank, None, kv.size)
    measures, benign, count = tumours.measures[mine], tumours.benign[mine], len(tumours.benign)
    for _ in range(steps):
        kv.push(gradients(params, measures, benign, count))
        kv.pull(params)
    return params


def train_alone(tumours: Tumours, steps: int) -> Arrays:
    """Train in this process with numpy alone, in one vector of 31 weights."""
    rows = np.column_stack([tumours.measures, np.ones(len(tumours.benign))])
    penalty = np.array([PENALTY] * 30 + [0.0])
    weights, velocity = np.zeros(31), np.zeros(31)
    for _ in range(steps):
        error = 1 / (1 + np.exp(-rows @ weights)) - tumours.benign
        gradient = rows.T @ error / len(rows) + penalty * weights
        velocity = MOMENTUM * velocity - RATE * gradient
        weights += MOMENTUM * velocity - RATE * gradient
    return {"weight": weights[:30], "bias": weights[30:]}


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Logistic regression with a Python updater, on any number of ranks.")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--seed", type=int, default=0, help="seed that chooses the test samples; default: 0")
    parser.add_argument("--verify", action="store_true", help="compare the weights with those of one process")
    return parser.parse_args()


def main() -> int:
    """Train, and report on the root."""
    options = arguments()
    tumours = load(options.seed)
    with mpikv.create() as kv:
        params = train(kv, tumours, options.steps)
        is_root, setting = kv.is_root, f"ranks {kv.size}, placement {kv.placement}, transport {kv.transport}"
    # The ranks' weights are equal, so that each comes to the same end of the comparison, and the same exit status.
    different = options.verify and not verified(params, train_alone(tumours, options.steps), is_root)
    if is_root:
        right = (probability(params, tumours.test_measures) > 0.5) == tumours.test_benign
        print(f"test accuracy {right.mean():.4f} ({setting})", flush=True)
    return 1 if different else 0


def verified(params: Arrays, reference: Arrays, is_root: bool) -> bool:
    """Return whether the weights are equal but for rounding."""
    difference = max(float(np.abs(params[name] - reference[name]).max()) for name in params)
    if is_root:
        print(f"max weight difference from one process {difference:.1e}", flush=True)
    return difference <= MOST_DIFFERENCE


if __name__ == "__main__":
    sys.exit(main())
