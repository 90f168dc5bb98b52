"""Each kind of store, once, on real ranks: what it is for works with the MPI library that is here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import Parameter, RowSparse, Trainer

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def sums(kv: Any) -> None:
    kv.init(["v", "w"], [np.zeros(3), np.zeros((40, 50), np.float32)])
    kv.set_optimizer("sgd", learning_rate=0.5)
    outs = np.empty(3), np.empty((40, 50), np.float32)
    for turn in range(1, 4):
        kv.push(["v", "w"], [np.ones(3), np.full((40, 50), kv.rank, np.float32)])
        kv.barrier()  # before which a push on arrival need not have come
        kv.pull(["v", "w"], out=list(outs))
        assert (outs[0] == -0.5 * turn * kv.size).all()
        assert (outs[1] == -0.25 * turn * kv.size * (kv.size - 1)).all()
        kv.barrier()  # after which one of the next turn may come


def calls_aside(kv: Any) -> None:
    kv.init("w", np.zeros(300))
    works = [kv.pushpull("w", np.ones(300), out=np.empty(300), wait=False) for _ in range(3)]
    for work in works:
        work.wait()
    assert (kv.pull("w") == kv.size).all()


def rows(kv: Any) -> None:
    kv.init("s", RowSparse([], np.zeros((0, 2)), (9, 2)))
    kv.push("s", RowSparse([kv.rank, 8], np.ones((2, 2)), (9, 2)))
    expected = np.zeros((9, 2))
    expected[: kv.size] += 1
    expected[8] += kv.size
    assert (kv.row_sparse_pull("s", row_ids=np.arange(9)).to_dense() == expected).all()


def compressed(kv: Any) -> None:
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", np.zeros(100, np.float32))
    kv.push("w", np.full(100, 0.75, np.float32))
    assert (kv.pull("w") == 0.5 * kv.size).all()


def unequal(kv: Any) -> None:
    kv.init("w", np.zeros(2))
    with kv.join():
        for _ in range(kv.rank + 1):
            kv.push("w", np.ones(2))
    assert (kv.pull("w") == 1).all(), "the last push was of one rank"


def wrong(kv: Any) -> None:
    kv.init("w", np.zeros(2))
    with pytest.raises((mpikv.ValueMismatch, mpikv.PeerFailed)):
        kv.push("w", np.ones(3 if kv.rank == kv.size - 1 else 2))
    kv.push("w", np.ones(2))
    assert (kv.pull("w") == kv.size).all()


@pytest.mark.parametrize("use", [sums, calls_aside, rows, compressed, unequal, wrong], ids=lambda use: use.__name__)
@pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
def test_stores(comm: Any, transport: str, use: Callable[[Any], None]) -> None:
    with mpikv.create(comm=comm, transport=transport if comm else "local", timeout=15) as kv:
        use(kv)


@pytest.mark.parametrize("name", ["p3", "dist_async"])
def test_stores_of_other_names(comm: Any, name: str) -> None:
    with mpikv.create(name, comm=comm, timeout=15) as kv:
        sums(kv)


@pytest.mark.parametrize("name", ["horovod", "byteps"])
def test_stores_without_values(comm: Any, name: str) -> None:
    store = mpikv.create(name, comm=comm)
    array = np.full(5, 1.0 + store.rank)
    store.pushpull("w", array, out=array)
    assert (array == store.size * (store.size + 1) / 2).all()
    store.close()


def test_a_checkpoint(comm: Any, folder: Path) -> None:
    for turn in range(2):
        with mpikv.create(comm=comm) as kv:
            if turn:
                kv.load(folder / "w")
                assert (kv.pull("w") == kv.size).all()
            else:
                kv.init("w", np.zeros(5))
                kv.push("w", np.ones(5))
                kv.save(folder / "w")


def test_a_trainer(comm: Any) -> None:
    weight = Parameter(np.zeros(4))
    with mpikv.create(comm=comm) as kv:
        trainer = Trainer({"w": weight}, "sgd", {"learning_rate": 1.0}, kvstore=kv)
        weight.grad = np.full(4, float(kv.rank))
        trainer.step(batch_size=1)
        assert (weight.data == -sum(range(kv.size))).all()
