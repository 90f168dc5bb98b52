"""The simulation's own exceptions."""

from __future__ import annotations

__all__ = ["Deadlock", "Ended", "Hung", "Planted", "SimulatedError"]


class SimulatedError(RuntimeError):
    """An error that MPI raises, or should raise."""

    number = 0

    def Get_error_class(self) -> int:  # noqa: N802, mpi4py's name
        return self.number


class Truncated(SimulatedError):
    """A message is longer than the memory of its receive."""

    number = 1


class Deadlock(RuntimeError):
    """All tasks wait for each other, and none of them has a deadline."""


class Hung(RuntimeError):
    """A task computes for long without a scheduling point, so no other task can run."""


class Planted(RuntimeError):
    """The exception of the fault :class:`~mpikv.testing.simulation.faults.Raise`."""


class Ended(BaseException):
    """Ends a task. Programs must let it pass."""
