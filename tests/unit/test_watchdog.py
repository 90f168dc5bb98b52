"""The thread that watches a GPU's queued work, with events that a test decides about."""

import re
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mpikv.cluster.waiting import Waiting
from mpikv.errors import TransportError
from mpikv.transports.watchdog import Watchdog, Work


class Ending:
    """An event that is there after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._limit = time.monotonic() + seconds

    @property
    def done(self) -> bool:
        return time.monotonic() >= self._limit


def watched(events: Sequence[Any], timeout: float, warn_after: float | None = None) -> list[tuple[str, str]]:
    """Return the failures, and the calls they are about, of work that ends at the events, all queued at once."""
    failures: list[tuple[str, str]] = []
    memory: Any = SimpleNamespace(gpu=Mock(), order=Mock())
    waiting, check = Waiting(timeout, warn_after or timeout / 2), lambda: None
    watchdog = Watchdog(
        waiting, memory, check, lambda error, call: failures.append((type(error).__name__, call)), rank=3
    )
    for number, event in enumerate(events):
        work = Work(f"push {number}")
        watchdog.look_after(work)
        work.event = event
    # It ends where nothing is in flight.
    Waiting(10.0).until(lambda: "mpikv-watchdog" not in [thread.name for thread in threading.enumerate()], tuple)
    return failures


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a watchdog end when nothing is in flight."""
    monkeypatch.setattr("mpikv.transports.watchdog._IDLE", 0.0)


def test_the_deadline_is_that_of_each_call_and_not_of_the_queue() -> None:
    assert watched([Ending(0.1 * number) for number in range(10)], 0.5) == []
    assert watched([Ending(0.1), Ending(0.2), Ending(100)], 0.3) == [("Stalled", "push 2")]


def test_an_event_that_fails_is_found_before_the_deadline() -> None:
    class Failing:
        @property
        def done(self) -> bool:
            raise TransportError("illegal access")

    assert watched([Failing(), Ending(100)], 100.0) == [("TransportError", "push 0")]


def test_a_warning_says_that_the_gpu_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    class EndingWithTheWarning:
        @property
        def done(self) -> bool:
            return bool(caplog.messages)

    assert watched([EndingWithTheWarning()], timeout=9.0, warn_after=0.2) == []
    assert re.fullmatch(r"rank 3 has waited [0-8]\.\d s for the GPU, in push 0", caplog.messages[0])
    assert len(caplog.messages) == 1
