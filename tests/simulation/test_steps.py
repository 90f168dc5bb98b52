"""``kv.steps(path=...)`` resumes from a checkpoint on disk, and a Trainer's loop from what the store does not have."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.testing import Deadlock, Kill, cluster
from mpikv.testing.simulation import Fault

from .test_restarts import run_ranks

STEPS = 6


def train(
    kv: Any, path: Path, steps: int = STEPS, every: float = 600.0, seen: list[int] | None = None
) -> tuple[Any, ...]:
    """Return how the loop began, and all that its steps depend on."""
    params = {"w": np.zeros(70_000, np.float32), "b": np.ones(3, np.float32)}
    kv.init(params)
    given = mpikv.optimizers.create("adam", learning_rate=0.1)
    kv.set_optimizer(given)
    mean, order = np.zeros(3), np.random.default_rng(kv.rank)
    kv.keep(mean=mean, order=order)
    for step in kv.steps(steps, fill=params, path=path, save_every=every):
        if seen is not None:
            seen.append(step)
        time.sleep(1)
        given.learning_rate = 0.1 / (step + 1)
        grads = {key: value - np.float32(step) for key, value in params.items()}
        kv.pushpull(grads, out=params)
        mean += params["b"]
        order.random()
    assert kv.optimizer is given
    return kv.restored, mean.tolist(), params["w"].tobytes(), params["b"].tobytes(), order.random(), kv.version("b")


def start(ranks: int, program: Callable[[Any], Any], folder: Path | None = None, *faults: Fault) -> list[Any]:
    """Run a program on ranks, with a folder for commits or without; return results, None for ranks that failed."""

    def caught(comm: Any) -> Any:
        try:
            with mpikv.create(comm=comm, timeout=10.0) as kv:
                return program(kv)
        except (mpikv.Stalled, mpikv.PeerFailed):
            return None

    try:
        return run_ranks(cluster(ranks, faults=faults), caught, folder)
    except Deadlock:  # in the start of MPI, which has no deadline: a launcher ends the others
        return [None] * ranks


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.feature("steps-on-disk")
def test_a_loop_resumes_from_disk(tmp_path: Path, before: int) -> None:
    wanted = start(2, lambda kv: train(kv, tmp_path / "whole"))
    start(before, lambda kv: train(kv, tmp_path / "run", 4))
    seen = list[int]()
    for rank, found in enumerate(start(2, lambda kv: train(kv, tmp_path / "run", seen=seen))):
        assert found[0] == (4, 0, 0, "")
        assert found[5] == wanted[rank][5]
        # Sums have other terms before; a generator of another number of ranks starts anew.
        assert (found[1:5] == wanted[rank][1:5]) == (before == 2)
    assert seen == [4, 4, 5, 5]
    # A loop that has ended makes no step.
    assert {found[0] for found in start(3, lambda kv: train(kv, tmp_path / "run"))} == {(STEPS, 0, 0, "")}


@pytest.mark.feature("steps-on-disk")
def test_another_number_of_ranks_resumes_nothing_that_each_rank_has_for_itself(tmp_path: Path) -> None:
    """It would go on with the state of step 0."""

    def count(kv: Any) -> list[int]:
        kv.init("w", np.zeros(2))
        mine = np.full(1, kv.rank)
        kv.keep(mine=mine)
        for _ in kv.steps(2 if kv.size == 2 else 3, path=tmp_path / "run"):
            mine += 10
        return mine.tolist()

    assert start(2, count) == [[20], [21]]
    assert start(2, count) == [[20], [21]]
    before = (tmp_path / "run").read_bytes()
    with pytest.raises(mpikv.ConfigError, match=r"no state of the kept object 'mine' for 3 ranks.* start as many"):
        start(3, count)
    assert (tmp_path / "run").read_bytes() == before


@pytest.mark.parametrize("every", [1e-9, 600.0])
def test_the_newest_step_of_memory_and_disk_counts(tmp_path: Path, every: float) -> None:
    folder, path = tmp_path / "keep", tmp_path / "run"
    folder.mkdir()
    wanted = start(2, lambda kv: train(kv, tmp_path / "whole"))
    start(2, lambda kv: train(kv, path, 2), folder)
    # A lost folder: the disk has the step.
    for file in folder.glob("1.1.*"):
        file.unlink()
    assert [found[0][0] for found in start(2, lambda kv: train(kv, path, 3, every), folder)] == [2, 2]
    # Older on disk than in memory, and the reverse.
    start(2, lambda kv: train(kv, tmp_path / "old", 1))
    assert [found[0][0] for found in start(2, lambda kv: train(kv, tmp_path / "old", 3, every), folder)] == [3, 3]
    assert [found[0][0] for found in start(2, lambda kv: train(kv, path, 5, every))] == [3, 3]
    found = start(2, lambda kv: train(kv, path, every=every), folder)
    assert [one[0][0] for one in found] == [5, 5]
    assert [one[1:] for one in found] == [one[1:] for one in wanted]


@pytest.mark.filterwarnings("ignore::mpikv.testing.Missed")
def test_a_save_that_a_death_cuts_short_leaves_the_one_before(tmp_path: Path) -> None:
    wanted = [one[1:] for one in start(2, lambda kv: train(kv, tmp_path / "whole"))]
    begins = list[int]()
    for at in range(20, 130, 12):
        start(2, lambda kv, at=at: train(kv, tmp_path / f"{at}", every=1e-9), None, Kill(1, at), Kill(0, at + 9))
        found = start(2, lambda kv, at=at: train(kv, tmp_path / f"{at}", every=1e-9))
        assert [one[1:] for one in found] == wanted
        begins.append(found[0][0].step if found[0][0] else 0)
    # The later the death, the later the step.
    assert begins == sorted(begins)
    assert len({*begins}) > 3


def test_a_folder_that_takes_no_file_is_named_before_the_first_step(tmp_path: Path) -> None:
    seen = list[int]()
    with pytest.raises(FileNotFoundError, match="missing"):
        start(2, lambda kv: train(kv, tmp_path / "missing" / "run", seen=seen))
    assert seen == []


@pytest.mark.parametrize("path", ["", "new/"])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(mpikv.ConfigError, match=f"steps: path='{path}' names no file"):
        start(2, lambda kv: kv.steps(3, path=path))


def test_a_total_below_the_saved_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for total in (3, 3, 2):
        assert "makes no step" not in caplog.text
        start(2, lambda kv, total=total: train(kv, tmp_path / "run", total))
    assert caplog.messages == ["steps: total=2 is below step 3, where the loop goes on: it makes no step"]


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    def saves(kv: Any) -> None:
        kv.init("w", np.zeros(2))
        kv.save(tmp_path / "plain")
        with pytest.raises(mpikv.ConfigError, match="is no checkpoint of a loop of steps; give another path"):
            kv.steps(3, path=tmp_path / "plain")

    start(2, saves)


# --- Trainers


def loop(kv: Any, on_store: bool, steps: int, at: Callable[[int], object], **options: Any) -> Any:
    params = {"w": np.ones(3), "mean": mpikv.Parameter(np.zeros(2), grad_req="null")}
    scaler = mpikv.LossScaler(8.0, window=2)
    trainer = mpikv.Trainer(
        params, "adam", {"learning_rate": 0.5}, kvstore=kv, update_on_kvstore=on_store, loss_scaler=scaler
    )
    epochs = [0]
    for step in trainer.steps(steps, epochs=epochs, **options):
        at(step)
        trainer.learning_rate, trainer.set_learning_rate(0.5 / (step + 1))
        params["mean"].data += params["w"][:2]
        trainer.set_grads({"w": scaler.loss_scale * params["w"] * (np.inf if step == 3 else 1)})
        trainer.step(1)
        epochs[0] += 1
    trainer.set_grads({"w": params["w"].copy()})
    trainer.step(1)
    return params["w"].tolist(), params["mean"].data.tolist(), scaler.state_dict(), epochs, trainer.learning_rate


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.feature("steps-of-trainers")
def test_a_trainer_goes_on(tmp_path: Path, on_store: bool, where: str) -> None:
    folder, options = (tmp_path, {}) if where == "memory" else (None, {"path": tmp_path / "run"})
    wanted = start(2, lambda kv: loop(kv, on_store, STEPS, lambda step: None))
    start(2, lambda kv: loop(kv, on_store, 4, lambda step: None, **options), folder)
    again = list[int]()
    assert start(2, lambda kv: loop(kv, on_store, STEPS, again.append, **options), folder) == wanted
    assert sorted(again) == [4, 4, 5, 5]


def test_several_trainers_share_a_loop(tmp_path: Path) -> None:
    def both(kv: Any, steps: int) -> Any:
        weights = {name: {f"{name}/w": np.full(2, 1.0 + len(name))} for name in ("g", "disc")}
        trainers = {
            name: mpikv.Trainer(one, "adam", kvstore=kv, update_on_kvstore=False) for name, one in weights.items()
        }
        trainers["g"].start()
        trainers["disc"].start()
        kv.keep(**trainers)
        for _ in kv.steps(steps):
            for name, trainer in trainers.items():
                trainer.set_grads({key: weight.copy() for key, weight in weights[name].items()})
                trainer.step(1)
        return [weight.tolist() for one in weights.values() for weight in one.values()]

    wanted = start(2, lambda kv: both(kv, 5))
    start(2, lambda kv: both(kv, 3), tmp_path)
    assert start(2, lambda kv: both(kv, 5), tmp_path) == wanted
