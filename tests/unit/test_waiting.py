"""Waiting for ranks, and for readers of a pipe."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from mpikv.cluster.waiting import Waiting, until_read
from mpikv.errors import Stalled
from mpikv.testing import cluster


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_until_somebody_reads(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b"the last words")
    heard = []

    def listen() -> None:
        time.sleep(0.1)
        heard.append(os.read(reading, 100))

    thread = threading.Thread(target=listen)
    thread.start()
    until_read([writing], 10.0)
    thread.join(0.05)  # it has read, and may not have appended yet
    assert heard == [b"the last words"]


def test_not_for_ever(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    os.write(writing, b"nobody hears")
    started = time.monotonic()
    until_read([writing], 0.05)
    assert time.monotonic() - started >= 0.05


def test_files_are_not_waited_for() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"all of it")
        file.flush()
        until_read([file.fileno()], 1e9)


def test_a_warning_comes_once_and_before_the_deadline() -> None:
    warnings = []

    def wait(comm: object) -> None:
        waiting = Waiting(60.0, 10.0).warning(lambda waited, missing: warnings.append((round(waited), *missing)))
        with pytest.raises(Stalled, match=r"^waited 60.0 s for ranks \[1\]"):
            waiting.until(lambda: False, lambda: (1,))

    cluster(1).run(wait)
    assert warnings == [(10, 1)]
