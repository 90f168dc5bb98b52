"""Waiting for ranks, and for readers of a pipe."""

import pytest

from mpikv.cluster import waiting
from mpikv.cluster.waiting import Waiting
from mpikv.errors import Stalled
from mpikv.testing import cluster


def test_a_warning_comes_once_and_before_the_deadline() -> None:
    warnings = []

    def wait(comm: object) -> None:
        waiting = Waiting(60.0, 10.0).warning(lambda waited, missing: warnings.append((round(waited), *missing)))
        with pytest.raises(Stalled, match=r"^waited 60.0 s for ranks \[1\]"):
            waiting.until(lambda: False, lambda: (1,))

    cluster(1).run(wait)
    assert warnings == [(10, 1)]


class Clock:
    """A system whose time goes on in naps alone."""

    polls = 0

    def __init__(self) -> None:
        self.time = 0.0
        self.naps: list[tuple[float, float]] = []

    def now(self) -> float:
        return self.time

    def nap(self, seconds: float, until: float, ready: object) -> None:
        self.naps.append((self.time, seconds))
        self.time += seconds


def test_naps_are_short_beside_what_was_waited_already_and_no_longer_than_a_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A core is left to others, and what comes is seen soon."""
    clock = Clock()
    monkeypatch.setattr(waiting, "present", lambda: clock)
    Waiting(60.0).until(lambda: clock.time >= 1.0 or len(clock.naps) > 2000, tuple)
    assert 1.0 <= clock.time < 1.01
    for waited, nap in clock.naps:
        assert 1e-5 <= nap <= 1e-3
        assert nap <= max(1e-5, waited / 30)
    assert [nap for _, nap in clock.naps[-900:]] == [1e-3] * 900
