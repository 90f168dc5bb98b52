"""Whatever one rank does wrong, every rank raises, says what to do, changes nothing, and goes on."""

import re
import sys
import time

import numpy as np
import pytest
from support.commands import python

import mpikv
from mpikv import (
    Closed,
    ConfigError,
    KeyAlreadyInitialized,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Stalled,
    TransportError,
    TransportUnavailable,
    Unsupported,
    ValueMismatch,
    optimizers,
)
from mpikv.cli.gpus import survey
from mpikv.errors import is_marked

GPU_NAMES = ("nccl", "dist_device_sync", "dist_sync_device")
NO_GPU = "the package CuPy .*pip install|no GPU can be used here|pip install 'nvidia-nccl"
ALL = pytest.mark.ranks(1, 2, 4)
SEVERAL = pytest.mark.ranks(2, 4)


class Watched:
    """A store, and what it held before an error, which it must still hold afterwards."""

    def __init__(self, kv, updates):
        self.kv, self.size, self.rank = kv, kv.size, kv.rank
        self.updates = updates
        kv.init(["weight", "bias"], [np.arange(6.0).reshape(2, 3), np.ones(3, np.float32)])
        if updates:
            kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        kv.push("weight", np.ones((2, 3)))
        self.keys, self.before, self.inside = kv.keys(), kv.pull(["weight", "bias"]), self.internals()

    def internals(self):
        """Versions, counts and this rank's optimizer state, which pulls do not show."""
        table = self.kv._exchange.values.table
        return [
            [entry.key, table.version(entry.key), table.counts[entry.index]]
            + [(name, array.tobytes()) for name, array in entry.state.items()]
            for entry in table.entries()
        ]

    def fails(self, kind, pattern, call):
        """Check that the call raises on this rank."""
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        text = str(caught.value)
        assert re.search(pattern, text), text
        assert not text.startswith(("'", '"')), "KeyError quotes its message"
        if self.size > 1:
            assert text.count(f"[rank {self.rank}/{self.size}]") == 1
        self.check_unchanged()
        return caught.value

    def check_unchanged(self):
        assert self.kv.keys() == self.keys
        assert self.internals() == self.inside
        for value, before in zip(self.kv.pull(["weight", "bias"]), self.before, strict=True):
            np.testing.assert_array_equal(value, before)

    def check_working(self):
        """Push once more. Without an updater the sum is stored; the velocity remembers the push at the beginning."""
        self.kv.push("weight", np.full((2, 3), 2.0))
        velocity = 0.5 * -0.5 * self.size - 0.5 * 2 * self.size
        expected = self.before[0] + velocity if self.updates else np.full((2, 3), 2.0 * self.size)
        np.testing.assert_array_equal(self.kv.pull("weight"), expected)


@pytest.fixture(params=["assign", "sgd"])
def watched(request, transport):
    with mpikv.create(transport=transport, timeout=10) as kv:
        watched = Watched(kv, request.param == "sgd")
        yield watched
        watched.check_working()


# --- The same mistake on every rank


@ALL
@pytest.mark.feature("push-wrong-shape")
def test_shapes(watched):
    kv, wrong = watched.kv, np.ones((3, 2))
    text = r"key 'weight' has shape \(3, 2\) and the stored value \(2, 3\)"
    watched.fails(ValueMismatch, f"^push: value of {text}", lambda: kv.push("weight", wrong))
    watched.fails(ValueMismatch, f"^set: value of {text}", lambda: kv.set("weight", wrong))
    watched.fails(ValueMismatch, f"^broadcast: value of {text}", lambda: kv.broadcast("weight", wrong))
    text = f"the array to fill of {text}"
    watched.fails(ValueMismatch, f"^pull: {text}", lambda: kv.pull("weight", wrong))
    watched.fails(ValueMismatch, f"^pushpull: {text}", lambda: kv.pushpull("weight", np.ones((2, 3)), wrong))


@ALL
@pytest.mark.feature("push-casts")
def test_dtypes(watched):
    kv = watched.kv
    text = "has dtype int64 and the stored value float32; only dtypes of one kind are cast"
    watched.fails(ValueMismatch, f"^push: value of key 'bias' {text}", lambda: kv.push("bias", np.arange(3)))
    watched.fails(
        ValueMismatch, f"^pull: the array to fill of key 'bias' {text}", lambda: kv.pull("bias", np.arange(3))
    )
    text = "^init: dtype object cannot be stored .*float32"
    watched.fails(ValueMismatch, text, lambda: kv.init("new", np.array([None])))
    watched.fails(ValueMismatch, "cannot be stored", lambda: kv.broadcast("new", np.array(["text"])))


@ALL
@pytest.mark.feature("values-unequal-lists")
def test_numbers_of_arrays(watched):
    kv, value = watched.kv, np.ones((2, 3))
    text = "2 keys and 1 values; give one value, or a list of them, per key"
    watched.fails(ValueMismatch, f"^push: {text}", lambda: kv.push(["weight", "bias"], [value]))
    watched.fails(ValueMismatch, "2 keys need a list of as many values", lambda: kv.push(["weight", "bias"], value))
    watched.fails(ValueMismatch, "2 keys and 3 outs", lambda: kv.pull(["weight", "bias"], [value] * 3))
    watched.fails(ValueMismatch, "empty list of values for key 'weight'", lambda: kv.push("weight", []))
    watched.fails(ValueMismatch, "no value for key 'weight'", lambda: kv.push("weight"))
    watched.fails(ValueMismatch, "2 values for key 'new'", lambda: kv.init("new", [value, value]))
    watched.fails(ValueMismatch, "priority is an int", lambda: kv.push("weight", value, priority=[1, 2]))


@ALL
@pytest.mark.feature("keys-other-types", "keys-mixed", "values-other-array")
def test_types(watched):
    kv, value = watched.kv, np.ones((2, 3))
    watched.fails(TypeError, "a key is an int or a str, not a float: 1.5", lambda: kv.pull(1.5))
    watched.fails(TypeError, "not a bool: True", lambda: kv.push(True, value))
    watched.fails(TypeError, "not a bytes", lambda: kv.init(b"weight", value))
    watched.fails(TypeError, "key 3 is of type int; the store's keys are all str", lambda: kv.init(3, value))
    watched.fails(TypeError, "key 3 is of type int; the store's keys are all str", lambda: kv.push(3, value))
    watched.fails(TypeError, "key 3 is of type int; the store's keys are all str", lambda: kv.pull(["weight", 3]))
    watched.fails(
        TypeError,
        r"is a float, not an array; a list holds several arrays .* numpy.asarray",
        lambda: kv.push("bias", [1.0, 1.0, 1.0]),
    )
    watched.fails(TypeError, r"is a list, not an array", lambda: kv.push("bias", [[1.0, 1.0, 1.0]]))
    watched.fails(TypeError, r"is a str, not an array", lambda: kv.push("bias", "text"))
    masked = np.ma.masked_array(np.ones(3), [0, 1, 0])
    watched.fails(TypeError, r"masked array .*filled", lambda: kv.push("bias", masked))
    constant = np.ones((2, 3))
    constant.flags.writeable = False
    watched.fails(TypeError, r"^pull: the array to fill is a read-only .*new", lambda: kv.pull("weight", constant))
    text = "^pushpull: the array to fill is a read-only"
    watched.fails(TypeError, text, lambda: kv.pushpull("weight", value, out=constant))
    watched.fails(TypeError, "float64, not an array that can be filled", lambda: kv.pull("weight", np.float64(1)))
    watched.fails(TypeError, "^push: wait=None is neither True", lambda: kv.push("weight", constant, wait=None))
    watched.fails(TypeError, r"f\(key, input, stored\), not an int", lambda: kv.set_updater(3))
    watched.fails(TypeError, "expected an optimizer or its name", lambda: kv.set_optimizer(print))
    watched.fails(TypeError, r"the class SGD; make one, as SGD\(", lambda: kv.set_optimizer(mpikv.optimizers.SGD))


@ALL
@pytest.mark.feature("optimizer-unknown")
def test_names_and_options(watched):
    kv = watched.kv
    text = "unknown optimizer 'addam' .*did you mean 'adam'"
    watched.fails(ConfigError, f"^set_optimizer: {text}", lambda: kv.set_optimizer("addam"))
    text = "unknown option of SGD 'momentun' .*did you mean 'momentum'"
    watched.fails(ConfigError, text, lambda: kv.set_optimizer("sgd", momentun=0.9))
    text = r"SGD: momentum=1.5 is not a number in \[0, 1\)"
    watched.fails(ConfigError, text, lambda: kv.set_optimizer("sgd", momentum=1.5))
    watched.fails(ConfigError, "go with an optimizer's name", lambda: kv.set_optimizer(optimizers.SGD(), wd=1.0))


@ALL
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
@pytest.mark.feature("placements")
def test_updaters_that_need_whole_values(placement, transport):
    with mpikv.create(placement=placement, transport=transport) as kv:
        watched = Watched(kv, False)
        text = f"^set_updater: placement '{placement}' cannot run a Python updater.*placement='root'"
        watched.fails(Unsupported, text, lambda: kv.set_updater(lambda key, given, stored: None))
        watched.check_working()


def test_multipliers_of_unknown_keys_are_named_once(caplog):
    """Not before the first init, as a program may set its optimizer first."""
    with mpikv.create() as kv:
        kv.set_optimizer("sgd", lr_mult={"early": 0.5})
        kv.init("w", np.ones(2))
        kv.set_optimizer("sgd", lr_mult={"w": 0.5, "wieght": 0.0}, wd_mult={"bias": 0.0})
        said = [text for text in caplog.messages if "unknown keys" in text]
        assert ["['wieght', 'bias']" in text for text in said] == [True] * kv.is_root


# --- A mistake of one rank


@SEVERAL
def test_the_line_of_a_mistake_is_the_callers():
    with mpikv.create() as kv:
        kv.init("w", np.zeros(3))
        wrong = kv.rank == kv.size - 1
        place = "" if wrong else re.escape(f"(at {__file__}:")
        with pytest.raises(TypeError if wrong else PeerFailed, match=f"is a str, not an array.*{place}"):
            kv.push("w", "text" if wrong else np.ones(3))


@SEVERAL
def test_a_schedule_that_differs_between_ranks():
    """Two functions of one name cannot be told apart; what they return can."""

    def schedule_of(rate):
        return lambda count: rate

    with mpikv.create() as kv:
        kv.init("w", np.ones(200_000))
        kv.set_optimizer("sgd", lr_scheduler=schedule_of(1.0 + kv.rank % 2))
        with pytest.raises(RankMismatch, match=r"learning rate 1\.0.*learning rate 2\.0.*nothing was changed"):
            kv.push("w", np.ones(200_000))
        np.testing.assert_array_equal(kv.pull("w"), np.ones(200_000))
        kv.optimizer.lr_scheduler = schedule_of(1.0)
        kv.push("w", np.ones(200_000))
        np.testing.assert_array_equal(kv.pull("w"), np.full(200_000, 1.0 - kv.size))


@ALL
@pytest.mark.feature("keys-failed-call")
def test_a_failed_call_does_not_decide_the_type_of_keys(transport):
    with mpikv.create(transport=transport, timeout=10) as kv:
        with pytest.raises(KeyNotInitialized):
            kv.pull(3)
        with pytest.raises(TypeError):
            kv.init(3, "text")
        if kv.size > 1:
            with pytest.raises(RankMismatch):
                kv.init("a" if kv.rank else 5, np.ones(2))
        kv.init("a", np.ones(2))
        with pytest.raises(KeyAlreadyInitialized, match=r"^init: .*with shape \(2,\); use set\(\).*overwrite=True"):
            kv.init("a", np.zeros(3))
        np.testing.assert_array_equal(kv.pull("a"), np.ones(2))


# --- Buffers and views


class Buffered:
    """The keys of a watched store with buffers, which errors must leave alone too."""

    def __init__(self, watched):
        self.watched, self.kv = watched, watched.kv
        self.buffers = self.kv.buffer(["weight", "bias"])
        self.fill()

    def fill(self):
        for buffer, number in zip(self.buffers, (3, 4), strict=True):
            buffer.fill(number + self.kv.rank)

    def fails(self, *arguments, **options):
        error = self.watched.fails(*arguments, **options)
        for buffer, number in zip(self.buffers, (3, 4), strict=True):
            assert (buffer == number + self.kv.rank).all(), "a buffer was changed"
        return error


@pytest.fixture
def buffered(watched):
    buffered = Buffered(watched)
    yield buffered
    kv = watched.kv
    kv.pushpull("bias")
    assert (kv.view("bias") == (1 if watched.updates else 0) + (-0.5 if watched.updates else 1) * total(kv, 4)).all()


def total(kv, number):
    return sum(number + rank for rank in range(kv.size))


@ALL
def test_values_that_are_missing(watched):
    kv = watched.kv
    text = "no value for key 'bias' and no buffer; pass one, or fill kv.buffer\\('bias'\\)"
    watched.fails(ValueMismatch, f"^push: {text}", lambda: kv.push("bias"))
    # Another key of the same dtype shares its memory, but nothing else.
    kv.init("other", np.zeros(3, np.float32))
    watched.keys, watched.inside = kv.keys(), watched.internals()
    kv.buffer("other")
    watched.fails(ValueMismatch, f"^push: {text}", lambda: kv.push("bias"))
    watched.fails(ValueMismatch, f"^pushpull: {text}", lambda: kv.pushpull(["other", "bias"]))
    watched.fails(ValueMismatch, f"^pushpull: {text}", lambda: kv.pushpull("bias", out=np.ones(3, np.float32)))
    watched.fails(TypeError, "not an array", lambda: kv.push(["other", "bias"], [None, None]))
    watched.fails(TypeError, "not an array", lambda: kv.push({"other": None}))


@ALL
def test_keys_of_buffers_and_views(watched):
    kv = watched.kv
    text = r"key 'weigth' was never initialized \(nearest known keys: 'weight'.*init\('weigth', value\) on every rank"
    watched.fails(KeyNotInitialized, f"^buffer: {text}", lambda: kv.buffer("weigth"))
    watched.fails(KeyNotInitialized, f"^delete: {text}", lambda: kv.delete(["bias", "weigth"]))
    watched.fails(KeyNotInitialized, "^buffer: key 'weigth'", lambda: kv.buffer(["bias", "weigth"]))
    watched.fails(
        TypeError, "^buffer: this call takes keys without arrays, not a dict", lambda: kv.buffer({"bias": np.ones(3)})
    )
    watched.fails(TypeError, "^buffer: a key is an int or a str", lambda: kv.buffer(None))
    watched.fails(TypeError, "^buffer: key 3 is of type int; the store's keys are all str", lambda: kv.buffer(3))
    for kind, key in (KeyNotInitialized, "weigth"), (TypeError, {"bias": 1}), (TypeError, 3), (TypeError, None):
        with pytest.raises(kind):
            kv.view(key)


@ALL
def test_views_cannot_be_written(buffered):
    kv = buffered.kv
    weight, bias = kv.view(["weight", "bias"])
    text = "the array to fill is a read-only numpy array"
    buffered.fails(TypeError, f"^pull: {text}", lambda: kv.pull("weight", out=weight[...]))
    same_shape = np.broadcast_to(np.float32(1), 3)
    buffered.fails(TypeError, f"^pull: {text}", lambda: kv.pull(["weight", "bias"], out=[weight, same_shape]))
    kv.init("other", np.zeros(3, np.float32))
    watched = buffered.watched
    watched.keys, watched.inside = kv.keys(), watched.internals()
    buffered.fails(TypeError, f"^pull: {text}", lambda: kv.pull("other", out=bias))
    buffered.fails(TypeError, f"^pushpull: {text}", lambda: kv.pushpull("bias", out=kv.view("other")))
    buffered.fails(ValueMismatch, "shape|read-only", lambda: kv.pushpull("bias", out=np.ones(4, np.float32)))
    buffered.fails(TypeError, f"^broadcast: {text}", lambda: kv.broadcast("other", np.zeros(3, np.float32), out=bias))
    for view in (weight, bias):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1
    kept = bias.copy()
    assert kv.pushpull("other", bias) is not bias  # without out, what cannot be written is not filled
    assert (bias == kept).all()


# --- Updaters that raise


def raising(condition):
    def update(key, given, stored):
        stored += given
        if condition(key):
            raise ZeroDivisionError("a mistake in the updater")
        return stored

    return update


@ALL
@pytest.mark.parametrize("given", [True, False], ids=["arrays", "buffers"])
@pytest.mark.parametrize("verb", ["push", "pushpull"])
@pytest.mark.parametrize("root", ["first", "last"])
@pytest.mark.feature("updater-raises")
def test_an_updater_raises(transport, verb, root, given, ranks):
    with mpikv.create(transport=transport, timeout=10, root=0 if root == "first" else ranks - 1) as kv:
        watched = Watched(kv, False)
        bad, buffered = ["bias"], Buffered(watched)
        kv.set_updater(raising(lambda key: key in bad))
        watched.inside = watched.internals()
        values = [np.full((2, 3), 3.0 + kv.rank), np.full(3, 4 + kv.rank, np.float32)]
        keys, numbers = ["weight", "bias"], (3, 4)
        for _ in range(2):
            kind = ZeroDivisionError if kv.is_root else PeerFailed
            with pytest.raises(kind, match="a mistake in the updater") as caught:
                getattr(kv, verb)(keys, values if given else None)
            if not kv.is_root:
                assert f"rank {kv.root} raised ZeroDivisionError" in str(caught.value)
                assert caught.value.rank == kv.root
                assert "test_errors.py" in str(caught.value), "the place in the updater is not named"
                assert "updating key 'bias'" in str(caught.value)
            else:
                assert caught.value.__notes__[0] == "updating key 'bias'"
                assert caught.value.__notes__[1].endswith(f" on rank {kv.root} of {ranks}")
            watched.check_unchanged()
            for array, number in zip([*buffered.buffers, *values], numbers * 2, strict=True):
                assert (array == number + kv.rank).all()
        bad.clear()
        getattr(kv, verb)(keys, values if given else None)
        for value, before, number in zip(kv.pull(keys), watched.before, numbers, strict=True):
            np.testing.assert_array_equal(value, before + total(kv, number))


SPOILS = {
    "a part": (
        lambda given, stored: given[:1],
        ValueMismatch,
        r"returned shape \(1, 3\) for key 'weight' of shape \(2, 3\)",
    ),
    "a mask": (
        lambda given, stored: np.ma.masked_array(stored, stored > 2),
        TypeError,
        "returned a masked array for key 'weight'; a value has no mask",
    ),
    "complex": (lambda given, stored: stored * 1j, ValueMismatch, "complex128"),
    **{
        name: (
            lambda given, stored, name=name, made=made: setattr(stored, name, made),
            ValueMismatch,
            "the updater changed dtype, shape or strides of stored for key 'weight', from float64, .*reshape",
        )
        for name, made in (("shape", (3, 2)), ("dtype", np.int64))
    },
}


@ALL
@pytest.mark.parametrize("spoil", SPOILS)
def test_an_updater_spoils_what_is_stored(transport, spoil):
    """The key before it in the push is as it was, too."""
    make, kind, text = SPOILS[spoil]
    with mpikv.create(transport=transport, timeout=10) as kv:
        watched = Watched(kv, False)
        kv.set_updater(lambda key, given, stored: make(given, stored) if key == "weight" else stored + given)
        watched.inside = watched.internals()
        values = [np.ones(3, np.float32), np.ones((2, 3))]
        with pytest.raises(kind if kv.is_root else PeerFailed, match=text) as caught:
            kv.push(["bias", "weight"], values)
        assert caught.type is (kind if kv.is_root else PeerFailed)
        watched.check_unchanged()
        kv.set_updater(None)
        watched.check_working()


@ALL
def test_an_updater_that_rebinds_is_told_once(caplog):
    def update(key, given, stored):
        stored = stored + given

    with mpikv.create() as kv:
        kv.init(["w", "b"], [np.ones(2), np.ones(3)])
        kv.set_updater(update)
        kv.push("b", np.zeros(3))
        assert not caplog.records, "nothing was to be changed"
        for _ in range(3):
            kv.push(["w", "b"], [np.ones(2), np.ones(3)])
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == kv.is_root
        assert all("did not change key 'w' and returned None" in text for text in texts)
        caplog.clear()
        kv.set_updater(lambda key, given, stored: stored if key == "w" else stored.__iadd__(given))
        kv.push(["w", "b"], [np.ones(2), np.ones(3)])
        assert not caplog.records


# --- A rank that does not come


@SEVERAL
@pytest.mark.parametrize("verb", ["push", "barrier"])
@pytest.mark.feature("late-rank-named")
def test_a_late_rank(transport, comm, verb, simulate_ranks_per_host):
    kv = mpikv.create(transport=transport, timeout=0.4, warn_after=100)
    last = kv.size - 1
    kv.init("weight", np.zeros(2))
    calls = {"push": lambda: kv.push("weight", np.ones(2)), "barrier": kv.barrier}
    if kv.rank == last:
        comm.Barrier()
        time.sleep(0.01)  # while the word of those that have given up is on its way
        with pytest.raises(Stalled, match="given up"):
            calls[verb]()
    else:
        started = time.monotonic()
        # Of its host, another rank tells where it is.
        host, of_last = (rank // simulate_ranks_per_host for rank in (kv.rank, last))
        there = transport != "hierarchical" or host == of_last or last > of_last * simulate_ranks_per_host
        told = (
            rf"rank {last} began call #1 init\('weight'\) last"
            if there
            else f"host .* does not answer: its rank {last}"
        )
        with pytest.raises(Stalled, match=rf"^{verb}.*{told}") as caught:
            calls[verb]()
        assert 0.3 < time.monotonic() - started < 5
        assert caught.value.missing == (last,)
        assert f"[rank {kv.rank}/{kv.size}]" in str(caught.value)
        assert isinstance(caught.value, TransportError)
        assert isinstance(caught.value, TimeoutError)
        comm.Barrier()
    with pytest.raises(Closed, match="the store ended in an earlier call"):
        kv.pull("weight")
    kv.close()
    with mpikv.create(transport=transport) as again:
        again.init("weight", np.ones(2))
        np.testing.assert_array_equal(again.pull("weight"), np.ones(2))


@SEVERAL
def test_a_rank_that_is_slow_in_its_updater(transport, comm):
    kv = mpikv.create(transport=transport, timeout=0.4, warn_after=100)
    kv.init("weight", np.zeros(2))
    kv.set_updater(lambda key, given, stored: time.sleep(1.5))
    with pytest.raises(Stalled) as caught:
        kv.push("weight", np.ones(2))
    if kv.rank:
        assert "push('weight')" in str(caught.value)
        assert caught.value.missing == (0,) if transport == "shm" else caught.value.missing in ((0,), ())
    comm.Barrier()


# --- create


@ALL
@pytest.mark.parametrize(
    ("arguments", "kind", "pattern"),
    [
        ({"name": "locla"}, ConfigError, "unknown store 'locla' .*did you mean 'local'"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"placement": "shard"}, ConfigError, "unknown placement 'shard' .*did you mean 'sharded'"),
        ({"transport": "smh"}, ConfigError, "unknown transport 'smh' .*did you mean 'shm'"),
        ({"bucket_bytes": 100}, ConfigError, "bucket_bytes=100 is not a multiple of 64 from 4096"),
        ({"timeout": 0}, ConfigError, "timeout=0 is not a number"),
        ({"deterministic": "no"}, ConfigError, "deterministic='no' is neither True nor False"),
        ({"root": 99}, ConfigError, "root=99 is not a rank"),
        *[({"name": name}, TransportUnavailable, NO_GPU) for name in GPU_NAMES],
    ],
)
@pytest.mark.feature("names-unknown", "names-not-a-string", "names-gpu")
def test_stores_that_cannot_be_made(arguments, kind, pattern, ranks):
    if pattern is NO_GPU and not survey().problems:
        pytest.skip("there is a GPU here")
    with pytest.raises(kind, match=f"^create: .*{pattern}") as caught:
        mpikv.create(**arguments)
    assert type(caught.value) is kind
    if ranks > 1:
        assert str(caught.value).count(f"/{ranks}]") == 1
    mpikv.create().close()


@SEVERAL
@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"root": 0}, {"root": 1}),
        ({"placement": "root"}, {"placement": "sharded"}),
        ({"name": "local"}, {"name": "dist"}),
        ({"timeout": 5.0}, {"timeout": 6.0}),
        ({"bucket_bytes": 4096}, {"bucket_bytes": 8192}),
        ({"transport": "shm"}, {"transport": "mpi"}),
    ],
)
def test_ranks_that_want_different_stores(comm, first, other):
    last = comm.size - 1
    with pytest.raises(RankMismatch, match=r"^create: ranks disagree: ") as caught:
        mpikv.create(**(other if comm.rank == last else first))
    ((name, value),) = first.items()
    assert f"disagree: {name} {value!r} on rank 0, {other[name]!r} on rank {last} [" in str(caught.value)
    mpikv.create().close()


@SEVERAL
def test_abort_may_differ_per_rank(comm, monkeypatch):
    monkeypatch.setenv("MPIKV_ABORT", "0" if comm.rank == 0 else "1")
    mpikv.create().close()


# --- The end


@ALL
@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
@pytest.mark.feature("close")
def test_closed(transport, name):
    kv = mpikv.create(name, transport=transport)
    kv.init("w", np.ones(2))
    kv.close()
    value = np.ones(2)
    calls = {"init": ("v", value), "push": ("w", value), "pull": ("w",), "pushpull": ("w", value), "buffer": ("w",)}
    calls |= {"view": ("w",), "broadcast": ("w", value), "set": ("w", value), "delete": ("w",), "barrier": ()}
    calls |= {"set_updater": (None,), "set_optimizer": ("sgd",), "set_learning_rate": (0.5,), "keys": ()}
    calls |= {"version": ("w",)}
    for verb, arguments in calls.items():
        if name == "dist_sync" or verb not in ("buffer", "view"):
            with pytest.raises(Closed, match=f"^{verb}: the store was closed; create a new store"):
                getattr(kv, verb)(*arguments)
    with pytest.raises(Closed, match=r"^with: the store was closed; create a new store"):
        kv.__enter__()
    assert "closed" in repr(kv)


@ALL
@pytest.mark.feature("close")
def test_an_error_inside_with_ends_the_store_without_waiting(transport):
    kv = mpikv.create(transport=transport)
    with pytest.raises(RuntimeError, match="a mistake in the script"), kv:
        raise RuntimeError("a mistake in the script")
    with pytest.raises(Closed, match="a mistake in the script"):
        kv.barrier()


@SEVERAL
def test_closing_while_others_push(transport, comm):
    kv = mpikv.create(transport=transport, timeout=0.5, warn_after=100)
    kv.init("w", np.ones(2))
    last = kv.size - 1
    with pytest.raises(RankMismatch, match=rf"push\('w'\).*rank {last} calls close"):
        kv.close() if kv.rank == last else kv.push("w", np.ones(2))
    comm.Barrier()


@SEVERAL
def test_calls_that_differ_are_told_with_their_lines(transport):
    """And the rank that is alone with its call prints the error in full, unless each is."""
    with mpikv.create(transport=transport) as kv:
        kv.init("w", np.ones(2))
        last = kv.size - 1
        place = rf"is at {re.escape(__file__)}:\d+ in test_calls_that_differ\w+"
        with pytest.raises(RankMismatch, match=rf"; rank 0 {place}, rank {last} {place} \[rank") as raised:
            kv.barrier() if kv.rank == last else kv.pull("w")
        assert is_marked(raised.value, "repeated") == (kv.rank != (last if kv.size > 2 else 0))


@SEVERAL
@pytest.mark.feature("optimizer-settings-differ")
@pytest.mark.parametrize(
    ("option", "values", "said"),
    [
        ("learning_rate", (0.5, 0.25), r"\(item 0: updater SGD: learning_rate=0\.5 against learning_rate=0\.25\)"),
        ("wd", (0.0, 0.25), r"\(item 0: updater SGD: wd=0\.0 against wd=0\.25\)"),
        ("begin_num_update", (0, 1), r"\(item 0: updater SGD: begin_num_update=0 against begin_num_update=1\)"),
        (
            "wd_mult",
            ({"w": 1.0}, {"w": 1.0, "v": 2.0}),
            r"\(item 0: updater SGD\(average.* against updater SGD\(average.*\)\)",
        ),
    ],
)
def test_only_what_differs_is_shown(transport, comm, option, values, said):
    with mpikv.create(transport=transport) as kv:
        kv.init("w", np.ones(2))
        kv.set_optimizer("sgd")
        setattr(kv.optimizer, option, values[kv.rank > 0])
        with pytest.raises(RankMismatch, match=said):
            kv.push("w", np.ones(2))


def test_a_store_without_keys_is_true():
    with mpikv.create() as kv:
        assert (len(kv), bool(kv)) == (0, True)


@ALL
def test_state_that_is_asked_for_after_a_push(transport, comm):
    """A new optimizer mends it, for values, too, that ranks do not have yet."""
    with mpikv.create(transport=transport, placement="sharded") as kv:
        kv.init(["v", "w"], [np.zeros(4), np.zeros(4)])
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push("w", np.ones(4))
        kv.push("v", np.ones(4))
        kv.optimizer.momentum = 0.9
        with pytest.raises(mpikv.ConfigError, match="call set_optimizer again"):
            kv.push(["v", "w"], [np.ones(4)] * 2)
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.9)
        np.testing.assert_array_equal(kv.pull(["v", "w"]), np.full((2, 4), -float(kv.size)))


def test_halves_without_masters_are_mentioned(caplog):
    with mpikv.create() as kv:
        kv.init({"w": np.ones(2, np.float16), "v": np.ones(2, np.float16)})
        kv.set_optimizer("sgd", multi_precision=True)
        assert not caplog.records
        kv.set_optimizer("sgd")
        kv.push("w", np.ones(2, np.float16))
        assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["SGD updates float16 values"]


def alone(code, **environment):
    """Run Python code in a process with these variables and no launcher's."""
    return python("-c", code, timeout=30, **environment)


@pytest.mark.processes
def test_a_launched_process_without_an_mpi_library():
    code = "import mpikv\ntry: mpikv.create()\nexcept mpikv.TransportUnavailable as error: print(error)"
    result = alone(code, MPI4PY_LIBMPI="/nonexistent", PMI_SIZE="2", PMI_RANK="0")
    assert result.returncode == 0, result.stderr
    assert "cannot load MPI4PY_LIBMPI=/nonexistent" in result.stdout
    assert "unset it, or give the full path of an MPI library" in result.stdout
    assert "dlopen" not in result.stdout
    assert "Traceback" not in result.stdout


@pytest.mark.processes
@pytest.mark.feature("no-roles")
def test_one_rank_needs_no_mpi_library():
    code = "import mpikv, sys\nmpikv.create().close()\nassert 'mpi4py.MPI' not in sys.modules"
    result = alone(code, MPI4PY_LIBMPI="/nonexistent")
    assert result.returncode == 0, result.stderr


REFUSED = """
import mpikv
for _ in range(2):
    try: mpikv.create()
    except mpikv.ConfigError as error: print(error)
from mpi4py import MPI
print("started" if MPI.Is_initialized() else "not started", MPI.Get_library_version().split()[0])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "environment", [{"WORLD_SIZE": "2", "RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}]
)
def test_launchers_that_start_no_mpi(environment):
    first, again, end = alone(REFUSED, **environment).stdout.splitlines()
    seen = r"(uses PMIx? and the launcher offers nothing|sees only this process)"
    assert re.search(rf"says 2 ranks but MPI \(.*\) {seen}.*mpikv run -n 2", first), first
    assert first == again
    assert end.startswith("not started" if "uses PMI" in first else "started")
    alone_on_purpose = "import mpikv; from mpi4py import MPI; print(mpikv.create(comm=MPI.COMM_SELF).size)"
    assert alone(alone_on_purpose, **environment).stdout == "1\n"


@pytest.mark.processes
def test_one_rank_in_a_job_of_several_tasks():
    result = alone("import mpikv; print(mpikv.create().size)", SLURM_NTASKS="8")
    assert (result.returncode, result.stdout) == (0, "1\n")
    told = "the store has one rank in a Slurm job of 8 tasks; to start all ranks, use  mpikv run -n 8 SCRIPT"
    assert told in result.stderr
    assert "srun --" not in result.stderr


@pytest.mark.processes
def test_the_launcher_of_another_library():
    """MPI would end the process, or each would believe that it is alone, and train alone."""
    mpich = {"PMI_FD": "77", "PMI_SIZE": "2", "PMI_RANK": "0"}
    openmpi = {"PMIX_NAMESPACE": "a", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    of_slurm = {"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}
    library = alone("from mpi4py import MPI; print(MPI.Get_library_version())").stdout
    foreign = {"MPICH": (openmpi, of_slurm), "Open MPI v5": (mpich,)}
    for environment in next((those for name, those in foreign.items() if library.startswith(name)), ()):
        result = alone(REFUSED, **environment)
        first, again, end = result.stdout.splitlines()
        seen = "uses (PMI and the launcher offers PMIx|PMIx and the launcher offers PMI)"
        assert re.search(rf"says 2 ranks but MPI \(.*\) {seen}: .*mpikv run -n 2", first), result
        assert first == again
        assert end.startswith("not started"), result


@pytest.mark.processes
def test_a_launcher_that_mpi_has_not_heard():
    """MPI starts, and each process would believe that it is alone."""
    environment = {"PMI_SIZE": "2", "PMI_RANK": "0", "SLURM_JOB_ID": "7"}
    first, again, end = alone(REFUSED, **environment).stdout.splitlines()
    if end == "started MPICH":
        assert re.search(r"says 2 ranks but MPI \(MPICH .*\) sees only this process.*mpikv run -n 2", first), first
    assert first == again


@pytest.mark.processes
def test_a_launcher_that_demands_munge_of_a_pmix_that_has_none():
    """As Slurm's may, and PMIx in Open MPI's wheel has none: MPI would end the process."""
    environment = {"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "0", "PMIX_SECURITY_MODE": "munge"}
    where = alone("import mpikv.cli.launchers as it, os; print(it.find_library(os.environ))").stdout
    if "Open MPI 5" not in where or sys.prefix not in where:
        pytest.skip("for Open MPI's wheel")
    assert "has a PMIx without munge, and the launcher requires munge" in alone(REFUSED, **environment).stdout


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tag", [32101, 32102])
def test_messages_of_the_program_stay_its_own(comm, tag):
    """Whatever their tags: a store's are on communicators of its own."""
    after = (comm.rank + 1) % comm.size
    messages = [comm.Isend(np.full(length, comm.rank), after, tag) for length in (0, 3)]
    with mpikv.create(comm=comm, timeout=10) as kv:
        kv.init("w", np.zeros(2))
        kv.push("w", np.ones(2))
    for length in (0, 3):
        received = np.empty(length, int)
        comm.Recv(received, (comm.rank - 1) % comm.size, tag)
        assert (received == (comm.rank - 1) % comm.size).all()
    for message in messages:
        message.Wait()


@pytest.mark.processes
@pytest.mark.ranks(2, 3)
def test_what_is_no_communicator_of_one_group(comm):
    from mpi4py import MPI

    half = comm.Split(comm.rank == 0, comm.rank)
    between = half.Create_intercomm(0, comm, 1 if comm.rank == 0 else 0)
    for given, error, text in (
        (between, ConfigError, "intercommunicator.*comm.Merge"),
        (MPI.COMM_NULL, ConfigError, "COMM_NULL.*only on members"),
        (4, TypeError, "comm=4 is not an mpi4py.MPI.Intracomm"),
        (MPI.GROUP_EMPTY, TypeError, "is not an mpi4py.MPI.Intracomm"),
    ):
        with pytest.raises(error, match=f"^create: .*{text}"):
            mpikv.create(comm=given)
    whole = between.Merge(comm.rank != 0)
    with mpikv.create(comm=whole) as kv:
        assert kv.size == comm.size
    for made in (whole, between, half):
        made.Free()


@pytest.mark.ranks(1)
def test_what_is_no_communicator_without_mpi():
    with pytest.raises(TypeError, match=r"create: comm=.world. is not an mpi4py\.MPI\.Intracomm"):
        mpikv.create(comm="world")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("call", ["pull", "join", "create"])
def test_an_updater_calls_other_stores(comm, call):
    """It runs on the owner alone: the other ranks would never come. A store of one rank may be called."""
    with mpikv.create(comm=comm, timeout=10) as other, mpikv.create(comm=comm, timeout=10) as kv:
        alone = mpikv.create(comm=comm and comm.Split(comm.rank, 0), timeout=10)
        calls = {
            "pull": lambda: other.pull("x"),
            "join": other.join().__enter__,
            "create": lambda: mpikv.create(comm=comm).close(),
        }

        def update(key, given, stored):
            alone.push("i", given)
            calls[call]()

        for store, key in ((alone, "i"), (other, "x"), (kv, "w")):
            store.init(key, np.zeros(2))
        alone.set_updater(lambda key, given, stored: stored.__iadd__(given))
        kv.set_updater(update)
        if kv.size > 1 or call == "create":
            told = "create: an updater" if call == "create" else "an updater"
            with pytest.raises(Unsupported if kv.is_root else PeerFailed, match=f"{told} runs only on the owner"):
                kv.push("w", np.ones(2))
            assert (kv.pull("w") == 0).all()
            assert (other.pull("x") == 0).all()
            assert (alone.pull("i") == (kv.size if kv.is_root else 0)).all()
            kv.set_updater(lambda key, given, stored: stored.__iadd__(given))
            kv.push("w", np.ones(2))
            assert (kv.pull("w") == kv.size).all()
        alone.close()
