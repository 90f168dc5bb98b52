"""Random programs of all verbs against a dict of arrays in one process.

Every rank makes the inputs of all ranks again from seeds, so that each can run the whole model; decisions that ranks
must share are drawn from the program, the others (layouts, dtypes, where results go) from the program and the rank.
Values are small integers, so that sums are exact in every dtype and order; only optimizers get a tolerance.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import mpikv

ml_dtypes = pytest.importorskip("ml_dtypes")

FLOATS = ("float64", "float32", "float16", "bfloat16")
DTYPES = (*FLOATS, "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES += ("complex64", "complex128")
SHAPES = ((), (0,), (1,), (3,), (5, 7), (129,), (2, 3, 4), (0, 3), (1500,), (33, 65), (4096,))
NAMES = ("a", "b", "c", "d", "net/w", "net/b")
VERBS = (
    *("init", "init", "overwrite", "push", "push", "push", "pull", "pull", "pushpull", "pushpull"),
    *("broadcast", "set", "delete", "updater", "optimizer"),
    *("buffer", "buffer", "push_buffers", "push_buffers", "push_buffers", "misfit", "misfit"),
)
STORES = [
    ("shm", "auto", False),
    ("shm", "root", True),
    ("shm", "sharded", True),
    ("mpi", "auto", True),
    ("mpi", "root", True),
    ("mpi", "sharded", True),
    ("mpi", "replicated", False),
    ("hierarchical", "auto", False),
    ("hierarchical", "root", True),
    ("hierarchical", "sharded", True),
    ("hierarchical", "replicated", True),
]

# More ranks than cores take turns.
EXAMPLES = {1: 60, 2: 25, 3: 12, 4: 10}


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def wide(dtype):
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.name in FLOATS else dtype


# --- The model: what a store is, for one process that knows all ranks' arrays


@dataclass
class Cell:
    value: np.ndarray
    state: dict = field(default_factory=dict)
    count: int = 0
    exact: bool = True
    """Whether no optimizer has rounded the value since it was last replaced."""

    def replace(self, value):
        self.value, self.exact = value.copy(), True


class Model:
    """The contract, in the plainest code."""

    def __init__(self):
        self.cells = {}
        self.rule = None

    def init(self, key, value):
        self.cells[key] = Cell(value.copy())

    def use(self, rule):
        self.rule = rule
        for cell in self.cells.values():
            cell.state, cell.count = {}, 0

    def push(self, key, groups):
        """``groups`` has one list of arrays per rank."""
        cell = self.cells[key]
        dtype = cell.value.dtype
        total = np.zeros(cell.value.shape, wide(dtype))
        for group in groups:
            mine = np.zeros(cell.value.shape, wide(dtype))
            for array in group:
                mine = mine + array.astype(mine.dtype)
            total = total + mine.astype(dtype).astype(total.dtype)
        cell.count += 1
        cell.exact &= self.rule in (None, add_twice)
        self.rule(cell, np.asarray(total)) if self.rule else self.assign(cell, np.asarray(total))

    @staticmethod
    def assign(cell, total):
        cell.replace(total.astype(cell.value.dtype))


def add_twice(cell, total):
    given = total.astype(cell.value.dtype)
    cell.value = np.asarray(cell.value + given + given)


def sgd(cell, total):
    velocity = 0.5 * cell.state.get("velocity", 0) - 0.25 * total
    cell.state["velocity"] = velocity
    cell.value = np.asarray(cell.value.astype(total.dtype) + velocity).astype(cell.value.dtype)


def moments(cell, total, epsilon):
    state, count = cell.state, cell.count
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * total
    state["square"] = 0.999 * state.get("square", 0) + 0.001 * total * total
    return (state["mean"] / (1 - 0.9**count)) / (np.sqrt(state["square"] / (1 - 0.999**count)) + epsilon)


def adam(cell, total):
    value = cell.value.astype(total.dtype)
    cell.value = np.asarray(value - 0.125 * moments(cell, total, 1e-8)).astype(cell.value.dtype)


def lamb(cell, total):
    value = cell.value.astype(total.dtype)
    direction = moments(cell, total, 1e-6) + 0.5 * value
    norms = [np.sqrt(np.sum(np.square(array, dtype=np.float64))) for array in (value, direction)]
    trust = norms[0] / norms[1] if all(norms) else 1.0
    cell.value = np.asarray(value - 0.125 * trust * direction).astype(cell.value.dtype)


OPTIMIZERS = {
    "sgd": (sgd, {"learning_rate": 0.25, "momentum": 0.5}),
    "adam": (adam, {"learning_rate": 0.125}),
    "lamb": (lamb, {"learning_rate": 0.125, "wd": 0.5}),
}


def in_place(key, given, stored):
    stored += given
    stored += given


def by_result(key, given, stored):
    return stored + given + given


# --- Inputs


def numbers(random, shape, dtype):
    low = 0 if dtype.kind in "ub" else -3
    values = random.integers(low, 4, shape)
    if dtype.kind == "c":
        values = values + 1j * random.integers(low, 4, shape)
    return np.asarray(values).astype(dtype)


def laid_out(random, array, writable=False):
    """Return an equal array in another layout."""
    layout = random.integers(5 if writable else 7)
    if layout == 1:
        return np.array(array, order="F")
    if layout == 2 and array.ndim:
        strided = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
        strided[...] = array
        return strided
    if layout == 3 and array.ndim:
        reverse = np.zeros(array.shape, array.dtype)[::-1]
        reverse[...] = array
        return reverse
    if layout == 4 and array.dtype.name != "bfloat16":
        return array.astype(array.dtype.newbyteorder())
    copy = array.copy()
    copy.flags.writeable = writable or layout != 5
    return copy


def relative(random, dtype, narrower=True):
    """Return the dtype or another of its kind, to which and from which values are cast."""
    kinds = {"float": FLOATS, "int": ("int8", "int16", "int32", "int64"), "complex": ("complex64", "complex128")}
    kinds["uint"] = ("uint8", "uint16", "uint32", "uint64")
    family = next((names for kind, names in kinds.items() if dtype.name in names), (dtype.name,))
    other = dtype_of(family[random.integers(len(family))])
    return other if narrower or other.itemsize >= dtype.itemsize else dtype


def inputs(seed, rank, key, cell):
    """Return the arrays that one rank pushes for one key."""
    random = np.random.default_rng((seed, rank, NAMES.index(key)))
    count = int(random.choice([1, 1, 1, 2, 3]))
    shape, dtype = cell.value.shape, cell.value.dtype
    arrays = []
    for _ in range(count):
        if random.random() < 0.15:
            constant = numbers(random, (), dtype)
            arrays.append(np.broadcast_to(constant, shape))
        else:
            arrays.append(laid_out(random, numbers(random, shape, relative(random, dtype))))
    if random.random() < 0.2:
        arrays.append(arrays[0])
    return arrays


# --- The program


class Run:
    """One program on one store, beside the model."""

    def __init__(self, kv, int_keys, functions):
        self.kv, self.model, self.functions = kv, Model(), functions
        self.external = (lambda name: 10 * NAMES.index(name)) if int_keys else (lambda name: name)
        self.nested = not int_keys
        self.buffers = {}
        """This rank's buffers of the keys that have some."""

    def step(self, verb, seed):
        random = np.random.default_rng(seed)
        known = [name for name in NAMES if name in self.model.cells]
        if verb in ("updater", "optimizer"):
            getattr(self, verb)(random)
            return
        new = [name for name in NAMES if name not in self.model.cells]
        pool = {"init": new, "broadcast": list(NAMES), "push_buffers": list(self.buffers)}.get(verb, known)
        if pool:
            chosen = list(random.permutation(pool)[: random.integers(1, len(pool), endpoint=True)])
            getattr(self, verb)(random, seed, [str(name) for name in chosen])

    def call(self, random, verb, names, groups=None, **options):
        """Make a call in one of the forms for these keys and groups of arrays."""
        keys = [self.external(name) for name in names]
        method = getattr(self.kv, verb)
        if groups is None:
            return method(keys[0] if len(keys) == 1 and random.random() < 0.5 else keys, **options)
        plain = [group[0] if len(group) == 1 else group for group in groups]
        form = random.integers(4)
        if len(keys) == 1 and form < 2:
            return method(keys[0], plain[0], **options)
        if form == 2:
            flat = [(key, array) for key, group in zip(keys, groups, strict=True) for array in group]
            return method([key for key, _ in flat], [array for _, array in flat], **options)
        if form == 3:
            return method(self.tree(names, plain), **options)
        return method(tuple(keys), plain, **options)

    def tree(self, names, values):
        tree = {}
        for name, value in zip(names, values, strict=True):
            if self.nested and "/" in name:
                parent, child = name.split("/")
                tree.setdefault(parent, {})[child] = value
            else:
                tree[self.external(name)] = value
        return tree

    def drawn(self, name, seed, *salt):
        """Return an array like the value of a key for each rank."""
        value = self.model.cells[name].value
        draws = [np.random.default_rng((seed, rank, *salt)) for rank in range(self.kv.size)]
        return [numbers(draw, value.shape, value.dtype) for draw in draws]

    def brought(self, seed, names):
        """Return the arrays of each key and rank in a push."""
        cells, ranks = self.model.cells, range(self.kv.size)
        return {name: [inputs(seed, rank, name, cells[name]) for rank in ranks] for name in names}

    def fresh(self, random, seed, names):
        """Return a value for each key per rank, of a new shape and dtype."""
        options = FLOATS if self.model.rule not in (None, add_twice) else DTYPES
        for name in names:
            shape, dtype = SHAPES[random.integers(len(SHAPES))], dtype_of(options[random.integers(len(options))])
            yield (
                name,
                [
                    numbers(np.random.default_rng((seed, rank, NAMES.index(name))), shape, dtype)
                    for rank in range(self.kv.size)
                ],
            )

    def init(self, random, seed, names, **options):
        values = dict(self.fresh(random, seed, names))
        layouts = np.random.default_rng((seed, self.kv.rank))
        groups = [[laid_out(layouts, values[name][self.kv.rank])] for name in names]
        assert self.call(random, "init", names, groups, **options) is None
        for name in names:
            self.model.init(name, values[name][self.kv.root])
            self.buffers.pop(name, None)

    def overwrite(self, random, seed, names):
        self.init(random, seed, names, overwrite=True)

    def push(self, random, seed, names, verb="push", **options):
        everyone = self.brought(seed, names)
        mine = [everyone[name][self.kv.rank] for name in names]
        before = [[array.copy() for array in group] for group in mine]
        result = self.call(random, verb, names, mine, **options)
        for group, copies in zip(mine, before, strict=True):
            for array, copy in zip(group, copies, strict=True):
                np.testing.assert_array_equal(array, copy, "a pushed array was changed")
        for name in names:
            self.model.push(name, everyone[name])
        return result

    def outs(self, seed, names):
        """Return arrays to fill: their number, layouts and dtypes are this rank's own."""
        random = np.random.default_rng((seed, self.kv.rank, 1))
        groups = []
        for name in names:
            value = self.model.cells[name].value
            filled = [np.ones(value.shape, relative(random, value.dtype, narrower=False)) for _ in range(2)]
            groups.append([laid_out(random, array, writable=True) for array in filled[: random.integers(1, 3)]])
        return groups

    def compare(self, names, groups):
        for name, group in zip(names, groups, strict=True):
            for array in group:
                self.same(array, self.model.cells[name], name)

    def same(self, array, cell, name):
        assert array.shape == cell.value.shape, name
        wide_array, expected = (each.astype(np.complex128) for each in (array, cell.value))
        if cell.exact:
            np.testing.assert_array_equal(wide_array, expected, name)
        else:
            # Where a rule rounds in another order, half precision differs by its last digit; it does so at each update.
            tolerance = 0.05 if min(array.dtype.itemsize, cell.value.dtype.itemsize) == 2 else 2e-4
            np.testing.assert_allclose(wide_array, expected, tolerance, tolerance, err_msg=name)

    def pull(self, random, seed, names):
        if random.random() < 0.5:
            result = self.call(random, "pull", names)
            groups = [[each] for each in result] if isinstance(result, list) else [[result]]
            for name, (array,) in zip(names, groups, strict=True):
                assert array.dtype == self.model.cells[name].value.dtype
        else:
            groups = self.outs(seed, names)
            self.call(random, "pull", names, groups)
        self.compare(names, groups)

    def pushpull(self, random, seed, names):
        if random.random() < 0.6:
            groups = self.outs(seed, names)
            out = [group if len(group) > 1 else group[0] for group in groups]
            keys = [self.external(name) for name in names]
            everyone = self.brought(seed, names)
            assert self.kv.pushpull(keys, [everyone[name][self.kv.rank] for name in names], out) is out
        else:
            everyone = {name: [[array] for array in self.drawn(name, seed)] for name in names}
            layouts = np.random.default_rng((seed, self.kv.rank, 2))
            groups = [[laid_out(layouts, everyone[name][self.kv.rank][0], writable=True)] for name in names]
            self.call(random, "pushpull", names, groups)
        for name in names:
            self.model.push(name, everyone[name])
        self.compare(names, groups)

    def broadcast(self, random, seed, names):
        values = {}
        for name, fresh in self.fresh(random, seed, names):
            values[name] = self.drawn(name, seed, 3) if name in self.model.cells else fresh
        groups = [[values[name][self.kv.rank].copy()] for name in names]
        result = self.kv.broadcast([self.external(name) for name in names], [array for (array,) in groups])
        for name in names:
            root = values[name][self.kv.root]
            if name in self.model.cells:
                self.model.cells[name].replace(root)
            else:
                self.model.init(name, root)
        self.compare(names, [[array] for array in result])

    def set(self, random, seed, names):
        arrays = {name: self.drawn(name, seed, 4) for name in names}
        layouts = np.random.default_rng((seed, self.kv.rank))
        self.call(random, "set", names, [[laid_out(layouts, arrays[name][self.kv.rank])] for name in names])
        for name in names:
            self.model.cells[name].replace(arrays[name][self.kv.root])

    def delete(self, random, seed, names):
        self.call(random, "delete", names)
        for name in names:
            del self.model.cells[name]
            self.buffers.pop(name, None)

    def buffer(self, random, seed, names):
        buffers = self.call(random, "buffer", names)
        for name, buffer in zip(names, buffers if isinstance(buffers, list) else [buffers], strict=True):
            assert (buffer.shape, buffer.dtype) == (
                self.model.cells[name].value.shape,
                self.model.cells[name].value.dtype,
            )
            self.buffers[name] = buffer

    def push_buffers(self, random, seed, names):
        keys = [self.external(name) for name in names]
        everyone = {}
        for name in names:
            everyone[name] = [[array] for array in self.drawn(name, seed, NAMES.index(name), 5)]
            self.buffers[name][...] = everyone[name][self.kv.rank][0]
            self.model.push(name, everyone[name])
        views, outs = self.kv.view(keys), self.outs(seed, names)
        way = random.integers(4)
        if way == 0:
            self.kv.push(keys)
            assert self.kv.pull(keys, out=views) is views
        elif way == 1:
            self.kv.pushpull(keys, out=[[view, *group] for view, group in zip(views, outs, strict=True)])
            self.compare(names, outs)
        else:
            results = self.call(random, "pushpull", names)
            results = results if isinstance(results, list) else [results]
            assert all(result is view for result, view in zip(results, views, strict=True))
        self.compare(names, [[view] for view in views])
        for name in names:
            np.testing.assert_array_equal(self.buffers[name], everyone[name][self.kv.rank][0], "a buffer was changed")

    def misfit(self, random, seed, names):
        """One rank makes another call than the others, or a bad one. All of them raise and nothing changes."""
        kv, keys = self.kv, [self.external(name) for name in names]
        values = [numbers(random, cell.value.shape, cell.value.dtype) for cell in map(self.model.cells.get, names)]
        wrong = [np.ones((*value.shape, 1), value.dtype) for value in values]
        calls = {
            "a push": lambda: kv.push(keys, values),
            "a pushpull": lambda: kv.pushpull(keys, [value.copy() for value in values], priority=1),
            "a wrong shape": lambda: kv.push(keys, wrong),
            "an unknown key": lambda: kv.push(12345 if isinstance(keys[0], int) else "unknown", values[0]),
            "a wrong out": lambda: kv.pushpull(keys, values, out=wrong),
        }
        bad = ["a wrong shape", "an unknown key", "a wrong out"]
        if all(name in self.buffers for name in names):
            calls["buffers"] = lambda: kv.push(keys)
            calls["buffers and back"] = lambda: kv.pushpull(keys)
        elif kv.size == 1 or random.random() < 0.5:
            calls["no buffers"] = lambda: kv.push(keys)
            bad.append("no buffers")
        if kv.size > 1:
            calls |= {
                "a pull": lambda: kv.pull(keys),
                "a barrier": kv.barrier,
                "too many keys": lambda: kv.push(keys * 2, values),
            }
        contents = {name: buffer.copy() for name, buffer in self.buffers.items()}
        first, second = random.permutation(list(calls) if kv.size > 1 else bad)[:2]
        with pytest.raises((mpikv.MPIKVError, TypeError)):
            calls[first if kv.rank == random.integers(kv.size) else second]()
        for name, content in contents.items():
            np.testing.assert_array_equal(self.buffers[name], content, "a buffer was changed")

    def updater(self, random):
        if self.functions and random.random() < 0.7:
            self.kv.set_updater([in_place, by_result][random.integers(2)])
            self.model.use(add_twice)
        else:
            self.kv.set_updater(None)
            self.model.use(None)

    def optimizer(self, random):
        if all(cell.value.dtype.name in FLOATS for cell in self.model.cells.values()):
            name = list(OPTIMIZERS)[random.integers(len(OPTIMIZERS))]
            rule, settings = OPTIMIZERS[name]
            self.kv.set_optimizer(name, **settings)
            self.model.use(rule)

    def finish(self):
        """All values are right at the end, pulled in one call."""
        names = list(self.model.cells)
        assert set(self.kv.keys()) == {self.external(name) for name in names}
        keys = [self.external(name) for name in names]
        self.compare(names, [[array] for array in self.kv.pull(keys)])
        self.compare(names, [[array] for array in self.kv.pull(keys, out=self.kv.view(keys))])


programs = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 2**32 - 1)), min_size=8, max_size=24)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.deadline(40)
@pytest.mark.parametrize(("transport", "placement", "streams"), STORES)
@pytest.mark.feature("push-order", "values-call-order")
def test_programs(comm, request, transport, placement, streams):
    if comm is None and transport != "shm":
        pytest.skip("one rank has one transport")
    if streams:
        request.getfixturevalue("streamed")

    # Shrinking takes minutes where every example that fails waits for a deadline.
    @hypothesis.settings(max_examples=EXAMPLES[comm.size if comm else 1], phases=[hypothesis.Phase.generate])
    @hypothesis.given(program=programs, int_keys=st.booleans(), root=st.integers(0, 3))
    def check(program, int_keys, root):
        together(comm, lambda: execute(program, int_keys, root))

    def execute(program, int_keys, root):
        size = comm.size if comm else 1
        options = {"placement": placement, "transport": transport, "bucket_bytes": 4096, "timeout": 5}
        kv = mpikv.create(root=root % size, **options)
        run = Run(kv, int_keys, placement in ("auto", "root"))
        for verb, seed in [("init", program[0][1]), *program]:
            run.step(verb, seed)
        run.finish()
        kv.close()

    check()


def together(comm, function):
    """Run a function; where it fails on one rank, fail on all of them, with the failure that came first."""
    failure = (float("inf"), "")
    try:
        function()
    except Exception:
        failure = (time.monotonic(), traceback.format_exc())
    _, trace = min(comm.allgather(failure) if comm else [failure])
    assert not trace, trace


# --- Memory that is used more than once


@pytest.fixture(
    params=[
        *(("shm", "auto"), ("shm", "root"), ("mpi", "auto"), ("mpi", "sharded"), ("mpi", "root")),
        *(("hierarchical", "auto"), ("hierarchical", "sharded"), ("hierarchical", "root")),
    ],
    ids=str,
)
def kv(request, streamed):
    transport, placement = request.param
    with mpikv.create(transport=transport, placement=placement, bucket_bytes=4096, timeout=10) as kv:
        yield kv


def ramp(kv, start, size=3000):
    return (np.arange(size, dtype=np.float64) + start) * (kv.rank + 1)


def ramp_sum(kv, start, size=3000):
    return (np.arange(size, dtype=np.float64) + start) * (kv.size * (kv.size + 1) // 2)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shift", ["swap", "swap on one rank", -700, -1, 1, 700])
def test_outs_lie_over_values_of_other_keys(kv, shift):
    kv.init(["a", "b"], [np.zeros(3000), np.zeros(3000)])
    memory = np.zeros(8000)
    memory[1000:4000], memory[4000:7000] = ramp(kv, 0), ramp(kv, 5)
    values = outs = [memory[1000:4000], memory[4000:7000]]
    if isinstance(shift, int):
        outs = [memory[1000 + shift : 4000 + shift], memory[4000 + shift : 7000 + shift]]
    elif shift == "swap" or kv.rank == kv.size - 1:
        outs = values[::-1]
    kv.pushpull(["a", "b"], values, outs)
    np.testing.assert_array_equal(outs[0], ramp_sum(kv, 0))
    np.testing.assert_array_equal(outs[1], ramp_sum(kv, 5))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.feature("values-same-array")
def test_the_same_array_several_times(kv):
    kv.init(["a", "b", "c"], [np.zeros(3000)] * 3)
    value = ramp(kv, 1)
    before = value.copy()
    kv.push(["a", "b", "c"], [value, [value] * 3, value])
    np.testing.assert_array_equal(value, before)
    for result, factor in zip(kv.pull(["a", "b", "c"]), (1, 3, 1), strict=True):
        np.testing.assert_array_equal(result, factor * ramp_sum(kv, 1))
    out = np.zeros(3000)
    kv.pull(["a", "b"], [out, [out, out]])
    np.testing.assert_array_equal(out, 3 * ramp_sum(kv, 1))
    kv.pushpull(["a", "b"], [value, [value] * 2])
    np.testing.assert_array_equal(value, 2 * ramp_sum(kv, 1))
