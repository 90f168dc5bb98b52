"""Which kernels there are. What numba's compute is in test_compiled.py."""

from __future__ import annotations

import sys

import pytest

import mpikv
from mpikv.compute import numba
from mpikv.compute.kernels import NumpyKernels, find_kernels
from mpikv.testing import KernelsContract


class TestNumpy(KernelsContract):
    def make(self):
        return find_kernels("numpy")


def test_numpy_is_the_default_and_loads_no_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with mpikv.create() as kv:
        assert isinstance(kv._exchange._kernels, NumpyKernels)


@pytest.fixture
def without_numba(monkeypatch):
    """Forget what has imported numba, which cannot be imported any more."""
    for name in ("compiling", "codecs", "rules", "half_rules", "lists"):
        monkeypatch.delitem(sys.modules, f"mpikv.compute.numba.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delattr(numba, "rules", raising=False)


def test_numba_is_missing(without_numba):
    with pytest.raises(mpikv.TransportUnavailable, match=r"numba.*pip install 'mpikv\[numba\]'") as caught:
        mpikv.create(kernels="numba")
    assert str(caught.value).startswith("create: kernels='numba' needs the package numba")
    assert isinstance(caught.value.__cause__, ImportError)


def test_numba_is_missing_by_the_variable(without_numba, monkeypatch):
    monkeypatch.setenv("MPIKV_KERNELS", "numba")
    with pytest.raises(mpikv.TransportUnavailable, match="numba"):
        mpikv.create()


def test_names():
    with pytest.raises(mpikv.ConfigError, match=r"unknown kernels 'numbas' \(known: numba, numpy\); did you mean"):
        mpikv.create(kernels="numbas")


def test_stores_on_gpus_refuse_them_by_what_asked_for_them(monkeypatch):
    with pytest.raises(mpikv.Unsupported, match=r"create: kernels='numba' is for stores on the host.*leave it out"):
        mpikv.create("nccl", kernels="numba")
    monkeypatch.setenv("MPIKV_KERNELS", "numba")
    with pytest.raises(mpikv.Unsupported, match="create: MPIKV_KERNELS=numba is for stores on the host"):
        mpikv.create("nccl")
