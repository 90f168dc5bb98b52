"""How a rank leaves MPI: the shutdown handshake with other ranks, the end of the whole job, and forked processes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..config import GIVEN_UP, run_directory
from .mpi_library import library_of, load_mpi
from .runtime import present
from .tracebacks import print_last
from .waiting import until_read

__all__ = [
    "abort_on_exception",
    "announce_shutdown",
    "await_shutdown",
    "disown_mpi",
    "end_job",
    "fail_at_end",
    "leave_mpi",
    "receive_shutdowns",
    "was_forked",
]

# The tag and the text of the message of a rank that makes no more calls. It may travel on a communicator of the
# caller's, whose own messages are told by their length.
_TAG, _TEXT = 32101, b"mpikv waits no longer"
# The state of an Open MPI that has come to its end.
_OMPI_FINALIZED = 5
# Whether this process was forked from one that had a store.
_forked = False


def announce_shutdown(comm: Any) -> Callable[[], list[int]]:
    """Tell the other ranks that this one shuts down. Local.

    Returns:
        What returns the ranks that have not told the same yet.
    """
    messages = [comm.Isend(_TEXT, rank, _TAG) for rank in range(comm.size) if rank != comm.rank]
    receive = receive_shutdowns(comm)

    def find_absent() -> list[int]:
        library_of(comm).Request.Testall(messages)
        return sorted(set(range(comm.size)) - receive() - {comm.rank})

    return find_absent


def receive_shutdowns(comm: Any) -> Callable[[], set[int]]:
    """Return a function that returns the ranks that have told so far that they shut down."""
    mpi = library_of(comm)
    ranks: set[int] = set()

    def receive() -> set[int]:
        status = mpi.Status()
        for rank in set(range(comm.size)) - ranks:
            if comm.Iprobe(rank, _TAG, status) and status.Get_count(mpi.BYTE) == len(_TEXT):
                comm.Recv(bytearray(len(_TEXT)), rank, _TAG)
                ranks.add(rank)
        return ranks

    return receive


def await_shutdown(handshakes: Sequence[Callable[[], list[int]]], seconds: float) -> list[int]:
    """Return the ranks that have not answered these handshakes after so many seconds."""
    here = present()
    limit = here.now() + seconds
    while absent := sorted({rank for find_absent in handshakes for rank in find_absent()}):
        if here.now() >= limit:
            return absent
        here.nap(0.01, limit)
    return []


def end_job(why: str) -> None:
    """End all ranks, from one that cannot leave in peace: MPI ends only when every rank has come to its end."""
    mpi = load_mpi()
    if not _forked and not mpi.Is_finalized():
        if directory := run_directory():
            with suppress(OSError):  # the job is to end also where there is no room to say why
                (directory / GIVEN_UP).write_text(f"rank {mpi.COMM_WORLD.rank} ended the job: {why}")
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


def abort_on_exception(mpi: Any) -> None:
    """Make an uncaught exception end all ranks, but not in a notebook: the others would wait for this one for ever."""
    if "ipykernel" in sys.modules or getattr(sys.excepthook, "ends_the_job", False):
        return
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    lock = threading.Lock()

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with lock:
            print_last(error, f"[rank {rank}/{size}] ", rank)
            until_read([stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None])
            mpi.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    end.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = end


def fail_at_end() -> None:
    """Give this process an exit status other than 0, once Python and MPI have come to their ends. Local."""
    system = ctypes.CDLL(None)
    # C calls the last one first: what is buffered is written before the end.
    for function, argument in ((system._exit, 1), (system.fflush, None)):
        system.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)


def disown_mpi() -> None:
    """Leave MPI and the end of the job to the process that this one was forked from."""
    global _forked
    _forked = True
    if getattr(sys.excepthook, "ends_the_job", False):
        sys.excepthook = sys.__excepthook__


def was_forked() -> bool:
    """Return whether this process was forked from a rank that had a store. Local."""
    return _forked


def leave_mpi() -> None:
    """Have a forked process end without MPI's end, which mpi4py calls for it: that would be the parent's. Local.

    ``os._exit`` would need the exit status, which Python tells nobody, and would pass over exit functions. What MPI
    looks at before it ends is the process's own: Open MPI at a variable, and MPICH at what a callback returns.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if not _forked or mpi is None or mpi.Is_finalized():
        return
    library = ctypes.CDLL(mpi.__file__)
    try:
        ctypes.c_int32.in_dll(library, "ompi_mpi_state").value = _OMPI_FINALIZED
    except ValueError:
        key, handle = ctypes.c_int(), ctypes.c_int if mpi._sizeof(mpi.Comm) == 4 else ctypes.c_void_p
        # Its return value, a process number, is an error where MPI wants 0.
        fail = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        library.MPI_Comm_create_keyval(None, fail, ctypes.byref(key), None)
        library.MPI_Comm_set_attr(handle.from_address(mpi._addressof(mpi.COMM_SELF)), key, None)
