"""Tracebacks without the frames of this package, and how a rank prints the error that ends it.

An error is to point at the caller's line. So where it leaves the package, the frames of the package, and of the
libraries that it calls, are taken out of its traceback. Those of the caller's own functions stay, as an updater's. An
error that nobody meant to raise is a bug here and keeps all frames.
"""

from __future__ import annotations

import dis
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from ..config import keeps_frames
from ..errors import MPIKVError, PeerFailed, is_repeated, is_settled, is_shortened, mark_shortened
from .printing import print_lines

__all__ = ["hidden_from_pytest", "hide_frames", "hiding_frames", "place_here", "place_of", "print_last"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PACKAGE = __name__.partition(".")[0]
# Programs, and tests, which use the rest as a caller does.
_CALLERS = (f"{_PACKAGE}.cli", f"{_PACKAGE}.testing")
# Between a simulated rank's program and the store that it calls.
_BETWEEN = f"{_PACKAGE}.testing.simulation.calls"
_LIBRARIES = ("cupy", "ml_dtypes", "mpi4py", "numba", "numpy")
# Of Python's own modules, of which some are frozen. By their names a caller's could be taken for them.
_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_RAISE = dis.opmap["RAISE_VARARGS"]
# Seconds in which the rank that prints an error in full can end the job; seconds more for each rank that comes before
# this one, and at most.
_PATIENCE, _TURN, _MOST_TURNS = 0.5, 0.02, 1.0
# Seconds that it leaves the others, which raise the same error at this moment, for their lines.
_OTHERS = 0.2


def hide_frames(error: BaseException) -> None:
    """Take the frames of this package out of the traceback of an error, and of those that it came from.

    The bare ``raise`` that follows adds no frame of its own, from Python 3.11 on.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [] if keeps_frames() else [error]
    while chain:
        if (one := chain.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            _shorten(one)
            chain += [one.__cause__, one.__context__]


def hiding_frames(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function that leaves no frame of this package in the tracebacks of its errors."""

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return function(*arguments, **options)
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def hidden_from_pytest(raised: Any) -> bool:
    """Return whether pytest is to leave out frames of a module whose ``__tracebackhide__`` this is."""
    return is_shortened(raised.value)


def print_last(error: BaseException, prefix: str, rank: int) -> None:
    """Print the error that ends a rank, and thereby the job.

    Where another rank has raised it, too, one line comes first. The rest follows if no other rank has ended the job
    when it is this one's turn.
    """
    hide_frames(error)
    if _is_repeated(error):
        # The line begins with this rank.
        print_lines(f"{_only(error).removesuffix(prefix.strip()).rstrip()}{place_of(error)}", prefix)
        time.sleep(_PATIENCE + min(rank * _TURN, _MOST_TURNS))
    print_lines("".join(traceback.format_exception(error)), prefix)
    if prefix and is_settled(error):
        time.sleep(_OTHERS)


def place_of(error: BaseException) -> str:
    """Return where an error was raised, for the end of a line: in a caller's code, if it passed any, and rather there
    than in a library from which the caller has come here, as torch.
    """
    entries = list(_callers(error.__traceback__)) or list(_entries(error.__traceback__))[-1:]
    return _innermost([(entry.tb_frame, entry.tb_lineno) for entry in reversed(entries)])


def place_here() -> str:
    """Return where the caller's code is that has called this package, for the end of a line; nothing where none has, as
    at the end of the program.
    """
    frames = traceback.walk_stack(None)
    return _innermost([(frame, line) for frame, line in frames if not _is_ours(frame) and not _is_library(frame)])


def _innermost(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return the place of the first of these frames that is of no installed library, if any is."""
    own = [(frame, line) for frame, line in frames if not _is_installed(frame)] or frames
    return f" at {own[0][0].f_code.co_filename}:{own[0][1]} in {own[0][0].f_code.co_name}" if own else ""


def _is_repeated(error: BaseException) -> bool:
    """Return whether one line says what is known here, and another rank has more to show."""
    alone = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    return alone and not keeps_frames() and (isinstance(error, PeerFailed) or is_repeated(error))


def _only(error: BaseException) -> str:
    return "; ".join(line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines())


def _shorten(error: BaseException) -> None:
    first = error.__traceback__
    entries, kept = list(_entries(first)), list(_callers(first))
    if not entries or not (entries[-1] in kept or _is_meant(error, entries[-1])):
        return
    mark_shortened(error)
    # Python 3.10 raises again with the first entry, whatever the error has.
    for one, following in pairwise([*dict.fromkeys([first, *kept]), None]):
        one.tb_next = following  # type: ignore[union-attr]
    # Not by assignment, which an error of the caller's own may forbid.
    BaseException.with_traceback(error, kept[0] if kept else None)


def _is_meant(error: BaseException, innermost: TracebackType) -> bool:
    """Return whether this package raised an error on purpose, or passes one on of which its callers are told."""
    if isinstance(error, (MPIKVError, OSError, MemoryError)) or is_shortened(error):
        return True
    raises = innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == _RAISE
    return raises and _is_ours(innermost.tb_frame) and not isinstance(error, AssertionError)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _callers(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of callers, and of functions of theirs that this package calls."""
    inside = False
    for entry in _entries(trace):
        # Such as contextlib's, by which the end of a ``with`` block comes here.
        leads_in = entry.tb_next is not None and _is_ours(entry.tb_next.tb_frame)
        inside = _is_ours(entry.tb_frame) or ((inside or leads_in) and _is_library(entry.tb_frame))
        if not inside:
            yield entry


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return f"{name}.".startswith(f"{_PACKAGE}.") and (name == _BETWEEN or not name.startswith(_CALLERS))


def _is_installed(frame: FrameType) -> bool:
    return bool({"site-packages", "dist-packages"} & {*Path(frame.f_code.co_filename).parts})


def _is_library(frame: FrameType) -> bool:
    top = frame.f_globals.get("__name__", "").partition(".")[0]
    return top in _LIBRARIES or (top in sys.stdlib_module_names and frame.f_code.co_filename.startswith(_STANDARD))
