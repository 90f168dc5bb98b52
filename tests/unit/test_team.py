"""Threads that share out work: jobs run at once, their errors come, and the threads end with their team."""

import _thread
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.engine.team import SHARED_OUT, Team, deal

LONGEST = SHARED_OUT // 8  # elements of float64


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mpikv lane"}


@pytest.mark.parametrize("closes", [False, True])
def test_jobs_run_at_once_and_the_threads_end_with_the_team(closes: bool) -> None:
    before, meeting, met = lanes(), threading.Barrier(3), list[int]()

    def job() -> None:
        meeting.wait(10)
        met.append(threading.get_ident())

    team = Team(3)
    assert lanes() == before, "a store of short messages has no threads"
    for _ in range(2):
        team.run([job] * 3)
    assert len(met) == 6
    assert len(set(met)) == 3
    own = lanes() - before
    assert len(own) == 2
    if closes:
        team.close()
    else:
        del team
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_comes_when_all_jobs_have_ended(place: int) -> None:
    ended = list[int]()

    def job(number: int) -> None:
        if number == place:
            raise KeyError(number)
        time.sleep(0.05)
        ended.append(number)

    team = Team(3)
    for turn in (1, 2):
        with pytest.raises(KeyError, match=str(place)):
            team.run([partial(job, number) for number in range(3)])
        assert sorted(ended) == sorted([number for number in range(3) if number != place] * turn)
    team.close()


def test_without_more_threads_the_caller_does_all() -> None:
    before, ran = threading.stack_size(1 << 46), list[int]()  # no machine has so much
    try:
        Team(3).run([partial(ran.append, number) for number in range(3)])
    finally:
        threading.stack_size(before)
    assert ran == [0, 1, 2]


def test_other_threads_warn_of_no_overflow() -> None:
    large, team = np.full(4, 3e38, np.float32), Team(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        team.run([lambda: None, lambda: np.multiply(large, large)])
    team.close()


def test_an_interrupt_waits_for_the_other_jobs() -> None:
    team, ended = Team(2), list[int]()

    def interrupted() -> None:
        time.sleep(0.1)
        _thread.interrupt_main()
        time.sleep(0.3)
        ended.append(1)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            team.run([lambda: None, interrupted])
        assert len(ended) == 1
        ended.clear()
    team.close()


SHAPES = st.sampled_from([(), (0,), (7,), (LONGEST,), (3, 0), (3, LONGEST // 4), (LONGEST // 8, 5), (50, 3, 1000)])


@given(st.lists(SHAPES, max_size=4), st.booleans(), st.integers(1, 8))
def test_each_element_is_in_one_lane(shapes: list[tuple[int, ...]], in_order: bool, count: int) -> None:
    targets = [np.zeros(shape, order="C" if in_order else "F") for shape in shapes]
    sources = [np.full(target.shape, number + 1.0) for number, target in enumerate(targets)]
    dealt = deal(targets, sources, count)
    assert len(dealt) == count
    for outs, given_ in dealt:
        for out, source in zip(outs, given_, strict=True):
            out += source
    assert all((target == source).all() for target, source in zip(targets, sources, strict=True))
    loads = [sum(out.nbytes for out in outs) for outs, _ in dealt]
    assert max(loads) - min(loads) < SHARED_OUT
