"""Structures of arrays in and out: dicts, lists, tuples and arrays of several libraries in random calls, with numpy.

By default each number of ranks makes 4 programs of 13 calls on each of 7 kinds of stores: 1,456 calls on 1 to 4 ranks.
``STRUCTURES=1000`` makes as many programs on each. A failure names the seed.
"""

import copy
import importlib
import os
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

import mpikv
from mpikv.errors import PeerFailed, ValueMismatch

PROGRAMS = int(os.environ.get("STRUCTURES", "4"))
CALLS = 12
STORES = {
    "default": {"name": "dist_sync"},
    "root": {"name": "dist_sync", "placement": "root"},
    "mpi": {"name": "dist_sync", "transport": "mpi"},
    "messages": {"name": "dist_sync", "bucket_bytes": 4096},
    "horovod": {"name": "horovod"},
    "async": {"name": "dist_async"},
}
NAMES = ("w", "layer/b", "layer/c", "layer/in/d", "out/w", "e", "f", "g")
SHAPES = ((), (0, 3), (5,), (2, 3), (4, 1, 2), (1500,))
ml_dtypes = pytest.importorskip("ml_dtypes")
# Small whole numbers are exact in all of one line, and so are their sums; within it is cast.
KINDS = [
    [np.dtype(name) for name in ("float16", "float32", "float64")] + [np.dtype(ml_dtypes.bfloat16)],
    [np.dtype(np.int32)],
    [np.dtype(np.int64)],
    [np.dtype(name) for name in ("complex64", "complex128")],
    [np.dtype(np.uint8)],
    [np.dtype(np.bool_)],
]


def by_dlpack(make):
    """Return a function that makes an array through DLPack, which numpy has not for all dtypes."""
    return lambda array, device: make(np.from_dlpack(array), device)


class Standin:
    """An array of a library whose arrays are never written to, as JAX's."""

    __module__ = "jaxlib.standin"
    device = "somewhere"

    def __init__(self, array):
        self._array = np.array(array)
        self.shape, self.dtype = array.shape, array.dtype

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=by_dlpack(made), asarray=made)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __array__(self, dtype=None, copy=None):
        return self._array


class Frozen(Standin):
    """One of a library that nobody knows, which says that it cannot be written."""

    __module__ = "frozen"

    def __init__(self, array):
        super().__init__(array)
        self._array.flags.writeable = False

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=by_dlpack(frozen), asarray=frozen)


class Foreign:
    """An array of a library that mpikv does not know, over numpy's memory."""

    def __init__(self, array):
        self.array = np.array(array)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class Table(Mapping):
    """A dict that cannot be changed, as some libraries of JAX have."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def made(array, device):
    assert device == Standin.device
    return Standin(array)


def frozen(array, device):
    assert device == Frozen.device
    return Frozen(array)


LIBRARIES = [importlib.import_module(name) if find_spec(name) else None for name in ("jax", "torch")]
JNP, TORCH = LIBRARIES[0] and LIBRARIES[0].numpy, LIBRARIES[1]


def strided(array):
    if not array.ndim:
        return array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
    wide[..., 1::2] = array
    return wide[..., 1::2]


def read_only(array):
    array.flags.writeable = False
    return array


def fits_jax(array):
    return JNP is not None and array.dtype.name not in ("float64", "int64", "complex128")


def fits_torch(array):
    return TORCH is not None and array.dtype.name != "bfloat16"


def fits_dlpack(array):
    return array.dtype.name != "bfloat16"


# What makes each kind of array, and of which arrays it can.
FILLED = {
    "plain": (np.array, lambda array: True),
    "fortran": (lambda array: np.array(array, order="F"), lambda array: True),
    "strided": (strided, lambda array: True),
    "reversed": (lambda array: array[::-1].copy()[::-1], lambda array: array.ndim > 0),
    "foreign": (Foreign, fits_dlpack),
    "torch": (lambda array: TORCH.from_numpy(array.copy()), fits_torch),
}
REPLACED = {"standin": (Standin, lambda array: True), "jax": (lambda array: JNP.asarray(array), fits_jax)}
# Where out is not given.
READ_ONLY = {
    "read-only": (lambda array: read_only(array.copy()), lambda array: True),
    "scalar": (lambda array: array[()], lambda array: not array.ndim and fits_dlpack(array)),
    "frozen": (Frozen, lambda array: np.lib.NumpyVersion(np.__version__) >= "2.1.0"),
    "views": (lambda array: np.broadcast_to(array, array.shape), lambda array: True),
}
ALL = {**FILLED, **REPLACED, **READ_ONLY}
Pair, Three = namedtuple("Pair", "a b"), namedtuple("Three", "x y z")


def read(array):
    if isinstance(array, Foreign):
        return array.array
    return array.numpy() if TORCH is not None and isinstance(array, TORCH.Tensor) else np.asarray(array)


class Leaf:
    """An array of some kind, and what it held."""

    def __init__(self, kind, array):
        self.kind, self.before, self.array = kind, array.copy(), ALL[kind][0](array)
        self.dtype = array.dtype


class Program:
    """Random calls on a store and on a dict of numpy arrays."""

    def __init__(self, kv, store, seed):
        self.kv, self.store = kv, store
        self.rank, self.size, self.root = kv.rank, kv.size, 0
        # The same on all ranks, and this rank's own: how it passes what all of them agree on.
        self.plan, self.own = np.random.default_rng(seed), np.random.default_rng([seed, kv.rank])
        self.seed, self.values, self.replaced = seed, {}, 0

    # --- What is drawn

    def chosen(self, names):
        """Return some names in the order of a nested dict of them."""
        names = [str(name) for name in self.plan.permutation(list(names))]
        picked = names[: self.plan.integers(1, len(names) + 1)]
        return [name for name, _ in leaves_of(nested(dict.fromkeys(picked)))]

    def numbers(self, shape, dtype, who):
        return who.integers(0, 3, shape).astype(dtype)

    def like(self, name):
        """Return another dtype to which a value may be cast, the same on all ranks."""
        dtype = self.values[name].dtype
        if self.store == "horovod":
            return dtype
        return self.plan.choice(np.array(next(kind for kind in KINDS if dtype in kind), object))

    def groups(self, names, kinds, most, dtypes):
        """Return this rank's arrays for each name, and the sum of all ranks'."""
        mine, totals = {}, {}
        for name in names:
            shape, dtype = np.shape(self.values[name]), dtypes[name]
            total = np.zeros(shape, self.values[name].dtype)
            for rank in range(self.size):
                count = int(self.plan.integers(1, most + 1))
                arrays = [self.numbers(shape, dtype, self.plan) for _ in range(count)]
                total = sum((array.astype(total.dtype) for array in arrays), start=total)
                if rank == self.rank:
                    mine[name] = [self.leaf(array, kinds) for array in arrays]
            totals[name] = total
        return mine, totals

    def leaf(self, array, kinds):
        fitting = [kind for kind in kinds if ALL[kind][1](array)]
        return Leaf(str(self.own.choice(fitting)), np.asarray(array))

    # --- Forms

    def form(self, mine, dicts=True):
        """Return a key and a value in some form that names these arrays."""
        way = self.own.choice(["dict", "list", "repeated", "single"] if dicts else ["list", "repeated", "single"])
        if way == "single" and len(mine) == 1:
            ((name, group),) = mine.items()
            return name, self.group(group)
        if way == "dict":
            return self.dressed(nested({name: self.group(group) for name, group in mine.items()})), None
        if way == "repeated":
            keys = [name for name, group in mine.items() for _ in group]
            values = [leaf for group in mine.values() for leaf in group]
        else:
            keys, values = list(mine), [self.group(group) for group in mine.values()]
        return self.sequence(keys, names=True), self.sequence(values)

    def group(self, group):
        return group[0] if len(group) == 1 and self.own.random() < 0.7 else self.sequence(group)

    def sequence(self, items, names=False):
        way = self.own.choice(["list", "tuple", "named"])
        if way == "named" and len(items) in (2, 3):
            return (Pair if len(items) == 2 else Three)(*items)
        return list(items) if way == "list" or (names and way == "named") else tuple(items)

    def dressed(self, tree):
        """Return the tree with other kinds of dicts."""
        if not isinstance(tree, dict):
            return tree
        items = {name: self.dressed(each) for name, each in tree.items()}
        make = [dict, OrderedDict, Table, MappingProxyType, lambda each: defaultdict(list, each)]
        return make[self.own.integers(len(make))](items)

    # --- Checks

    def check(self, text, given, result, expected):
        """Compare what a call has returned with the structure of leaves that it was given."""
        new = any(leaf.kind in REPLACED or leaf.kind in READ_ONLY for _, leaf in leaves_of(given))
        text = f"{text}, seed {self.seed}, rank {self.rank}"
        same_structure(text, given, result)
        for (name, leaf), (_, array) in zip(leaves_of(given), leaves_of(result), strict=True):
            wanted = expected[name].astype(leaf.dtype)
            found = read(array)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), text
            np.testing.assert_array_equal(found, wanted, f"{text}: {name} {leaf.kind}")
            if leaf.kind in FILLED:
                assert array is leaf.array, f"{text}: {name} {leaf.kind} was replaced"
            else:
                self.replaced += 1
                assert type(array) is type(leaf.array), f"{text}: {name} {leaf.kind}"
                assert array is not leaf.array or leaf.kind == "scalar", text  # numpy has one True
                self.unchanged(text, leaf)
        return new

    def unchanged(self, text, leaf):
        np.testing.assert_array_equal(read(leaf.array), leaf.before, f"{text}: a {leaf.kind} array has changed")

    # --- Calls

    def enter(self, overwrite):
        unknown = [name for name in NAMES if name not in self.values]
        names = self.chosen(NAMES if overwrite or not unknown else unknown)
        dtypes = {name: KINDS[self.plan.integers(len(KINDS))][0] for name in names}
        for name in names:
            kinds = KINDS[self.plan.integers(len(KINDS))]
            dtypes[name] = kinds[self.plan.integers(len(kinds))]
            self.values[name] = np.zeros(SHAPES[self.plan.integers(len(SHAPES))], dtypes[name])
        return names, dtypes

    def roots(self, names, kinds, dtypes):
        """Return an array of this rank for each name, and make the root's the values."""
        mine = {}
        for name in names:
            shape, stored = np.shape(self.values[name]), self.values[name].dtype
            every = [self.numbers(shape, dtypes[name], self.plan) for _ in range(self.size)]
            mine[name] = [self.leaf(every[self.rank], kinds)]
            self.values[name] = np.asarray(every[self.root].astype(stored))
        return mine

    def init(self):
        names, dtypes = self.enter(overwrite=True)
        key, value = self.form(self.roots(names, ALL, dtypes))
        assert self.kv.init(arrays(key), arrays(value), overwrite=True) is None
        self.all_unchanged("init", key, value)

    def set(self):
        names = self.chosen(self.values)
        dtypes = {name: self.like(name) for name in names}
        key, value = self.form(self.roots(names, ALL, dtypes))
        assert self.kv.set(arrays(key), arrays(value)) is None
        self.all_unchanged("set", key, value)

    def all_unchanged(self, text, key, value):
        for _, leaf in leaves_of(key if value is None else value):
            self.unchanged(f"{text}, seed {self.seed}, rank {self.rank}", leaf)

    def push(self):
        names = self.chosen(self.values)
        mine, totals = self.groups(names, ALL, 3, {name: self.like(name) for name in names})
        key, value = self.form(mine)
        if self.plan.random() < 0.3 and self.store != "async":
            assert self.kv.push(arrays(key), arrays(value), wait=False).wait() is None
        else:
            assert self.kv.push(arrays(key), arrays(value)) is None
        self.all_unchanged("push", key, value)
        self.values.update(totals)

    def outs(self, names):
        """Return arrays to fill for each name, which differ on every rank."""
        outs = {}
        for name in names:
            kind = next(kind for kind in KINDS if self.values[name].dtype in kind)
            count = int(self.own.integers(1, 3))
            dtypes = [kind[self.own.integers(len(kind))] for _ in range(count)]
            empty = [np.full(np.shape(self.values[name]), 1, dtype) for dtype in dtypes]
            outs[name] = [self.leaf(array, {**FILLED, **REPLACED}) for array in empty]
        return outs

    def pull(self):
        names, beside = self.chosen(self.values), self.plan.random() < 0.3
        if (self.store == "async" or not beside) and self.own.random() < 0.2:
            keys = self.sequence(names, names=True)
            found = self.kv.pull(keys)
            assert type(found) is type(keys)
            for name, array in zip(names, found, strict=True):
                np.testing.assert_array_equal(array, self.values[name])
            return
        key, out = self.form(self.outs(names))
        if beside and self.store != "async":
            result = self.kv.pull(key_in := arrays(key), arrays(out), wait=False).wait()
        else:
            result = self.kv.pull(key_in := arrays(key), arrays(out))
        given = key if out is None else out
        if not self.check("pull", given, result, self.expected(key, out)) and out is None:
            assert result is key_in

    def expected(self, key, value):
        """Return what each leaf of a structure is to hold, under the names that :func:`leaves_of` gives it."""
        if value is None:
            return self.values
        if isinstance(key, str):
            return {place: self.values[key] for place, _ in leaves_of(value)}
        return {
            f"{at}/{place}".rstrip("/"): self.values[name]
            for at, name in enumerate(key)
            for place, _ in leaves_of(value[at])
        }

    def pushpull(self):
        names = self.chosen(self.values)
        dtypes = {name: self.like(name) for name in names}
        mine, totals = self.groups(names, ALL, 2, dtypes)
        key, value = self.form(mine)
        self.finish("pushpull", names, key, value, totals)

    def broadcast(self):
        unknown = [name for name in NAMES if name not in self.values]
        if not self.values or (unknown and self.plan.random() < 0.5):
            names, dtypes = self.enter(overwrite=False)
        else:
            names = self.chosen(self.values)
            dtypes = {name: self.like(name) for name in names}
        key, value = self.form(self.roots(names, ALL, dtypes))
        self.finish("broadcast", names, key, value, {})

    def finish(self, verb, names, key, value, totals):
        """Make a call that brings arrays and fills some."""
        self.values.update(totals)
        key_in, value_in = arrays(key), arrays(value)
        options = {}
        if verb == "pushpull" and self.plan.random() < 0.3 and self.store not in ("async", "horovod"):
            options["wait"] = False
        given = key if value is None else value
        out_in = None
        if self.own.random() < 0.5:
            given = outs = self.outs(names)
            if isinstance(key, Mapping):
                given = self.dressed(nested({name: self.group(group) for name, group in outs.items()}))
            elif isinstance(key, str):
                given = self.group(outs[key])
            else:
                given = self.outs_for(key)
            out_in = arrays(given)
            value = None if isinstance(key, Mapping) else given
        else:
            value = None if isinstance(key, Mapping) else value
        result = getattr(self.kv, verb)(key_in, value_in, out_in, **options)
        result = result.wait() if options else result
        if not self.check(verb, given, result, self.expected(key, value)):
            assert result is (out_in if out_in is not None else key_in if value_in is None else value_in)

    def outs_for(self, keys):
        """Return an array for each place of a list of keys."""
        shaped = [np.full(np.shape(self.values[name]), 1, self.values[name].dtype) for name in keys]
        return self.sequence([self.leaf(array, {**FILLED, **REPLACED}) for array in shaped])

    def run(self):
        self.init() if self.store != "horovod" else self.broadcast()
        for _ in range(CALLS):
            sums_only = ("pushpull", "broadcast")
            verbs = sums_only if self.store == "horovod" else (*sums_only, "init", "set", "push", "pull", "pull")
            verb = str(self.plan.choice(verbs))
            getattr(self, verb)()
            if self.store == "async":
                self.kv.barrier()


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *above, last = name.split("/")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def leaves_of(tree, inside=False):
    """Yield the place of each leaf, and the leaf: the name of a key in a dict, and positions in lists beside keys."""
    if isinstance(tree, Mapping):
        for name, each in tree.items():
            for place, leaf in leaves_of(each, inside=True):
                yield (f"{name}/{place}" if place else name), leaf
    elif isinstance(tree, (list, tuple)):
        for at, each in enumerate(tree):
            for place, leaf in leaves_of(each, inside):
                yield (place if inside else f"{at}/{place}".rstrip("/")), leaf
    else:
        yield "", tree


def arrays(tree):
    """Return a structure of leaves as one of their arrays."""
    if isinstance(tree, MappingProxyType):
        return MappingProxyType({name: arrays(each) for name, each in tree.items()})
    if isinstance(tree, Table):
        return Table({name: arrays(each) for name, each in tree.items()})
    if isinstance(tree, dict):
        new = copy.copy(tree)
        new.update({name: arrays(each) for name, each in tree.items()})
        return new
    if isinstance(tree, (Pair, Three)):
        return type(tree)(*map(arrays, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(arrays, tree))
    return tree.array if isinstance(tree, Leaf) else tree


def same_structure(text, given, found):
    if isinstance(given, Leaf):
        return
    assert type(found) is type(given), text
    if isinstance(given, Mapping):
        assert list(found) == list(given), text
        assert getattr(found, "default_factory", None) is getattr(given, "default_factory", None), text
        for name, each in given.items():
            same_structure(text, each, found[name])
        return
    for each, other in zip(given, found, strict=True):
        same_structure(text, each, other)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.deadline(20 + PROGRAMS)
@pytest.mark.parametrize("store", STORES)
def test_random_structures_in_and_out(comm, store):
    if store == "async" and comm is not None:
        pytest.skip("ranks whose pushes replace a value by themselves leave any of them")
    options = STORES[store]
    replaced = 0
    for seed in range(PROGRAMS):
        if comm is None and "transport" in options:
            options = {"name": "dist_sync"}
        with mpikv.create(comm=comm, **options) as outer:
            if store == "async":
                outer.set_updater(lambda key, received, stored: received)
            program = Program(outer, store, seed)
            program.run()
            replaced += program.replaced
    assert replaced > 0


# --- What is not drawn


@pytest.mark.ranks(1, 2)
def test_a_compiled_call_needs_arrays_that_can_be_written(kv):
    kv.init("w", np.zeros(3))
    for given in (read_only(np.ones(3)), Standin(np.ones(3))):
        with pytest.raises(TypeError, match="each call fills the same arrays, and one of them is read-only"):
            kv.capture("w", given)
    out = np.zeros(3)
    kv.capture("w", Standin(np.ones(3)), out=out)()
    np.testing.assert_array_equal(out, np.full(3, kv.size))


@pytest.mark.ranks(1, 2)
def test_a_structure_that_cannot_be_made(kv):
    """One that has no constructor of a dict is refused before data move; arrays that fail afterwards end no store."""

    class Odd(Table):
        def __init__(self, first, second):
            super().__init__({"w": first})

    class Lacking(Standin):
        __module__ = "jaxlib.standin"

        def __array_namespace__(self):
            return SimpleNamespace(from_dlpack=lambda array, device: 1 / 0)

    kv.init("w", np.zeros(3))
    with pytest.raises(TypeError if kv.is_root else PeerFailed):
        kv.pushpull(Odd(Standin(np.ones(3)), None) if kv.is_root else {"w": np.ones(3)})
    assert kv.version("w") == 0
    if kv.is_root:
        with pytest.raises(ZeroDivisionError):
            kv.pushpull("w", Lacking(np.ones(3)))
    else:
        kv.pushpull("w", np.ones(3))
    np.testing.assert_array_equal(kv.pull("w"), np.full(3, kv.size))


# --- What is advised is right: each is followed


@pytest.mark.ranks(1, 2)
def test_advice_about_arrays(kv):
    def fails(kind, text, call):
        with pytest.raises(kind, match=text):
            call()

    kv.init("w", np.zeros(3))
    matrix = np.arange(6.0).reshape(2, 3)
    fails(TypeError, r"out=numpy\.empty\(shape, dtype\)", lambda: kv.pull("w", out=[0.0, 0.0, 0.0]))
    kv.pull("w", out=np.empty(3, np.float64))
    fails(
        TypeError,
        r"one for each device; numpy\.asarray\(list, dtype\) makes one",
        lambda: kv.push("w", [1.0, 2.0, 3.0]),
    )
    kv.push("w", np.asarray([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(kv.pull("w"), np.array([1.0, 2.0, 3.0]) * kv.size)
    fails(ValueMismatch, "2 values for key 'm'.* give one of them, or a key", lambda: kv.init("m", list(matrix)))
    kv.init(["m0", "m1"], list(matrix))
    kv.init("m", matrix)
    fails(ValueMismatch, r"is in a list, .* numpy\.stack makes one", lambda: kv.push("m", list(matrix)))
    kv.push("m", np.stack(list(matrix)))
    np.testing.assert_array_equal(kv.pull("m"), matrix * kv.size)
    fails(
        ValueMismatch,
        "only dtypes of one kind are cast, .*; pass an out of float64",
        lambda: kv.pull("w", out=np.zeros(3, np.int64)),
    )
    kv.pull("w", out=np.zeros(3, np.dtype("float64")))
    fails(ValueMismatch, "only dtypes of one kind are cast, .*; use astype", lambda: kv.push("w", np.ones(3, np.int64)))
    kv.push("w", np.ones(3, np.int64).astype(np.float64))
    fails(TypeError, "out of a dict of arrays is a dict", lambda: kv.pushpull({"w": np.ones(3)}, out=[np.ones(3)]))
    kv.pushpull({"w": np.ones(3)}, out={"w": np.ones(3)})
    rows = mpikv.RowSparse([0], np.ones((1, 3)), (2, 3))
    fails(TypeError, r"value\.to_dense\(\) makes one", lambda: kv.set("m", rows))
    kv.set("m", rows.to_dense())


def test_advice_about_a_parameter():
    with pytest.raises(TypeError, match=r"pass numpy\.array\(value\)"):
        mpikv.Parameter(Standin(np.ones(2)))
    assert mpikv.Parameter(np.array(Standin(np.ones(2)))).data.tolist() == [1, 1]
