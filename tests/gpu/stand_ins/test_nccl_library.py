"""What stands for CuPy's NCCL and arrays has their names and arguments, and the real NCCL takes what it is given.

The library is called without a communicator, which it refuses before it looks for a GPU: that shows that each call has
the arguments it needs, of the right types, not that they mean the right thing.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest

from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.waiting import Waiting
from mpikv.errors import TransportError
from mpikv.memory.device import DeviceMemory
from mpikv.testing.fakegpu import FakeArray, FakeGpu
from mpikv.testing.fakenccl import FakeCommunicator, FakeNccl, NcclError
from mpikv.transports.local import LocalTransport
from mpikv.transports.nccl import WIRES, NcclTransport, last_error

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # without NCCL it warns
    import cupy
    from cupy.cuda import nccl
if not nccl.available:
    pytest.skip("NCCL is not installed", allow_module_level=True)

UNUSED = {"_initAll", "initAll", "commSplit"}


def names(of: type) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


def arguments(function: Any) -> list[str]:
    """Return the names of arguments: of one of the fake's, or of one of CuPy's, which has them in its docstring."""
    line = (function.__doc__ or "").partition("\n")[0]
    if found := re.fullmatch(r"[\w.]+\((.*)\)", line):
        return [part.partition("=")[0].split()[-1] for part in found[1].split(", ") if part and part != "self"]
    code = function.__code__
    return [name for name in code.co_varnames[: code.co_argcount] if name != "self"]


def test_the_fake_communicator_has_the_names_of_the_real_one():
    assert names(FakeCommunicator) - {"carry_out"} == names(nccl.NcclCommunicator) - UNUSED


@pytest.mark.parametrize("name", sorted(names(FakeCommunicator) - {"carry_out", "comm"}))
def test_calls_have_the_arguments_of_the_real_ones(name):
    assert arguments(getattr(FakeCommunicator, name)) == arguments(getattr(nccl.NcclCommunicator, name))


def test_a_communicator_is_made_of_the_same_arguments():
    (given,) = re.findall(r"NcclCommunicator\((.*)\)", nccl.NcclCommunicator.__doc__.partition("\n")[0])
    assert arguments(FakeNccl.NcclCommunicator) == [part.partition("=")[0].split()[-1] for part in given.split(", ")]


@pytest.mark.parametrize("name", ["groupStart", "groupEnd", "get_unique_id", "get_version", "get_build_version"])
def test_functions_have_the_arguments_of_the_real_ones(name):
    assert arguments(getattr(FakeNccl, name)) == arguments(getattr(nccl, name)) == []


def test_constants_are_those_of_the_real_module():
    ours = {name: value for name, value in vars(FakeNccl).items() if name.startswith("NCCL_")}
    assert ours == {name: getattr(nccl, name) for name in dir(nccl) if name.startswith("NCCL_")}


def test_sums_are_made_in_constants_that_there_are():
    for wire in WIRES.values():
        assert wire.constant == f"NCCL_{wire.dtype.upper()}"
        assert isinstance(getattr(nccl, wire.constant), int)
        assert isinstance(getattr(nccl, wire.operation), int)


@pytest.mark.parametrize("status", range(1, 9))
def test_errors_are_those_of_the_real_module(status):
    def raised(make: Any) -> tuple[str, Any]:
        try:
            error = make(status)
        except KeyError as failure:
            return "KeyError", failure.args
        return type(error).__name__, (error.status, isinstance(error, RuntimeError))

    def fake(status: int) -> NcclError:
        if status > 6:
            raise KeyError(status)
        return NcclError(status)

    assert raised(fake) == raised(nccl.NcclError)


def test_arrays_have_only_what_cupys_have():
    ours = {name for kind in FakeArray.__mro__[:-1] for name in vars(kind)}
    private = {name for name in ours if name.startswith("_") and not name.endswith("__")}
    # The last is of numpy's mixin.
    made_by_python = {
        "__dict__",
        "__weakref__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotations__",
        "__imatmul__",
    }
    assert not ours - private - made_by_python - set(dir(cupy.ndarray))
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array is not allowed"):
        np.asarray(FakeGpu().upload(np.ones(1)))


@pytest.fixture
def transport() -> NcclTransport:
    """Return a transport over the real NCCL without a communicator, as the first of two ranks."""
    fake = FakeNccl(FakeGpu())
    made = NcclTransport(ProcessGroup(), LocalTransport(4096), DeviceMemory(fake.gpu), fake, 4096, Waiting(20.0))
    made._nccl, made.size = nccl, 2
    made._comm = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    return made


@pytest.mark.parametrize("dtype", ["bool", "int16", "float16", "float32", "complex128"])
@pytest.mark.parametrize("verb", ["reduce", "allreduce", "reduce_scatter", "uneven reduce_scatter"])
def test_nccl_takes_sums(transport, verb, dtype):
    send, recv = (transport.memory.source(np.ones(10, dtype)) for _ in range(2))
    further = {"reduce": [0], "allreduce": [], "reduce_scatter": [[5, 5]], "uneven reduce_scatter": [[10, 0]]}[verb]
    refused(transport, verb.split()[-1], send, recv, *further)


@pytest.mark.parametrize("verb", ["broadcast", "all_gather", "uneven all_gather", "all_to_all"])
def test_nccl_takes_bytes(transport, verb):
    buffer = transport.memory.source(np.ones(10, np.uint8))
    further = {"broadcast": 0, "all_gather": [5, 5], "uneven all_gather": [10, 0], "all_to_all": None}[verb]
    refused(transport, verb.split()[-1], buffer, further)


def refused(transport: NcclTransport, verb: str, *given: Any) -> None:
    with pytest.raises(TransportError, match=r"NCCL 2\.\d+\.\d+ failed in \w+: invalid argument") as caught:
        transport.memory.order.run(getattr(transport, verb), *given)
    cause = caught.value.__cause__
    assert isinstance(cause, nccl.NcclError)
    assert cause.status == 4
    # No group is left open, in which calls would seem to go well.
    with pytest.raises(nccl.NcclError):
        nccl.NcclCommunicator.__new__(nccl.NcclCommunicator).bcast(0, 0, 0, 0, 0)


def test_nccl_takes_the_ends_of_a_communicator():
    none = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    none.abort()
    none.destroy()
    with pytest.raises(nccl.NcclError):
        none.check_async_error()


def test_nccl_says_more_of_its_last_error(transport):
    refused(transport, "broadcast", transport.memory.source(np.ones(1)), 0)
    assert last_error() == "Broadcast : comm argument is NULL"
    assert "invalid argument (Broadcast : comm argument is NULL)" in str(transport._failure)


@pytest.mark.skipif(cupy.cuda.is_available(), reason="NCCL finds a GPU here")
def test_a_communicator_without_a_gpu_is_an_error():
    with pytest.raises(TransportError, match=r"making the communicator: a CUDA call failed \(Cuda failure .*driver"):
        NcclTransport(ProcessGroup(), LocalTransport(4096), DeviceMemory(FakeGpu()), nccl, 4096, Waiting(20.0))


def test_a_version_and_an_id_are_there_without_a_gpu():
    assert nccl.get_version() >= 22707
    assert len(nccl.get_unique_id()) == len(FakeNccl(FakeGpu()).get_unique_id()) == 128
