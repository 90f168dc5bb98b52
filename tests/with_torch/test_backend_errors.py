"""A mistake in a call of the backend "mpikv" is raised on every rank, with the ranks and their calls."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mpikv import Closed, PeerFailed, RankMismatch, Unsupported, ValueMismatch

from .training import is_too_old, torch

dist = torch.distributed

pytestmark = [pytest.mark.ranks(2, 3), is_too_old]

MISTAKES: dict[str, tuple[Callable[[int], Any], type[Exception], type[Exception], str]] = {
    "shape": (lambda odd: dist.all_reduce(torch.ones(3 + odd)), RankMismatch, RankMismatch, r"32\[3\].*32\[4\]"),
    "type": (
        lambda odd: dist.broadcast(torch.ones(3, dtype=torch.float64 if odd else torch.float32), 0),
        RankMismatch,
        RankMismatch,
        r"float32\[3\].*float64\[3\]",
    ),
    "operation": (
        lambda odd: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        RankMismatch,
        RankMismatch,
        r"all_reduce\(sum.*all_reduce\(max",
    ),
    "order": (
        lambda odd: dist.barrier() if odd else dist.all_reduce(torch.ones(3)),
        RankMismatch,
        RankMismatch,
        r"all_reduce\(sum, float32\[3\]\).*barrier\(\).*test_backend_errors\.py:\d+",
    ),
    "root": (lambda odd: dist.broadcast(torch.ones(3), odd), RankMismatch, RankMismatch, "from 0.*from 1"),
    "device": (
        lambda odd: dist.all_reduce(torch.ones(3, device="meta" if odd else "cpu")),
        Unsupported,
        PeerFailed,
        r"on meta.*dist\.new_group\(backend='nccl'\)",
    ),
    "expanded": (
        lambda odd: dist.all_reduce(torch.ones(1).expand(3) if odd else torch.ones(3)),
        Unsupported,
        PeerFailed,
        r"float32\[3\] is expanded",
    ),
    "mean": (lambda odd: dist.all_reduce(torch.ones(3).int(), dist.ReduceOp.AVG), Unsupported, Unsupported, "the mean"),
    "parts": (
        lambda odd: dist.all_gather([torch.ones(3)] * (dist.get_world_size() + odd), torch.ones(3)),
        ValueMismatch,
        PeerFailed,
        r"float32\[3\] is not this rank's part",
    ),
    "gather": (
        lambda odd: dist.gather(torch.ones(3), *([[torch.ones(3)]] if odd else [None]), dist.get_world_size() - 1),
        ValueMismatch,
        PeerFailed,
        r"a list of 1 tensors for \d ranks",
    ),
    "scatter": (
        lambda odd: dist.scatter(torch.ones(3), *([[torch.ones(3)]] if odd else [None]), dist.get_world_size() - 1),
        ValueMismatch,
        PeerFailed,
        r"a list of 1 tensors for \d ranks",
    ),
    "lists": (
        lambda odd: dist.all_to_all(*([[torch.ones(3)] * (dist.get_world_size() + odd)] * 2)),
        ValueMismatch,
        PeerFailed,
        r"a list of \d tensors for \d ranks",
    ),
    "rows": (
        lambda odd: dist.all_to_all_single(*[torch.ones(dist.get_world_size())] * 2, *([[1]] * 2 if odd else [[]] * 2)),
        ValueMismatch,
        PeerFailed,
        r"cannot be cut into",
    ),
}
"""A call with a mistake on the last rank, what it raises there and elsewhere, and the words of both."""
VERBS = ("all_reduce", "broadcast", "barrier", "all_gather", "gather", "scatter", "all_to_all", "all_to_all_single")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank(group: Any, name: str, asynchronous: bool, monkeypatch: Any) -> None:
    call, here, elsewhere, words = MISTAKES[name]
    if asynchronous:
        for verb in VERBS:
            plain = getattr(dist, verb)
            monkeypatch.setattr(dist, verb, lambda *given, plain=plain: plain(*given, async_op=True).wait())
    is_odd = group.rank() == group.size() - 1
    with pytest.raises(here if is_odd else elsewhere, match=rf"(?s){words}.*\[rank {group.rank()}/{group.size()}\]"):
        call(int(is_odd))
    dist.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [group.size()] * 2


def test_an_error_that_a_hook_hides_is_raised_by_the_next_call(group: Any) -> None:
    work = dist.all_reduce(torch.ones(2 + (group.rank() == 1)), async_op=True)
    assert work.get_future().then(lambda done: 3).wait() == 3
    with pytest.raises(RankMismatch, match=r"float32\[2\].*float32\[3\]") as caught:
        dist.barrier()
    assert sys.version_info < (3, 11) or "for which nobody has waited" in "".join(caught.value.__notes__)
    dist.barrier()


def test_a_function_that_handles_an_error_asks_for_it(group: Any) -> None:
    work = dist.all_reduce(torch.ones(2 + (group.rank() == 1)), async_op=True)
    assert isinstance(work.get_future().then(lambda _: work.exception()).wait(), RankMismatch)
    dist.barrier()


def test_the_end_logs_an_error_that_nobody_has_seen(group: Any, caplog: Any) -> None:
    part = dist.new_group(list(range(group.size())))
    dist.all_reduce(torch.ones(2 + (group.rank() == 1)), group=part, async_op=True)
    dist.destroy_process_group(part)
    assert "RankMismatch: all_reduce: ranks disagree" in caplog.text


def test_a_failed_future_says_why(group: Any) -> None:
    work = dist.all_reduce(torch.ones(2 + (group.rank() == 1)), async_op=True)
    with pytest.raises(RuntimeError, match="RankMismatch: all_reduce: ranks disagree"):
        work.get_future().wait()
    assert not work.is_success()
    assert isinstance(work.exception(), RankMismatch)
    dist.barrier()


def test_a_mistake_in_a_function_of_a_future_has_its_own_line(group: Any) -> None:
    def differ(_: Any) -> int:
        with pytest.raises(RankMismatch, match=r"is at .* in differ, rank"):
            dist.all_reduce(torch.ones(2 + (group.rank() == 1)))
        return 1

    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(2)]
    assert works[1].get_future().then(differ).wait() == 1


def test_a_function_of_a_future_cannot_wait_for_a_later_call(group: Any) -> None:
    issued = threading.Event()

    def wait_for_the_later(_: Any) -> bool:
        # Whichever thread completes the call runs this: here the call may have completed before it got its function.
        if threading.current_thread() is threading.main_thread():
            return True
        assert issued.wait(60)
        return later.wait()

    slow = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(3)]
    future = slow[0].get_future().then(wait_for_the_later)
    later = dist.barrier(async_op=True)
    issued.set()
    try:
        assert future.wait() is True
    except RuntimeError as error:
        assert "Unsupported: a function of a future waits for barrier()" in str(error)  # noqa: PT017
    later.wait()


def test_a_group_that_was_destroyed(group: Any) -> None:
    part = dist.new_group(list(range(group.size())))
    dist.destroy_process_group(part)
    with pytest.raises(Closed, match="all_reduce: the process group was destroyed"):
        part.allreduce([torch.ones(2)])
