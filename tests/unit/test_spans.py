"""Ranges of elements, beside sets of numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.engine.spans import Spans, cut

EDGES = st.lists(st.integers(0, 40), min_size=2, max_size=12).map(sorted)
SPANS = EDGES.map(lambda edges: Spans.join(zip(edges[::2], edges[1::2], strict=False)))
RANGES = st.tuples(st.integers(0, 42), st.integers(0, 42)).map(sorted)


def elements(spans: Spans) -> set[int]:
    return {element for low, high in spans for element in range(low, high)}


@given(EDGES)
def test_joined_ranges_do_not_touch(edges: list[int]) -> None:
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    spans = Spans.join(ranges)
    assert elements(spans) == {element for low, high in ranges for element in range(low, high)}
    assert spans.size == len(elements(spans))
    flat = [edge for each in spans for edge in each]
    assert flat == sorted(set(flat)), "a range is empty, or touches the next one"


@given(SPANS, SPANS)
def test_the_elements_of_both(first: Spans, second: Spans) -> None:
    assert elements(first & second) == elements(first) & elements(second)


@given(SPANS, RANGES)
def test_a_part_of_them(spans: Spans, part: list[int]) -> None:
    low, high = part
    inside = elements(spans) & set(range(low, high))
    assert elements(Spans(tuple(spans.within(low, high)))) == inside
    # Joined ranges do not touch, so that elements side by side are in one of them.
    assert spans.have(low, high) == (inside == set(range(low, high)))
    if spans.have(low, high):
        kept = np.array(sorted(elements(spans)), np.int64)
        assert kept[spans.locate(low, high)].tolist() == list(range(low, high))
    else:
        with pytest.raises(AssertionError):
            spans.locate(low, high)


@given(RANGES, st.integers(1, 9))
def test_a_range_is_cut_at_the_multiples_of_a_step(bounds: list[int], step: int) -> None:
    low, high = bounds
    parts = list(cut(low, high, step))
    assert [element for begin, end in parts for element in range(begin, end)] == list(range(low, high))
    assert all(begin < end and begin // step == (end - 1) // step for begin, end in parts)
