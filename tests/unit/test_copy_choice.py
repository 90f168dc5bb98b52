"""Which of two ways is taken."""

from mpikv.transports.cma import CopyChoice


def tried(first: float, second: float) -> CopyChoice:
    """Return a choice that has measured both ways once, at so many seconds."""
    choice = CopyChoice()
    assert [choice.next() for _ in range(32)] == [0, 1] + [0] * 30
    for way, seconds in enumerate((first, second)):
        assert choice.next() == way
        choice.took(way, seconds, 1)
    return choice


def test_both_ways_are_tried_again_from_time_to_time():
    for seconds, better in (((3.0, 2.0), 1), ((2.0, 3.0), 0), ((2.0, 2.0), 0)):
        choice = tried(*seconds)
        assert [choice.next() for _ in range(62)] == [better] * 30 + [0, 1] + [better] * 30


def test_time_is_compared_by_amount():
    choice = tried(1.0, 2.0)
    choice.took(1, 4.0, 8)
    assert choice.next() == 0
    for _ in range(10):
        choice.took(1, 4.0, 8)
    assert choice.next() == 1


def test_the_first_turns_in_which_memory_gets_its_pages_do_not_count():
    """Else a way would be taken for slow long after: one turn of 32 is too few to show that it is not."""
    choice = CopyChoice()
    for turn in range(34):
        way = choice.next()
        assert way == (turn in (1, 3, 33)), "each way is measured soon after"
        for _ in range(3):  # reads of other ranks' messages
            choice.took(way, (8.0, 4.0)[way] if turn < 2 else (1.0, 2.0)[way], 1)
    assert choice.next() == 0


def test_one_late_turn_does_not_count_much_and_many_do():
    choice = tried(1.0, 1.5)
    for turns, seconds, better in ((1, 1000.0, 0), (10, 3.0, 1), (30, 1.0, 0)):
        for _ in range(turns):
            choice.took(0, seconds, 1)
        assert choice.next() == better
