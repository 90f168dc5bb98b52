"""A pushpull that is compiled makes the updates of a plain one on a host, by a graph of CUDA's: whatever changes,
differs or fails between its calls, and in the order of streams.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store import test_capture as host

import mpikv
from mpikv import optimizers, schedules
from mpikv.compute.cuda.gpu import CupyGraph, CupyStream
from mpikv.errors import Closed, KeyNotInitialized, PeerFailed, RankMismatch, TransportError, Unsupported
from mpikv.store.kvstore import open_stores

from .. import MANY

# Changes, random programs and what ranks do apart are for three ranks, too; the rest does not depend on their number.
pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2), pytest.mark.deadline(60)]
SEVERAL, ALL = pytest.mark.ranks(2, 3), pytest.mark.ranks(1, 2, 3)

SHAPES = {"w": (300, 7), "b": (5,), "large": (3001, 5), "none": (0, 2)}
UPDATERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optimizers.SGD(learning_rate=0.5, momentum=0.5, wd=0.25),
    "schedule": lambda: optimizers.SGD(lr_scheduler=schedules.Factor(2, factor=0.5, base_lr=0.5)),
    "adam": lambda: optimizers.Adam(learning_rate=0.1),
    "adam of keys": lambda: optimizers.Adam(
        lr_scheduler=schedules.Cosine(40, base_lr=0.1, warmup_steps=5),
        lr_mult={"b": 0.5, "large": 0.0},
        wd=0.01,
        wd_mult={"w": 0.0},
    ),
    "own schedule": lambda: optimizers.Adam(lr_scheduler=lambda count: 0.1 / count),
}


class Both:
    """A store on a GPU, whose pushpulls may be compiled, and one on the host that makes the same by plain calls."""

    def __init__(self, cupy: Any, updater: str = "", dtype: str = "float32", **options: Any) -> None:
        self.here, self.there = (mpikv.create(name, **options) for name in ("nccl", "dist_sync"))
        self.keys, self.random = list(SHAPES), np.random.default_rng(self.here.rank)
        self.gradients = [np.ones(shape, dtype) for shape in SHAPES.values()]
        self.expected = [np.empty_like(array) for array in self.gradients]
        self.sent, self.outs = ([cupy.asarray(array) for array in self.gradients] for _ in "so")
        self.on_both(lambda kv: kv.init(self.keys, self.gradients))
        if updater:
            self.set_optimizer(UPDATERS[updater])

    def on_both(self, call: Callable[[Any], object]) -> None:
        for kv in (self.here, self.there):
            call(kv)

    def set_optimizer(self, make: Callable[[], Any]) -> None:
        self.on_both(lambda kv: kv.set_optimizer(make()))

    def capture(self) -> Any:
        return self.here.capture(self.keys, self.sent, self.outs)

    def draw(self) -> None:
        """Have other gradients, whose sums are exact."""
        for array, gradient in zip(self.sent, self.gradients, strict=True):
            gradient[...] = self.random.integers(-8, 9, gradient.shape) / 4
            array.set(gradient)

    def step(self, run: Callable[[], Any]) -> None:
        """Push and pull once, here by ``run``, and compare all bits."""
        self.draw()
        self.there.pushpull(self.keys, self.gradients, out=self.expected)
        run()
        self.compare()

    def compare(self) -> None:
        for found, expected in zip(self.outs, self.expected, strict=True):
            assert found.get().tobytes() == expected.tobytes()
        assert [self.here.version(key) for key in self.keys] == [self.there.version(key) for key in self.keys]

    def close(self) -> None:
        self.on_both(lambda kv: kv.close())


@pytest.fixture
def make(cupy: Any) -> Iterator[Callable[..., Both]]:
    """Return what makes both stores, which are closed in the end if the test has not."""
    every = list[Both]()
    yield lambda *arguments, **options: every.append(Both(cupy, *arguments, **options)) or every[-1]
    for both in every:
        both.close()


@pytest.fixture
def captured(make: Callable[..., Both]) -> Callable[..., tuple[Both, Any]]:
    """Return what makes both stores and a captured step, which has been made three times."""

    def captured(*arguments: Any, **options: Any) -> tuple[Both, Any]:
        both = make(*arguments, **options)
        step = both.capture()
        for _ in range(3):
            both.step(step)
        assert step.captured
        return both, step

    return captured


@pytest.mark.parametrize(
    ("updater", "placement", "dtype"),
    [
        ("", "replicated", "float32"),
        ("", "sharded", "float16"),
        ("momentum", "root", "float32"),
        ("momentum", "sharded", "float16"),
        ("adam of keys", "sharded", "float32"),
        ("adam of keys", "replicated", "float32"),
    ],
)
def test_replays_have_the_bits_of_plain_calls(make: Any, ranks: int, updater: str, placement: str, dtype: str) -> None:
    both = make(updater, dtype, placement=placement, bucket_bytes=32768)
    step = both.capture()
    # Ranks that share a GPU take turns, of some milliseconds.
    for number in range(102 if ranks == 1 else 8):
        both.step(step)
        assert step.captured is (number > 0), step.reason


@pytest.mark.parametrize("wait", [True, False])
def test_a_replay_is_in_the_order_of_the_caller(cupy: Any, wait: bool) -> None:
    """Its gradient is computed on the way, changed right after, and its result used at once."""
    with mpikv.create("nccl") as kv, cupy.cuda.Stream(non_blocking=True):
        gradient, out = cupy.zeros(MANY, np.float32), cupy.zeros(MANY, np.float32)
        kv.init("w", gradient)
        step = kv.capture("w", gradient, out)
        for number in range(1, 30):
            for _ in range(20):
                gradient.fill(np.nan)
            gradient.fill(number)
            made = step(wait=wait)
            assert wait or made.wait() is out
            gradient.fill(np.nan)
            doubled = out * 2
            out.fill(np.nan)
            assert (doubled.get() == 2 * number * kv.size).all()
        assert step.captured


# --- As on the host


@pytest.mark.parametrize("form", host.FORMS)
def test_every_form_of_arguments(cupy: Any, form: str) -> None:
    with mpikv.create("nccl") as kv:
        host.check_form(kv, form, lambda number: cupy.full((2, 3), float(number)), captured=True)


def test_bad_arguments_are_refused_when_it_is_compiled(cupy: Any) -> None:
    host.check_bad_arguments(mpikv.create("nccl"))


@SEVERAL
@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_ranks_that_call_something_else(make: Any, before: int) -> None:
    both = make("adam")
    host.check_mismatch(both.here, (both.keys, both.sent, both.outs), before, captures=True)


def test_steps_that_are_waited_for_when_their_values_are_used(cupy: Any) -> None:
    with mpikv.create("nccl") as kv, mpikv.create("dist_sync") as plain:
        host.check_steps_of_layers(kv, plain, cupy.asarray, captures=True)


# --- What cannot be recorded


def double(key: Any, received: Any, stored: Any) -> None:
    stored += 2 * received


LACKS: dict[str, tuple[str, dict[str, Any], Callable[[Both], Any]]] = {
    "updater": ("function is Python", {}, lambda both: both.on_both(lambda kv: kv.set_updater(double))),
    "compression": ("are compressed", {}, lambda both: both.on_both(lambda kv: kv.set_gradient_compression("fp16"))),
    "order": ("deterministic sums allocate", {"deterministic": True}, lambda both: None),
    "several": ("several arrays", {}, lambda both: both.here.capture("w", [both.sent[0]] * 2, both.outs[0])),
    "rows": ("rows are pushed", {}, lambda both: both.here.capture(
        "w", mpikv.RowSparse([1], np.ones((1, 7), np.float32), SHAPES["w"]), both.outs[0])),
    "host in": ("pushed is the host's, of key 'w'", {}, lambda both: both.here.capture(
        "w", both.gradients[0], both.outs[0])),
    "host out": ("filled with key 'w' is the host's", {}, lambda both: both.here.capture(
        "w", both.sent[0], both.expected[0])),
    "view": ("copied each time", {"bucket_bytes": 16384}, lambda both: both.here.capture(
        both.keys, [*both.sent[:2], both.here.view("large"), both.sent[3]], both.outs)),
    "one rank": ("the host's|rank 0 cannot", {}, lambda both: both.here.capture(
        "w", both.sent[0], (both.outs if both.here.rank else both.expected)[0])),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lack", LACKS)
def test_what_cannot_be_recorded_is_pushed_plainly(make: Any, lack: str) -> None:
    """On all ranks, though only one may lack something."""
    reason, options, prepare = LACKS[lack]
    both = make(**options)
    other = prepare(both)
    step = other or both.capture()
    for _ in range(4):
        version = both.here.version("w")
        step() if other else both.step(step)
        assert both.here.version("w") == version + 1
        assert not step.captured
        assert any(each in step.reason for each in reason.split("|")), step.reason
    assert repr(step).startswith("<mpikv.CapturedStep #0 not captured: ")


@SEVERAL
def test_a_rank_that_cannot_record(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU says so at the end of the capture. All ranks go on without."""
    both = make("adam")
    step, end_capture = both.capture(), CupyStream.end_capture

    def end(stream: CupyStream) -> Any:
        graph = end_capture(stream)
        if both.here.rank == 1:
            raise TransportError("it is too old")
        return graph

    with monkeypatch.context() as patch:
        patch.setattr(CupyStream, "end_capture", end)
        for _ in range(5):
            both.step(step)
            assert not step.captured
        assert ("it is too old" if both.here.rank == 1 else "rank 1 cannot") in step.reason
    both.set_optimizer(UPDATERS["momentum"])
    for _ in range(3):
        both.step(step)
    assert step.captured


# --- What changes between calls


@SEVERAL
def test_settings_that_differ_for_a_while(captured: Any) -> None:
    """What a refused call has found out on one rank alone is forgotten."""
    both, step = captured("momentum")
    optimizer = both.here.optimizer
    optimizer.nesterov = both.here.rank == 0
    with pytest.raises(RankMismatch, match="nesterov"):
        step()
    assert step.captured
    optimizer.nesterov = False
    for _ in range(2):
        both.step(step)
    assert step.captured
    both.close()
    assert "the store was closed" in step.reason


@SEVERAL
def test_a_rank_whose_schedule_fails(captured: Any) -> None:
    both, step = captured()
    fails = [False]

    def rate(count: int) -> float:
        if fails[0]:
            raise ZeroDivisionError("no rate")
        return 0.5

    both.set_optimizer(lambda: optimizers.SGD(lr_scheduler=rate))
    for _ in range(3):
        both.step(step)
    fails[0] = both.here.rank == 0
    with pytest.raises(ZeroDivisionError if both.here.rank == 0 else PeerFailed, match="no rate"):
        step()
    fails[0] = False
    both.step(step)
    assert step.captured


def test_rates_that_are_set_take_no_new_capture(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both, begun, begin = make("momentum"), list[CupyStream](), CupyStream.begin_capture
    monkeypatch.setattr(CupyStream, "begin_capture", lambda stream: begun.append(stream) or begin(stream))
    step = both.capture()
    for number in range(1, 9):
        for kv in (both.here, both.there):
            kv.set_learning_rate(1 / number)
            kv.optimizer.rescale_grad = 0.5**number
            kv.optimizer.clip_gradient = 0.5 if number % 3 else 0.25
            kv.optimizer.wd = 0.125 * (number % 2)
        both.step(step)
    assert step.captured
    assert len(begun) == 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another rule": lambda kv: setattr(kv.optimizer, "nesterov", True),
    "another optimizer": lambda kv: kv.set_optimizer("adam", learning_rate=0.5),
    "none": lambda kv: kv.set_updater(None),
    "a function for a while": lambda kv: kv.set_updater(double),
    "compression for a while": lambda kv: kv.set_gradient_compression("fp16"),
    "other keys": lambda kv: (kv.init("more", np.zeros(9, np.float32)), kv.delete("more")),
    "a key anew": lambda kv: kv.init("b", np.full(5, 3, np.float32), overwrite=True),
    "counts that differ": lambda kv: kv.init("w", np.full(SHAPES["w"], 3, np.float32), overwrite=True),
    "values": lambda kv: kv.set("w", np.full(SHAPES["w"], 7, np.float32)),
    "multipliers": lambda kv: setattr(kv.optimizer, "lr_mult", {"b": 0.25}),
    "a push": lambda kv: kv.push(["b", "w"], [np.ones(SHAPES[key], np.float32) for key in "bw"]),
    "buffers": lambda kv: kv.buffer("w"),
}


@ALL
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_heeded(captured: Any, change: str) -> None:
    both, step = captured("momentum")
    both.on_both(CHANGES[change])
    for _ in range(4):
        both.step(step)
    assert step.captured is not change.endswith("for a while"), step.reason
    both.set_optimizer(UPDATERS["adam"])
    both.on_both(lambda kv: kv.set_gradient_compression(None))
    for _ in range(4):
        both.step(step)
    assert step.captured


def test_a_checkpoint_that_is_loaded(captured: Any, comm: Any, folder: Any) -> None:
    both, step = captured("adam")
    both.there.save(folder / "file")
    for _ in range(2):
        both.step(step)
    both.on_both(lambda kv: kv.load(folder / "file"))
    for _ in range(4):
        both.step(step)
    assert step.captured


def test_a_key_that_is_gone(captured: Any) -> None:
    both, step = captured()
    both.on_both(lambda kv: kv.delete("b"))
    with pytest.raises(KeyNotInitialized, match="'b'"):
        step()
    with pytest.raises(KeyNotInitialized, match="'b'"):
        step(wait=False).wait()
    both.on_both(lambda kv: kv.init("b", np.zeros(5, np.float32)))
    both.step(step)


@SEVERAL
def test_ranks_that_have_no_work_left(captured: Any) -> None:
    both, step = captured()
    kv = both.here
    both.set_optimizer(lambda: optimizers.SGD(learning_rate=1.0))
    for _ in range(3):
        both.step(step)
    before = kv.pull("w").get()
    for array in both.sent:
        array.fill(1)
    with kv.join():
        with pytest.raises(Unsupported, match="wait=False cannot be used in join"):
            step(wait=False)
        for _ in range(kv.rank + 1):
            step()
    made = sum(range(1, kv.size + 1))
    assert (kv.pull("w").get() == before - made).all()
    assert step.captured
    step()
    assert (kv.pull("w").get() == before - made - kv.size).all()


@SEVERAL
def test_what_is_wrong_with_a_step_is_raised_where_it_is_waited_for(captured: Any) -> None:
    both, step = captured()
    kv = both.here
    with pytest.raises(TypeError if kv.rank == 0 else PeerFailed, match="neither True nor False"):
        step(wait=1 if kv.rank == 0 else True)
    work = step(wait=False) if kv.rank else kv.pushpull("w", both.sent[0], wait=False)
    with pytest.raises(RankMismatch, match="ranks disagree"):
        work.wait()


# --- Failures and ends


@pytest.mark.parametrize("end", ["close", "abandon", "collected"])
def test_graphs_end_before_what_they_use(captured: Any, end: str) -> None:
    both, step = captured("adam")
    graph, kv = step._known.graph, both.here
    if end == "collected":
        del step, graph
        gc.collect()
        kv.push("w", both.sent[0])
        return
    if end == "close":
        kv.close()
    else:
        with pytest.raises(ZeroDivisionError), kv:
            raise ZeroDivisionError
    with pytest.raises(Closed):
        step()
    if end == "close" or kv.size > 1:
        with pytest.raises(TransportError, match="was discarded"):
            graph.launch()


@SEVERAL
@pytest.mark.parametrize("status", [None, 1, 6])
def test_a_capture_that_fails_or_whose_launch_never_ends_is_given_up(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    kv = mpikv.create("nccl", timeout=2.0, bucket_bytes=1 << 14)  # kept, as NCCL may use it
    kv.init("w", np.zeros(5))
    step, mover = kv.capture("w", cupy.ones(5), cupy.ones(5)), kv._transport
    step()
    if status is None:
        if kv.rank == 0:
            monkeypatch.setattr(CupyGraph, "launch", lambda graph: None)
        step()  # the capture, whose launch waits for that of rank 0
        with pytest.raises(TransportError, match=r"pushpull\('w'\) in flight" if kv.rank else None):
            again(lambda: kv.pull("w", out=np.empty(5)))
    else:

        def fail(*_: Any) -> Any:
            raise mover._nccl.NcclError(status)

        if kv.rank == 0:
            monkeypatch.setattr(mover, "_constants_of", fail)
        with pytest.raises((TransportError, PeerFailed)):
            again(step, kv.barrier)
    with pytest.raises((Closed, TransportError)):
        step()


def again(*calls: Callable[[], Any]) -> None:
    """Make calls until one fails."""
    for _ in range(1000):
        for call in calls:
            call()


# --- What a launch costs the host

MOST_CALLS = {"momentum": 60, "adam": 70}
"""Adam's numbers change at each call, and are written. Three of the calls note when this rank begins a
call, meets the others, and ends it. Two ranks take 57 and 66; a busy machine was seen to take three more.
"""


def calls_of(run: Callable[[], Any]) -> list[str]:
    """Return the functions of Python that a call passes, but for those that depend on the time."""
    passed: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and not any(part in place for place in places_of(frame) for part in NOT_COUNTED):
            passed.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return passed


# Waiting for ranks; reading the processor's time after a long phase; waking the watchdog, and dropping the arguments of
# each call that the GPU has finished.
NOT_COUNTED = ("shm.py _await_peers", "lateness.py _sample", "watchdog.py wake", "stream_order.py _keep")


def places_of(frame: Any) -> Iterator[str]:
    """Yield where a function is, and where those are that have called it."""
    while frame is not None:
        yield f"{frame.f_code.co_filename} {frame.f_code.co_name}"
        frame = frame.f_back


@pytest.mark.parametrize("updater", ["momentum", "adam"])
def test_a_launch_takes_few_python_calls(cupy: Any, updater: str) -> None:
    """However many keys there are, and though numbers of a rule change at each call."""
    gc.collect()
    # A call looks at every open store, also at one that an earlier test has left.
    others = len(open_stores())
    for count in (3, 100):
        with mpikv.create("nccl") as kv:
            arrays = [cupy.ones((2, 3), np.float32) for _ in range(2 * count)]
            kv.init(list(range(count)), arrays[:count])
            kv.set_optimizer(UPDATERS[updater]())
            step = kv.capture(list(range(count)), arrays[:count], arrays[count:])
            calls = [calls_of(step) for _ in range(12)][2:]
            assert step.captured
        # One call for each of the keys would be 97 more.
        fewest = min(calls, key=len)
        assert len(fewest) <= MOST_CALLS[updater] + others, fewest


def test_a_plain_list_takes_python_calls_for_its_messages_and_not_for_its_keys(cupy: Any) -> None:
    keys = list(range(400))
    with mpikv.create("nccl", bucket_bytes=1 << 23) as kv:
        pushed, pulled = ([cupy.ones(256, np.float32) for _ in keys] for _ in "pp")
        kv.init(keys, pushed)
        kv.set_optimizer("adam")
        assert min(len(calls_of(lambda: kv.pushpull(keys, pushed, out=pulled))) for _ in range(3)) <= 247


# --- Programs

ACTIONS = ("step", "step", "step", "other", "push", "pull", "rate", "optimizer", "assign", "overwrite", "stream")
EXAMPLES = {1: 40, 2: 15, 3: 8}


@ALL
@pytest.mark.deadline(120)
def test_programs_of_compiled_and_plain_calls(cupy: Any, ranks: int) -> None:
    @settings(max_examples=EXAMPLES[ranks], deadline=None)
    @given(
        st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=25), st.sampled_from(["root", "sharded", "replicated"])
    )
    def run(program: list[str], placement: str) -> None:
        both = Both(cupy, "adam of keys", placement=placement)
        step = both.capture()
        other = both.here.capture(["large", "b"], [both.sent[2], both.sent[1]], [both.outs[2], both.outs[1]])
        streams, stream = [cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)], 0
        for number, action in enumerate(program):
            with streams[stream]:
                if action == "stream":
                    streams[1 - stream].wait_event(streams[stream].record())
                    stream = 1 - stream
                else:
                    act(both, action, number, step, other)
        both.close()

    run()


def act(both: Both, action: str, number: int, step: Any, other: Any) -> None:
    if action == "step":
        both.step(step)
    elif action == "other":
        both.draw()
        other()
        some, filled = ([each[2], each[1]] for each in (both.gradients, both.expected))
        both.there.pushpull(["large", "b"], some, filled)
        for item in (1, 2):
            assert both.outs[item].get().tobytes() == both.expected[item].tobytes()
    elif action == "push":
        both.draw()
        both.here.push(both.keys, both.sent)
        both.there.push(both.keys, both.gradients)
    elif action == "pull":
        both.here.pull(both.keys, both.outs)
        both.there.pull(both.keys, both.expected)
        both.compare()
    else:
        both.on_both(lambda kv: change(kv, action, number))


def change(kv: Any, action: str, number: int) -> None:
    if action == "optimizer":
        kv.set_optimizer(list(UPDATERS.values())[number % len(UPDATERS)]())
    elif action == "assign":
        kv.set_updater(None)
    elif action == "overwrite":
        kv.init("b", np.full(5, number, np.float32), overwrite=True)
    elif kv.optimizer is not None and kv.optimizer.lr_scheduler is None:
        kv.set_learning_rate(0.5 ** (number % 4))
