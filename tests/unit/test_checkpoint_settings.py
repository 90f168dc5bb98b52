"""Settings of optimizers in checkpoints that somebody has written by hand: loaded, or refused as a bad checkpoint."""

import copy
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import schedules
from mpikv.checkpoint.compatibility import describe_updater, restore_updater
from mpikv.optimizers.updaters import Assign

TRIALS = int(os.environ.get("CHECKPOINT_SETTINGS", "500"))
ODD = (None, True, False, 0, 1, -1, 2**70, 0.5, -0.0, 1e308, "", "w", "0.5", [], {}, [1], [[1, 2]], {"tuple": [1, 2]})
ODDER = (
    {"dict": [[None, 1.0], [3, 2.0]]},
    {"dict": [["w", 1.0], [3, None]]},
    {"dict": [[{"tuple": [1]}, 1.0], [True, 2.0], [1.5, 2.0]]},
    {"dict": [[{"dict": []}, 1.0]]},
    {"dict": 3},
    {"tuple": None},
    {"schedule": ["MultiFactor", {"dict": [["steps", {"tuple": [None, "a"]}]]}]},
    {"schedule": []},
    {"schedule": ["Schedule", {"dict": []}]},
    {"array": []},
    {"array": ["float64", [1]]},
    {"tensor": ["float32", [1], 4]},
    {"number": {"array": ["float64", []]}},
)
OPTIMIZERS = (
    mpikv.optimizers.SGD(learning_rate=0.5, momentum=0.5, lr_mult={"w": 0.5, "v": 1.0}, wd_mult={1: 0.5, "v": 2.0}),
    mpikv.optimizers.SGD(lr_scheduler=schedules.Factor(step=2, factor=0.5, base_lr=0.1)),
    mpikv.optimizers.Adam(clip_gradient=1.0, lr_scheduler=schedules.MultiFactor(step=(2, 5), factor=0.5, base_lr=0.1)),
    mpikv.optimizers.LAMB(),
    mpikv.optimizers.FTRL(),
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within a tree, with each of its keys."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from places(tree[key])


def mutate(draw: random.Random, options: dict[str, Any]) -> None:
    container, key = draw.choice(list(places(options)))
    what = draw.randrange(4)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container[draw.choice(("", "learning_rate", "momentum", "lr_mult", "tuple", "dict"))] = container.pop(key)
    else:
        container[key] = copy.deepcopy(draw.choice(ODD + ODDER))


@pytest.mark.deadline(120)
def test_mutated_settings() -> None:
    seed = int(os.environ.get("CHECKPOINT_SEED", "0"))
    draw, seen = random.Random(seed), Counter[str]()
    for trial in range(TRIALS):
        saved = copy.deepcopy(describe_updater(draw.choice(OPTIMIZERS)))
        for _ in range(draw.randint(1, 3)):
            if saved["options"]:
                mutate(draw, saved["options"])
        try:
            made = restore_updater(saved, Assign())
            # What a store does with it before anything moves, and in its first pushes.
            made.settings()
            describe_updater(made)
            with mpikv.create() as kv:
                kv.init(["w", "x"], [np.ones(2), np.ones(2)])
                kv.set_optimizer(made)
                with np.errstate(all="ignore"):
                    for _ in range(2):
                        kv.push(["w", "x"], [np.ones(2), np.ones(2)])
            seen["loaded"] += 1
        except mpikv.CheckpointError:
            seen["refused"] += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, trial {trial}: {error!r}: {saved['options']}")
    assert min(seen["loaded"], seen["refused"]) > TRIALS // 50, seen
