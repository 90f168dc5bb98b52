"""What a rank that is asked where it is answers, when several ask at once."""

from __future__ import annotations

from pathlib import Path

import mpikv
from mpikv.board import _telling

ASIDE = str(Path(mpikv.__file__).with_name("work.py"))
MAIN = """  File "train.py", line 7 in evaluate
  File "train.py", line 22 in <module>
"""
IDLE = f"""  File "threading.py", line 320 in wait
  File "{ASIDE}", line 9 in _await
  File "{ASIDE}", line 8 in _serve
  File "threading.py", line 1002 in _bootstrap
"""
BUSY = f"""  File "shm.py", line 5 in _arrive
  File "{ASIDE}", line 9 in _perform
  File "{ASIDE}", line 8 in _serve
  File "threading.py", line 1002 in _bootstrap
"""


def answer(*others: str) -> str:
    threads = [f"Thread 0x01 (most recent call first):\n{frames}\n" for frames in others]
    return "".join([*threads, f"Current thread 0x02 (most recent call first):\n{MAIN}"])


def test_one_thread() -> None:
    assert _telling(f"Stack (most recent call first):\n{MAIN}")[0] == ("train.py", "7", "evaluate")


def test_the_thread_that_is_busy_with_a_call_tells() -> None:
    assert _telling(answer(IDLE))[0] == ("train.py", "7", "evaluate")
    assert _telling(answer(BUSY))[0] == ("shm.py", "5", "_arrive")


def test_an_answer_may_begin_and_end_in_the_middle_of_another() -> None:
    whole = answer(IDLE)
    for cut in range(len(whole)):
        assert _telling(whole[cut:] + whole)[0] == ("train.py", "7", "evaluate")
        assert _telling(whole + whole[:cut])[0] == ("train.py", "7", "evaluate")


def test_what_says_nothing() -> None:
    assert _telling("") == []
    assert _telling('line 22 in <module>\n  File "x.py", line 3 in f\n') == []
