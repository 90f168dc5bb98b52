"""What a rank answers that is asked where it is."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpikv.cluster import status_board as board
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard, _answer, _answer_questions, _ask, _frames, _is_in_use

FRAMES = """  File "train.py", line 7 in evaluate
  File "train.py", line 22 in <module>
"""
ANSWER = f"Stack (most recent call first):\n{FRAMES}"


def test_the_board_says_the_latest_call() -> None:
    """A short text after a long one, and the same again."""
    shown = board.StatusBoard(ProcessGroup())
    assert shown.call == "create"
    for number, text in enumerate(("push(" + "x" * 200 + ")", "pull('é')", "pull('é')", "barrier()"), 1):
        shown.write(number, board.note(text))
        assert shown.call == f"call #{number} {text[:160]}"


def test_an_answer() -> None:
    assert _frames(ANSWER) == [("train.py", "7", "evaluate"), ("train.py", "22", "<module>")]


def test_an_answer_may_begin_and_end_in_the_middle_of_another() -> None:
    for cut in range(len(ANSWER)):
        assert _frames(ANSWER[cut:] + ANSWER)[0] == ("train.py", "7", "evaluate")
        assert _frames(ANSWER + ANSWER[:cut])[0] == ("train.py", "7", "evaluate")


def test_what_says_nothing() -> None:
    assert _frames("") == []
    assert _frames('line 22 in <module>\n  File "x.py", line 3 in f\n') == []


def test_only_the_thread_that_makes_the_calls_answers() -> None:
    """The frames of one that goes on meanwhile may be gone before they are read, which kills the process."""
    told = np.zeros(1, [("pid", "i8"), ("thread", "i8"), ("answers", "i8")])[0]
    told["pid"], told["answers"] = os.getpid(), _answer_questions()
    ready, over = threading.Event(), threading.Event()

    def busy() -> None:
        told["thread"] = threading.get_native_id()
        ready.set()
        over.wait()

    thread = threading.Thread(target=busy)
    thread.start()
    ready.wait()
    functions = [function for _, _, function in _ask(told)]
    over.set()
    thread.join()
    assert "busy" in functions
    assert "test_only_the_thread_that_makes_the_calls_answers" not in functions
    assert _ask(told) == []  # that thread is no more
    told["thread"] = os.getpid()
    assert "test_only_the_thread_that_makes_the_calls_answers" in [function for _, _, function in _ask(told)]


def test_a_process_that_answers_nothing_is_not_waited_for(tmp_path, monkeypatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(board, "_signal", lambda pid, thread: None)
    monkeypatch.setattr(time, "sleep", naps.append)
    with (tmp_path / "answers").open("w+") as answers:
        assert _answer(0, 0, answers) == ""
    assert len(naps) == board._LOOKS


@pytest.mark.parametrize("grows_at", [(1,), (1, 2), (1, 3), (2, 3, 5)])
def test_an_answer_is_whole_when_it_has_come_to_rest(tmp_path, monkeypatch, grows_at: tuple[int, ...]) -> None:
    """It comes in pieces. Whoever asks waits for no longer than it takes to see that none follows."""
    naps = itertools.count(1)
    with (tmp_path / "answers").open("w+") as answers, (tmp_path / "answers").open("a") as writer:

        def nap(seconds: float) -> None:
            if next(naps) in grows_at:
                writer.write("piece ")
                writer.flush()

        monkeypatch.setattr(board, "_signal", lambda pid, thread: None)
        monkeypatch.setattr(time, "sleep", nap)
        assert _answer(0, 0, answers) == "piece " * len(grows_at)
    assert next(naps) - 1 == grows_at[-1] + board._AT_REST


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGWINCH, signal.SIGXFSZ, signal.SIGRTMAX])
def test_a_signal_that_is_ignored_is_in_use(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert _is_in_use(number)
        signal.signal(number, signal.SIG_DFL)
        assert not _is_in_use(number)
    finally:
        signal.signal(number, before)


def test_a_board_that_is_closed_does_not_keep_the_shared_memory() -> None:
    memory = mmap.mmap(-1, 4096)
    windows = SimpleNamespace(allocate=lambda nbytes: np.frombuffer(memory, np.uint8, nbytes))
    alone = SimpleNamespace(rank=0, size=1, local_rank=0, host_ranks=(0,), one_host=True, windows=windows)
    closed = StatusBoard(alone)
    closed.write(1, board.note("barrier()"))
    with pytest.raises(BufferError):
        memory.close()
    closed.close()
    memory.close()
