"""Which kernels there are. What numba's compute is in test_compiled.py."""

import sys

import numpy as np
import pytest

import mpikv
from mpikv.compute import numba
from mpikv.compute.kernels import find_kernels
from mpikv.testing import KernelsContract


class TestNumpy(KernelsContract):
    def make(self):
        return find_kernels("numpy")


def test_numpy_is_the_default_and_loads_no_numba(hide):
    hide("numba")
    with mpikv.create() as kv:
        kv.init("w", np.ones(3))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push("w", np.ones(3))
        assert kv.pull("w").tolist() == [0, 0, 0]


@pytest.fixture
def without_numba(monkeypatch, hide):
    """Forget what has imported numba, which cannot be imported any more."""
    for name in ("compiling", "codecs", "rules", "half_rules", "lists"):
        monkeypatch.delitem(sys.modules, f"mpikv.compute.numba.{name}", raising=False)
    hide("numba")
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
