"""``check_finite`` finds NaN and infinity before they are summed, and ``mean`` gives one number for all ranks."""

from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import NotFinite, PeerFailed, RankMismatch, RowSparse, Unsupported

pytestmark = pytest.mark.ranks(1, 2, 3)


def array(bad: float | None) -> Any:
    values = np.ones((2, 3), np.float32)
    if bad is not None:
        values[1, 2] = bad
    return values


# For each form of a push: the keyword of its key, and what is pushed.
FORMS = {
    "array": array,
    "list": lambda bad: [array(None), array(bad)],
    "half": lambda bad: array(bad).astype(np.float16),
    "rows": lambda bad: RowSparse([1, 4], array(bad), (5, 3)),
}


@pytest.mark.parametrize("verb", ["push", "pushpull"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_is_named_and_not_summed(comm: Any, form: str, verb: str) -> None:
    shape, dtype = ((5, 3) if form == "rows" else (2, 3)), np.float16 if form == "half" else np.float32
    start = RowSparse([0], np.zeros((1, 3), np.float32), shape) if form == "rows" else np.zeros(shape, dtype)
    with mpikv.create(comm=comm, check_finite=2) as kv:
        kv.init("w", start)

        def bring(bad: float | None) -> None:
            getattr(kv, verb)("w", FORMS[form](bad if kv.rank == kv.size - 1 else None))

        bring(None)
        with pytest.raises(NotFinite if kv.rank == kv.size - 1 else PeerFailed) as caught:
            bring(np.inf)
        assert "key 'w' has inf at element [1, 2]" in str(caught.value)
        assert np.isfinite(kv.pull("w")).all()
        bring(np.nan)  # the third push is not looked at
        assert np.isnan(kv.pull("w")).any()


def test_buffers_are_looked_at(comm: Any) -> None:
    with mpikv.create(comm=comm, check_finite=1) as kv:
        kv.init(["v", "w"], [np.zeros(2), np.zeros(3)])
        buffers = [kv.buffer(key) for key in ("v", "w")]
        kv.push(["v", "w"])
        if kv.rank == 0:
            buffers[1][1] = np.nan
        with pytest.raises(NotFinite if kv.rank == 0 else PeerFailed, match=r"key 'w' has nan at element \[1\]"):
            kv.push(["v", "w"])


def test_integers_are_finite(comm: Any) -> None:
    with mpikv.create(comm=comm, check_finite=1) as kv:
        kv.init("w", np.zeros(2, np.int64))
        kv.push("w", np.ones(2, np.int64))
        assert (kv.pull("w") == kv.size).all()


@pytest.mark.parametrize("name", ["dist_async", "allreduce"])
def test_stores_without_the_check_say_so(comm: Any, name: str) -> None:
    with pytest.raises(Unsupported, match="check_finite"):
        mpikv.create(name, comm=comm, check_finite=1)


def test_captured_steps_do_not_look(comm: Any) -> None:
    with mpikv.create(comm=comm, check_finite=2) as kv:
        kv.init("w", np.zeros(2))
        with pytest.raises(Unsupported, match="captured steps look at no values"):
            kv.capture("w", np.ones(2))


def test_the_mean_of_a_metric(comm: Any) -> None:
    with mpikv.create(comm=comm) as kv:
        mean = (kv.size - 1) / 2
        assert kv.mean(kv.rank) == mean
        assert kv.mean(np.float32(kv.rank)) == mean
        assert kv.mean({"loss": 0.1, "rank": kv.rank}) == {"loss": sum([0.1] * kv.size) / kv.size, "rank": mean}
        assert np.isnan(kv.mean(np.nan if kv.rank == 0 else 1.0))
        with pytest.raises(TypeError if kv.rank == 0 else PeerFailed):
            kv.mean([1.0] if kv.rank == 0 else 1.0)
        if kv.size > 1:
            with pytest.raises(RankMismatch, match="mean"):
                kv.mean({"loss": 1.0} if kv.rank == 0 else {"accuracy": 1.0})
