"""Which frames an error shows where it leaves the package, and what of it each rank prints."""

import re
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

import mpikv
from mpikv.cluster import tracebacks
from mpikv.config import keeps_frames

PACKAGE = str(Path(mpikv.__file__).parent)
# Before Python 3.11 each function that raises an error again leaves its frame.
AGAIN = 0 if sys.version_info >= (3, 11) else 3


def frames_of(error):
    return traceback.extract_tb(error.__traceback__)


def ours(error):
    return [frame.name for frame in frames_of(error) if frame.filename.startswith(PACKAGE)]


def names_here(error):
    return [frame.name for frame in frames_of(error) if frame.filename == __file__]


@pytest.fixture
def kv():
    with mpikv.create() as store:
        store.init("w", np.zeros(3))
        yield store


def divide(key, received, stored):
    return stored / 0 if stored.ndim > 9 else 1 // 0


def without_entry(count):
    return {}[count]


def in_trainer(kv):
    mpikv.Trainer({"b": np.zeros(3)}, "sgd").step(1)


def left_in_context(kv):
    with mpikv.create() as other:
        other.push("w", np.ones(3))


def on_arrival(kv):
    store = mpikv.create("dist_async")
    store.init("w", np.zeros(3))
    store.push("w", np.ones(3))


def unseen(kv):
    kv.push("w", np.ones(4), wait=False)
    kv.pull("w")


def closed(kv):
    store = mpikv.create()
    store.close()
    store.pull("w")


MISTAKES = [
    (mpikv.KeyNotInitialized, 1, lambda kv: kv.push("v", np.ones(3))),
    (mpikv.ValueMismatch, 1, lambda kv: kv.pushpull("w", np.ones(4))),
    (TypeError, 1, lambda kv: kv.pull("w", out="x")),
    (mpikv.KeyAlreadyInitialized, 1, lambda kv: kv.init("w", np.ones(3))),
    (mpikv.KeyNotInitialized, 0, lambda kv: kv.view("v")),
    (mpikv.ConfigError, 0, lambda kv: mpikv.create(placement="shard")),
    (mpikv.ConfigError, 2, lambda kv: kv.set_optimizer("adm")),
    (FileNotFoundError, 1, lambda kv: kv.save("/nowhere/at/all")),
    (FileNotFoundError, 1, lambda kv: kv.load("/nowhere/at/all")),
    (mpikv.ValueMismatch, 1, lambda kv: kv.push("w", np.ones(4), wait=False).wait()),
    (mpikv.ValueMismatch, 1, unseen),
    (mpikv.Unsupported, 2, lambda kv: mpikv.create("horovod").push("w", np.ones(3))),
    (mpikv.ConfigError, 2, on_arrival),
    (TypeError, 0, lambda kv: mpikv.Trainer([np.ones(3)], "sgd")),
    (mpikv.StaleGradient, 2, in_trainer),
    (mpikv.KeyNotInitialized, 1, left_in_context),
    (mpikv.Closed, 2, closed),
]


@pytest.mark.parametrize(("kind", "most", "mistake"), MISTAKES)
def test_an_error_points_at_the_callers_line(kv, kind, most, mistake):
    with pytest.raises(kind) as raised:
        mistake(kv)
    assert type(raised.value) is kind
    assert len(ours(raised.value)) <= most + AGAIN
    assert names_here(raised.value)[1:] == [mistake.__name__]
    assert raised.value.__cause__ is None
    shown = [str(entry.path) for entry in raised.traceback.filter(raised)]
    assert shown == [__file__] * 2, "pytest shows more"


@pytest.mark.parametrize("name", ["local", "dist_async"])
def test_the_callers_own_functions_stay(name):
    with mpikv.create(name) as kv:
        kv.init("w", np.zeros(3))
        kv.set_updater(divide)
        with pytest.raises(ZeroDivisionError) as raised:
            kv.pushpull("w", np.ones(3))
        assert names_here(raised.value) == ["test_the_callers_own_functions_stay", "divide"]
        assert len(ours(raised.value)) <= 2 + AGAIN


def test_a_schedule_that_raises_stays(kv):
    kv.set_optimizer("sgd", lr_scheduler=without_entry)
    with pytest.raises(KeyError) as raised:
        kv.push("w", np.ones(3))
    assert names_here(raised.value)[1:] == ["without_entry"]
    assert ours(raised.value) == ["push", "_collective"][: 1 + AGAIN]


def test_a_module_of_the_callers_stays_whatever_its_name(kv, tmp_path):
    """One that is called like a module of Python's own."""
    source = tmp_path / "select.py"
    source.write_text("def update(key, received, stored):\n    return {}[key]\n")
    module = {"__name__": "select"}
    exec(compile(source.read_text(), source, "exec"), module)
    kv.set_updater(module["update"])
    with pytest.raises(KeyError) as raised:
        kv.push("w", np.ones(3))
    assert [frame.filename for frame in frames_of(raised.value) if not frame.filename.startswith(PACKAGE)][1:] == [
        str(source)
    ]


def test_an_updater_that_calls_the_store_stays(kv):
    def calling(key, received, stored):
        kv.pull("w")

    kv.set_updater(calling)
    with pytest.raises(mpikv.Unsupported, match="an updater") as raised:
        kv.push("w", np.ones(3))
    assert names_here(raised.value)[1:] == ["calling"]


def test_a_bug_keeps_all_frames(kv, monkeypatch):
    monkeypatch.setattr(kv._exchange, "check_storable", None)
    with pytest.raises(TypeError, match="not callable") as raised:
        kv.init("v", np.ones(3))
    assert len(ours(raised.value)) > 3
    assert not tracebacks.hidden_from_pytest(raised)


def test_what_an_error_came_from_stays(kv, monkeypatch):
    def failing(*_):
        raise mpikv.TransportError("MPI failed") from OSError("no route")

    monkeypatch.setattr(kv._transport.control, "agree", failing)
    with pytest.raises(mpikv.TransportError) as raised:
        kv.push("w", np.ones(3))
    assert isinstance(raised.value.__cause__, OSError)


def test_the_variable_keeps_all_frames(kv, monkeypatch):
    monkeypatch.setenv("MPIKV_FULL_TRACEBACK", "1")
    with pytest.raises(mpikv.KeyNotInitialized) as raised:
        kv.push("v", np.ones(3))
    assert len(ours(raised.value)) > 5
    assert not tracebacks.hidden_from_pytest(raised)


@pytest.mark.parametrize(("text", "keeps"), [("1", True), ("0", False), ("off", False), ("", True), ("all", True)])
def test_values_of_the_variable(text, keeps):
    assert keeps_frames({"MPIKV_FULL_TRACEBACK": text}) is keeps


def printed(capsys, error, rank):
    started = time.monotonic()
    tracebacks.print_last(error, f"[rank {rank}/9] ", rank)
    return capsys.readouterr().err.splitlines(), time.monotonic() - started


def caught(error):
    try:
        raise error
    except type(error) as raised:
        return raised


def test_what_another_rank_prints_comes_in_one_line_and_later_in_full(capsys):
    lines, seconds = printed(capsys, caught(mpikv.PeerFailed("push: rank 1 raised\nit", 1)), 3)
    place = rf"; this rank is at {re.escape(__file__)}:\d+ in caught"
    assert re.fullmatch(rf"\[rank 3/9\] mpikv\.errors\.PeerFailed: push: rank 1 raised; it{place}", lines[0])
    assert lines[1] == "[rank 3/9] Traceback (most recent call last):"
    assert seconds > 0.3


def test_a_place_in_the_text_is_not_repeated(capsys, monkeypatch):
    monkeypatch.setattr(tracebacks, "_PATIENCE", 0.0)
    error = caught(mpikv.PeerFailed("push: ranks disagree", 1))
    error.args = (f"push: ranks disagree; rank 3 is{tracebacks.place_of(error)}, rank 4 is elsewhere [rank 3/9]",)
    lines, _ = printed(capsys, error, 3)
    assert (lines[0].count(__file__), lines[0][-9:]) == (1, "elsewhere")


@pytest.mark.parametrize("keep", [False, True])
def test_an_error_of_ones_own_comes_in_full_at_once(capsys, monkeypatch, keep):
    error = mpikv.PeerFailed("push: rank 1 raised", 1) if keep else mpikv.ValueMismatch("push: it")
    monkeypatch.setenv("MPIKV_FULL_TRACEBACK", str(int(keep)))
    lines, seconds = printed(capsys, caught(error), 3)
    assert lines[0] == "[rank 3/9] Traceback (most recent call last):"
    assert seconds < 0.3


def test_what_was_raised_on_the_way_is_not_left_out(capsys):
    try:
        try:
            raise KeyError("mine")
        except KeyError:
            raise mpikv.PeerFailed("push: rank 1 raised", 1) from None
    except mpikv.PeerFailed as error:
        error.__suppress_context__ = False
        lines, _ = printed(capsys, error, 3)
    assert any("KeyError: 'mine'" in line for line in lines)
    assert lines[0] == "[rank 3/9] Traceback (most recent call last):"


def test_the_place_of_an_error_is_the_callers_line_and_none_of_an_installed_library(tmp_path: Path, kv) -> None:
    library: dict = {}
    text = "def calls(store):\n    store.pull('missing')\n"
    exec(compile(text, str(tmp_path / "site-packages" / "library.py"), "exec"), library)
    with pytest.raises(mpikv.KeyNotInitialized) as caught:
        library["calls"](kv)
    assert re.match(f" at {re.escape(__file__)}:[0-9]+ in test_the_place_of", tracebacks.place_of(caught.value))
