"""What moves rows of arrays, of each memory: numpy, the stand-in for a GPU, and the real seam to CuPy with the real
kernels, which run on the host here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.emulation import OnDevice, compiler, cupy_on_host, emulated

from mpikv.arrays.arrays import accumulator
from mpikv.compute.cuda import loading
from mpikv.compute.cuda.gpu import CupyGpu
from mpikv.memory.device import GpuWorkspace
from mpikv.memory.host import HOST
from mpikv.protocols import Array, Workspace
from mpikv.testing.fakegpu import FakeGpu

from .test_gpu import Standin

DTYPES = ("float32", "float64", "float16", "int8", "int64", "uint16", "bool", "complex64", "complex128")
SHAPES = ((9, 3), (9,), (9, 2, 4), (9, 300), (9, 0))


class OnSecond(OnDevice):
    """A numpy array that tells that it lies on the second GPU."""

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=1)


class CupyOnHost(Standin):
    """CuPy's calls, over numpy's arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.ndarray = OnSecond
        self.empty = lambda shape, dtype: self.note("empty", np.empty(shape, dtype).view(OnSecond))


class Kind(NamedTuple):
    """One of the three."""

    tables: Workspace
    there: Callable[[Array], Array]
    here: Callable[[Array], Array]


# The first test compiles the kernels for all.
pytestmark = pytest.mark.deadline(120)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    compiler()
    folder = tmp_path_factory.mktemp("cuda")
    return {name: emulated(name, folder) for name in ("rows.cu", "copies.cu")}


@pytest.fixture(params=["host", "stand-in", "cupy"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "host":
        yield Kind(HOST, np.copy, np.copy)
    elif request.param == "stand-in":
        fake = FakeGpu()
        yield Kind(GpuWorkspace(fake), fake.upload, lambda array: array.get())
        fake.checker.assert_clean()
    else:
        kernels = request.getfixturevalue("kernels")
        loading.loaded.cache_clear()
        monkeypatch.setitem(sys.modules, "cupy", cupy_on_host(kernels, []))
        standin = CupyOnHost()
        gpu = CupyGpu(standin, 1)
        yield Kind(GpuWorkspace(gpu), gpu.upload, np.asarray)
        assert standin.present == 0
        assert {present for _, present in standin.notes} == {1}
        loading.loaded.cache_clear()


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Return small integers, of which sums are exact."""
    return rng.integers(0 if dtype.startswith("u") else -4, 5, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [0, 1, 6, 9])
def test_rows_are_moved_and_added(kind: Kind, shape: tuple[int, ...], dtype: str, count: int) -> None:
    rng, tables = np.random.default_rng(count), kind.tables
    tables.prepare_rows(np.dtype(dtype))
    table, some = drawn(rng, shape, dtype), drawn(rng, (count, *shape[1:]), dtype)
    ids, there = rng.permutation(9)[:count], kind.there(table)
    np.testing.assert_array_equal(kind.here(tables.take_rows(there, ids)), table[ids])
    out = tables.empty(some.shape, some.dtype)
    assert tables.take_rows(there, ids, out) is out
    np.testing.assert_array_equal(kind.here(out), table[ids])
    used, others = tables.numbers([ids, ids[::2]])
    np.testing.assert_array_equal(kind.here(used), ids)
    np.testing.assert_array_equal(kind.here(others), ids[::2])
    tables.add_rows(there, used, kind.there(some))
    table[ids] += some
    np.testing.assert_array_equal(kind.here(there), table)
    tables.put_rows(there, used, kind.there(some.astype(accumulator(some.dtype))))
    table[ids] = some
    np.testing.assert_array_equal(kind.here(there), table)
    tables.put_rows(there, ids, None)
    table[ids] = 0
    np.testing.assert_array_equal(kind.here(there), table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_runs_are_summed(kind: Kind, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    order, starts, rows = rng.permutation(9), np.array([0, 1, 5, 7]), drawn(rng, shape, dtype)
    found = kind.here(kind.tables.sum_runs(kind.there(rows), order, starts))
    expected = [rows[run].sum(axis=0, dtype=dtype) for run in np.split(order, starts[1:])]
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, expected)


def test_half_precision_is_added_in_single_precision(kind: Kind) -> None:
    total, terms = kind.there(np.zeros((1, 1), np.float32)), np.array([[2048], [1], [1]], np.float16)
    for term in terms:
        kind.tables.add_rows(total, np.array([0]), kind.there(term[None]))
    assert kind.here(total).tolist() == [[2050]]
    summed = kind.tables.sum_runs(kind.there(terms), np.arange(3), np.array([0]))
    assert kind.here(summed).tolist() == [[2050]]
