"""Cross-memory attach: reading the memory of other processes of this host.

Linux lets a process do that if it may trace the other one. The system copies straight from the arrays of another rank
into memory of this one: one copy, where shared memory takes two, and no write to a cache line that another core has
read. MPI libraries do the same. Some containers forbid it. So does the security module Yama, except between parent and
child. Then :func:`attach` returns None.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..cluster.runtime import system_function
from ..errors import TransportError
from ..protocols import Array, Group

# Bytes of one call: the kernel copies no more than 2,147,479,552, and returns as if that were all.
_MOST_BYTES = 1 << 30
# In this many choices each way is tried once, since the faster way changes within minutes.
_PERIOD = 32
# The weight of a new sample, and its bound as a multiple of the mean: a rank may have lost its core meanwhile.
_WEIGHT, _MOST = 1 / 8, 2
# The first choices, one of each way, are not measured. They touch fresh memory, and the system makes its pages then:
# copying seemed five to eight times slower than it is.
_UNCOUNTED = 2


class _Range(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Attached:
    """The memories of the ranks of a host, by their local ranks."""

    def __init__(self, pids: Sequence[int], ranks: Sequence[int]) -> None:
        """Look up process_vm_readv, or raise OSError. ``ranks`` are numbers in the group, for messages. Local.

        Raises:
            OSError: this system has no such call.
        """
        self._call = system_function("process_vm_readv")
        self._call.restype = ctypes.c_ssize_t
        self._call.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
        self._pids, self._ranks = tuple(pids), tuple(ranks)
        # Made once, not for each read: an exchange makes one read per rank, and new ctypes objects cost time there.
        self._into, self._from, self._ends = _Range(), _Range(), ctypes.create_string_buffer(2)
        self._arguments = ctypes.addressof(self._into), 1, ctypes.addressof(self._from), 1, 0

    def is_readable(self, array: Array) -> bool:
        """Return whether other ranks can read an array, by a trial on its ends here; False for a GPU's. Local."""
        # Tried on the first and the last byte, by this process on itself: the kernel takes the same path.
        first = array.ctypes.data
        ends = (_Range * 2)(_Range(first, 1), _Range(first + array.nbytes - 1, 1))
        # Both ends at once: an array may begin in ordinary memory and end in a device's.
        into = _Range(ctypes.addressof(self._ends), 2)
        return bool(self._call(os.getpid(), ctypes.addressof(into), 1, ctypes.addressof(ends), 2, 0) == 2)

    def read(self, local_rank: int, address: int, into: Array) -> None:
        """Fill a contiguous array from an address in another rank's memory; TransportError if that fails. Local.

        Raises:
            TransportError: the process is gone, or has no such memory.
        """
        base, size = into.ctypes.data, into.nbytes
        for done in range(0, size, _MOST_BYTES):
            self._into.base, self._from.base = base + done, address + done
            self._into.length = self._from.length = length = min(size - done, _MOST_BYTES)
            count = self._call(self._pids[local_rank], *self._arguments)
            if count != length:
                why = os.strerror(ctypes.get_errno()) if count < 0 else f"{done + count} of {size} bytes could be read"
                raise TransportError(
                    f"the arrays of rank {self._ranks[local_rank]} cannot be read: {why}; set MPIKV_SINGLE_COPY=0 to "
                    "copy them through shared memory instead"
                )


def attach(group: Group) -> Attached | None:
    """Return an Attached for this host's ranks' memory; None on all if one cannot read. Collective over the host."""
    # In another PID namespace this number may be another process, so a read alone proves nothing: a secret does.
    secret = np.frombuffer(secrets.token_bytes(16), np.uint8)
    offer = json.dumps([os.getpid(), secret.ctypes.data, secret.tobytes().hex()])
    pids, addresses, expected = zip(*map(json.loads, group.exchange(offer)), strict=True)
    attached, copies = None, np.zeros((len(pids), secret.size), np.uint8)
    with suppress(OSError, TransportError):  # forbidden, or not Linux: ranks then copy through shared memory
        attached = Attached(pids, group.host_ranks)
        for local_rank, address in enumerate(addresses):
            attached.read(local_rank, address, copies[local_rank])
    # This exchange also keeps every rank's secret alive until all have read it.
    known = group.exchange(str(copies.tobytes().hex() == "".join(expected)))
    return attached if set(known) == {"True"} else None


class CopyChoice:
    """Chooses between two ways, 0 and 1, of doing the same thing. Local.

    The number of choices alone decides when each way is tried, so ranks that choose equally often try a way together.

    Example:
        >>> choice = CopyChoice()
        >>> for turn in range(4):
        ...     way = choice.next()
        ...     choice.took(way, 2.0 if way else 3.0, 1)
        >>> choice.next()
        1
    """

    def __init__(self) -> None:
        self._chosen, self._pace = 0, [0.0, 0.0]

    def next(self) -> int:
        """Count a choice, and return 0 or 1: each once in 32 choices, else the faster way, or one not measured yet."""
        # By the count alone, no clock and no chance: ranks then try a way in the same exchange.
        turn, self._chosen = self._chosen % _PERIOD, self._chosen + 1
        return turn if turn < 2 else int(self._pace[1] < self._pace[0])

    def took(self, way: int, seconds: float, amount: int) -> None:
        """Renew the mean pace of a way (0, 1) by the seconds for an amount; the first two choices do not count."""
        if self._chosen <= _UNCOUNTED:
            return
        new, mean = seconds / amount, self._pace[way]
        self._pace[way] = mean + _WEIGHT * (min(new, _MOST * mean) - mean) if mean else new
