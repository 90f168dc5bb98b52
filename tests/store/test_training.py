"""The examples learn, and n ranks find the weights of one process."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
train_digits: Any = pytest.importorskip("train_digits")

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def ignore(params: Any) -> None:
    pass


def furthest(params: Any, reference: Any) -> float:
    return max(float(np.abs(params[name] - reference[name]).max()) for name in params)


@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_digits_have_the_weights_of_one_process(comm: Any, optimizer: str, placement: str, transport: str) -> None:
    settings = train_digits.Settings(optimizer, "float64", epochs=2, batch=64, seed=0)
    digits = train_digits.load("float64", 0)
    with mpikv.create(comm=comm, placement=placement, transport=transport) as kv:
        params = train_digits.train(kv, digits, settings, ignore)
    assert furthest(params, train_digits.train_alone(digits, settings)) <= 1e-12


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_digits_are_learnt(comm: Any, dtype: str) -> None:
    digits = train_digits.load(dtype, 0)
    with mpikv.create(comm=comm) as kv:
        settings = train_digits.Settings("adam", dtype, epochs=20, batch=64, seed=0)
        params = train_digits.train(kv, digits, settings, ignore)
    _, accuracy = train_digits.measure(params, digits.test_images, digits.test_labels)
    assert accuracy >= 0.98
    if dtype == "float64":
        assert round(accuracy * len(digits.test_labels)) == 353  # on any number of ranks


@pytest.mark.ranks(2, 4)
@pytest.mark.deadline(120)
@pytest.mark.parametrize("staleness", [None, 4])
def test_digits_are_learnt_by_updates_on_arrival(comm: Any, staleness: int | None) -> None:
    """To within a point of what the sums of all ranks learn, in the mean of two trainings."""
    found, expected = [], []
    for seed in (0, 1):
        digits = train_digits.load("float64", seed)
        settings = train_digits.Settings("adam", "float64", epochs=20, batch=64, seed=seed)
        with mpikv.create("dist_async", comm=comm, staleness=staleness) as kv:
            params = train_digits.train(kv, digits, settings, ignore)
            kv.barrier()
            params = kv.pull(params)
        found.append(train_digits.measure(params, digits.test_images, digits.test_labels)[1])
        alone = train_digits.train_alone(digits, settings)
        expected.append(train_digits.measure(alone, digits.test_images, digits.test_labels)[1])
    assert np.mean(found) >= np.mean(expected) - 0.01


def accuracy(comm: Any, compression: Any, optimizer: str = "adam", scale: float = 1.0) -> float:
    """Return the mean accuracy of two trainings in float32."""
    accuracies = []
    for seed in (0, 1):
        digits = train_digits.load("float32", seed)
        settings = train_digits.Settings(optimizer, "float32", epochs=20, batch=64, seed=seed, scale=scale)
        with mpikv.create(comm=comm, compression=compression) as kv:
            params = train_digits.train(kv, digits, settings, ignore)
        accuracies.append(train_digits.measure(params, digits.test_images, digits.test_labels)[1])
    return float(np.mean(accuracies))


@cache
def uncompressed(optimizer: str) -> float:
    """Return the mean accuracy of the same trainings in one process."""
    accuracies = []
    for seed in (0, 1):
        digits = train_digits.load("float32", seed)
        params = train_digits.train_alone(digits, train_digits.Settings(optimizer, "float32", 20, 64, seed))
        accuracies.append(train_digits.measure(params, digits.test_images, digits.test_labels)[1])
    return float(np.mean(accuracies))


@pytest.mark.ranks(4)
@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", train_digits.COMPRESSIONS)
def test_digits_are_learnt_with_packed_gradients(comm: Any, name: str) -> None:
    compression = {"type": name, **train_digits.COMPRESSIONS[name]}
    optimizer = "sgd" if name in train_digits.SCALES else "adam"
    found = accuracy(comm, compression, optimizer, train_digits.SCALES.get(name, 1.0))
    assert found >= uncompressed(optimizer) - 0.01


@pytest.mark.ranks(4)
@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    ("compression", "scale"),
    [({"type": "2bit", "threshold": 0.05}, 1.0), ({"type": "1bit", "threshold": 0.0}, 64.0)],
    ids=["2bit", "1bit"],
)
def test_error_feedback_is_what_makes_up_for_biased_codes(comm: Any, compression: Any, scale: float) -> None:
    """SGD, whose steps are as long as the gradient: what is left out for good is missing (Karimireddy et al. 2019)."""
    with_feedback = accuracy(comm, compression, "sgd", scale)
    without = accuracy(comm, {**compression, "error_feedback": False}, "sgd", scale)
    assert without < with_feedback - 0.02


def test_a_missing_library_is_one_line(hide: Any) -> None:
    hide("sklearn.datasets")
    why = r"\(import of sklearn\.datasets halted; .*\)"
    with pytest.raises(SystemExit, match=rf"^\w+\.py needs scikit-learn {why}:  pip install scikit-learn$"):
        train_digits.load("float64", 0)
