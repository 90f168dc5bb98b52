"""Ranges of elements: the one type that names some elements of an array."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter


def cut(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[low, high)`` between multiples of a step.

    >>> list(cut(3, 9, 4))
    [(3, 4), (4, 8), (8, 9)]
    """
    while low < high:
        end = min((low // step + 1) * step, high)
        yield low, end
        low = end


@dataclass(frozen=True)
class Spans:
    """Elements of an array, as ranges ``[low, high)`` in ascending order that do not touch."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def join(cls, ranges: Iterable[tuple[int, int]]) -> Spans:
        """Return the Spans of ranges that ascend, do not overlap, and may touch or be empty.

        >>> Spans.join([(0, 2), (2, 5), (7, 7), (8, 9)])
        Spans(ranges=((0, 5), (8, 9)))
        """
        joined: list[tuple[int, int]] = []
        for low, high in ranges:
            if joined and joined[-1][1] == low:
                low, _ = joined.pop()
            if low < high:
                joined.append((low, high))
        return cls(tuple(joined))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.ranges)

    def __and__(self, other: Spans) -> Spans:
        """Return new Spans of the elements that are in both."""
        return Spans(tuple(part for low, high in self for part in other.within(low, high)))

    def within(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of the ranges that are in ``[low, high)``."""
        # The range before may reach into [low, high); the ones before that end earlier.
        number = max(self._last_before(low), 0)
        while number < len(self.ranges) and self.ranges[number][0] < high:
            begin, end = self.ranges[number]
            if max(begin, low) < min(end, high):
                yield max(begin, low), min(end, high)
            number += 1

    def have(self, low: int, high: int) -> bool:
        """Return whether one range has all elements of ``[low, high)``."""
        number = self._last_before(low)
        return low == high or (number >= 0 and high <= self.ranges[number][1])

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self._offsets[-1]

    def locate(self, low: int, high: int) -> slice:
        """Return the slice of ``[low, high)``, within one range, in an array that has the ranges' elements alone."""
        assert self.have(low, high), f"[{low}, {high}) is in none of {self.ranges}"
        if low == high:
            return slice(0, 0)
        number = self._last_before(low)
        offset = self._offsets[number] + low - self.ranges[number][0]
        return slice(offset, offset + high - low)

    @cached_property
    def _offsets(self) -> list[int]:
        """For each range the number of elements before it in all ranges; at the end, the number of all."""
        return list(accumulate((high - low for low, high in self.ranges), initial=0))

    def _last_before(self, element: int) -> int:
        """Return the number of the last range that begins at an element or before it, or -1."""
        return bisect_right(self.ranges, element, key=itemgetter(0)) - 1
