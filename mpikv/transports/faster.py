"""The faster of two ways, as it turns out while both are used."""

from __future__ import annotations

__all__ = ["Faster"]

# Every so often the other way is taken, to see what it takes by now.
_PERIOD = 32
# The weight of a new figure; and how many times the mean so far it may be: a rank may have lost its core meanwhile.
_WEIGHT, _MOST = 1 / 8, 2
# The first turns, one of each way, are not measured. They touch fresh memory, whose pages the system makes then: that
# takes several times as long as writing to it.
_UNCOUNTED = 2


class Faster:
    """Chooses between two ways, 0 and 1, of doing the same thing.

    Which is tried when follows from the number of choices alone, so that ranks that choose equally often try a way
    together.

    Example:
        >>> faster = Faster()
        >>> for turn in range(34):
        ...     way = faster.next()
        ...     faster.took(way, 2.0 if way else 3.0, 1)
        >>> faster.next()
        1
    """

    def __init__(self) -> None:
        self._chosen = 0
        self._pace = [0.0, 0.0]

    def next(self) -> int:
        """Return the way for this turn. Of 32, one tries each; the others take the faster, 0 until both are known."""
        turn, self._chosen = self._chosen % _PERIOD, self._chosen + 1
        return turn if turn < 2 else int(0 < self._pace[1] < self._pace[0])

    def took(self, way: int, seconds: float, amount: int) -> None:
        """Tell how long a way took for some amount."""
        if self._chosen <= _UNCOUNTED:
            return
        new, mean = seconds / amount, self._pace[way]
        self._pace[way] = mean + _WEIGHT * (min(new, _MOST * mean) - mean) if mean else new
