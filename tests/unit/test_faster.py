"""Which of two ways is taken."""

from __future__ import annotations

from mpikv.transports.faster import Faster


def tried(first: float, second: float) -> Faster:
    """Return a choice of which both ways have been taken once, for so many seconds."""
    faster = Faster()
    for way, seconds in enumerate((first, second)):
        assert faster.next() == way
        faster.took(way, seconds, 1)
    return faster


def test_both_ways_are_tried_again_from_time_to_time():
    for seconds, better in (((3.0, 2.0), 1), ((2.0, 3.0), 0), ((2.0, 2.0), 0)):
        faster = tried(*seconds)
        assert [faster.next() for _ in range(62)] == [better] * 30 + [0, 1] + [better] * 30


def test_time_is_compared_by_amount():
    faster = Faster()
    faster.took(0, 3.0, 3)
    faster.took(1, 4.0, 2)
    assert [faster.next() for _ in range(3)] == [0, 1, 0]


def test_one_late_turn_does_not_count_much_and_many_do():
    faster = tried(1.0, 1.5)
    faster.took(0, 1000.0, 1)
    assert faster.next() == 0
    for _ in range(10):
        faster.took(0, 3.0, 1)
    assert faster.next() == 1
    for _ in range(30):
        faster.took(0, 1.0, 1)
    assert faster.next() == 0
