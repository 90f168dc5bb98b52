"""How a rank leaves MPI, or an operation of MPI for which others do not come: what it tells them, the end of the whole
job, and forked processes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..config import GIVEN_UP, run_directory
from ..errors import Stalled
from .mpi_library import library_of, load_mpi
from .printing import flush_output, until_read
from .runtime import OfMessages, present
from .tracebacks import print_last
from .waiting import Waiting

__all__ = [
    "abort_on_exception",
    "announce_shutdown",
    "await_shutdown",
    "complete",
    "disown_mpi",
    "end_job",
    "fail_at_end",
    "leave_mpi",
    "receive_shutdowns",
    "was_forked",
]

# The tags of the message of a rank that makes no more calls, and of one that has given up an operation; and the text.
# Such a message may travel on a communicator of the caller's, whose own messages are told by their length.
_TAG, _STALLED, _TEXT = 32101, 32105, b"mpikv waits no longer"
# Seconds to wait for a rank that has waited too long for others.
PATIENCE = 0.3
# Operations that were given up. MPI may still read and write their buffers, which their requests keep alive.
_unfinished: list[Any] = []
# The state of an Open MPI that has come to its end.
_OMPI_FINALIZED = 5
# Whether this process was forked from one that had a store.
_forked = False


def announce_shutdown(comm: Any, tag: int = _TAG) -> Callable[[], list[int]]:
    """Tell the other ranks that this one shuts down. Local.

    Returns:
        What returns the ranks that have not told the same yet.
    """
    messages = [comm.Isend(_TEXT, rank, tag) for rank in range(comm.size) if rank != comm.rank]
    receive = receive_shutdowns(comm, tag)

    def find_absent() -> list[int]:
        library_of(comm).Request.Testall(messages)
        return sorted(set(range(comm.size)) - receive() - {comm.rank})

    return find_absent


def receive_shutdowns(comm: Any, tag: int = _TAG) -> Callable[[], set[int]]:
    """Return a function that returns the ranks that have told so far that they shut down."""
    mpi = library_of(comm)
    ranks: set[int] = set()

    def receive() -> set[int]:
        status = mpi.Status()
        for rank in set(range(comm.size)) - ranks:
            if comm.Iprobe(rank, tag, status) and status.Get_count(mpi.BYTE) == len(_TEXT):
                comm.Recv(bytearray(len(_TEXT)), rank, tag)
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


def complete(request: Any, comm: Any, ranks: Sequence[int], timeout: float) -> None:
    """Wait for an operation of all ranks of a communicator, but no longer than ``timeout`` seconds. Collective.

    ``ranks`` are their numbers in the store.

    Raises:
        Stalled: some do not come, or had given up when this one came.
    """
    try:
        Waiting(timeout).until(OfMessages(request.Test), tuple)
    except Stalled:
        _unfinished.append(request)
        # Those that wait, too, have the same deadline.
        absent = await_shutdown([announce_shutdown(comm, _STALLED)], PATIENCE)
        missing = [ranks[place] for place in absent]
        waited = f"waited {timeout:.1f} s for ranks {missing}"
        text = waited if missing else "the other ranks have given up waiting for this one"
        raise Stalled(text, missing) from None
    except BaseException:  # Ctrl-C
        _unfinished.append(request)
        raise


def end_job(why: str) -> None:
    """End all ranks, from one that cannot leave in peace: MPI ends only when every rank has come to its end."""
    mpi = load_mpi()
    if not _forked and not mpi.Is_finalized():
        if directory := run_directory():
            with suppress(OSError):  # the job is to end also where there is no room to say why
                (directory / GIVEN_UP).write_text(f"rank {mpi.COMM_WORLD.rank} ended the job: {why}")
        flush_output()
        mpi.COMM_WORLD.Abort(1)


def abort_on_exception(mpi: Any) -> None:
    """Make an uncaught exception end all ranks, but not in a notebook: the others would wait for this one for ever."""
    if "ipykernel" in sys.modules or getattr(sys.excepthook, "ends_the_job", False):
        return
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    lock = threading.Lock()

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with lock:
            try:  # Ctrl-C comes here, too
                print_last(error, f"[rank {rank}/{size}] ", rank)
                until_read()
            finally:
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
