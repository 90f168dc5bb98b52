"""Random programs of all verbs, and of mistakes, beside what one process would have; memory that is used twice."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import mpikv

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from chaos_program import Program

STORES = [
    ("shm", "auto", False),
    ("shm", "root", True),
    ("shm", "sharded", True),
    ("mpi", "auto", True),
    ("mpi", "root", True),
    ("mpi", "sharded", True),
    ("mpi", "replicated", False),
    ("hierarchical", "auto", False),
    ("hierarchical", "root", True),
    ("hierarchical", "sharded", True),
    ("hierarchical", "replicated", True),
]
# More ranks than cores take turns.
PROGRAMS = {1: 12, 2: 5, 3: 3, 4: 2}
MORE = int(os.environ.get("DIFFERENTIAL", "0"))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.deadline(120 + 5 * MORE)
@pytest.mark.parametrize(("transport", "placement", "streams"), STORES)
@pytest.mark.feature("push-order", "values-call-order", "init-other-shapes", "priority-differs", "unequal-batches")
def test_programs(comm, ranks, request, transport, placement, streams):
    if comm is None and transport != "shm":
        pytest.skip("one rank has one transport")
    if streams:
        request.getfixturevalue("streamed")
    options = {"transport": transport, "placement": placement, "bucket_bytes": 4096, "timeout": 5.0}
    for number in range(MORE or PROGRAMS[ranks]):
        name = f"{transport} {placement} {number}"
        try:
            Program(comm, name, **options).run(60)
        except Exception as error:
            raise AssertionError(f"in program {name!r}: {error}") from error


# --- Memory that is used more than once


@pytest.fixture(
    params=[
        *(("shm", "auto"), ("shm", "root"), ("mpi", "auto"), ("mpi", "sharded"), ("mpi", "root")),
        *(("hierarchical", "auto"), ("hierarchical", "sharded"), ("hierarchical", "root")),
    ],
    ids=str,
)
def kv(request, streamed):
    transport, placement = request.param
    with mpikv.create(transport=transport, placement=placement, bucket_bytes=4096, timeout=10) as kv:
        yield kv


def ramp(kv, start, size=3000):
    return (np.arange(size, dtype=np.float64) + start) * (kv.rank + 1)


def ramp_sum(kv, start, size=3000):
    return (np.arange(size, dtype=np.float64) + start) * (kv.size * (kv.size + 1) // 2)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shift", ["swap", "swap on one rank", -700, -1, 1, 700])
def test_outs_lie_over_values_of_other_keys(kv, shift):
    kv.init(["a", "b"], [np.zeros(3000), np.zeros(3000)])
    memory = np.zeros(8000)
    memory[1000:4000], memory[4000:7000] = ramp(kv, 0), ramp(kv, 5)
    values = outs = [memory[1000:4000], memory[4000:7000]]
    if isinstance(shift, int):
        outs = [memory[1000 + shift : 4000 + shift], memory[4000 + shift : 7000 + shift]]
    elif shift == "swap" or kv.rank == kv.size - 1:
        outs = values[::-1]
    kv.pushpull(["a", "b"], values, outs)
    np.testing.assert_array_equal(outs[0], ramp_sum(kv, 0))
    np.testing.assert_array_equal(outs[1], ramp_sum(kv, 5))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.feature("values-same-array")
def test_the_same_array_several_times(kv):
    kv.init(["a", "b", "c"], [np.zeros(3000)] * 3)
    value = ramp(kv, 1)
    before = value.copy()
    kv.push(["a", "b", "c"], [value, [value] * 3, value])
    np.testing.assert_array_equal(value, before)
    for result, factor in zip(kv.pull(["a", "b", "c"]), (1, 3, 1), strict=True):
        np.testing.assert_array_equal(result, factor * ramp_sum(kv, 1))
    out = np.zeros(3000)
    kv.pull(["a", "b"], [out, [out, out]])
    np.testing.assert_array_equal(out, 3 * ramp_sum(kv, 1))
    kv.pushpull(["a", "b"], [value, [value] * 2])
    np.testing.assert_array_equal(value, 2 * ramp_sum(kv, 1))
