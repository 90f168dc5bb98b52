"""Checkpoints from job to job, continued on fewer ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.launching import launch, why_no_mpi

pytestmark = pytest.mark.one_library

# The work of 4 ranks, on any number of them: the first half and a checkpoint, or the second half from there.
TRAIN = """
import sys
import numpy as np
import mpikv
from mpikv import schedules

folder, part = sys.argv[1:]

def gradient(number, share):
    return {"w": np.random.default_rng((number, share)).normal(size=(301, 7)), "b": np.full(5, number / 3 + share)}

for deterministic in (False, True):
    with mpikv.create(deterministic=deterministic) as kv:
        shares = range(kv.rank * 4 // kv.size, (kv.rank + 1) * 4 // kv.size)
        path = f"{folder}/{deterministic}"
        if part == "second":
            kv.load(path)
        else:
            kv.init(gradient(99, 0))
            kv.set_optimizer("adam", lr_scheduler=schedules.Cosine(12, base_lr=0.1), wd=0.01, lr_mult={"b": 0.5})
        for number in range(5, 10) if part == "second" else range(10):
            if number == 5 and part == "both":
                kv.save(path)
            given = [gradient(number, share) for share in shares]
            kv.push(["w", "b"], [[one["w"] for one in given], [one["b"] for one in given]])
        final = kv.pull(["w", "b"])
        if kv.is_root:
            np.savez(f"{path}-{part}-{kv.size}.npz", *final)
"""


@pytest.fixture(autouse=True)
def with_mpi() -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)


@pytest.mark.deadline(180)
@pytest.mark.feature("recovery")
def test_fewer_ranks_continue(tmp_path: Path) -> None:
    def run(size: int, part: str) -> None:
        command, environ = launch(size, [sys.executable, str(tmp_path / "train.py"), str(tmp_path), part])
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr

    def final(deterministic: bool, part: str, size: int) -> list[np.ndarray]:
        with np.load(tmp_path / f"{deterministic}-{part}-{size}.npz") as arrays:
            return [arrays[name] for name in arrays.files]

    (tmp_path / "train.py").write_text(TRAIN)
    run(4, "both")
    for size in (1, 2, 3):
        run(size, "second")
        for resumed, through in zip(final(False, "second", size), final(False, "both", 4), strict=True):
            assert np.abs(resumed - through).max() <= 1e-12
        for resumed, through in zip(final(True, "second", size), final(True, "both", 4), strict=True):
            assert np.abs(resumed - through).max() <= 1e-12
            # Sums in pairs are the same on numbers of ranks that are powers of two.
            assert size == 3 or resumed.tobytes() == through.tobytes()
