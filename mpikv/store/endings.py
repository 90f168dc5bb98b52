"""The end of a process that has made stores: it closes them, and prints errors that nobody has seen."""

from __future__ import annotations

import atexit
import logging
import os
from functools import cache

from ..cluster.printing import log, print_lines
from ..cluster.shutdown import await_shutdown, disown_mpi, end_job, fail_at_end, leave_mpi
from ..errors import Stalled, notes, text_of
from .kvstore import lost_stores, open_stores


def prepare_endings(on_gpu: bool) -> None:
    """Have stores closed at exit, before MPI and CuPy end, and made unusable in a forked child. Local."""
    _register()
    if on_gpu:  # before CuPy ends, which may have been imported after the first store was made
        # Functions run in reverse: registered again, this one comes before CuPy's.
        atexit.unregister(_close_all)
        atexit.register(_close_all)


@cache
def _register() -> None:
    """Register, once per process, the functions for its exit and for a forked child. Local."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_end_in_child)


def tell_unseen() -> None:
    """Print the first unseen error of each open or lost store's calls with ``wait=False``. First wait for pending
    calls, as long as one completes each second. Local.
    """
    for store in (*open_stores(), *lost_stores()):
        if (unseen := store.unseen()) is not None:
            _tell(unseen)


def _close_all() -> None:
    """At exit: close open stores and print unseen errors; after lost stores, await ranks or end the job. Collective."""
    # In the order of their creation, the same on all ranks: closing is collective.
    while stores := open_stores():
        store = stores[0]
        try:
            store.drain()
            store.close()
        except BaseException as error:  # sys.exit in an updater, too
            if isinstance(error, Stalled):
                log("a store could not be closed at exit: %s", error)
            else:
                _complain(error)
            store.abandon("the program has ended")
    for store in lost_stores():
        if (unseen := store.unseen()) is not None:
            _complain(unseen)
    # First to all, then wait: the ranks may have lost their stores in another order.
    handshakes = [store.announce_shutdown() for store in lost_stores()]
    seconds = max((seconds for _, seconds in handshakes), default=0)
    if absent := await_shutdown([find_absent for find_absent, _ in handshakes], seconds):
        why = f"ranks {absent} do not reach the end of their programs"
        log("ending the job: %s", why, level=logging.ERROR)
        end_job(why)
    leave_mpi()


def _complain(error: BaseException) -> None:
    """Print an error that nobody can catch any more, and make the process exit with a failure. Local."""
    _tell(error)
    fail_at_end()


def _tell(error: BaseException) -> None:
    """Print an error and its notes to standard error, as one at the end of the program. Local; raises nothing."""
    text = "; ".join([f"{type(error).__name__}: {text_of(error)}", *notes(error)])
    print_lines(text, "mpikv: at the end of the program: ")


def _end_in_child() -> None:
    """In a forked child, make the stores unusable and leave MPI and the job's end to the parent. Local."""
    for store in open_stores().copy():
        store.abandon(
            "the store was made before a fork, which neither MPI nor CUDA survives; use it in the parent "
            "(see docs/how-to/launch-problems.md#fork)"
        )
    lost_stores().clear()  # the parent's affair
    disown_mpi()
