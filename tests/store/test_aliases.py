"""Arrays over the memory of values, which no flag tells: they are pushed, set and pulled into as values of their own.

Random programs, against a dict of arrays in one process: 2 sequences of 8 calls in each of 12 stores, on 1 to 4 ranks;
``ALIAS_SEQUENCES=100`` makes 100 of them. Numbers are small integers, so that sums are exact in every order. Where
torch is installed, its tensors are among the arrays.
"""

import ctypes
import os
from types import SimpleNamespace

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse

try:
    import torch
except ImportError:
    torch = None

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SEQUENCES = int(os.environ.get("ALIAS_SEQUENCES", "2"))
# The name of the store, its transport, placement and compression, and bytes to a message.
STORES = [
    ("dist", "shm", "auto", None, 4096),
    ("dist", "shm", "root", None, 4096),
    ("dist", "shm", "sharded", None, 1 << 20),
    ("dist", "shm", "auto", "fp16", 4096),
    ("p3", "shm", "auto", None, 4096),
    ("dist", "mpi", "auto", None, 4096),
    ("dist", "mpi", "root", None, 1 << 20),
    ("dist", "mpi", "sharded", None, 4096),
    ("dist", "mpi", "sharded", "fp16", 1 << 20),
    ("p3", "mpi", "replicated", None, 4096),
    ("dist", "hierarchical", "auto", None, 4096),
    ("dist", "hierarchical", "sharded", None, 4096),
]
# Small values side by side; those of several messages of 4 KiB; and those that are not copied before they are sent.
SHAPES = {"a": (7, 3), "b": (7, 3), "c": (40, 31), "d": (40, 31), "e": (130, 150), "f": (130, 150), "g": (2480,)}
LARGEST = 200


def by_address(view):
    """Return a writable array over the same memory."""
    memory = (ctypes.c_char * view.nbytes).from_address(view.__array_interface__["data"][0])
    return np.frombuffer(memory, view.dtype).reshape(view.shape)


def by_interface(view):
    interface = {**view.__array_interface__, "data": (view.__array_interface__["data"][0], False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, kept=view))


def by_bytes(view):
    return np.frombuffer(memoryview(by_address(view)).cast("B"), view.dtype).reshape(view.shape)


def by_base(view):
    """Return the part of the memory beneath a view: numpy lets it be written."""
    beneath = view
    while isinstance(beneath.base, np.ndarray):
        beneath = beneath.base
    if not beneath.flags.writeable:
        return by_address(view)
    skipped = view.__array_interface__["data"][0] - beneath.__array_interface__["data"][0]
    return beneath.view(np.uint8)[skipped : skipped + view.nbytes].view(view.dtype).reshape(view.shape)


def by_torch(view):
    return torch.from_numpy(by_address(view))


def by_torch_and_back(view):
    return by_torch(view).numpy()


ALIASES = [lambda view: view, by_address, by_interface, by_bytes, by_base]
NUMPYS = len(ALIASES)
ALIASES += [by_torch, by_torch_and_back] if torch else []


@pytest.fixture
def store(request, comm):
    name, transport, placement, compression, bucket_bytes = request.param
    transport = transport if comm is not None else "local"
    options = {"transport": transport, "placement": placement, "bucket_bytes": bucket_bytes, "timeout": 15}
    with mpikv.create(name, comm=comm, **options) as kv:
        if compression:
            kv.set_gradient_compression(compression)
        yield kv


class Program:
    """Random calls with arrays over the memory of values, made on the store and on the model."""

    VERBS = ("push", "push", "pushpull", "swap", "set", "broadcast", "overwrite", "own", "other", "rows", "buffers")

    def __init__(self, kv, seed, placement):
        self.kv, self.rng = kv, np.random.default_rng(seed)
        self.packed, self.placement = kv.compression is not None, placement
        self.dtype = np.dtype("float32" if self.packed else self.rng.choice(["float64", "float32", "int32"]))
        self.values, self.factor = {}, None

    def run(self, steps):
        kinds = ["assign"] + ["add"] * (self.placement in ("auto", "root")) + ["sgd"] * (self.dtype.kind == "f")
        kind = kinds[self.rng.integers(len(kinds))]
        self.factor = {"assign": None, "add": 1, "sgd": -1}[kind]
        if kind == "sgd":
            self.kv.set_optimizer("sgd", learning_rate=1.0)
        else:
            self.kv.set_updater(add if kind == "add" else None)
        self.values = {key: self.small(key) for key in SHAPES}
        self.kv.init(self.values)
        for _ in range(steps):
            getattr(self, str(self.rng.choice(self.VERBS)))()
            self.check()
        self.kv.delete(list(SHAPES))

    def small(self, key):
        return self.rng.integers(-4, 5, SHAPES[key]).astype(self.dtype)

    def check(self):
        keys = list(SHAPES)
        # Views of the newest values, as aliases are made of them.
        for key, value in zip(keys, self.kv.pull(keys, out=self.kv.view(keys)), strict=True):
            np.testing.assert_array_equal(value, self.values[key], key)
        for key in keys:
            if np.abs(self.values[key]).max() > LARGEST:
                self.values[key] = self.small(key)
                self.kv.set(key, self.values[key])

    def chosen(self, most=7):
        keys = [str(key) for key in self.rng.permutation(list(SHAPES))]
        return keys[: int(self.rng.integers(1, most + 1))]

    def source(self, key, same_on_all=False):
        """Return an array for a key on this rank, and what each rank's holds."""
        like = [name for name in SHAPES if SHAPES[name] == SHAPES[key]]
        names = [str(name) for name in self.rng.choice(like, self.kv.size)]
        kinds = self.rng.integers(0, len(ALIASES) + 1, self.kv.size)
        if same_on_all:
            names, kinds = names[:1] * self.kv.size, kinds[:1].repeat(self.kv.size)
        pairs = list(zip(names, kinds.tolist(), strict=True))
        every = [self.values[name].copy() if kind < len(ALIASES) else self.small(key) for name, kind in pairs]
        name, kind = pairs[self.kv.rank]
        mine = ALIASES[kind](self.kv.view(name)) if kind < len(ALIASES) else every[self.kv.rank].copy()
        if self.rng.integers(4) == 0 and all(kind < NUMPYS for _, kind in pairs):
            return mine[::-1], [each[::-1] for each in every]
        return mine, every

    def sources(self, keys):
        """Return what this rank pushes for each key, an array or a list, and the sums over ranks."""
        mine, sums = [], []
        count = 1 if self.rng.integers(3) or self.packed else 2
        for key in keys:
            some = [self.source(key) for _ in range(count)]
            mine.append(some[0][0] if count == 1 else [each for each, _ in some])
            sums.append(sum(each for _, every in some for each in every))
        return mine, sums

    def apply(self, keys, sums):
        for key, total in zip(keys, sums, strict=True):
            changed = total if self.factor is None else self.values[key] + self.factor * total
            self.values[key] = changed.astype(self.dtype)

    def in_form(self, keys, arrays):
        form = self.rng.integers(3)
        if len(keys) == 1 and form == 0:
            return keys[0], arrays[0]
        return (dict(zip(keys, arrays, strict=True)), None) if form == 1 else (keys, arrays)

    def push(self):
        keys = self.chosen()
        mine, sums = self.sources(keys)
        waits = bool(self.rng.integers(3))
        work = self.kv.push(*self.in_form(keys, mine), wait=waits)
        if not waits:
            work.wait()
        self.apply(keys, sums)

    def swap(self):
        """Push, or set, the values of two keys each to the other."""
        one, other = ("a", "b") if self.rng.integers(2) else ("c", "d") if self.rng.integers(2) else ("e", "f")
        kind = ALIASES[self.rng.integers(len(ALIASES))]
        given, values = [kind(view) for view in self.kv.view([other, one])], [self.values[other], self.values[one]]
        if self.rng.integers(2):
            self.kv.set([one, other], given)
            self.values[one], self.values[other] = (value.copy() for value in values)
        else:
            self.kv.push([one, other], given)
            self.apply([one, other], [value * self.kv.size for value in values])

    def pushpull(self):
        keys = self.chosen()
        mine, sums = self.sources(keys)
        outs = [np.empty(SHAPES[key], self.dtype) for key in keys]
        self.kv.pushpull(keys, mine, outs)
        self.apply(keys, sums)
        for key, out in zip(keys, outs, strict=True):
            np.testing.assert_array_equal(out, self.values[key], key)

    def given(self, keys):
        """Return what the root gives the keys; other ranks give shapes."""
        some = [self.source(key, same_on_all=True) for key in keys]
        return [mine for mine, _ in some], [every[self.kv.root].copy() for _, every in some]

    def set(self):
        keys = self.chosen()
        mine, values = self.given(keys)
        self.kv.set(*self.in_form(keys, mine))
        self.values.update(zip(keys, values, strict=True))

    def broadcast(self):
        keys = self.chosen(3)
        mine, values = self.given(keys)
        outs = self.kv.broadcast(keys, mine, [np.empty(SHAPES[key], self.dtype) for key in keys])
        self.values.update(zip(keys, values, strict=True))
        for key, out in zip(keys, outs, strict=True):
            np.testing.assert_array_equal(out, self.values[key], key)
        with pytest.raises(TypeError, match="broadcast: the array to fill"):
            self.kv.broadcast(keys[0], self.values[keys[0]], out=by_address(self.kv.view(keys[0])))
        with pytest.raises(TypeError, match="broadcast: the array to fill lies in the memory of the store's values"):
            self.kv.broadcast(keys[0], by_address(self.kv.view(keys[0])))

    def overwrite(self):
        keys = self.chosen(3)
        mine, values = self.given(keys)
        self.kv.init(*self.in_form(keys, mine), overwrite=True)
        self.values.update(zip(keys, values, strict=True))

    def own(self):
        """Pull into the memory of the value itself."""
        keys = self.chosen()
        kind = ALIASES[1 + self.rng.integers(len(ALIASES) - 1)]
        outs = [kind(view) for view in self.kv.view(keys)]
        if self.rng.integers(2):
            self.kv.pull(*self.in_form(keys, outs))
            return
        self.kv.pushpull(keys, outs)
        self.apply(keys, [self.values[key] * self.kv.size for key in keys])
        for key, out in zip(keys, outs, strict=True):
            np.testing.assert_array_equal(np.asarray(out), self.values[key], key)

    def other(self):
        """An out over the memory of another value would lose that value."""
        one, other = ("a", "b") if self.rng.integers(2) else ("c", "d") if self.rng.integers(2) else ("e", "f")
        alias = ALIASES[1 + self.rng.integers(len(ALIASES) - 1)](self.kv.view(other))
        fresh = self.small(one)
        attempts = {
            "pull": lambda: self.kv.pull(one, alias),
            "pushpull": lambda: self.kv.pushpull([one], [fresh], [alias]),
        }
        attempts["row_sparse_pull"] = lambda: self.kv.row_sparse_pull(one, by_address(self.kv.view(one)), row_ids=[1])
        verb = str(self.rng.choice(list(attempts)))
        with pytest.raises(TypeError, match=f"^{verb}: the array to fill lies in the memory of the store's values"):
            attempts[verb]()

    def rows(self):
        """Rows that lie in the memory of values."""
        if self.packed:
            return
        every = [self.source("c") for _ in range(2)]
        mine = [RowSparse(np.arange(40), np.asarray(array), (40, 31)) for array, _ in every]
        self.kv.push(["c", "d"], mine)
        self.apply(["c", "d"], [sum(each) for _, each in every])

    def buffers(self):
        """The ranks' buffers are arrays like any other."""
        one, other = ("a", "b") if self.rng.integers(2) else ("c", "d")
        buffer, fresh = self.kv.buffer(one), [self.small(one) for _ in range(self.kv.size)]
        buffer[...] = fresh[self.kv.rank]
        self.kv.push(other, buffer)
        self.apply([other], [sum(fresh)])
        self.kv.pull(other, out=buffer)
        self.kv.push([one])
        self.apply([one], [self.values[other] * self.kv.size])


def add(key, received, stored):
    stored += received.to_dense() if isinstance(received, RowSparse) else received


@pytest.mark.deadline(30 + 2 * SEQUENCES)
@pytest.mark.parametrize("store", STORES, indirect=True, ids=str)
def test_random_programs_with_views_that_can_be_written(store, request):
    placement = request.node.callspec.params["store"][2]
    for seed in range(SEQUENCES):
        try:
            Program(store, seed, placement).run(8)
        except AssertionError as error:
            raise AssertionError(f"in sequence {seed}: {error}") from error


@pytest.mark.parametrize("count", [10_000, 400_000])
@pytest.mark.parametrize("alias", ALIASES[:NUMPYS])
@pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
def test_a_value_that_is_pushed_to_itself(comm, transport, alias, count):
    """In one message, which is not copied before it is sent: the sum is made in the memory in which it lies."""
    with mpikv.create(comm=comm, transport=transport if comm else "local", bucket_bytes=1 << 22) as kv:
        kv.init("x", np.arange(count, dtype=float))
        for turn in range(1, 4):
            kv.push("x", alias(kv.view("x")))
            np.testing.assert_array_equal(kv.pull("x"), np.arange(count) * float(kv.size) ** turn)
