"""A loss scaler without a Trainer: an overflow on one rank skips the update on all, and their scales stay equal."""

from __future__ import annotations

import numpy as np
import pytest

import mpikv

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def test_an_overflow_of_one_rank_skips_the_update_on_all(comm, ranks):
    with mpikv.create() as kv:
        kv.init({"w": np.zeros(3, np.float16), "b": np.zeros(2)})
        kv.set_optimizer("sgd", learning_rate=1.0, multi_precision=True)
        scaler, updates, scales = mpikv.LossScaler(8.0, window=2), 0, []
        for step in range(6):
            culprit = step % ranks if step in (1, 4) else None
            grads = {"w": np.full(3, 0.25 * scaler.loss_scale, np.float16), "b": np.full(2, 0.5 * scaler.loss_scale)}
            if kv.rank == culprit:
                grads["b" if step == 1 else "w"][1] = np.nan if step == 1 else np.inf
            before = scaler.loss_scale
            divisor = scaler.divisor(kv, grads)
            assert divisor == (before if culprit is None else None)
            if divisor is not None:
                # As late as can be: by now the scale is that of the next loss.
                kv.optimizer.rescale_grad = 1 / (divisor * ranks)
                kv.push(grads)
                updates += 1
            scales.append(scaler.loss_scale)
        assert scales == [8, 4, 4, 8, 4, 4]
        assert kv.version("w") == updates == 4
        assert (kv.pull("w") == -0.25 * updates).all()
        assert (kv.pull("b") == -0.5 * updates).all()


def test_all_forms_of_gradients_are_looked_at(comm):
    with mpikv.create() as kv:
        finite, infinite = np.ones((2, 3)), np.full((), np.inf, np.float32)
        mine = infinite if kv.is_root else finite
        for given in (mine, [finite, mine], {"a": {"b": mine}}, [[finite, mine], [finite]], [np.array([np.inf])]):
            scaler = mpikv.LossScaler(4.0)
            assert scaler.divisor(kv, given) is None
            assert scaler.loss_scale == 2
        for given in (finite, {}, [], {"a": [np.arange(3)]}):
            assert mpikv.LossScaler().divisor(kv, given) == 2.0**16


def test_what_is_no_array_is_told_to_all(comm, ranks):
    with mpikv.create(timeout=5) as kv:
        scaler = mpikv.LossScaler(4.0)
        for culprit in range(ranks):
            with pytest.raises(TypeError if kv.rank == culprit else mpikv.PeerFailed, match="expected an array"):
                scaler.divisor(kv, "gradient" if kv.rank == culprit else np.full(1, np.nan))
        assert scaler.loss_scale == 4
        assert scaler.divisor(kv, np.full(1, np.nan)) is None
