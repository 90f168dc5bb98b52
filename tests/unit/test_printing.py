"""What a rank prints and logs, and what of it cannot be written; and readers of a pipe."""

import io
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.cluster.printing import log, print_lines, until_read


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError("No space left on device")


class Failing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("I/O operation on closed file")


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what the process has begun with as its stderr."""
    monkeypatch.setattr(sys, "__stderr__", stream := io.StringIO())
    return stream


@pytest.mark.parametrize("make", [Closed, Full, lambda: None])
def test_what_a_stream_of_the_program_does_not_take_goes_to_the_first_one(first, make) -> None:
    with redirect_stdout(make()), redirect_stderr(make()):
        print_lines("one\ntwo", "[rank 1/2] ")
    assert first.getvalue() == "[rank 1/2] one\n[rank 1/2] two\n"


def test_a_stream_without_flush_is_given_all_once(first) -> None:
    stream: Any = SimpleNamespace(write=first.write)
    with redirect_stderr(stream):
        print_lines("one", "")
    assert first.getvalue() == "one\n"


def test_a_log_that_cannot_be_written_stops_no_thread_and_no_call() -> None:
    log, failing = logging.getLogger("mpikv"), Failing()
    log.addHandler(failing)
    try:
        with mpikv.create() as kv:
            kv.init("w", np.zeros(2))
            work = kv.push("w", np.ones(3), wait=False)
            with pytest.raises(mpikv.ValueMismatch):
                work.wait()
            kv.push("w", np.ones(2), wait=False).wait()
            kv.set_updater(lambda key, received, stored: None)
            kv.push("w", np.ones(2))  # warns that nothing was changed
    finally:
        log.removeHandler(failing)


def test_a_record_has_the_place_that_logs(caplog) -> None:
    log("%d of %d", 1, 2)
    assert [(record.getMessage(), record.pathname) for record in caplog.records] == [("1 of 2", __file__)]


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
        heard.append("reads")  # before: after it has read, this thread may be held up
        os.read(reading, 100)

    thread = threading.Thread(target=listen)
    thread.start()
    until_read([writing], 10.0)
    assert heard == ["reads"]


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
