"""What a rank answers to other hosts that ask about its own."""

import json
from collections.abc import Iterable

import pytest

from mpikv.cluster.status_board import Inquiry


class Group:
    """What an inquiry needs of a group, of two hosts: the questions that have come, and the answers that were sent."""

    rank = 0
    hosts = ("a", "b")
    ranks_of_hosts = ((0, 1), (2,))

    def __init__(self) -> None:
        self.questions: list[tuple[int, bytes]] = []
        self.sent: list[tuple[int, list[object]]] = []

    def receive_notice(self, tag: int) -> tuple[int, bytes] | None:
        return self.questions.pop() if self.questions else None

    def send_notice(self, text: bytes, ranks: Iterable[int], tag: int) -> None:
        self.sent += [(rank, json.loads(text)) for rank in ranks]


@pytest.mark.parametrize(("call", "text"), [(1, "rank 1 was late"), (2, "rank 1 is late")])
def test_an_answer_is_given_again_in_the_same_call_only(call: int, text: str) -> None:
    group, calls, found = Group(), [1], [((1,), "rank 1 was late"), ((1,), "rank 1 is late")]
    inquiry = Inquiry(group, lambda: found.pop(0), lambda: calls[-1])
    for number in (1, 2):
        group.questions.append((2, str(number).encode()))
        inquiry.answer()
        calls.append(call)
    assert group.sent == [(2, [1, [1], "rank 1 was late"]), (2, [2, [1], text])]
