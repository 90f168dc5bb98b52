"""Memory of a process, read from outside of it."""

from __future__ import annotations

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
    except OSError as error:
        pytest.skip(str(error))
    except TransportError as error:
        if "Operation not permitted" not in str(error):
            raise
        pytest.skip(str(error))
    return attached


def test_what_can_be_read_can_be_lent(own: Attached) -> None:
    array, copy = np.arange(1000.0), np.empty(1000)
    assert own.is_readable(array)
    own.read(0, array.ctypes.data, copy)
    np.testing.assert_array_equal(copy, array)


def test_memory_that_cannot_be_read(own: Attached) -> None:
    copy = np.empty(1000)
    with pytest.raises(TransportError, match="rank 0 cannot be read: Bad address"):
        own.read(0, 1 << 20, copy)
    with pytest.raises(TransportError, match="rank 7 cannot be read: No such process"):
        Attached([1 << 22], [7]).read(0, copy.ctypes.data, copy)
