"""What a simulation raises of itself."""

from __future__ import annotations

__all__ = ["Deadlock", "Ended", "Hung", "Planted", "SimulatedError"]


class SimulatedError(RuntimeError):
    """What MPI would raise, or should."""


class Deadlock(RuntimeError):
    """All tasks wait for each other, and none of them has a deadline."""


class Hung(RuntimeError):
    """A task computes for long without a scheduling point, so that no other can go on."""


class Planted(RuntimeError):
    """What the fault :class:`~mpikv.testing.simulation.faults.Raise` raises in a rank."""


class Ended(BaseException):
    """Raised in a task that has to end. Programs must let it pass."""
