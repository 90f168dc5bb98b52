"""Bells: a rank sleeps in the kernel until another rank of its host rings.

A bell is a POSIX semaphore in memory that the host's ranks share. It counts the rings that its rank has not heard yet.
So no ring is lost, whoever rings at the same moment and whenever the rank falls asleep. It needs no name, and a killed
rank leaves none behind.
"""

from __future__ import annotations

import ctypes

from ..errors import TransportError
from ..protocols import Group
from .runtime import present, system_function

# Bytes between two bells: more than a semaphore has, and two cache lines, as processors fetch lines in pairs.
_STRIDE = 128


class Bells:
    """The bell of each rank of a host, as one of them uses them. All methods but the constructor are local."""

    def __init__(self, group: Group) -> None:
        """Make the bells; TransportError on all ranks if the system of one cannot. Collective over the host.

        Raises:
            TransportError: on every rank of the host, if the system makes no such semaphore for one.
        """
        self._memory = group.allocate(len(group.host_ranks) * _STRIDE)
        first = self._memory.ctypes.data
        self._bells = {rank: ctypes.c_void_p(first + place * _STRIDE) for place, rank in enumerate(group.host_ranks)}
        self._own = self._bells[group.rank]
        failed = system_function("sem_init")(self._own, 1, 0) != 0
        if ranks := "".join(group.exchange(f" {group.rank}" if failed else "")):  # nobody rings before
            raise TransportError(f"the system makes no semaphores that processes share, on ranks{ranks} of this host")

    def ring(self, rank: int) -> None:
        """Wake a rank of this host, now or when it next falls asleep."""
        system_function("sem_post")(self._bells[rank])

    def listen(self) -> int:
        """Sleep until another rank rings, unless one has; return the number of rings, 0 after a signal. May wait."""
        here = present()
        # A signal interrupts sem_wait.
        first = here.nap(0, ready=self._heard) if here.world else system_function("sem_wait")(self._own) == 0
        return first and 1 + sum(iter(self._heard, False))

    def _heard(self) -> bool:
        """Take one ring of this rank's bell, if there is one, without waiting; return whether there was."""
        return bool(system_function("sem_trywait")(self._own) == 0)
