"""The two ways to checked communicators: a call, and the import of mpi4py under ``mpikv run --check``."""

from __future__ import annotations

import sys
from functools import wraps
from importlib.util import find_spec
from typing import Any

from ..cluster.mpi_library import load_mpi


def checked(comm: Any, *, timeout: float | None = None, warn_after: float | None = None) -> Any:
    """Return a communicator with the handle of ``comm`` and checks: every rank raises where calls differ. Collective.

    MPI would hang there, or give wrong results. The result is an ``MPI.Intracomm`` and no duplicate of ``comm``, so
    freeing one frees both. What it makes, as by ``Dup`` and ``Split``, is checked too. ``MPI.Request.Waitall`` and its
    like wait without a deadline, unless the program runs under ``mpikv run --check``; ``Wait`` of a request has one.

    Args:
        comm: an intracommunicator of mpi4py, as ``MPI.COMM_WORLD``.
        timeout: seconds that a call waits for another rank before it raises :class:`~mpikv.errors.Stalled`.
        warn_after: seconds after which a waiting rank logs where the late ranks are.

    Raises:
        TypeError: ``comm`` is no intracommunicator.
        Stalled: not all ranks have come.
    """
    mpi = load_mpi()
    from .intracomm import CheckedComm, open_checks

    if not isinstance(comm, mpi.Intracomm):
        raise TypeError(
            f"checked: comm={comm!r} is not an mpi4py.MPI.Intracomm; pass one, as MPI.COMM_WORLD, on every rank "
            f"[rank {mpi.COMM_WORLD.rank}/{mpi.COMM_WORLD.size}]"
        )
    return open_checks(CheckedComm(comm), "checked", timeout, warn_after)


def check_world() -> None:
    """Have a later import of ``mpi4py.MPI`` put checked objects there, COMM_WORLD too, and begin the checks. Local."""

    class Finder:
        """Finds ``mpi4py.MPI`` as Python does, and has it changed once it is loaded."""

        @classmethod
        def find_spec(cls, name: str, path: Any, target: Any = None) -> Any:
            """Return None; but for ``mpi4py.MPI`` remove this finder, and return a spec that rebinds after the load."""
            if name != "mpi4py.MPI":
                return None
            sys.meta_path.remove(cls)
            spec: Any = find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: load(module) or _rebind(module)
            return spec

    sys.meta_path.insert(0, Finder)


def _rebind(mpi: Any) -> Any:
    """Replace Request, Init and Finalize of mpi4py by checked ones; COMM_WORLD too, now or once MPI starts. Collective,
    if MPI has started.
    """
    from .check import end_checks
    from .intracomm import CheckedComm, CheckedRequest, open_checks

    mpi.Request, end = CheckedRequest, mpi.Finalize

    def begin() -> None:
        """Replace COMM_WORLD by a checked one. Collective."""
        mpi.COMM_WORLD = open_checks(CheckedComm(mpi.COMM_WORLD), "Init")

    # A program may start and end MPI itself.
    def starting(start: Any) -> Any:
        """Return a function that starts MPI by ``start``, and begins the checks."""

        @wraps(start)
        def call(*given: Any, **named: Any) -> Any:
            """Start MPI, begin the checks, and return the start's result. Collective."""
            result = start(*given, **named)
            begin()
            return result

        return call

    def ending() -> None:
        """End the checks, then MPI. Collective."""
        end_checks()
        end()

    mpi.Init, mpi.Init_thread, mpi.Finalize = starting(mpi.Init), starting(mpi.Init_thread), wraps(end)(ending)
    if mpi.Is_initialized():
        begin()
