"""The clocks of ranks, with requests in every order that hypothesis finds."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from mpikv.async_store.ssp import SspClocks


class Rank:
    """A rank as a program: it asks before each push, sends the push to its owners, and leaves after the last."""

    def __init__(self, owners):
        self.owners, self.unapplied, self.asked, self.leaving = owners, [], None, False

    @property
    def clock(self):
        return len([*takewhile(lambda parts: parts == 0, self.unapplied)])

    def act(self, number, clocks, bound):
        """Do the next thing; return the parts of a push that are on their way."""
        made = len(self.unapplied)
        if made == len(self.owners):
            self.leaving = True
            clocks.leave(number, "left", made)
        elif self.asked != made:
            self.asked = made
            clocks.wait(number, made, made + 1 - bound)
        else:
            self.unapplied.append(self.owners[made])
            return [(number, made)] * self.owners[made]
        return []


@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_clocks_never_differ_by_more_than_the_bound(data, size, bound):
    """Ranks go on in any order, and owners apply their parts in any order, until each rank has left."""
    answered, coming = set(), []
    clocks = SspClocks(size, lambda number, ticket: answered.add((number, ticket)))
    ranks = [Rank(data.draw(st.lists(st.integers(1, 3), max_size=8))) for _ in range(size)]
    while working := {number: rank for number, rank in enumerate(ranks) if (number, "left") not in answered}:
        now = [rank.clock for rank in working.values()]
        assert max(clocks.widest, max(now) - min(now)) <= bound
        assert clocks.slowest == min(now)
        asking = [number for number, rank in working.items() if rank.asked == len(rank.unapplied)]
        waiting = [number for number in asking if (number, ranks[number].asked) not in answered]
        for number in waiting:
            least = ranks[number].asked + 1 - bound
            behind = [other for other in working if ranks[other].clock < least]
            assert behind
            assert clocks.list_awaited(number) == [other for other in behind if other != number]
        free = [number for number, rank in working.items() if number not in waiting and not rank.leaving]
        assert free or coming, "nobody can go on"
        at = data.draw(st.integers(0, len(free) + len(coming) - 1))
        if at < len(free):
            coming += ranks[free[at]].act(free[at], clocks, bound)
        else:
            number, push = coming.pop(at - len(free))
            ranks[number].unapplied[push] -= 1
            clocks.tick(number, push + 1, ranks[number].owners[push])
