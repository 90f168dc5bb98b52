"""What a rank answers that is asked where it is."""

import mmap
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpikv.cluster import status_board as board
from mpikv.cluster.calls import note
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard, _answer_questions, _ask, _frames, _is_in_use

FRAMES = """  File "train.py", line 7 in evaluate
  File "train.py", line 22 in <module>
"""
HEAD = "Stack (most recent call first):\n"
ANSWER = HEAD + FRAMES


def test_the_board_says_the_latest_call() -> None:
    """A short text after a long one, and the same again."""
    shown = board.StatusBoard(ProcessGroup())
    assert shown.report((1, 2, 3, 4, 5)).text == "create"  # these are on another host
    assert len(shown.describe([5, 4, 3, 2, 1, 0])) == 1
    for number, text in enumerate(("push(" + "x" * 200 + ")", "pull('é')", "pull('é')", "barrier()"), 1):
        shown.record.begin(note(text))
        assert shown.report(()).text == f"call #{number} {text[:160]}"


def test_an_answer_is_whole_when_the_next_one_begins() -> None:
    """It comes in pieces, and also without its last line it would tell another place."""
    assert _frames(ANSWER + HEAD) == [("train.py", "7", "evaluate"), ("train.py", "22", "<module>")]
    for cut in range(len(ANSWER) + 1):
        assert _frames(ANSWER[:cut]) == []


def test_an_answer_may_begin_and_end_in_the_middle_of_another() -> None:
    for cut in range(len(ANSWER)):
        assert len(_frames(ANSWER[cut:] + ANSWER + HEAD + FRAMES[:cut])) == 2


def test_what_says_nothing() -> None:
    assert _frames("") == _frames('line 22 in <module>\n  File "x.py", line 3 in f\n') == []


def test_only_the_thread_that_makes_the_calls_answers() -> None:
    """The frames of one that goes on meanwhile may be gone before they are read, which kills the process."""
    told = np.zeros(1, [(name, "i8") for name in ("pid", "space", "thread", "answers")])[0]
    told["pid"], told["space"], told["answers"] = os.getpid(), board._pid_space(), _answer_questions()
    ready, over = threading.Event(), threading.Event()

    def busy() -> None:
        told["thread"] = threading.get_native_id()
        ready.set()
        over.wait()

    thread = threading.Thread(target=busy)
    thread.start()
    ready.wait()
    functions = [function for _, _, function in _ask(told)]
    # As where this thread still answers another rank.
    told["thread"] = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    answer = _ask(told)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGURG})
    told["thread"] = thread.native_id
    over.set()
    thread.join()
    assert "busy" in functions
    assert "test_only_the_thread_that_makes_the_calls_answers" not in functions
    assert answer == []
    assert _ask(told) == []  # that thread is no more
    told["thread"] = os.getpid()
    assert "test_only_the_thread_that_makes_the_calls_answers" in [function for _, _, function in _ask(told)]
    assert f"is now at {__file__}:" in board.whereabouts(told)


def test_what_is_said_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of one in another container may mean another process here, or none."""
    ended = SimpleNamespace(process=1 << 22, peer=lambda _: None)  # above every number of the system
    monkeypatch.setattr(board, "present", lambda: ended)
    shown = StatusBoard(ProcessGroup())
    assert shown.gone() == (0,)
    monkeypatch.setattr(board, "_pid_space", lambda: 1)
    assert shown.gone() == ()
    started = str(Path(board.__file__).parents[1] / "cli" / "rank.py")  # which mpikv run starts, by a line of its own
    for first, text in ((os.__file__, "has reached the end of its program"), ("train.py", "is now at train.py:1 in f")):
        frames = [(file, "1", "f") for file in (first, started, "<string>")]
        ended.peer = lambda _, frames=frames: SimpleNamespace(state=lambda: "running", frames=lambda _: frames)
        assert board.whereabouts({"pid": 1, "thread": 1, "answers": 1}) == text


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
    memory = mmap.mmap(-1, board.SLOT.itemsize)
    allocate = partial(np.frombuffer, memory, np.uint8)
    alone = SimpleNamespace(rank=0, size=1, local_rank=0, host_ranks=(0,), allocate=allocate)
    closed = StatusBoard(alone)
    closed.record.begin(note("barrier()"))
    with pytest.raises(BufferError):
        memory.close()
    closed.close()
    memory.close()
