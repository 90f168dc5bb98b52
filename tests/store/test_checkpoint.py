"""What was saved is what is loaded, bit for bit: on any ranks, in any placement, and nothing is lost by an error."""

import errno
import fcntl
import itertools
import json
import os
import shutil
from functools import partial
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import mpikv
from mpikv import CheckpointError, ConfigError, PeerFailed, RankMismatch, Unsupported, ValueMismatch, schedules
from mpikv.checkpoint import chunks
from mpikv.checkpoint.files import Reader
from mpikv.checkpoint.header import CHUNK
from mpikv.cluster.mpi_library import library_of

ml_dtypes = pytest.importorskip("ml_dtypes")

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

FLOATS = [np.dtype(name) for name in ("float64", "float32", "float16", ml_dtypes.bfloat16)]
OTHERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64", "complex128"]
DTYPES = FLOATS + [np.dtype(name) for name in OTHERS]
SHAPES = [(), (0,), (1,), (3,), (5, 7), (2, 0, 3), (129,), (33, 65), (70_000,), (1, 1, 40_001)]
STORES = [("shm", "auto"), ("shm", "root"), ("shm", "sharded"), ("mpi", "root"), ("mpi", "sharded")]
STORES += [("mpi", "replicated"), ("mpi", "auto")]
EXAMPLES = {1: 60, 2: 30, 3: 15, 4: 10}

SCHEDULES = [
    schedules.Schedule(base_lr=0.3, warmup_steps=7, warmup_begin_lr=0.1, warmup_mode="constant"),
    schedules.Factor(3, factor=0.7, base_lr=0.2, stop_factor_lr=1e-3),
    schedules.MultiFactor([2, 5, np.int64(9)], factor=0.1, base_lr=1 / 3),
    schedules.Polynomial(40, pwr=1.5, final_lr=0.01, base_lr=0.1),
    schedules.Cosine(50, final_lr=1e-5, base_lr=0.1, warmup_steps=3),
]
OPTIMIZERS = [
    ("sgd", {"momentum": 0.9, "nesterov": True, "wd": 1e-4}),
    ("signum", {"momentum": 0.5}),
    ("adagrad", {"learning_rate": 1 / 3}),
    ("rmsprop", {"rescale_grad": 1 / 7}),
    ("adadelta", {}),
    ("adam", {"clip_gradient": 2.0, "multi_precision": True}),
    ("adamw", {"wd": 0.1}),
    ("nadam", {"begin_num_update": 3}),
    ("adamax", {"beta1": 0.8}),
    ("ftrl", {}),
    ("lars", {"momentum": 0.5, "skip": ("b", "c")}),
    ("lamb", {"lower_bound": 0.1, "bias_correction": False}),
    ("test", {"learning_rate": 0.25}),
]


@pytest.fixture
def other(comm):
    with mpikv.create(comm=comm) as store:
        yield store


def on_ranks(comm):
    """Return the stores that can be made on these ranks, as arguments of create."""
    if comm is None:
        return [{"placement": placement} for placement in ("auto", "root", "sharded", "replicated")]
    return [{"transport": transport, "placement": placement} for transport, placement in STORES]


def numbers(shape, dtype, *seed):
    random = np.random.default_rng(seed)
    low = 0 if dtype.kind in "ub" else -4
    return np.asarray(random.integers(low, 5, shape) / (2 if dtype in FLOATS else 1)).astype(dtype)


def push(kv, like, number):
    """Push to all keys what depends on the number and on the rank."""
    keys = list(like)
    kv.push(keys, [numbers(like[key].shape, like[key].dtype, number, kv.rank, at) for at, key in enumerate(keys)])


def bits(arrays):
    return [(array.shape, array.dtype.name, array.tobytes()) for array in arrays]


def contents(kv):
    """Return all that a pull and the facts tell of a store."""
    keys = list(kv.keys())
    return keys, bits(kv.pull(keys)), [kv.version(key) for key in keys]


def tensors(path):
    """Read a file of safetensors in the plainest way."""
    raw = Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    del header["__metadata__"]
    spans = sorted(entry["data_offsets"] for entry in header.values())
    edges = [0, *itertools.chain.from_iterable(spans), len(raw) - start]
    assert edges[::2] == edges[1::2], "the arrays have gaps, or overlap"
    return {name: (entry, raw[start:][slice(*entry["data_offsets"])]) for name, entry in header.items()}


# --- What comes back


@st.composite
def cases(draw):
    floats = draw(st.booleans())
    dtypes = FLOATS if floats else DTYPES
    count = draw(st.integers(0, 6))
    kinds = st.integers(-(2**70), 2**70) if draw(st.booleans()) else st.text(max_size=6)
    keys = draw(st.lists(kinds, unique=True, min_size=count, max_size=count))
    values = {
        key: numbers(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))
        for key in keys
    }
    optimizer = draw(st.sampled_from(OPTIMIZERS)) if floats else None
    return values, optimizer, draw(st.integers(0, 3)), draw(st.integers(0, 99)), draw(st.integers(0, 99))


@pytest.mark.deadline(120)
def test_all_that_can_be_stored(comm, folder, ranks):
    stores = on_ranks(comm)

    @hypothesis.settings(max_examples=EXAMPLES[ranks])
    @hypothesis.given(cases())
    def holds(case):
        values, optimizer, pushes, here, there = case
        path = folder / "checkpoint"
        bucket = [4096, 65536, 1 << 20][here % 3]
        with mpikv.create(comm=comm, deterministic=True, bucket_bytes=bucket, **stores[here % len(stores)]) as kv:
            kv.init(values)
            push(kv, values, 77)
            if optimizer:
                kv.set_optimizer(optimizer[0], **optimizer[1])
            for number in range(pushes):
                push(kv, values, number)
            kv.save(path)
            saved, settings = contents(kv), kv.optimizer and kv.optimizer.settings()
            held = tensors(path)
            for key, array in zip(values, kv.pull(list(values)), strict=True):
                assert held[f"value/{key}"][1] == array.tobytes()
            push(kv, values, 5)
            going_on = contents(kv)
        with mpikv.create(comm=comm, deterministic=True, **stores[there % len(stores)]) as kv:
            kv.load(path)
            assert contents(kv) == saved
            assert (kv.optimizer and kv.optimizer.settings()) == settings
            push(kv, values, 5)
            assert contents(kv) == going_on
            kv.load(path)
            assert contents(kv) == saved
            push(kv, values, 5)
            assert contents(kv) == going_on

    holds()


GOING_ON = OPTIMIZERS + [("sgd", {"lr_scheduler": schedule}) for schedule in SCHEDULES]


@pytest.mark.parametrize(("name", "options"), GOING_ON)
def test_every_optimizer_and_schedule_goes_on(kv, other, folder, name, options):
    values = {"a": numbers((300,), FLOATS[1], 1), "b": numbers((2, 3), FLOATS[2], 2), "c": numbers((5,), FLOATS[3], 3)}
    kv.init(values)
    kv.set_optimizer(name, **options, lr_mult={"a": 0.5, "c": 0.1 + 0.2}, wd_mult={"b": 0.0})
    for number in range(4):
        push(kv, values, number)
    kv.save(folder / "checkpoint")
    other.load(folder / "checkpoint")
    assert other.optimizer.settings() == kv.optimizer.settings()
    for number in range(4, 12):
        push(kv, values, number)
        push(other, values, number)
    assert contents(other) == contents(kv)


@pytest.mark.parametrize("save_in", range(len(STORES)))
def test_every_placement_writes_the_same_file(comm, folder, save_in):
    """The file does not depend on who wrote it; ranks share chunks of it, and chunks lie in several windows."""
    stores = on_ranks(comm)
    values = {"large": numbers((260_001,), FLOATS[0], 1), "odd": numbers((33,), FLOATS[2], 2)}
    values |= {f"small{number}": numbers((number,), FLOATS[1], number) for number in range(9)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_WINDOW", 2 * CHUNK)
        for number, arguments in enumerate([stores[0], stores[save_in % len(stores)]]):
            with mpikv.create(comm=comm, bucket_bytes=320_000, **arguments) as kv:
                kv.init(values)
                kv.set_optimizer("adam")
                push(kv, values, 1)
                kv.save(folder / f"{number}")
        assert (folder / "0").read_bytes() == (folder / "1").read_bytes()
        assert (folder / "0").stat().st_size > 5 * CHUNK
        with mpikv.create(comm=comm, **stores[save_in % len(stores)]) as kv:
            kv.load(folder / "0")
            kv.save(folder / "2")
            assert (folder / "2").read_bytes() == (folder / "0").read_bytes()
            push(kv, values, 2)
            kv.load(folder / "0")
            kv.save(folder / "2")
            assert (folder / "2").read_bytes() == (folder / "0").read_bytes()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.feature("optimizer-states-other-size", "recovery")
def test_fewer_ranks_load_and_go_on(comm, folder, ranks, deterministic):
    """A run on all ranks, and its continuation on some of them that do the work of all; to the bit in a fixed order."""

    def gradient(number, part):
        return [np.random.default_rng((number, part)).normal(size=shape) for shape in ((41, 13), (5,))]

    def train(kv, first, last):
        mine = range(kv.rank * ranks // kv.size, (kv.rank + 1) * ranks // kv.size)
        for number in range(first, last):
            kv.push(["w", "b"], [list(each) for each in zip(*(gradient(number, part) for part in mine), strict=True)])
        return np.concatenate([value.reshape(-1) for value in kv.pull(["w", "b"])])

    with mpikv.create(comm=comm, deterministic=deterministic) as kv:
        kv.init(["w", "b"], gradient(99, 0))
        kv.set_optimizer("adam", lr_scheduler=schedules.Cosine(10, base_lr=0.1), wd=0.01, lr_mult={"b": 0.5})
        train(kv, 0, 3)
        kv.save(folder / "checkpoint")
        through = train(kv, 3, 6)
    for size in range(1, ranks + 1):
        if comm is not None and comm.rank >= size:
            comm.Split(library_of(comm).UNDEFINED, 0)
            continue
        some = comm and comm.Split(0, comm.rank)
        with mpikv.create(comm=some, deterministic=deterministic) as kv:
            kv.load(folder / "checkpoint")
            resumed = train(kv, 3, 6)
        assert np.abs(resumed - through).max() <= 1e-12
        # Sums in pairs are the same on numbers of ranks that are powers of two.
        if deterministic and (size == ranks or (ranks in (2, 4) and size in (1, 2))):
            assert resumed.tobytes() == through.tobytes()
        if some is not None:
            some.Free()


def test_views_and_buffers_stay(kv, folder):
    kv.init("w", np.arange(5.0))
    kv.save(folder / "checkpoint")
    view, buffer = kv.view("w"), kv.buffer("w")
    buffer[:] = kv.rank + 1
    kv.pushpull("w")
    assert view[0] != 0
    kv.load(folder / "checkpoint")
    assert kv.view("w") is view
    np.testing.assert_array_equal(view, np.arange(5.0))
    np.testing.assert_array_equal(buffer, np.full(5, kv.rank + 1.0))


@pytest.mark.parametrize("codec", [{"type": "2bit", "threshold": 0.5}, {"type": "lowrank", "rank": 1}])
@pytest.mark.feature("compression-residuals-in-checkpoints")
def test_residuals_that_are_left_out_start_anew(comm, folder, codec):
    """Where what pushes have left out is not asked for, none of it is left after a load."""
    values = {"w": numbers((30, 7), FLOATS[1], 1)}
    with mpikv.create(comm=comm, compression=codec) as kv, mpikv.create(comm=comm, compression=codec) as other:
        kv.init(values)
        push(kv, values, 1)
        kv.save(folder / "checkpoint", residuals=False)
        saved = contents(kv)
        push(kv, values, 2)
        other.load(folder / "checkpoint")
        kv.load(folder / "checkpoint")
        assert contents(kv) == contents(other) == saved
        for number in (3, 4):
            for store in (kv, other):
                push(store, values, number)
            assert contents(kv) == contents(other)


# --- What no file can hold


def double(key, given, stored):
    stored += 2 * given


def halve(key, given, stored):
    stored += given / 2


def test_an_optimizer_that_was_changed_to_keep_more(kv, folder):
    kv.init("w", np.zeros(3))
    kv.set_optimizer("sgd", learning_rate=0.5)
    kv.optimizer.momentum = 0.5
    for save in (kv.save, kv.save_optimizer_states):
        with pytest.raises(ConfigError, match=r"was changed to keep .* call set_optimizer again"):
            save(folder / "checkpoint")
    assert list(folder.iterdir()) == []


def test_an_updater_function_has_to_be_given(kv, other, folder):
    kv.init("w", np.zeros(3))
    kv.set_updater(double)
    kv.push("w", np.ones(3))
    kv.save(folder / "checkpoint")
    with pytest.raises(CheckpointError, match=r"callable .*double.* the store has assign; a file holds no functions"):
        other.load(folder / "checkpoint")
    other.set_updater(halve)
    with pytest.raises(CheckpointError, match=r"double.* the store has callable .*halve"):
        other.load(folder / "checkpoint")
    other.set_updater(double)
    other.load(folder / "checkpoint")
    other.push("w", np.ones(3))
    np.testing.assert_array_equal(other.pull("w"), np.full(3, 4.0 * kv.size))
    assert other.version("w") == 2


def rates(count):
    return 1.0 / count


def test_a_schedule_function_has_to_be_given(kv, other, folder):
    kv.init("w", np.zeros(3))
    kv.set_optimizer("sgd", lr_scheduler=rates, momentum=0.5)
    kv.push("w", np.ones(3))
    kv.save(folder / "checkpoint")
    with pytest.raises(CheckpointError, match="a file holds no functions"):
        other.load(folder / "checkpoint")
    with pytest.raises(Unsupported, match="an option is an object of your own"):
        kv.save_optimizer_states(folder / "states", dump_optimizer=True)
    other.set_optimizer("sgd", lr_scheduler=rates, momentum=0.5)
    other.load(folder / "checkpoint")
    for store in (kv, other):
        store.push("w", np.ones(3))
    assert contents(other) == contents(kv)


def test_another_updater_is_not_dropped(kv, folder):
    kv.init("w", np.zeros(3))
    kv.save(folder / "assign")
    kv.set_optimizer("adam", learning_rate=0.5)
    kv.save(folder / "adam")
    with pytest.raises(CheckpointError, match=r"made with no updater and the store has Adam\("):
        kv.load(folder / "assign")
    kv.set_optimizer("sgd")
    with pytest.raises(CheckpointError, match=r"made with Adam\(.* and the store has SGD\("):
        kv.load(folder / "adam")
    kv.set_optimizer("adam", learning_rate=0.25)
    kv.load(folder / "adam")
    assert kv.optimizer.learning_rate == 0.5


# --- The optimizer's state alone


@pytest.mark.parametrize("dump", [False, True])
@pytest.mark.feature("optimizer-states-saved")
def test_states(kv, other, folder, dump):
    values = {"a": numbers((300, 7), FLOATS[0], 1), "b": numbers((), FLOATS[2], 2)}
    kv.init(values)
    kv.set_optimizer("adam", learning_rate=0.5, multi_precision=True)
    for number in range(3):
        push(kv, values, number)
    kv.save_optimizer_states(folder / "states", dump_optimizer=dump)
    assert not any(name.startswith("value/") for name in tensors(folder / "states"))
    other.init(values)
    push(other, values, 1)
    other.set("a", kv.pull("a"))
    other.set_optimizer("adam", learning_rate=0.5 if not dump else 0.125, multi_precision=True)
    before = other.version("a"), other.version("b"), bits(other.pull(["a", "b"]))
    other.load_optimizer_states(folder / "states")
    assert before == (other.version("a"), other.version("b"), bits(other.pull(["a", "b"])))
    assert other.optimizer.learning_rate == 0.5
    for number in range(2):
        push(kv, values, number)
        push(other, values, number)
    # Those of b come from the master, which is state.
    assert bits(other.pull(["a", "b"])) == bits(kv.pull(["a", "b"]))


def test_states_of_more_updates_than_pushes(comm, folder):
    """The value is younger than its state; saved and loaded again, it is as it was."""
    values = {"w": numbers((7,), FLOATS[0], 1)}
    with mpikv.create(comm=comm) as kv, mpikv.create(comm=comm) as other, mpikv.create(comm=comm) as third:
        for store in (kv, other):
            store.init(values)
            store.set_optimizer("adam")
        for number in range(5):
            push(kv, values, number)
        kv.save_optimizer_states(folder / "states")
        other.load_optimizer_states(folder / "states")
        assert other.version("w") == 0
        for number in range(2):
            push(other, values, number)
        other.save(folder / "checkpoint")
        third.load(folder / "checkpoint")
        assert third.version("w") == other.version("w") == 2
        third.save_optimizer_states(folder / "states")
        third.load_optimizer_states(folder / "states")
        for store in (other, third):
            push(store, values, 3)
        assert contents(third) == contents(other)


def test_states_that_do_not_fit(kv, folder):
    kv.init("w", np.zeros(3))
    for verb in (kv.save_optimizer_states, kv.load_optimizer_states):
        with pytest.raises(ConfigError, match="no optimizer"):
            verb(folder / "states")
    kv.set_optimizer("adam")
    kv.save_optimizer_states(folder / "states")
    kv.save(folder / "checkpoint")
    with pytest.raises(CheckpointError, match="load_optimizer_states loads it"):
        kv.load(folder / "states")
    with pytest.raises(CheckpointError, match="holds values; load loads it"):
        kv.load_optimizer_states(folder / "checkpoint")
    kv.set_optimizer("adamw")
    with pytest.raises(CheckpointError, match=r"holds the state of Adam and the store has AdamW"):
        kv.load_optimizer_states(folder / "states")
    kv.set_optimizer("sgd", momentum=0.5)
    kv.save_optimizer_states(folder / "states")
    kv.set_optimizer("sgd")
    with pytest.raises(CheckpointError, match=r"has the states \{'momentum': 'float64'\} for key 'w'"):
        kv.load_optimizer_states(folder / "states")
    kv.init("b", np.zeros(1))
    with pytest.raises(ValueMismatch, match="'b' is not in the checkpoint"):
        kv.load_optimizer_states(folder / "states")


# --- What is wrong, on one rank or on all


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"w": np.zeros(4)}, r"'w' is float64\[3\] in the checkpoint and float64\[4\] in the store"),
        ({"w": np.zeros(3, np.float32)}, r"'w' is float64\[3\] in the checkpoint and float32\[3\] in the store"),
        ({"w": np.zeros(3), "b": np.zeros(1)}, "1 keys and the store 2: 'b' is not in the checkpoint"),
        ({"b": np.zeros(3)}, "'w' is not in the store"),
        ({7: np.zeros(3)}, "'w' is not in the store"),
    ],
)
def test_other_values(kv, other, folder, values, complaint):
    kv.init("w", np.ones(3))
    kv.save(folder / "checkpoint")
    other.init(values)
    before = contents(other)
    with pytest.raises(ValueMismatch, match=complaint):
        other.load(folder / "checkpoint")
    assert contents(other) == before


STATE = {"epoch": 3, "none": None, "deep": {"a": [np.arange(5.0), (True, "x")]}, "half": np.ones(2, ml_dtypes.bfloat16)}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.feature("checkpoint-state")
def test_a_state_of_the_program(comm, folder, ranks, wait):
    path, size = folder / "state", max(ranks - 1, 1)

    def own(rank):
        return np.random.default_rng(rank).bit_generator.state

    with mpikv.create(comm=comm) as kv:
        kv.init("w", np.arange(3.0))
        work = kv.save(path, wait=wait, state={**STATE, "rng": own(kv.rank)})
        if not wait:
            work.wait()
        assert repr(kv.load(path)) == repr(dict(sorted({**STATE, "rng": own(kv.rank)}.items())))
        few = kv.group(range(size))
        if few is not None:
            # What differs between ranks returns to as many.
            wanted = {**STATE, "rng": own(kv.rank)} if ranks == 1 else STATE
            assert repr(few.load(path)) == repr(dict(sorted(wanted.items())))
            assert few.pull("w").tolist() == [0, 1, 2]
            few.close()
        with pytest.raises(TypeError if kv.is_root else PeerFailed, match=r"state\['epoch'\] is a set"):
            kv.save(path, state={"epoch": {3}} if kv.is_root else {"epoch": 3})
        with pytest.raises(TypeError, match="state is an int, and not a dict of names"):
            kv.save(path, state=3)
        kv.barrier()
        if ranks > 1:
            with pytest.raises(RankMismatch, match="state of 'epoch'"):
                kv.save(path, state={"epoch": 3} if kv.is_root else None)


def test_a_state_alone(kv, other, folder):
    kv.save(folder / "alone", state={"epoch": 3})
    assert kv.load(folder / "alone") == other.load(folder / "alone") == {"epoch": 3}
    kv.save(folder / "none")
    assert other.load(folder / "none") == {}


def check_error(error, kind, *texts):
    assert isinstance(error, kind), error
    assert all(text in str(error) for text in texts), error


def outcome(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def test_another_path_on_one_rank(kv, folder, ranks):
    kv.init("w", np.ones(3))
    path = folder / ("other" if kv.rank == ranks - 1 and ranks > 1 else "checkpoint")
    error = outcome(kv.save, path)
    if ranks > 1:
        assert isinstance(error, RankMismatch)
        assert "checkpoint" in str(error)
        assert "other" in str(error)
        assert os.listdir(folder) == []
    kv.barrier()


def test_multipliers_in_another_order(kv, other, folder):
    """Settings that are equal are so in the file, too."""
    names = ["w", "b", "c"]
    kv.init(dict.fromkeys(names, np.ones(3)))
    shifted = names[kv.rank % 3 :] + names[: kv.rank % 3]
    kv.set_optimizer("sgd", lr_mult={name: ord(name) / 100 for name in shifted})
    kv.save(folder / "checkpoint")
    other.load(folder / "checkpoint")
    assert other.optimizer.settings() == kv.optimizer.settings()
    kv.save_optimizer_states(folder / "states", dump_optimizer=True)


@pytest.mark.processes
@pytest.mark.ranks(2, 3)
def test_another_setting_on_one_rank(comm, folder, monkeypatch):
    """The error shows what differs."""
    with mpikv.create(comm=comm) as kv, mpikv.create(comm=comm.Split(kv.rank, 0)) as alone:
        for store in (kv, alone):
            store.init("w", np.ones(3))
            store.set_optimizer("sgd", momentum=0.5)
            store.optimizer.momentum = 0.5 if kv.is_root else 0.25
        check_error(outcome(kv.save, folder / "checkpoint"), RankMismatch, "momentum=0.5 against momentum=0.25")
        assert os.listdir(folder) == []
        kv.barrier()
        (folder / f"{kv.rank}").mkdir()
        monkeypatch.chdir(folder / f"{kv.rank}")
        alone.save("checkpoint")
        check_error(outcome(kv.load, "checkpoint"), RankMismatch, "momentum=0.5 against momentum=0.25")


@pytest.mark.processes
def test_a_file_that_one_rank_cannot_read(comm, folder, ranks, monkeypatch):
    """All ranks learn of it, and the store is as it was."""
    path, culprit = folder / "checkpoint", ranks - 1
    with mpikv.create(comm=comm) as kv, mpikv.create(comm=comm) as other:
        kv.init("w", np.arange(5.0))
        kv.set_optimizer("adam")
        kv.push("w", np.ones(5))
        kv.save(path)
        kv.save_optimizer_states(folder / "states")
        kv.push("w", np.ones(5))
        before = contents(kv)
        real = os.open

        def closed(name, *arguments):
            if Path(os.fsdecode(name)).name in ("checkpoint", "states"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            return real(name, *arguments)

        if kv.rank == culprit:
            monkeypatch.setattr(os, "open", closed)
        for verb, name in ((kv.load, path), (other.load, path), (kv.load_optimizer_states, folder / "states")):
            check_error(outcome(verb, name), PermissionError if kv.rank == culprit else PeerFailed, "Permission denied")
        monkeypatch.undo()
        assert contents(kv) == before
        assert len(other) == 0
        kv.load(path)
        other.load(path)
        assert contents(kv) == contents(other) != before
        other.push("w", np.ones(5))
        assert contents(other) == before
        kv.load_optimizer_states(folder / "states")
        kv.push("w", np.ones(5))
        assert contents(kv) == before


def test_a_folder_that_is_not_there(kv, folder):
    kv.init("w", np.ones(3))
    check_error(outcome(kv.save, folder / "no" / "checkpoint"), FileNotFoundError if kv.is_root else PeerFailed, "/no'")
    error = outcome(kv.save, folder)
    assert isinstance(error, FileExistsError if kv.is_root else PeerFailed)
    assert os.listdir(folder) == []
    kv.barrier()
    error = outcome(kv.load, folder / "checkpoint")
    assert isinstance(error, FileNotFoundError)
    assert error.__notes__ == [f"in load on rank {kv.rank} of {kv.size}"]
    assert isinstance(outcome(kv.load, 3.5), TypeError)
    kv.save(folder / "checkpoint")
    kv.load(folder / "checkpoint")


def test_a_link_stays(kv, folder):
    kv.init("w", np.ones(3))
    if kv.is_root:
        (folder / "versions").mkdir()
        (folder / "last").symlink_to(folder / "versions" / "1")
    kv.barrier()
    for _ in range(2):
        kv.save(folder / "last")
        assert (folder / "last").is_symlink()
        assert os.listdir(folder / "versions") == ["1"]
        kv.load(folder / "last")


@pytest.mark.processes
def test_ranks_in_other_folders(comm, kv, folder, ranks, monkeypatch):
    """As on hosts that share no file system."""
    kv.init("w", np.ones(3))
    (folder / f"{kv.rank}").mkdir()
    monkeypatch.chdir(folder / f"{kv.rank}")
    error = outcome(kv.save, "checkpoint")
    if ranks == 1:
        assert error is None
    else:
        assert isinstance(error, PeerFailed if kv.is_root else Unsupported)
        assert "a file system that all hosts share" in str(error)
        assert os.listdir() == []
        # Not even where a killed job has left a draft.
        Path(leftover("checkpoint")).write_bytes(bytes(100))
        assert "all hosts share" in str(outcome(kv.save, "checkpoint"))
        with mpikv.create(comm=comm.Split(kv.rank, 0)) as alone:
            alone.init("w", np.full(3, 1.0 * kv.rank))
            alone.save("checkpoint")
        assert isinstance(outcome(kv.load, "checkpoint"), RankMismatch)


def leftover(name):
    """Return the name of a draft."""
    return f"{name}.0123456789abcdef.mpikv-part"


def test_what_a_killed_job_has_left(kv, folder):
    draft = folder / leftover("checkpoint")
    kv.init("w", np.ones(3))
    if kv.is_root:
        draft.write_bytes(bytes(12345))
    kv.save(folder / "checkpoint")
    assert os.listdir(folder) == ["checkpoint"]
    kv.load(folder / "checkpoint")
    kv.barrier()
    if kv.is_root:
        draft.write_bytes(b"")
    kv.barrier()
    with draft.open("rb") as busy:
        if kv.is_root:
            fcntl.flock(busy, fcntl.LOCK_EX)
        error = outcome(kv.save, folder / "checkpoint")
    assert isinstance(error, CheckpointError if kv.is_root else PeerFailed)
    assert "another store is being saved" in str(error)
    kv.barrier()
    assert draft.exists()
    kv.load(folder / "checkpoint")


def flip(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("arguments", STORES)
def test_a_damaged_byte(comm, folder, arguments):
    arguments = {} if comm is None else dict(zip(("transport", "placement"), arguments, strict=True))
    path = folder / "checkpoint"
    values = {"w": numbers((300_000,), FLOATS[0], 1), "b": numbers((3,), FLOATS[0], 2)}
    with mpikv.create(comm=comm, **arguments) as kv, mpikv.create(comm=comm, **arguments) as other:
        kv.init(values)
        kv.set_optimizer("sgd", momentum=0.5)
        push(kv, values, 1)
        kv.save(path)
        push(kv, values, 2)
        before = contents(kv)
        size = path.stat().st_size
        for offset in (size - 1, size - 2_400_001, size // 2):
            kv.barrier()
            if kv.is_root:
                flip(path, offset)
            kv.barrier()
            for store in (kv, other):
                check_error(
                    outcome(store.load, path),
                    (CheckpointError, PeerFailed),
                    "the checkpoint is damaged: the checksum of its bytes",
                )
            assert contents(kv) == before
            assert (len(other), other.optimizer) == (0, None)
            kv.barrier()
            if kv.is_root:
                flip(path, offset)
        kv.barrier()
        other.load(path)
        kv.load(path)
        for store in (kv, other):
            push(store, values, 2)
            assert contents(store) == before


def fail(error, path):
    raise error


@pytest.mark.parametrize(
    ("event", "error", "text"),
    [
        (partial(fail, OSError(errno.EIO, os.strerror(errno.EIO))), CheckpointError, "could not be read again"),
        (partial(fail, KeyboardInterrupt("Ctrl-C")), KeyboardInterrupt, "Ctrl-C|could not be read again"),
        # Only the first read is compared with the checksums; who writes to the file changes its time.
        (lambda path: os.utime(path, ns=(0, 0)), CheckpointError, "was changed while it was loaded"),
    ],
    ids=["fault", "interrupt", "change"],
)
def test_a_file_that_cannot_be_read_again(comm, folder, monkeypatch, event, error, text):
    """After it was found whole, and when half of it is loaded, only the end of the store is honest."""
    path, kv = folder / "checkpoint", mpikv.create(comm=comm)
    kv.init("w", np.zeros(10))
    kv.save(path)
    read, reads = Reader.read, []

    def second(self, parts, offset):
        reads.append(offset)
        if len(reads) > 1:
            event(path)
        read(self, parts, offset)

    if kv.is_root:
        monkeypatch.setattr(Reader, "read", second)
    with pytest.raises(error if kv.is_root else CheckpointError, match=text):
        kv.load(path)
    with pytest.raises(mpikv.Closed, match="ended in an earlier call"):
        kv.push("w", np.ones(10))


@pytest.mark.processes
def test_a_file_that_is_replaced_meanwhile(kv, folder, ranks, monkeypatch):
    path = folder / "checkpoint"
    kv.init("w", np.ones(3))
    kv.save(path)
    open_reader = Reader.open

    def late(self):
        if kv.is_root:
            shutil.copy(path, folder / "copy")
            (folder / "copy").replace(path)
        open_reader(self)

    monkeypatch.setattr(Reader, "open", late)
    error = outcome(kv.load, path)
    monkeypatch.undo()
    assert isinstance(error, CheckpointError if kv.is_root else (PeerFailed, CheckpointError))
    assert "was changed while it was loaded" in str(error)
    np.testing.assert_array_equal(kv.pull("w"), np.ones(3))
    kv.load(path)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("transport", ["hierarchical"])
def test_ranks_of_several_hosts(comm, folder, transport, placement):
    """Saved there and loaded by messages alone, and the other way round; and what follows is the same."""
    values = {"w": numbers((70_000,), FLOATS[0], 1), "b": numbers((3,), FLOATS[0], 2)}
    with (
        mpikv.create(comm=comm, transport=transport, placement=placement) as kv,
        mpikv.create(comm=comm, transport="mpi", placement=placement) as other,
    ):
        kv.init(values)
        kv.set_optimizer("adam")
        push(kv, values, 1)
        kv.save(folder / "checkpoint")  # before anything is pulled
        saved = contents(kv)
        other.load(folder / "checkpoint")
        assert contents(other) == saved
        for store in (kv, other):
            push(store, values, 2)
        kv.load(folder / "checkpoint")
        assert contents(kv) == saved
        np.testing.assert_array_equal(kv.view("w"), kv.pull("w"))
        push(kv, values, 2)
        # Up to the order in which the ranks' gradients are added.
        for key in values:
            np.testing.assert_allclose(kv.pull(key), other.pull(key), rtol=1e-5)
