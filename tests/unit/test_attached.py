"""Memory of a process, read from outside of it."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from mpikv.errors import TransportError
from mpikv.transports.cma import Attached


@pytest.fixture
def own() -> Attached:
    """Return access to this process's memory, where the system allows it."""
    byte = np.zeros(1, np.uint8)
    try:
        attached = Attached([os.getpid()], [0])
        attached.read(0, byte.ctypes.data, byte.copy())
    except (OSError, TransportError) as error:
        if isinstance(error, TransportError) and "Operation not permitted" not in str(error):
            raise
        pytest.skip(str(error))
    return attached


def test_what_can_be_read_can_be_lent(own: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads 2 GiB less a page by one call; here are arrays of several calls."""
    page = mmap.PAGESIZE
    array = np.frombuffer(mmap.mmap(-1, 6 * page), np.uint8)
    array[:] = np.random.default_rng(0).integers(256, size=array.size)
    assert own.is_readable(array)
    for most in (array.size, 1000):
        copy = np.zeros_like(array)
        monkeypatch.setattr("mpikv.transports.cma._MOST_BYTES", most)
        own.read(0, array.ctypes.data, copy)
        np.testing.assert_array_equal(copy, array)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(array.ctypes.data + 5 * page), page, 0) == 0
    with pytest.raises(TransportError, match=f"cannot be read: {5 * page} of {6 * page} bytes could be read"):
        own.read(0, array.ctypes.data, copy)


def test_memory_that_cannot_be_read(own: Attached) -> None:
    copy = np.empty(1000)
    with pytest.raises(TransportError, match="rank 0 cannot be read: Bad address"):
        own.read(0, 1 << 20, copy)
    with pytest.raises(TransportError, match="rank 7 cannot be read: No such process"):
        Attached([1 << 22], [7]).read(0, copy.ctypes.data, copy)
