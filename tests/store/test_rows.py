"""Pushes and pulls of rows, against a dict of whole arrays in one process that knows what every rank brings.

Numbers are small integers, or halves of them, so that sums and updates are exact in every order.
"""

import os
import tracemalloc
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# How many random sequences each store is given; 250 makes 1,000 of those on two ranks.
SEQUENCES = int(os.environ.get("ROW_SEQUENCES", "9"))
# Transport, placement, deterministic.
STORES = [
    ("shm", "auto", False),
    ("shm", "root", True),
    ("mpi", "auto", True),
    ("mpi", "sharded", False),
    ("mpi", "replicated", False),
    ("hierarchical", "auto", False),
    ("hierarchical", "sharded", False),
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
        # Two hosts, of which each has the values of what it owns alone; see conftest.py.
        assert transport != "hierarchical" or kv._exchange.transport.shared is (kv.size == 1)
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
        self.shapes = cycle(SHAPES[seed % len(SHAPES) :] + SHAPES[: seed % len(SHAPES)])

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
        shape, dtypes = next(self.shapes), EXACT[self.rule]
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
        keys, most = list(dict.fromkeys([key, *self.cells]))[:2], int(self.rng.choice([3, 40, 3000]))
        values = [self.cells[name].value for name in keys]
        asked = [[drawn(self.rng, value.shape, "bool", most)[0] for value in values] for _ in range(self.kv.size)]
        pulled = self.kv.row_sparse_pull(keys, row_ids=asked[self.kv.rank])
        for value, wanted, rows in zip(values, asked[self.kv.rank], pulled, strict=True):
            np.testing.assert_array_equal(rows.indices, np.unique(wanted))
            np.testing.assert_array_equal(rows.values, value[np.unique(wanted)])

    def dense(self, key):
        cell = self.cells[key]
        given = [self.rng.integers(-3, 4, cell.value.shape).astype(cell.value.dtype) for _ in range(self.kv.size)]
        if self.rng.integers(3):
            self.kv.push(key, given[self.kv.rank])
        else:
            self.kv.buffer(key)[...] = given[self.kv.rank]
            self.kv.push(key)
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


@pytest.mark.feature("sparse-push", "sparse-assign", "sparse-pull")
@pytest.mark.deadline(30 + 2 * SEQUENCES)
@pytest.mark.parametrize("store", STORES, indirect=True, ids=str)
def test_random_programs_do_what_whole_arrays_do(store, request):
    functions = request.node.callspec.params["store"][1] in ("auto", "root")
    for seed in range(SEQUENCES):
        try:
            Program(store, seed, functions).run(12)
        except AssertionError as error:
            raise AssertionError(f"in sequence {seed}: {error}") from error


def test_rows_of_several_owners_are_fetched_in_parts(comm):
    """In each row a rank owns several ranges of one length."""
    shape = (5, 2100)
    rows = RowSparse(np.arange(5), np.random.default_rng(4).standard_normal(shape), shape)
    with mpikv.create(comm=comm, transport="mpi", placement="sharded", bucket_bytes=4096) as kv:
        kv.init("w", np.zeros(shape))
        kv.push("w", rows if kv.is_root else RowSparse([], np.zeros((0, 2100)), shape))
        np.testing.assert_array_equal(kv.row_sparse_pull("w", row_ids=[3, 1]).values, rows.values[[1, 3]])


# --- The forms of row_sparse_pull

VALUE = np.arange(12.0).reshape(6, 2)


def filled(comm, **options):
    kv = mpikv.create(comm=comm, **options)
    kv.init(["s", "d"], [RowSparse(np.arange(6), VALUE, (6, 2))] * 2)
    kv.delete("d")
    kv.init("d", VALUE)
    return kv


@pytest.fixture
def kv(comm):
    with filled(comm) as store:
        yield store


def empty():
    return RowSparse([], np.zeros((0, 2)), (6, 2))


@pytest.mark.feature("sparse-pull")
@pytest.mark.parametrize("key", ["s", "d"])
@pytest.mark.parametrize(
    "ids",
    [np.array([4, 1, 4]), [4, 1, 4], np.array([[4.0, 1.0]], np.float32), np.array([1, 4], np.uint8), (1, 4)],
    ids=["array", "list", "floats", "bytes", "tuple"],
)
def test_one_key(kv, key, ids):
    rows = kv.row_sparse_pull(key, row_ids=ids)
    assert (rows.indices.tolist(), rows.values.tolist(), rows.shape) == ([1, 4], [[2, 3], [8, 9]], (6, 2))
    out = RowSparse([0, 5], np.ones((2, 2), np.float32), (6, 2))
    assert kv.row_sparse_pull(key, out=out, row_ids=ids) is out
    assert (out.indices.tolist(), out.values.tolist(), out.dtype) == ([1, 4], [[2, 3], [8, 9]], np.float32)
    dense = np.full((6, 2), 7.0)
    assert kv.row_sparse_pull(key, dense, 0, ids) is dense
    np.testing.assert_array_equal(dense, np.where(np.isin(np.arange(6), [1, 4])[:, None], VALUE, 0))


@pytest.mark.feature("sparse-pull-lists")
def test_lists(kv):
    outs = [empty(), empty()]
    kv.row_sparse_pull("s", out=outs, row_ids=np.array([3, 0]))
    assert [out.indices.tolist() for out in outs] == [[0, 3], [0, 3]]
    assert not np.shares_memory(outs[0].values, outs[1].values)
    kv.row_sparse_pull("s", out=outs, row_ids=[np.array([3]), np.array([5, 2])])
    assert [out.values.tolist() for out in outs] == [[[6, 7]], [[4, 5], [10, 11]]]
    mixed = [empty(), np.ones((6, 2))]
    kv.row_sparse_pull(["s", "d"], out=mixed, row_ids=[np.array([1]), np.array([], np.int64)])
    assert (mixed[0].values.tolist(), mixed[1].any()) == ([[2, 3]], False)
    one, (two, three) = kv.row_sparse_pull(["d", "s"], row_ids=[[1], [np.array([2]), np.array([0, 2])]])
    assert [rows.indices.tolist() for rows in (one, two, three)] == [[1], [2], [0, 2]]
    (rows,) = kv.row_sparse_pull(["s"], out=outs[:1], row_ids=np.array([1]))
    assert (rows is outs[0], rows.values.tolist()) == (True, [[2, 3]])
    again = kv.row_sparse_pull(["s", "s"], row_ids=[[1], [2]])
    assert [rows.values.tolist() for rows in again] == [[[2, 3]], [[4, 5]]]
    assert len(kv.row_sparse_pull("s", row_ids=[])) == 0


@pytest.mark.ranks(1)
def test_a_few_rows_of_a_large_value_take_little_memory():
    shape, out = (10_000, 100), np.empty((10_000, 100))
    with mpikv.create() as kv:
        kv.init("w", RowSparse([3], np.ones((1, 100)), shape))
        tracemalloc.start()
        try:
            kv.row_sparse_pull("w", out=out, row_ids=[3, 9])
            assert tracemalloc.get_traced_memory()[1] < out.nbytes / 2
        finally:
            tracemalloc.stop()
    assert (out[3].all(), out.sum()) == (True, 100)


@pytest.mark.processes
@pytest.mark.feature("sparse-ignore")
def test_pull_leaves_rows_as_they_are_or_fills_them(comm, transport, caplog):
    caplog.set_level("INFO", "mpikv")
    value = np.zeros((40, 31))
    value[[3, 17, 39]] = comm.size if comm else 1
    none, half = np.zeros((4, 0)), np.array([[1, 0], [0, 0], [0, -0.0], [0, np.nan]], np.float16)
    with mpikv.create(comm=comm, transport=transport, bucket_bytes=4096) as kv:
        kv.init(["s", "d", "none", "half"], [np.zeros((40, 31)), np.ones(3), none, half])
        kv.push("s", RowSparse([39, 3, 17], np.ones((3, 31)), (40, 31)))
        outs = RowSparse([5], np.ones((1, 31), np.float32), (40, 31)), np.empty((40, 31)), np.empty(3)
        given = [[outs[0], outs[1]], outs[2]]
        assert kv.pull(["s", "d"], out=given) is given
        assert (outs[0].indices.tolist(), outs[0].values.tolist()) == ([5], [[1.0] * 31])
        assert [record.levelname for record in caplog.records if "'s'" in record.message] == ["INFO"]
        np.testing.assert_array_equal(outs[1], value)
        np.testing.assert_array_equal(outs[2], np.ones(3))
        kv.pull(["s", "d"], out=given, ignore_sparse=False)
        assert outs[0].indices.tolist() == [3, 17, 39]
        np.testing.assert_array_equal(outs[0].to_dense(), value.astype(np.float32))
        rows = {
            "none": RowSparse([2], np.ones((1, 0)), (4, 0)),
            "half": RowSparse([], np.empty((0, 2), np.float16), (4, 2)),
        }
        assert kv.pull(rows, ignore_sparse=False) is rows
        assert len(rows["none"]) == 0
        np.testing.assert_array_equal(rows["half"].indices, [0, 3])
        np.testing.assert_array_equal(rows["half"].values, half[[0, 3]])
        outs[0].values.fill(7)
        np.testing.assert_array_equal(kv.pull("s"), value)


def test_rows_that_do_not_fit_a_pull(comm):
    """On one rank; the others, who pull whole arrays, are told."""
    size, rank = (comm.size, comm.rank) if comm else (1, 0)
    with mpikv.create(comm=comm) as kv:
        kv.init("s", np.ones((3, 2)))
        out = RowSparse([0], np.ones((1, 3)), (3, 3)) if rank == size - 1 else np.empty((3, 2))
        for ignore in (True, False):
            with pytest.raises(mpikv.ValueMismatch if rank == size - 1 else mpikv.PeerFailed, match="shape"):
                kv.pull("s", out=out, ignore_sparse=ignore)
        np.testing.assert_array_equal(kv.pull("s"), np.ones((3, 2)))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"row_ids": [0, 6]}, IndexError, "row 6 is outside of an array of 6 rows"),
        ({"row_ids": np.array([-1])}, IndexError, "row -1 is outside"),
        ({"row_ids": None}, TypeError, "row_ids says which rows are wanted"),
        ({"row_ids": [0.5]}, TypeError, "expected an array, got float"),
        ({"row_ids": [[0], [1]], "out": [empty()] * 3}, mpikv.ValueMismatch, "3 outs and 2 row_ids for key 's'"),
        ({"row_ids": [0], "out": RowSparse([], np.zeros((0, 3)), (6, 3))}, mpikv.ValueMismatch, "shape"),
        ({"row_ids": [0], "out": RowSparse([], np.zeros((0, 2), int), (6, 2))}, mpikv.ValueMismatch, "int64"),
        ({"row_ids": [0], "out": np.zeros((2, 2))}, mpikv.ValueMismatch, "shape"),
        ({"key": "z", "row_ids": [0]}, mpikv.KeyNotInitialized, "key 'z' was never initialized"),
        ({"key": ["s", "d"], "row_ids": [0]}, mpikv.ValueMismatch, "2 keys need a list of as many row_ids"),
        ({"key": "n", "row_ids": [0]}, mpikv.ValueMismatch, "the value of key 'n' is a single number and has no rows"),
    ],
)
def test_bad_pulls(kv, arguments, error, text):
    kv.init("n", np.array(1.0))
    bad = {"key": "s", **arguments}
    if kv.rank != kv.size - 1:
        bad = {"key": "s", "row_ids": [0]}
        error, text = mpikv.PeerFailed, "raised"
    with pytest.raises(error, match=text):
        kv.row_sparse_pull(**bad)
    assert kv.row_sparse_pull("s", row_ids=[5]).values.tolist() == [[10, 11]]


def few():
    return RowSparse([4], np.ones((1, 2)), (6, 2))


# --- What does not go


@pytest.mark.parametrize("which", ["kind", "shape", "mixture", "dtype", "init", "out"])
def test_ranks_that_differ(kv, which):
    last = kv.rank == kv.size - 1
    rows = RowSparse([1], np.ones((1, 2)), (6, 2))
    calls = {
        "kind": lambda: kv.push("s", VALUE if last else rows),
        "shape": lambda: kv.push("s", RowSparse([1], np.ones((1, 3)), (6, 3)) if last else rows),
        "mixture": lambda: kv.push(["s", "d"], [rows, VALUE if last else rows]),
        "dtype": lambda: kv.push("s", RowSparse([1], np.ones((1, 2), int), (6, 2)) if last else rows),
        "init": lambda: kv.init("new", VALUE if last else rows),
        "out": lambda: kv.pushpull("s", rows, out=np.zeros((6, 2)) if last else empty()),
    }
    errors = {"kind": mpikv.RankMismatch, "init": mpikv.RankMismatch, "out": mpikv.RankMismatch}
    if kv.size > 1 or which not in errors:
        wanted = errors.get(which, mpikv.ValueMismatch if last else mpikv.PeerFailed)
        told = {
            "kind": r"\(item \d: rows against whole arrays\)",
            "init": r"rows, overwrite \[\] against whole arrays, overwrite \[\]",
        }
        with pytest.raises(wanted, match=told.get(which)):
            calls[which]()
    np.testing.assert_array_equal(kv.pull("s"), VALUE)
    kv.push("s", rows)
    assert kv.pull("s").sum() == 2 * kv.size


def test_what_excludes_rows(comm):
    rows = RowSparse([1], np.ones((1, 2), np.float32), (6, 2))
    with mpikv.create(comm=comm, compression="fp16") as kv:
        kv.init("s", rows)
        with pytest.raises(mpikv.Unsupported, match="rows cannot be compressed"):
            kv.push("s", rows)
        kv.set_gradient_compression(None)
        kv.set_optimizer("lamb")
        with pytest.raises(mpikv.Unsupported, match="LAMB updates whole values"):
            kv.push("s", rows)
        for verb in (kv.set, kv.broadcast):
            with pytest.raises(TypeError, match="expected an array, got RowSparse"):
                verb("s", rows)
        assert kv.is_capable("sparse")


# --- Updates

RULES = {
    "sgd": {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 0.5},
    "momentum": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 1.5},
    "adam": {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "wd": 0.01},
    "adagrad": {"learning_rate": 0.1, "epsilon": 1e-4},
}


def lazily(name, options, value, state, ids, total, count):
    """MXNet's lazy updates, by the papers' formulas, row by row."""
    for row in ids:
        g = total[row] * options.get("rescale_grad", 1.0)
        if "clip_gradient" in options:
            g = np.clip(g, -options["clip_gradient"], options["clip_gradient"])
        g = g + options.get("wd", 0.0) * value[row]
        first, second = state.setdefault(row, (np.zeros_like(g), np.zeros_like(g)))
        rate = options["learning_rate"]
        if name in ("sgd", "momentum"):
            first = options.get("momentum", 0.0) * first - rate * g
            value[row] += first
        elif name == "adagrad":
            first = first + g * g
            value[row] -= rate * g / (np.sqrt(first) + options["epsilon"])
        else:
            beta1, beta2 = options["beta1"], options["beta2"]
            first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
            # The number of updates is the key's, as in MXNet, not the row's.
            mean, variance = first / (1 - beta1**count), second / (1 - beta2**count)
            value[row] -= rate * mean / (np.sqrt(variance) + 1e-8)
        state[row] = first, second


@pytest.mark.feature("sparse-optimizers")
@pytest.mark.parametrize("rule", RULES)
def test_optimizers_change_the_rows_in_the_sum(comm, rule, transport):
    options, shape = RULES[rule], (500, 5)
    rng = np.random.default_rng(3)
    expected, state = rng.standard_normal(shape), {}
    with mpikv.create(comm=comm, transport=transport, bucket_bytes=4096) as kv:
        kv.init("w", expected.copy())
        kv.set_optimizer("sgd" if rule == "momentum" else rule, **options)
        for count in range(1, 6):
            brought = [[(rng.integers(0, 500, 9), rng.standard_normal((9, 5)))] for _ in range(kv.size)]
            ids, total = sum_of(Cell(expected), brought)
            kv.push("w", RowSparse(*brought[kv.rank][0], shape))
            lazily(rule, options, expected, state, ids, total, count)
            np.testing.assert_allclose(kv.pull("w"), expected, rtol=1e-12, atol=1e-14)
        assert kv.version("w") == 5


def test_a_function_receives_rows(kv):
    seen = []

    def update(key, received, stored):
        seen.append((key, received))
        stored[received.indices] -= received.values

    kv.set_updater(update)
    kv.push(["d", "s"], [RowSparse([kv.rank, 5], np.ones((2, 2)), (6, 2))] * 2)
    assert [key for key, _ in seen] == (["d", "s"] if kv.is_root else [])
    assert all(type(rows) is RowSparse and rows.shape == (6, 2) for _, rows in seen)
    expected = VALUE.copy()
    expected[: kv.size] -= 1
    expected[5] -= kv.size
    np.testing.assert_array_equal(kv.pull("s"), expected)
    np.testing.assert_array_equal(kv.pull("d"), expected)


# --- With the rest of the store


def test_join(kv):
    kv.set_optimizer("test", learning_rate=1.0)
    with kv.join():
        for _ in range(kv.rank + 1):
            rows = RowSparse([1], np.ones((1, 2)), (6, 2))
            kv.push("s", rows)
            kv.pushpull("s", rows, out=np.zeros((6, 2)))
            kv.pushpull("s", rows)  # which then has the new values
            kv.row_sparse_pull("s", row_ids=[1])
    pushes = 3 * kv.size * (kv.size + 1) / 2
    assert kv.pull("s")[1].tolist() == [2 - pushes, 3 - pushes]


def test_calls_that_nobody_waits_for(kv):
    kv.set_optimizer("test", learning_rate=1.0)
    rows = [RowSparse([number], np.ones((1, 2)), (6, 2)) for number in range(4)]
    works = [kv.push("s", each, wait=False) for each in rows[:3]]
    last = kv.pushpull("s", rows[3], wait=False)
    for work in works:
        work.wait()
    assert last.wait().values.tolist() == [[6 - kv.size, 7 - kv.size]]
    assert kv.pull("s").sum() == VALUE.sum() - 8 * kv.size


def test_checkpoints(comm, folder):
    name = folder / "rows.mpikv"
    rows = RowSparse([1, 2], np.ones((2, 2)), (6, 2))
    with filled(comm) as kv:
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        kv.push("s", rows)
        kv.save(name)
        kv.push("s", rows)
        expected = kv.pull("s")
    with mpikv.create(comm=comm) as kv:
        kv.load(name)
        kv.push("s", rows)
        np.testing.assert_array_equal(kv.pull("s"), expected)
        kv.set_updater(None)
        kv.push("s", rows)
        np.testing.assert_array_equal(kv.pull("s"), kv.size * rows.to_dense())


def resident() -> int:
    """Return how many bytes of memory this rank has for itself, in pages that it has written to."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.processes
@pytest.mark.deadline(120)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_rows_that_are_never_touched_take_no_memory(comm, transport):
    """A table of 800 MB, of whose two states every rank would have 1.6 GB more; nobody writes to all of it."""
    shape = (400_000, 500)
    with mpikv.create(comm=comm, transport=transport if comm else "local") as kv:
        before = resident()
        kv.init("s", RowSparse([5], np.ones((1, 500), np.float32), shape))
        if kv.transport == "shm":
            before = resident()  # each rank writes zeros to its part of the memory that all share
        kv.set_optimizer("adam")
        rng = np.random.default_rng(0)
        for place in (0, 200_000, 399_000):
            ids = place + rng.integers(0, 1000, 50)
            kv.push("s", RowSparse(ids, np.ones((50, 500), np.float32), shape))
            kv.row_sparse_pull("s", row_ids=ids)
        # 150 rows of three arrays, which are in three places each, in pages of 2 MB.
        assert resident() - before < 64 << 20


def test_more_keys_than_a_message_can_tell_the_lengths_of(comm, transport):
    keys = [f"k{number}" for number in range(300)]
    with mpikv.create(comm=comm, transport=transport, bucket_bytes=4096) as kv:
        kv.init(keys, [RowSparse([], np.zeros((0, 3)), (9, 3))] * 300)
        for _ in range(2):
            kv.push(keys, [RowSparse([number % 9], np.full((1, 3), 1.0 * number), (9, 3)) for number in range(300)])
            rows = kv.row_sparse_pull(keys, row_ids=[[number % 9, 0] for number in range(300)])
            for number, each in enumerate(rows):
                assert each.values[-1].tolist() == [kv.size * number] * 3
                assert len(each) == (1 if number % 9 == 0 else 2)
        kv.push(keys, [RowSparse([], np.zeros((0, 3)), (9, 3))] * 300)
        assert not any(each.values.any() for each in kv.row_sparse_pull(keys, row_ids=[[0, 1, 2]] * 300))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("transport", "deterministic"), [("shm", False), ("shm", True), ("mpi", True)])
def test_the_bits_are_those_of_whole_arrays(comm, transport, deterministic, dtype):
    rng = np.random.default_rng([6, 0 if comm is None else comm.rank])
    transport = "local" if comm is None else transport
    with mpikv.create(comm=comm, transport=transport, deterministic=deterministic) as kv:
        kv.init("s", RowSparse([], np.zeros((0, 5), dtype), (200, 5)))
        kv.init("d", np.zeros((200, 5), dtype))
        for length in (1, 2, 3):
            rows = []
            for _ in range(length):
                ids = rng.choice(200, 90, replace=False)
                rows.append(RowSparse(ids, rng.standard_normal((90, 5)).astype(dtype), (200, 5)))
            kv.push("s", rows)
            kv.push("d", [each.to_dense() for each in rows])
            np.testing.assert_array_equal(kv.pull("s"), kv.pull("d"))


# --- Views


@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_keys_that_start_anew_from_views(comm, transport, placement):
    """The views lie in memory that the new values may be given."""
    shape, ids = (900, 5), np.arange(400)
    value = {key: np.random.default_rng(number).integers(1, 9, shape) * 1.0 for number, key in enumerate("abd")}

    def rows(kv, key):
        return RowSparse(ids, kv.view(key)[:400], shape)

    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        for new, old in (("a", "a"), ("ab", "ba"), ("d", "d"), ("da", "ad")):
            for given, kept in ((rows, 400), (lambda kv, key: kv.view(key), 900)):
                kv.init({key: RowSparse(np.arange(900), value[key], shape) for key in "ab"}, overwrite=True)
                kv.init("d", value["d"], overwrite=True)
                kv.init(list(new), [given(kv, key) for key in old], overwrite=True)
                for key, source in zip(new, old, strict=True):
                    np.testing.assert_array_equal(kv.pull(key)[:kept], value[source][:kept])
                    assert not kv.pull(key)[kept:].any()


# --- Rounding, and what the caller has told numpy to raise


def test_rows_are_rounded_once(comm):
    exact = np.array([[1 + 2.0**-11 + 2.0**-40]])
    with mpikv.create(comm=comm) as kv:
        kv.init(["d", "s"], [np.zeros((2, 1), np.float16)] * 2)
        # From one rank alone, so that nothing is added.
        kv.push("d", np.concatenate([exact, exact]) * (kv.rank == 0))
        kv.push("s", RowSparse([0, 1] * (kv.rank == 0), np.concatenate([exact, exact])[: 2 * (kv.rank == 0)], (2, 1)))
        assert kv.pull("s").tolist() == kv.pull("d").tolist() == [[1 + 2.0**-10]] * 2


@pytest.mark.filterwarnings("error")
def test_sums_pass_over_overflows_as_those_of_arrays_do(comm):
    with mpikv.create(comm=comm) as kv:
        kv.init("s", np.zeros((2, 1), np.float16))
        rows = RowSparse([0, 1], np.full((2, 1), 60000, np.float16), (2, 1))
        wide = RowSparse([0, 1], np.full((2, 1), 1e9), (2, 1))
        with np.errstate(all="raise"):
            kv.push("s", [rows, rows])
            assert np.isinf(kv.pull("s")).all()
            kv.push("s", wide)
            assert np.isinf(kv.pull("s")).all()


# --- What fails on one rank alone


CALLS = {
    "push": lambda kv: kv.push("s", VALUE),
    "push of buffers": lambda kv: kv.push("s"),
    "pull": lambda kv: kv.pull("s"),
    "pushpull": lambda kv: kv.pushpull("s", VALUE, out=np.zeros((6, 2))),
    "pushpull of buffers": lambda kv: kv.pushpull("s"),
    "pushpull of rows": lambda kv: kv.pushpull("s", few(), out=np.zeros((6, 2))),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_value_that_cannot_be_cut_on_one_rank(comm, call, transport, monkeypatch):
    """What a plan lacks after calls of rows is worked out before the ranks agree on a call that needs it."""

    def fail(*arguments):
        raise MemoryError("on purpose")

    rows = RowSparse(np.arange(6), VALUE, (6, 2))
    with filled(comm, transport=transport) as kv:
        kv.buffer("s")
        kv.set_optimizer("test", learning_rate=1.0)
        kv.set_updater(None)  # which forgets all plans
        kv.push("s", rows)
        with monkeypatch.context() as patch:
            if kv.rank == kv.size - 1:
                patch.setattr(kv._exchange.placement, "shard", fail)
            with pytest.raises(MemoryError if kv.rank == kv.size - 1 else mpikv.PeerFailed, match="on purpose"):
                CALLS[call](kv)
        np.testing.assert_array_equal(kv.pull("s"), kv.size * VALUE)
        CALLS[call](kv)
