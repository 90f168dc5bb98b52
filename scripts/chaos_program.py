"""A random program on a store, beside what one process would have: ``scripts/chaos`` runs it on all kinds of ranks.

A program is the life of one store: its options, its calls and its mistakes are drawn from a name. Every rank draws the
same, the arrays of the other ranks too, and so knows what each value must be, bit for bit: what is pushed are small
integers, whose sums are exact in any order.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from chaos_faults import FUNCTION, MISTAKES, Mistake, Scene, Wrong, judge

import mpikv
from mpikv import KVStore, optimizers
from mpikv.arrays.arrays import accumulator, castable
from mpikv.cluster.runtime import present

try:
    import ml_dtypes

    HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
except ImportError:
    HALVES = [np.dtype(np.float16)]

FLOATS = [np.dtype(np.float32), np.dtype(np.float64), *HALVES]
DTYPES = [
    *FLOATS,
    *(np.dtype(name) for name in ("bool", "int8", "int32", "int64", "uint16", "complex64", "complex128")),
]
SHAPES = [(), (1,), (3,), (0,), (2, 3), (37, 5), (1000,), (4, 0, 2), (5003,), (300, 70)]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"learning_rate": 0.5, "momentum": 0.5}),
    ("sgd", {"learning_rate": 0.25, "wd": 0.125, "multi_precision": True}),
    ("adam", {"learning_rate": 0.01, "clip_gradient": 2.0}),
    ("rmsprop", {"learning_rate": 0.01}),
    ("ftrl", {"learning_rate": 0.1}),
    ("lamb", {"learning_rate": 0.01}),
    ("lars", {"learning_rate": 0.1, "momentum": 0.5}),
]


class Function:
    """An updater whose result depends on the sum and on the stored value, and stays small. It notes its keys."""

    def __init__(self, returns: bool) -> None:
        self.returns = returns
        """Whether it returns the new value, or writes it into the old one."""
        self.seen: list[Any] = []
        self.before: Callable[[Any], Any] = lambda key: None
        """What it does first: a fault."""

    def __call__(self, key: Any, given: np.ndarray, stored: np.ndarray) -> Any:
        self.seen.append(key)
        self.before(key)
        result = self.result(given, stored)
        if self.returns:
            stored.fill(0)
            return result
        stored[...] = result
        return None

    def result(self, given: np.ndarray, stored: np.ndarray) -> np.ndarray:
        if self.returns:
            return given.reshape(-1)[::-1].reshape(given.shape)
        return np.where(stored == 0, given, np.zeros_like(given))


class Model:
    """The values, counts and states that a store must have."""

    def __init__(self) -> None:
        self.values: dict[Any, np.ndarray] = {}
        self.counts: dict[Any, int] = {}
        self.states: dict[Any, dict[str, np.ndarray]] = {}
        self.buffers: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        """This rank's, of the keys that have some, and what they must hold."""
        self.updater: Any = None

    def enter(self, key: Any, value: np.ndarray) -> None:
        self.values.pop(key, None)
        self.buffers.pop(key, None)
        self.values[key] = value.copy()
        self.restart(key)

    def write(self, key: Any, value: np.ndarray) -> None:
        self.values[key][...] = value
        if "master" in self.states[key]:
            self.states[key]["master"][...] = value

    def delete(self, key: Any) -> None:
        self.buffers.pop(key, None)
        for table in (self.values, self.counts, self.states):
            del table[key]

    def adopt(self, updater: Any) -> None:
        self.updater = updater
        for key in self.values:
            self.restart(key)

    def restart(self, key: Any) -> None:
        self.counts[key], self.states[key] = 0, {}
        if self.optimizes:
            value = self.values[key]
            self.states[key] = {name: np.zeros(value.shape, d) for name, d in self.updater.slots(value.dtype).items()}
            if "master" in self.states[key]:
                self.states[key]["master"][...] = value

    def push(self, key: Any, arrays: Sequence[np.ndarray]) -> None:
        value = self.values[key]
        wide = accumulator(value.dtype)
        total = np.zeros(value.shape, wide)
        for array in arrays:
            total = np.asarray(total + array.astype(wide))
        self.counts[key] += 1
        if self.updater is None:
            value[...] = total
        elif self.optimizes:
            self.updater.update(self.updater.step(key, self.counts[key]), total, value, self.states[key])
        else:
            value[...] = self.updater.result(total.astype(value.dtype), value)

    @property
    def optimizes(self) -> bool:
        return isinstance(self.updater, optimizers.Optimizer)

    @property
    def floats_only(self) -> bool:
        return all(value.dtype in FLOATS for value in self.values.values())


class Program:
    """The calls and mistakes of one store."""

    def __init__(
        self, comm: Any, name: str, make: Callable[..., KVStore] = mpikv.create, mistakes: bool = True, **options: Any
    ) -> None:
        """``options`` are those of the store; what is not given is drawn."""
        self.plan = plan = random.Random(name)
        self.name, self.comm, self.make, self.mistakes = name, comm, make, mistakes
        self.size, self.rank = (comm.size, comm.rank) if comm else (1, 0)
        drawn = {
            "root": plan.randrange(self.size),
            "transport": plan.choice(["shm", "mpi"]) if comm else "auto",
            "placement": plan.choice(["auto", "auto", "root", "sharded", "replicated"]),
            "bucket_bytes": plan.choice([4096, 1 << 16, 1 << 20]),
            "timeout": 30.0,
        }
        self.options = {**drawn, **options}
        self.root, self.wanted = self.options["root"], self.options["placement"]
        self.names = plan.choice(["numbers", "texts"])
        self.model, self.counts = Model(), Counter[str]()
        self.number_of_calls, self.fresh, self.slowest = 0, 0, 0.0
        self.kv: Any = None

    def run(self, calls: int = 0) -> Counter[str]:
        """Make so many calls in a new store, by default a number that is drawn."""
        self.kv = self.open()
        self.init()
        for _ in range(calls or self.plan.randrange(20, 120)):
            action = self.plan.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            self.number_of_calls += 1
            getattr(self, action)()
            self.counts[f"call {action.replace('_', ' ')}"] += 1
            if self.number_of_calls % 8 == 0:
                self.check("a sequence of calls")
        self.check("the last call")
        keys = list(self.model.values)
        self.compare("views", self.model.values.values(), self.kv.pull(keys, out=self.kv.view(keys)))
        self.kv.close()
        return self.counts

    def open(self, **changed: Any) -> Any:
        """Make a store."""
        return self.make(comm=self.comm, **{**self.options, **changed})

    def start(self, values: dict[Any, np.ndarray]) -> None:
        """Make the store, and give it values, whose keys are texts."""
        self.names = "texts"
        self.kv = self.open()
        self.enter(values)

    def step(self, aside: bool) -> None:
        """Push to all keys, by the store's thread if ``aside``, and compare the values."""
        self.number_of_calls += 1
        for key, arrays in self.contributions(list(self.model.values), range(self.size), 1).items():
            brought = [array for (array,) in arrays]
            self.model.push(key, brought)
            self.kv.push(key, brought[self.rank], wait=not aside)
        self.check("a push")

    def mistake(self, mistake: Mistake, culprit: int, keys: Sequence[Any]) -> tuple[Exception | None, list[str]]:
        """Let one rank make a mistake; return what this rank raised, and what is wrong with that.

        Raises:
            Wrong: the values or keys are not as before.
        """
        scene, error = Scene(self, culprit, *keys, self.new_key()), None
        self.number_of_calls += 1
        started = present().now()
        try:
            (mistake.odd if scene.odd else mistake.usual)(scene)
        except Wrong:
            raise
        except Exception as caught:
            error = caught
        self.slowest = max(self.slowest, present().now() - started)
        mistake.repair(scene)
        problems = judge(mistake, scene, error)
        self.check(mistake.name)
        return error, problems

    # --- What is drawn

    def new_key(self) -> Any:
        self.fresh += 1
        number = self.fresh * 7 % 10007
        return number if self.names == "numbers" else f"layer{number % 5}/weight{self.fresh}"

    def some_keys(self) -> list[Any]:
        known = list(self.model.values)
        return self.plan.sample(known, self.plan.randint(1, min(len(known), self.plan.choice([1, 1, 4, 40]))))

    def arrays(
        self, rank: int, key: Any, shape: tuple[int, ...], dtype: np.dtype[Any], most: int = 1, filled: bool = False
    ) -> list[Any]:
        """Return what a rank brings for a key in this call, to be filled too or not; the same on any asking rank."""
        text = f"{self.name} {self.number_of_calls} {rank} {key}"
        draw, data = random.Random(text), np.random.default_rng(list(text.encode()))
        # The sum of hundreds of ranks must fit in int8.
        high = 2 if dtype.kind == "b" or (dtype == np.int8 and rank >= 8) else 5
        low = 0 if dtype.kind in "ub" else 1 - high
        # Integers are cast to wider ones alone.
        dtypes = [one for one in relatives(dtype) if castable(one, dtype) and castable(dtype, one if filled else dtype)]
        brought = []
        for _ in range(draw.randint(1, most)):
            array = data.integers(low, high, shape).astype(draw.choice(dtypes))
            brought.append(draw.choice(LAYOUTS)(array))
        return brought

    def contributions(
        self, keys: Sequence[Any], ranks: Sequence[int], most: int, filled: bool = False
    ) -> dict[Any, list[list[Any]]]:
        """Return the arrays of each key, by rank."""
        kinds = {key: (self.model.values[key].shape, self.model.values[key].dtype) for key in keys}
        return {key: [self.arrays(rank, key, *kinds[key], most, filled) for rank in ranks] for key in keys}

    def value(self, key: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return a value of a new shape and dtype: this rank's, and the root's."""
        dtype = self.plan.choice(FLOATS if self.model.optimizes else DTYPES)
        shape = self.plan.choice(SHAPES)
        mine, roots = (self.arrays(rank, key, shape, dtype)[0].astype(dtype) for rank in (self.rank, self.root))
        return mine, roots

    def form(self, groups: dict[Any, list[Any]], most: int) -> tuple[Any, Any]:
        """Return key and value of a call in one of their forms."""
        keys = list(groups)
        way = self.plan.choice([*(["list", "repeated"] if len(keys) > 1 else ["one", "list"]), "dict"])
        values = [group[0] if most == 1 else group for group in groups.values()]
        if way == "one":
            return keys[0], values[0]
        if way == "dict":
            return self.tree(dict(zip(keys, values, strict=True))), None
        if way == "repeated" and most == 1:
            return tuple(keys), tuple(values)
        if way == "repeated":
            pairs = [(key, each) for key, group in groups.items() for each in group]
            return [key for key, _ in pairs], [each for _, each in pairs]
        return keys, values

    def tree(self, flat: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict; where its order allows, a nested one."""
        if self.names == "numbers" or len(flat) > 1:
            return flat
        ((key, value),) = flat.items()
        first, _, second = key.partition("/")
        return {first: {second: value}}

    # --- Calls

    def init(self) -> None:
        keys = [self.new_key() for _ in range(self.plan.randint(1, 5))]
        pairs = {key: self.value(key) for key in keys}
        key, value = self.form({key: [mine] for key, (mine, _) in pairs.items()}, 1)
        self.kv.init(key, value)
        for name, (_, roots) in pairs.items():
            self.model.enter(name, roots)

    def enter(self, values: dict[Any, np.ndarray]) -> None:
        """Init what is the same on all ranks."""
        self.kv.init(values)
        for key, value in values.items():
            self.model.enter(key, value)

    def overwrite(self) -> None:
        key = self.some_keys()[0]
        mine, roots = self.value(key)
        self.kv.init(key, mine, overwrite=True)
        self.model.enter(key, roots)

    def push(self) -> None:
        self.push_from(list(range(self.size)))

    def push_from(self, ranks: Sequence[int]) -> None:
        """Push from some of the ranks; the others only learn what the values become."""
        keys, most = self.some_keys(), self.plan.choice([1, 1, 3])
        verb, priority = self.plan.choice(["push", "pushpull", "out"]), self.plan.choice([0, 0, 0, 5])
        brought = self.contributions(keys, ranks, most, filled=verb == "pushpull")
        groups = {
            key: [] if self.rank not in ranks else arrays[ranks.index(self.rank)] for key, arrays in brought.items()
        }
        key, value = self.form(groups, most) if self.rank in ranks else self.form({name: [None] for name in keys}, most)
        for name, arrays in brought.items():
            self.model.push(name, [array for group in arrays for array in group])
        if self.rank in ranks:
            for function in self.functions:
                function.seen.clear()
            before = [array.copy() for group in groups.values() for array in group]
            after = [array for group in groups.values() for array in group]
            if verb == "out":
                self.pushpull_out(groups, priority)
            else:
                getattr(self.kv, verb)(key, value, priority=priority)
            if verb == "pushpull":
                expected = [self.model.values[name].astype(a.dtype) for name, group in groups.items() for a in group]
                self.compare("pushpull", expected, after)
            else:
                self.compare("what was pushed", before, after)
            self.check_updater(keys)

    def pushpull_out(self, groups: dict[Any, list[Any]], priority: int) -> None:
        """Fill arrays whose numbers, layouts and dtypes are this rank's own."""
        own, outs = random.Random(f"{self.name} {self.number_of_calls} {self.rank} out"), []
        for key in groups:
            value = self.model.values[key]
            dtypes = [value.dtype, relatives(value.dtype)[-1]]
            number = own.choice([1, 2])
            outs.append([own.choice(LAYOUTS)(np.ones(value.shape, own.choice(dtypes))) for _ in range(number)])
        self.kv.pushpull(list(groups), list(groups.values()), out=outs, priority=priority)
        for key, group in zip(groups, outs, strict=True):
            value = self.model.values[key]
            self.compare("pushpull", [value.astype(out.dtype) for out in group], group)

    def buffer(self) -> None:
        """Ask for buffers, and fill them."""
        keys = self.some_keys()
        for key, buffer in zip(keys, self.kv.buffer(keys), strict=True):
            self.model.buffers[key] = buffer, buffer.copy()

    def push_buffers(self) -> None:
        self.push_buffers_from(list(range(self.size)))

    def push_buffers_from(self, ranks: Sequence[int]) -> None:
        """Push the buffers of some of the ranks; see what the views hold then."""
        known = list(self.model.buffers)
        keys = self.plan.sample(known, self.plan.randint(0, min(len(known), 6)))
        verb, priority = self.plan.choice(["push", "pushpull", "out"]), self.plan.choice([0, 0, 5])
        brought = {
            key: [array.astype(self.model.values[key].dtype) for (array,) in arrays]
            for key, arrays in self.contributions(keys, ranks, 1).items()
        }
        for key, arrays in brought.items():
            self.model.push(key, arrays)
        if self.rank in ranks:
            for key, arrays in brought.items():
                self.model.buffers[key][0][...] = self.model.buffers[key][1][...] = arrays[ranks.index(self.rank)]
            views, values = self.kv.view(keys), [self.model.values[key] for key in keys]
            if verb == "push":
                self.kv.push(keys, priority=priority)
                self.kv.pull(keys, out=views)
            elif verb == "pushpull":
                self.compare("a pushpull of buffers", values, self.kv.pushpull(keys, priority=priority))
            else:
                outs = [np.ones_like(value) for value in values]
                self.kv.pushpull(keys, out=outs, priority=priority)
                self.compare("a pushpull of buffers", values, outs)
            self.compare("views", values, views)

    def check_updater(self, keys: Sequence[Any]) -> None:
        for function in self.functions:
            expected = list(keys) if self.rank == self.root else []
            if function.seen != expected:
                raise Wrong(f"the updater was called for {function.seen}, not for {expected}")

    def pull(self) -> None:
        keys = self.some_keys()
        values = [self.model.values[key] for key in keys]
        way = self.plan.choice(["new", "out", "several", "dict", "cast"])
        if way == "new":
            self.compare("pull", values, self.kv.pull(keys))
            return
        outs = [np.ones(value.shape, relatives(value.dtype)[-1] if way == "cast" else value.dtype) for value in values]
        if way == "dict":
            self.kv.pull(dict(zip(keys, outs, strict=True)))
        elif way == "several":
            others = [strided(out) for out in outs]
            self.kv.pull(keys, [[out, other] for out, other in zip(outs, others, strict=True)], priority=-1)
            self.compare("pull", values, others)
        else:
            self.kv.pull(keys[0] if len(keys) == 1 else keys, outs[0] if len(keys) == 1 else outs)
        self.compare("pull", [value.astype(out.dtype) for value, out in zip(values, outs, strict=True)], outs)

    def broadcast(self) -> None:
        key = self.plan.choice([self.some_keys()[0], self.new_key()])
        if key in self.model.values:
            known = self.model.values[key]
            brought = [self.arrays(rank, key, known.shape, known.dtype)[0] for rank in (self.rank, self.root)]
            mine, roots = (array.astype(known.dtype) for array in brought)
            self.model.write(key, roots)
        else:
            mine, roots = self.value(key)
            self.model.enter(key, roots)
        out = self.kv.broadcast(key, mine, out=mine if self.plan.random() < 0.5 else None)
        self.compare("broadcast", [self.model.values[key].astype(out.dtype)], [out])

    def set(self) -> None:
        keys = self.some_keys()
        brought = self.contributions(keys, range(self.size), 1)
        self.kv.set(keys, [brought[key][self.rank][0] for key in keys])
        for key in keys:
            self.model.write(key, brought[key][self.root][0])

    def delete(self) -> None:
        keys = self.some_keys()
        if len(keys) < len(self.model.values):
            self.kv.delete(keys)
            for key in keys:
                self.model.delete(key)

    def barrier(self) -> None:
        self.kv.barrier()

    def no_updater(self) -> None:
        self.plan.choice([self.kv.set_updater, self.kv._set_updater])(None)
        self.model.adopt(None)

    def function(self) -> None:
        if self.wanted not in ("sharded", "replicated"):
            self.use_function(returns=self.plan.choice([False, True]))

    def use_function(self, returns: bool) -> None:
        function = Function(returns)
        self.kv.set_updater(function)
        self.model.adopt(function)

    @property
    def functions(self) -> list[Function]:
        return [self.model.updater] if isinstance(self.model.updater, Function) else []

    def optimizer(self) -> None:
        name, options = self.plan.choice(OPTIMIZERS)
        if self.model.floats_only:
            self.use_optimizer(name, **options)

    def use_optimizer(self, name: str, **options: Any) -> None:
        self.kv.set_optimizer(name, **options)
        self.model.adopt(optimizers.create(name, **options))

    def floats(self) -> None:
        """Delete what no optimizer can update."""
        keys = [key for key, value in self.model.values.items() if value.dtype not in FLOATS]
        if 0 < len(keys) < len(self.model.values):
            self.kv.delete(keys)
            for key in keys:
                self.model.delete(key)

    def learning_rate(self) -> None:
        if self.model.optimizes:
            rate = self.plan.choice([0.0, 0.125, 0.01])
            self.kv.set_learning_rate(rate)
            self.model.updater.learning_rate = rate

    def slow(self) -> None:
        late, seconds = self.plan.randrange(self.size), self.plan.uniform(0, 0.02)
        if self.rank == late:
            present().sleep(seconds)
        self.push()

    def join(self) -> None:
        steps = [self.plan.randrange(4) for _ in range(self.size)]
        with self.kv.join():
            for step in range(max(steps)):
                self.number_of_calls += 1
                ranks = [rank for rank in range(self.size) if steps[rank] > step]
                if self.plan.random() < 0.3 and self.rank in ranks:
                    self.kv.barrier()
                self.plan.choice([self.push_from, self.push_buffers_from])(ranks)

    def aside(self) -> None:
        """Calls that a thread makes; each rank waits for some of them, in an order of its own, and makes more."""
        keys, own = self.some_keys(), random.Random(f"{self.name} {self.number_of_calls} {self.rank}")
        # A more urgent push to a key would come before an earlier one.
        priorities = {key: self.plan.choice([0, 0, 3, -3]) for key in keys}
        expected, issued = [], []
        for _ in range(2):
            self.number_of_calls += 1
            for key, arrays in self.contributions(keys, range(self.size), 1).items():
                brought = [array.astype(self.model.values[key].dtype) for (array,) in arrays]
                self.model.push(key, brought)
                expected.append(self.model.values[key].copy())
                out = np.ones_like(brought[self.rank])
                issued.append((self.kv.pushpull(key, brought[self.rank], out, priorities[key], wait=False), out))
            for work, out in own.sample(issued, own.randint(0, len(issued))):
                if work.wait() is not out:
                    raise Wrong("what a call returned aside is not its out")
        self.kv.pull(keys[0])
        self.compare("what was pulled aside", expected, [out for _, out in issued])

    def err(self) -> None:
        """Make one of the mistakes of the table that this store can have now."""
        mistake = self.plan.choice([each for each in MISTAKES if each.fits(self)])
        culprit = self.root if mistake.needs is FUNCTION else self.plan.randrange(self.size)
        keys = list(self.model.values)
        if self.mistakes and len(keys) > 1:
            error, problems = self.mistake(mistake, culprit, self.plan.sample(keys, 2))
            if problems:
                raise Wrong(f"{mistake.name}: {'; '.join(problems)}")
            self.counts[f"fault {mistake.name}: {type(error).__name__}"] += 1

    # --- Checks

    def check(self, after: str) -> None:
        """Compare all keys and values with the model's."""
        keys = list(self.model.values)
        if list(self.kv.keys()) != keys:
            raise Wrong(f"after {after}: the keys are {self.kv.keys()}, not {keys}")
        self.compare(f"all values after {after}", self.model.values.values(), self.kv.pull(keys))
        for buffer, content in self.model.buffers.values():
            self.compare(f"a buffer after {after}", [content], [buffer])

    def compare(self, what: str, expected: Any, found: Any) -> None:
        for wanted, value in zip(expected, found, strict=True):
            if not same(wanted, value):
                different = np.argwhere(np.asarray(wanted != value))[:1].tolist()
                raise Wrong(f"{what}: {wanted.dtype}{list(wanted.shape)} differs, first at {different}: {self.kv!r}")


ACTIONS = {
    "push": 30,
    "pull": 15,
    "buffer": 5,
    "push_buffers": 15,
    "slow": 3,
    "set": 5,
    "broadcast": 5,
    "barrier": 2,
    "delete": 4,
    "init": 6,
    "overwrite": 4,
    "no_updater": 2,
    "function": 3,
    "optimizer": 4,
    "floats": 2,
    "learning_rate": 3,
    "join": 5,
    "aside": 8,
    "err": 25,
}


def same(left: Any, right: Any) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


def relatives(dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    """Return dtypes of the same kind, which are cast; the last holds every value of the dtype."""
    kinds = {"f": "f4 f8", "i": "i1 i8", "u": "u1 u8", "c": "c8 c16"}
    others = kinds.get("f" if dtype in FLOATS else dtype.kind, "")
    return [dtype, dtype, dtype, *map(np.dtype, others.split())]


def column_major(array: np.ndarray) -> np.ndarray:
    return np.array(array, order="F")


def strided(array: np.ndarray) -> np.ndarray:
    """Return a copy that is not contiguous."""
    wide = np.repeat(array[..., np.newaxis], 2, axis=-1)
    return wide[..., 0]


def backwards(array: np.ndarray) -> np.ndarray:
    return array[::-1].copy()[::-1] if array.ndim else array.copy()


def swapped(array: np.ndarray) -> np.ndarray:
    """Return a copy in the other order of bytes, which numpy has for its own dtypes alone."""
    return array.astype(array.dtype.newbyteorder()) if array.dtype.kind != "V" else array.copy()


LAYOUTS = (np.array, np.array, column_major, strided, backwards, swapped)
