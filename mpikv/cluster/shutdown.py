"""How a rank leaves MPI, or an operation of MPI that others do not join.

Here are its messages, the end of the whole job, and forked processes.
"""

from __future__ import annotations

import ctypes
import io
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..errors import Stalled
from .environment import GIVEN_UP, run_directory
from .mpi_library import library_of, load_mpi
from .printing import until_read
from .runtime import OfMessages, present
from .tracebacks import print_last
from .waiting import Waiting

# Message tags: a rank makes no more calls; a rank has given up an operation. Such a message may travel on the caller's
# communicator; the length of the text distinguishes it from the caller's own messages.
_TAG, _STALLED, _TEXT = 32101, 32105, b"mpikv waits no longer"
# Seconds to wait for the messages of ranks with the same deadline, which passes a little later there.
PATIENCE = 0.3
# Operations that nobody waits for, and so their buffers: MPI and other ranks may still read and write these.
_abandoned: list[Any] = []
# OMPI_MPI_STATE_FINALIZE_COMPLETED of Open MPI's enum ompi_mpi_state_t.
_OMPI_FINALIZED = 5
# Whether this process was forked from one that had a store.
_forked = False


def announce_shutdown(comm: Any, tag: int = _TAG) -> Callable[[], list[int]]:
    """Tell other ranks, not waiting, that this one shuts down; return a function that lists those yet to do so. Local.

    Returns:
        A function that lists the ranks that have not said the same yet.
    """
    messages = [comm.Isend(_TEXT, rank, tag) for rank in range(comm.size) if rank != comm.rank]
    receive = receive_shutdowns(comm, tag)

    def find_absent() -> list[int]:
        """Return the ranks that have not announced their shutdown by now; does not wait."""
        library_of(comm).Request.Testall(messages)
        return sorted(set(range(comm.size)) - receive() - {comm.rank})

    return find_absent


def receive_shutdowns(comm: Any, tag: int = _TAG) -> Callable[[], set[int]]:
    """Return a function that receives notices, not waiting, and returns the ranks that have shut down so far. Local."""
    mpi = library_of(comm)
    ranks: set[int] = set()

    def receive() -> set[int]:
        """Receive the notices that have come; return the one set, itself, of the ranks that have sent one so far."""
        status = mpi.Status()
        # By source, not by any: a message of the caller's own may wait in front, and must stay where it is.
        for rank in set(range(comm.size)) - ranks:
            if comm.Iprobe(rank, tag, status) and status.Get_count(mpi.BYTE) == len(_TEXT):
                comm.Recv(bytearray(len(_TEXT)), rank, tag)
                ranks.add(rank)
        return ranks

    return receive


def await_shutdown(handshakes: Sequence[Callable[[], list[int]]], seconds: float) -> list[int]:
    """Wait until these functions list no ranks, ``seconds`` at most; return the ranks that they list then. Local."""
    here = present()
    limit = here.now() + seconds
    while absent := sorted({rank for find_absent in handshakes for rank in find_absent()}):
        # Looked at once more after the deadline: this rank may have had no core meanwhile.
        if here.now() >= limit:
            return absent
        here.nap(0.01, limit)
    return []


def wait_or_abandon(request: Any, comm: Any, timeout: float) -> None:
    """Wait for an MPI request of all ranks; after the timeout abandon it, tell the ranks, raise Stalled. Collective.

    Raises:
        Stalled: some ranks do not come, or had given up when this one came.
    """
    try:
        Waiting(timeout).until(OfMessages(request.Test), tuple)
    except BaseException as error:  # also Ctrl-C
        abandon([request])
        if not isinstance(error, Stalled):
            raise
        # The other waiting ranks have the same deadline, so they announce themselves now; the rest are missing.
        missing = await_shutdown([announce_shutdown(comm, _STALLED)], PATIENCE)
        waited = f"waited {timeout:.1f} s for ranks {missing}"
        text = waited if missing else "the other ranks have given up waiting for this one"
        raise Stalled(text, missing) from None


def abandon(operations: Iterable[Any]) -> None:
    """Keep operations that nobody waits for, and so their buffers, until the process ends. Local."""
    _abandoned.extend(operations)


def end_job(why: str) -> None:
    """Write ``why`` to a file for mpikv run and end all ranks by MPI's Abort; nothing if forked, or after MPI's end."""
    # A forked child would end its parent's job.
    mpi = load_mpi()
    if not _forked and not mpi.Is_finalized():
        if directory := run_directory():
            with suppress(OSError):  # a full disk must not keep the job alive
                (directory / GIVEN_UP).write_text(f"rank {mpi.COMM_WORLD.rank} ended the job: {why}")
        until_read()
        mpi.COMM_WORLD.Abort(1)


def abort_on_exception(mpi: Any) -> None:
    """Set ``sys.excepthook`` so that an uncaught exception ends all ranks, except in a notebook. Local.

    The others would wait for this rank for ever.
    """
    if "ipykernel" in sys.modules or getattr(sys.excepthook, "ends_the_job", False):
        return
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    lock, stream = threading.Lock(), sys.stderr

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error and end all ranks by MPI's Abort, which does not return."""
        with lock:
            if isinstance(sys.stderr, io.StringIO):
                # A hook around this one, as PyTorch's, collects the text for later, and there is no later.
                sys.stderr = stream
            try:  # Ctrl-C may interrupt it, and must still end the job
                print_last(error, f"[rank {rank}/{size}] ", rank)
                until_read()
            finally:
                mpi.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    end.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = end


def fail_at_end() -> None:
    """Register exit functions: this process ends with status 1 once Python and MPI have ended. Returns now. Local."""
    system = ctypes.CDLL(None)
    # C runs exit functions in reverse: fflush writes the buffers, then _exit ends the process with status 1.
    for function, argument in ((system._exit, 1), (system.fflush, None)):
        system.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)


def disown_mpi() -> None:
    """Note that this process was forked from a rank, and let its uncaught exceptions end no job. Local."""
    global _forked
    _forked = True
    if getattr(sys.excepthook, "ends_the_job", False):
        sys.excepthook = sys.__excepthook__


def was_forked() -> bool:
    """Return whether this process was forked from a rank that had a store. Local."""
    return _forked


def leave_mpi() -> None:
    """In a forked child, change MPI's own state, so that MPI_Finalize at exit ends nothing of the parent's. Local.

    ``os._exit`` would need the exit status, which Python does not reveal, and would skip exit functions. So it changes
    the child's own copy of a value that MPI reads before it ends: a state variable of Open MPI, a callback's result in
    MPICH.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if not _forked or mpi is None or mpi.Is_finalized():
        return
    library = ctypes.CDLL(mpi.__file__)
    try:
        ctypes.c_int32.in_dll(library, "ompi_mpi_state").value = _OMPI_FINALIZED
    except ValueError:
        key, handle = ctypes.c_int(), ctypes.c_int if mpi._sizeof(mpi.Comm) == 4 else ctypes.c_void_p
        # MPI_Finalize first deletes the attributes of COMM_SELF ("Allowing User Functions at MPI Finalization" in the
        # standard). getpid as their delete function returns a number other than 0, an error, and MPICH stops there.
        fail = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        library.MPI_Comm_create_keyval(None, fail, ctypes.byref(key), None)
        library.MPI_Comm_set_attr(handle.from_address(mpi._addressof(mpi.COMM_SELF)), key, None)
