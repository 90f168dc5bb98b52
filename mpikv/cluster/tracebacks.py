"""Tracebacks without the frames of this package, and how a rank prints its last error.

An error should point at the caller's line. So when it leaves the package, the frames of the package, and of the
libraries that it calls, are cut out of its traceback. Frames of the caller's own functions stay, as an updater's. An
error that nobody meant to raise is a bug here and keeps all frames.
"""

from __future__ import annotations

import dis
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from ..config import keeps_frames
from ..errors import MPIKVError, PeerFailed, is_marked, mark
from .printing import print_lines
from .runtime import here

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PACKAGE = __name__.partition(".")[0]
# Programs and tests: they call the rest of the package as a user does.
_CALLERS = (f"{_PACKAGE}.cli", f"{_PACKAGE}.testing")
# Between a simulated rank's program and the store that it calls.
_BETWEEN = f"{_PACKAGE}.testing.simulation.calls"
_LIBRARIES = ("cupy", "ml_dtypes", "mpi4py", "numba", "numpy")
# Paths of Python's own modules; some are frozen. A name alone would also match a caller's module of that name.
_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_RAISE = dis.opmap["RAISE_VARARGS"]
# Seconds for the rank with the full error to print it and end the job: on a busy machine its deadline passes later, and
# it waits up to a second for the reader of its output. More seconds for each rank before this one, and their limit.
_PATIENCE, _TURN, _MOST_TURNS = 2.0, 0.02, 1.0
# Seconds that this rank leaves the others to print their lines: they raise the same error at this moment.
_OTHERS = 0.2


def hide_frames(error: BaseException) -> None:
    """Cut mpikv's frames out of the tracebacks of an error and its causes, in place; not those of a bug of mpikv, and
    none under MPIKV_FULL_TRACEBACK. Local.

    From Python 3.11 on, a bare ``raise`` afterwards adds no frame of its own.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [] if keeps_frames() else [error]
    while chain:
        if (one := chain.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            _shorten(one)
            # Python prints them, too, above the error itself.
            chain += [one.__cause__, one.__context__]


def hiding_frames(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function, wrapped so that errors leave it with no frame of this package in their tracebacks."""

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        """Return the function's result, or raise its error with fewer frames."""
        __tracebackhide__ = True  # from pytest: Python 3.10 leaves this entry, whatever is cut below
        try:
            return function(*arguments, **options)
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def hidden_from_pytest(raised: Any) -> bool:
    """Return whether the error of pytest's ExceptionInfo has cut frames; used as ``__tracebackhide__``."""
    return is_marked(raised.value, "shortened")


def print_last(error: BaseException, prefix: str, rank: int) -> None:
    """Print the error that ends a rank; if another rank prints it in full, print one line, sleep some seconds, then
    print all. Local.

    The rest is printed only if the job has not ended when this rank's turn comes.
    """
    hide_frames(error)
    alone = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    # One line is enough here, as another rank prints the same in full.
    if alone and not keeps_frames() and (isinstance(error, PeerFailed) or is_marked(error, "repeated")):
        lines, place = "".join(traceback.format_exception_only(error)).splitlines(), place_of(error)
        # The prefix already names this rank, and the text after RankMismatch may name its place.
        text = "; ".join(map(str.strip, lines)).removesuffix(prefix.strip()).rstrip()
        # This line first and alone, so that the full traceback of the other rank is not buried by those of all.
        print_lines(text if place in text else f"{text}; this rank is{place}", prefix)
        time.sleep(_PATIENCE + min(rank * _TURN, _MOST_TURNS))
    print_lines("".join(traceback.format_exception(error)), prefix)
    if prefix and is_marked(error, "settled"):
        time.sleep(_OTHERS)


def place_of(error: BaseException) -> str:
    """Return " at FILE:LINE in NAME" of the caller's code that raised an error, else of the innermost frame.

    It is in a caller's code, if the error passed any. A caller's own file comes before a library that called this
    package, as torch.
    """
    return callers_place_of(error) or _innermost(list(traceback.walk_tb(error.__traceback__))[-1:])


def callers_place_of(error: BaseException) -> str:
    """Return " at FILE:LINE in NAME" of the innermost caller's code in an error's traceback; "" if there is none.

    The caller's code may lie above the frame that caught the error.
    """
    return _innermost([(entry.tb_frame, entry.tb_lineno) for entry in _callers(error.__traceback__)][::-1])


def place_here() -> str:
    """Return " at FILE:LINE in NAME" of the caller's line that called this package; "" if there is none.

    There is none at the end of the program. In the thread that makes ``wait=False`` calls, it is the line that issued
    the present one.
    """
    if here.place is not None:
        return here.place
    # One by one: each wait=False call comes here, and the first frame mostly ends the search.
    frames = traceback.walk_stack(sys._getframe())
    return _innermost((frame, line) for frame, line in frames if not _is_ours(frame) and not _is_library(frame))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return " at FILE:LINE in NAME" of the first frame outside installed libraries, else of the first; "" for none."""
    first = ""
    for frame, line in frames:
        place = f" at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        if not _is_installed(frame):
            return place
        first = first or place
    return first


def _shorten(error: BaseException) -> None:
    """Cut this package's frames out of an error's traceback, in place, and mark it, unless it is a bug here."""
    first = error.__traceback__
    # An error of the caller's own code, as of an updater, ends in a frame that is kept.
    entries, kept = list(_entries(first)), list(_callers(first))
    if not entries or not (entries[-1] in kept or _is_meant(error, entries[-1])):
        return
    mark(error, "shortened")
    # Python 3.10 raises again with the first entry, whatever __traceback__ is: so that entry is kept in the chain.
    for one, following in pairwise([*dict.fromkeys([first, *kept]), None]):
        one.tb_next = following  # type: ignore[union-attr]
    # Not by assignment: a caller's own exception may forbid that.
    BaseException.with_traceback(error, kept[0] if kept else None)


def _is_meant(error: BaseException, innermost: TracebackType) -> bool:
    """Return whether this package raised or passed on an error on purpose; if not, it is a bug."""
    if isinstance(error, (MPIKVError, OSError, MemoryError)) or is_marked(error, "shortened"):
        return True
    # By the instruction: a documented error is raised by a raise statement, and a bug by any other.
    raises = innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == _RAISE
    return raises and _is_ours(innermost.tb_frame) and not isinstance(error, AssertionError)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback, from the outermost to the innermost."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _callers(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield a traceback's entries without those of this package and of the libraries that it calls. Local."""
    inside = False
    for entry in _entries(trace):
        # As contextlib's frame, through which the end of a ``with`` block enters this package.
        leads_in = entry.tb_next is not None and _is_ours(entry.tb_next.tb_frame)
        inside = _is_ours(entry.tb_frame) or ((inside or leads_in) and _is_library(entry.tb_frame))
        if not inside:
            yield entry


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of this package other than its programs and tests."""
    name = frame.f_globals.get("__name__", "")
    return f"{name}.".startswith(f"{_PACKAGE}.") and (name == _BETWEEN or not name.startswith(_CALLERS))


def _is_installed(frame: FrameType) -> bool:
    """Return whether a frame's file is in a directory of installed packages."""
    return not {"site-packages", "dist-packages"}.isdisjoint(frame.f_code.co_filename.split(os.sep))


def _is_library(frame: FrameType) -> bool:
    """Return whether a frame runs a module of Python's own, or of a library that this package calls."""
    top = frame.f_globals.get("__name__", "").partition(".")[0]
    return top in _LIBRARIES or (top in sys.stdlib_module_names and frame.f_code.co_filename.startswith(_STANDARD))
