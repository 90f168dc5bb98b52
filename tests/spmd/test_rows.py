"""Pushes and pulls of rows, against a dict of whole arrays in one process that knows what every rank brings.

Numbers are small integers, or halves of them, so that sums and updates are exact in every order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# How many random sequences each store is given; 250 makes 1,000 of those on two ranks.
SEQUENCES = int(os.environ.get("ROW_SEQUENCES", "6"))
STORES = [
    ("shm", "auto", False),
    ("shm", "root", True),
    ("mpi", "auto", True),
    ("mpi", "sharded", False),
    ("mpi", "replicated", False),
    ("hosts", "auto", False),
    ("hosts", "sharded", False),
]
# With messages of 4 KiB owners' ranges end inside of rows, and some rows have more than two owners.
SHAPES = ((700, 3), (40, 31), (5, 2100), (3000,), (129, 2, 3), (0, 3), (4, 0), (1, 1), (900, 64))
DTYPES = ("float64", "float32", "float16", "int32", "bool", "complex128")


@pytest.fixture
def store(request, comm):
    transport, placement, deterministic = request.param
    if comm is None:
        transport = "local"
    with mpikv.create(
        comm=comm, transport=transport, placement=placement, deterministic=deterministic, bucket_bytes=4096
    ) as kv:
        yield kv


# --- The model


@dataclass
class Cell:
    value: np.ndarray
    velocity: dict = field(default_factory=dict)


def assign(cell, ids, total):
    cell.value = np.zeros_like(cell.value)
    cell.value[ids] = total[ids]


def descend(cell, ids, total):
    """SGD with momentum 0.5 and rate 0.5, of these rows alone."""
    velocity = cell.velocity.setdefault("v", np.zeros_like(cell.value))
    velocity[ids] = 0.5 * velocity[ids] - 0.5 * total[ids]
    cell.value[ids] += velocity[ids]


def twice(cell, ids, total):
    cell.value += total + total


def sum_of(cell, brought):
    """Return the rows that any rank brings, and the sum of all: ``brought`` has one list of rows per rank."""
    total = np.zeros_like(cell.value)
    ids = set()
    for indices, values in (each for group in brought for each in group):
        np.add.at(total, indices, values)
        ids |= set(indices.tolist())
    return np.array(sorted(ids), np.int64), total


def drawn(rng, shape, dtype, most):
    """Return the numbers of some rows, in any order and repeated or not, and these rows."""
    count = int(rng.integers(0, min(most, shape[0] * 2) + 1)) if shape[0] else 0
    indices = rng.integers(0, max(shape[0], 1), count)
    return indices, rng.integers(-4, 5, (count, *shape[1:])).astype(dtype)


def add_twice(key, received, stored):
    dense = received.to_dense() if isinstance(received, RowSparse) else received
    stored += dense + dense


class Program:
    """Random calls, made on the store and on the model."""

    VERBS = ("init", "push", "push", "push", "push", "pushpull", "pull", "dense", "set", "updater", "delete")

    def __init__(self, kv, seed, functions):
        self.kv, self.rng, self.functions = kv, np.random.default_rng(seed), functions
        self.cells, self.rule = {}, assign

    def run(self, steps):
        self.init("a")
        for _ in range(steps):
            key = str(self.rng.choice(["a", "b", "c"]))
            verb = str(self.rng.choice(self.VERBS))
            if verb == "init" or key in self.cells:
                getattr(self, verb)(key)
            self.check()
        self.kv.set_updater(None)
        for key in self.cells:
            self.kv.delete(key)

    def init(self, key):
        shape, dtypes = SHAPES[self.rng.integers(len(SHAPES))], EXACT[self.rule]
        dtype = dtypes[self.rng.integers(len(dtypes))]
        indices, values = drawn(self.rng, shape, dtype, 50)
        cell = self.cells[key] = Cell(np.zeros(shape, dtype))
        np.add.at(cell.value, indices, values)
        rows = RowSparse(indices, values, shape)
        self.kv.init(key, rows if self.rng.integers(2) else rows.to_dense(), overwrite=True)

    def brought(self, cell):
        """Return what each rank brings to a push: a list of one length or another, perhaps of nothing."""
        most = int(self.rng.choice([0, 3, 30, 3000]))
        return [
            [drawn(self.rng, cell.value.shape, cell.value.dtype, most) for _ in range(self.rng.integers(1, 4))]
            for _ in range(self.kv.size)
        ]

    def mine(self, cell, brought):
        rows = [RowSparse(indices, values, cell.value.shape) for indices, values in brought[self.kv.rank]]
        return rows if len(rows) > 1 else rows[0]

    def push(self, key):
        keys = list(dict.fromkeys([key, *self.cells]))[:2]
        brought = {name: self.brought(self.cells[name]) for name in keys}
        self.kv.push(keys, [self.mine(self.cells[name], brought[name]) for name in keys])
        self.update(brought)

    def pushpull(self, key):
        cell = self.cells[key]
        brought = self.brought(cell)
        rows = self.mine(cell, brought)
        if self.rng.integers(2):
            out = self.kv.pushpull(key, rows, out=np.empty_like(cell.value))
            self.update({key: brought})
            np.testing.assert_array_equal(out, cell.value)
        else:
            self.kv.pushpull(key, rows)
            self.update({key: brought})
            for each in rows if isinstance(rows, list) else [rows]:
                np.testing.assert_array_equal(each.values, cell.value[each.indices])

    def update(self, brought):
        for name, groups in brought.items():
            self.rule(self.cells[name], *sum_of(self.cells[name], groups))

    def pull(self, key):
        value = self.cells[key].value
        wanted = [drawn(self.rng, value.shape, "float64", 40)[0] for _ in range(self.kv.size)][self.kv.rank]
        rows = self.kv.row_sparse_pull(key, row_ids=wanted)
        np.testing.assert_array_equal(rows.indices, np.unique(wanted))
        np.testing.assert_array_equal(rows.values, value[np.unique(wanted)])

    def dense(self, key):
        cell = self.cells[key]
        given = [self.rng.integers(-3, 4, cell.value.shape).astype(cell.value.dtype) for _ in range(self.kv.size)]
        self.kv.push(key, given[self.kv.rank])
        every = np.arange(len(cell.value))
        self.update({key: [[(every, array)] for array in given]})

    def set(self, key):
        cell = self.cells[key]
        cell.value = self.rng.integers(-3, 4, cell.value.shape).astype(cell.value.dtype)
        self.kv.set(key, cell.value)

    def updater(self, key):
        rule = (assign, descend, twice)[self.rng.integers(3)]
        if (rule is twice and not self.functions) or {cell.value.dtype for cell in self.cells.values()} - set(
            map(np.dtype, EXACT[rule])
        ):
            return
        if rule is descend:
            self.kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        else:
            self.kv.set_updater(add_twice if rule is twice else None)
        self.rule = rule
        for cell in self.cells.values():
            cell.velocity.clear()

    def delete(self, key):
        if len(self.cells) > 1:
            self.kv.delete(key)
            del self.cells[key]

    def check(self):
        for key, cell in self.cells.items():
            if self.rng.integers(3) == 0:
                np.testing.assert_array_equal(self.kv.pull(key), cell.value)


# In which dtypes a rule makes no rounding.
EXACT = {assign: DTYPES, descend: ("float64",), twice: ("float64", "int32", "bool", "complex128")}


@pytest.mark.deadline(30 + 2 * SEQUENCES)
@pytest.mark.parametrize("store", STORES, indirect=True, ids=str)
def test_random_programs_do_what_whole_arrays_do(store, request):
    functions = request.node.callspec.params["store"][1] in ("auto", "root")
    for seed in range(SEQUENCES):
        try:
            Program(store, seed, functions).run(12)
        except AssertionError as error:
            raise AssertionError(f"in sequence {seed}: {error}") from error
