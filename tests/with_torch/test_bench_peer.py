"""The exchange of DDP beside which ``scripts/bench`` measures makes the same updates as the store."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mpikv.cli.bench.keysets import gradients

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from benchmark.rules import RULES
from benchmark.torch_peer import TorchBuckets, torch_problem

pytestmark = pytest.mark.ranks(2, 3)

SHAPES = [(300,), (4, 5)]
STEPS = 3


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_means_are_updated_as_sums_are(comm, name):
    rule = RULES[name]
    assert torch_problem(comm, rule) == ""
    peer = TorchBuckets(comm, list(gradients(comm.rank, SHAPES)), rule)
    try:
        for _ in range(STEPS):
            peer.step()
        found = peer.results()
    finally:
        peer.close()
    for key, arrays in enumerate(zip(*(gradients(rank, SHAPES) for rank in range(comm.size)), strict=True)):
        total = sum(arrays).reshape(-1)
        weight, states = np.ones_like(total), [np.zeros_like(total) for _ in range(rule.states)]
        for count in range(1, STEPS + 1):
            rule.apply(count, total.copy(), weight, states)
        tolerance = rule.tolerance(STEPS, np.abs(total).max(), np.abs(weight).max())
        np.testing.assert_allclose(found[key].reshape(-1), weight, rtol=0, atol=tolerance)
