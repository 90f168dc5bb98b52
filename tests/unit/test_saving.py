"""What a save keeps for itself while the store goes on: copies, and a thread that runs ahead."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mpikv.checkpoint.ahead import Ahead
from mpikv.checkpoint.saving import Copies, Span
from mpikv.memory.host import HOST


def test_copies_are_those_of_the_call() -> None:
    first, second, apart = np.arange(5.0), np.ones((2, 3), np.float32), np.arange(7, dtype=np.int8)
    pieces = Copies(HOST).make([Span(40, second), Span(100, apart), Span(0, first), Span(64, first[:0])])
    expected = {0: first.tobytes(), 40: second.tobytes(), 100: apart.tobytes()}
    for array in (first, second, apart):
        array += 1
    assert {piece.offset: bytes(piece.memory) for piece in pieces} == expected


def test_memory_is_used_again_and_as_much_as_is_needed() -> None:
    copies = Copies(HOST)

    def room(count: int) -> np.ndarray:
        return np.frombuffer(copies.make([Span(0, np.ones(count))])[0].memory, np.uint8)

    first = room(1000)
    assert np.shares_memory(first, room(1000))
    assert not np.shares_memory(first, room(999))
    assert copies._room.nbytes == 999 * 8
    copies.release()
    assert copies._room.nbytes == 0


def test_items_are_made_before_they_are_asked_for() -> None:
    made = []
    last = threading.Event()

    def items() -> Iterator[int]:
        for number in range(4):
            made.append(threading.current_thread())
            yield number
        last.set()

    ahead = Ahead(items())
    assert made == []
    ahead.start()
    assert last.wait(10)
    assert threading.main_thread() not in made
    assert list(ahead) == [0, 1, 2, 3]
    assert ahead.ended


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise SystemExit("full")

    ahead = Ahead(items())
    taken = iter(ahead)
    ahead.start()
    assert next(taken) == 1
    with pytest.raises(SystemExit, match="full"):
        next(taken)


def test_it_ends_with_the_item_that_is_being_made() -> None:
    begun, goes_on, made = threading.Event(), threading.Event(), []

    def items() -> Iterator[int]:
        for number in range(9):
            begun.set()
            goes_on.wait(10)
            made.append(number)
            yield number

    ahead = Ahead(items())
    ahead.close()  # what has not started needs no end
    ahead.start()
    assert begun.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    ahead.close()
    assert made == [0]
    assert ahead.ended
    ahead.close()
