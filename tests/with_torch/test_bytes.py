"""A step gives as many bytes to the store as docs/explanation/torch.md says, as a trace shows."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from support.commands import mpikv

pytest.importorskip("torch", reason="torch is not installed: pip install 'mpikv[torch]'")

pytestmark = [pytest.mark.processes, pytest.mark.deadline(100)]

STEPS = 3
SCRIPT = f"""\
import sys
import torch
import mpikv.torch

model = torch.nn.Sequential(torch.nn.Linear(500, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 2))
optimizer = torch.optim.Adam(model.parameters())
mpikv.torch.attach(model, optimizer, update=sys.argv[1])
for _ in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(4, 500)).sum().backward()
    optimizer.step()
"""
PARAMETERS = 6
WEIGHTS = 4 * (500 * 600 + 600 + 2 * 600 + 600 * 2 + 2)
CALLS = ("pushpull", "all_gather")
BUFFERS = 2 * 4 * 600 + 8


@pytest.mark.parametrize("update", ["local", "store"])
def test_bytes_of_a_step(update: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for command in ["run", "-n", "2", "train.py", update], ["trace", "trace"]:
        done = mpikv(*command, cwd=tmp_path, timeout=60, OMP_NUM_THREADS="1", MPIKV_TRACE="trace")
        assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    begun = [event for event in events if event["ph"] == "B" and event["pid"] == 0]
    # The keys and the bytes of a call are in the event after its own.
    moved = sum(after["args"]["bytes"] for call, after in pairwise(begun) if call["name"] in CALLS)
    expected = WEIGHTS + BUFFERS + 8 * (PARAMETERS + 6) + (WEIGHTS if update == "store" else 0)
    assert moved == STEPS * expected
