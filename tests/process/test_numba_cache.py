"""Compiled kernels on disk: several ranks compile at once, and the next job loads what they have kept."""

import pytest
from support.commands import mpikv, python

pytest.importorskip("numba")

TRAINING = """
import numpy as np, mpikv
with mpikv.create(kernels="numba") as kv:
    kv.init("w", np.zeros(3))
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    kv.push("w", np.ones(3))
    assert (kv.pull("w") == -0.5 * kv.size).all()
"""


@pytest.mark.deadline(120)
def test_ranks_compile_at_once_and_the_next_job_does_not(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    kept = []
    for _ in range(2):
        done = mpikv("run", "-n", 4, script, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
        assert done.returncode == 0, done.stderr
        kept.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*.nb?")})
    assert [name.partition("-")[0] for name in sorted(kept[0])] == ["rules.sgd_rule"] * 2
    assert kept[0] == kept[1]


@pytest.mark.deadline(120)
def test_a_full_disk(tmp_path):
    # No file may have any content.
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    done = python("-c", full + TRAINING, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
