"""When each call of a rank began and ended, and how long it waited for the others, in the form of Chrome's traces.

A traced store is of a subclass of its own, so other stores pay nothing. Each rank writes a file of its own, an event a
line, as it happens: of a job that is killed, or that waits for ever, all is there up to that moment. ``mpikv trace``
puts the files of all ranks into one.

Source of the form: Trace Event Format, https://github.com/catapult-project/catapult (tracing).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ..cluster.calls import Call, PreparedCall
from ..cluster.environment import launch_of
from ..cluster.printing import log
from ..errors import ConfigError
from .kvstore import KVStore

SUFFIX = ".mpikv-trace"
"""Ends the name of a rank's file."""


def open_tracer(directory: str) -> Tracer:
    """Return this process's tracer for a directory; the first call makes the directory and a file there. Local.

    Raises:
        ConfigError: no file can be made there.
    """
    try:
        return _tracer(Path(directory), os.getpid())
    except OSError as error:
        raise ConfigError(f"MPIKV_TRACE={directory!r}: no file can be made there ({error})") from error


class Tracer:
    """Writes the events of one process."""

    def __init__(self, directory: Path, process: int) -> None:
        """Make the directory, and open a new file in it, named by host and process. Local."""
        directory.mkdir(parents=True, exist_ok=True)
        self._host = os.uname().nodename
        # Two containers may have one name of a host and one number of a process.
        name = f"{self._host}.{process}.{os.urandom(4).hex()}{SUFFIX}"
        # Without a buffer: each line is with the system when a killed process is gone.
        self._file = (directory / name).open("xb", buffering=0)
        self._works = True
        self._lock, self._stores = threading.Lock(), 0

    def name_store(self, store: KVStore) -> str:
        """Count a store, return its name in traces; the first call writes the file's head. Raises nothing. Local."""
        if not self._stores:
            # A store may be of some ranks only, which count otherwise.
            ranks = launch_of() or store
            # Clocks of one host's processes agree; those of two hosts differ by what the wall clocks say.
            ahead = time.time_ns() - time.monotonic_ns()
            self._write({"ph": "mpikv", "rank": ranks.rank, "size": ranks.size, "host": self._host, "ahead": ahead})
        self._stores += 1
        return f"{store.type} #{self._stores - 1}"

    @contextmanager
    def event(self, name: str, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """In a with block: write its begin to the file, and its end, with the yielded dict and any error. Local."""
        self._mark("B", name, about)
        known: dict[str, Any] = {}
        try:
            yield known
        except BaseException as error:
            known["error"] = type(error).__name__
            raise
        finally:
            self._mark("E", name, known)

    def _mark(self, phase: str, name: str, about: dict[str, Any]) -> None:
        """Write an event to the file, with this thread and the present time: "B" for a begin, "E" for an end. Local."""
        thread = threading.get_native_id()
        self._write({"ph": phase, "name": name, "ts": time.monotonic_ns(), "tid": thread, "args": about})

    def _write(self, event: dict[str, Any]) -> None:
        """Append an event to the file; if that fails, log it and write nothing more. Any thread. Local."""
        # A line at once, unbuffered: lines of two threads must not mix.
        line = f"{json.dumps(event)}\n".encode()
        with self._lock:
            if not self._works:
                return
            try:
                if self._file.write(line) < len(line):
                    raise OSError("only a part of a line could be written")
            except OSError as error:
                # Raised here, on one rank, it would leave the others waiting.
                self._works = False
                log("tracing of calls has stopped: %s", error)


# For each directory the one of this process; a forked child has its own.
_tracer = cache(Tracer)


def traced(kind: type[KVStore], tracer: Tracer) -> type[KVStore]:
    """Return a subclass of a store's class that writes each call, and its wait for ranks, to a tracer. Local."""

    # The kind is known at run time alone, and mypy wants a base that it can read.
    class Traced(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *parts: Any, **options: Any) -> None:
            super().__init__(*parts, **options)
            self._traced_as = tracer.name_store(self)

        def _collective(self, verb: str, prepare: Callable[..., PreparedCall], *arguments: Any) -> Any:
            """Make a call as any store does; write the call, and its wait for other ranks, to the file. Collective."""
            with tracer.event(verb, {"store": self._traced_as}) as known, ExitStack() as waiting:

                def timed(*given: Any) -> PreparedCall:
                    """Prepare the call; write the begin of the wait for ranks. The returned run writes its end.
                    Local.
                    """
                    call, run = prepare(*given)
                    known.update(self._facts_of(call))
                    # The wait for the other ranks lies between the preparation of a call and its run.
                    waiting.enter_context(tracer.event("wait", known.copy()))
                    start = time.monotonic_ns()
                    waiting.callback(lambda: known.update(waited_us=(time.monotonic_ns() - start) / 1000))

                    def run_after_wait() -> Any:
                        """Write the end of the wait; run the call and return its result. Collective."""
                        waiting.close()
                        return run()

                    return call, run_after_wait

                return super()._collective(verb, timed, *arguments)

        def _facts_of(self, call: Call) -> dict[str, Any]:
            """Return what an event says of a call: the keys as a text, and the bytes of their values. Local."""
            table = self._exchange.values.table
            nbytes = sum(table[key].value.nbytes for key in call.keys if key in table)
            return {"keys": call.label, **({"bytes": nbytes} if call.keys else {})}

    return Traced
