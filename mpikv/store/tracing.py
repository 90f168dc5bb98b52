"""When each call of a rank began and ended, and how long it waited for the others, in the form of Chrome's traces.

A store is traced by putting a clock around its doors, on that object alone: one that is not traced has none. Each rank
writes a file of its own, an event a line, as it happens: of a job that is killed, or that waits for ever, all is there
up to that moment. ``mpikv trace`` puts the files of all ranks into one.

Source of the form: Trace Event Format, https://github.com/catapult-project/catapult (tracing).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..cluster.calls import Call
from ..cluster.environment import launch_of
from ..cluster.printing import log
from ..errors import ConfigError
from .kvstore import KVStore

__all__ = ["SUFFIX", "Tracer", "find_tracer"]

SUFFIX = ".mpikv-trace"
"""Ends the name of a rank's file."""


def find_tracer(directory: str) -> Tracer:
    """Return the tracer of this process for a directory. Local.

    Raises:
        ConfigError: no file can be made there.
    """
    try:
        return _tracer(directory, os.getpid())
    except OSError as error:
        raise ConfigError(f"MPIKV_TRACE={directory!r}: no file can be made there ({error})") from error


@cache
def _tracer(directory: str, process: int) -> Tracer:
    """Return the one of this process; a forked child has its own."""
    return Tracer(Path(directory), process)


class Tracer:
    """Writes the events of one process."""

    def __init__(self, directory: Path, process: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._host = os.uname().nodename
        # Two containers may have one name of a host and one number of a process.
        name = f"{self._host}.{process}.{os.urandom(4).hex()}{SUFFIX}"
        # Without a buffer: each line is with the system when a killed process is gone.
        self._file = (directory / name).open("xb", buffering=0)
        self._works = True
        self._lock, self._stores, self._here = threading.Lock(), 0, threading.local()
        launch = launch_of()
        self._launched = None if launch is None else (launch.rank, launch.size)

    def watch(self, store: KVStore) -> None:
        """Put a clock around the calls of a store, and around their waiting for each other."""
        if not self._stores:
            # A store may be of some ranks only, which count otherwise.
            rank, size = self._launched or (store.rank, store.size)
            # Clocks of one host's processes agree; those of two hosts differ by what the wall clocks say.
            ahead = time.time_ns() - time.monotonic_ns()
            self._write({"ph": "mpikv", "rank": rank, "size": size, "host": self._host, "ahead": ahead})
        inner: Any = store
        inner._collective = self._call(inner._collective, f"{store.type} #{self._stores}")
        inner._agreement.begin = self._wait(inner._agreement.begin, store)
        self._stores += 1

    def _call(self, door: Callable[..., Any], name: str) -> Callable[..., Any]:
        def collective(verb: str, *arguments: Any) -> Any:
            # An updater may call another store meanwhile.
            outer, self._here.said = getattr(self._here, "said", {}), {}
            self._event("B", verb, {"store": name})
            error = ""
            try:
                return door(verb, *arguments)
            except BaseException as raised:
                error = type(raised).__name__
                raise
            finally:
                self._event("E", verb, {**self._here.said, **({"error": error} if error else {})})
                self._here.said = outer

        return collective

    def _wait(self, begin: Callable[..., None], store: KVStore) -> Callable[..., None]:
        table = store._exchange.values.table

        def waiting(call: Call, *arguments: Any) -> None:
            said: dict[str, Any] = {"keys": call.label}
            if call.keys:
                said["bytes"] = sum(table[key].value.nbytes for key in call.keys if key in table)
            self._event("B", "wait", said)
            start = time.monotonic_ns()
            try:
                begin(call, *arguments)
            finally:
                waited = (time.monotonic_ns() - start) / 1000
                self._event("E", "wait", {})
                self._here.said = {**said, "waited_us": waited}

        return waiting

    def _event(self, phase: str, name: str, arguments: dict[str, Any]) -> None:
        """Write an event that begins or ends now, in nanoseconds of this host's clock."""
        thread = threading.get_native_id()
        self._write({"ph": phase, "name": name, "ts": time.monotonic_ns(), "tid": thread, "args": arguments})

    def _write(self, event: dict[str, Any]) -> None:
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
