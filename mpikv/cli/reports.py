"""Reports of ranks to ``mpikv run`` about their start and end, and signals back to them.

A rank on the same host writes files into the directory MPIKV_RUN, and ``mpikv run`` can signal its process id. A rank
on another host uses a connection to the address in MPIKV_RUN_AT for both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..cluster.environment import run_directory
from .watch import PREFIX

Report = Callable[[str, str], object]
"""Writes a text under a name."""

LOST = "lost."
"""Prefix of a file for a rank on another host, with the time in ns at which its connection ended."""

_ADDRESS_OF_INTERFACE = 0x8915  # of <linux/sockios.h>
_CONNECTION_TIME = 5.0
"""Seconds for a connection, and for the last reports."""
_OTHER_FILES = 256
"""More than this process opens beside the connections."""


class Reports:
    """The connections of ranks on other hosts. Each report becomes a file, as if the rank were on this host."""

    def __init__(self, directory: Path, ranks: int) -> None:
        token, lines = os.urandom(16).hex(), set[socket.socket]()
        closed, writing = threading.Event(), threading.Lock()

        def write(name: str, text: str) -> None:
            # A late report must not write while the directory is removed.
            with writing:
                if not closed.is_set():
                    _write(directory / name, text)

        class Line(socketserver.StreamRequestHandler):
            rank = ""

            def handle(self) -> None:
                if self.rfile.readline() != f"{token}\n".encode():
                    return
                self.wfile.write(b"0\n")
                lines.add(self.connection)
                try:
                    # A killed rank resets its connection: socketserver would print a traceback.
                    with contextlib.suppress(ConnectionError):
                        self._write_reports()
                finally:
                    if self.rank:
                        # A file's own time lies up to a tick of the kernel behind the clock of other deaths.
                        write(f"{LOST}{self.rank}", str(time.time_ns()))
                    # Only now: wait() takes a connection without a line for one that has reported all.
                    lines.discard(self.connection)

            def _write_reports(self) -> None:
                for line in self.rfile:
                    name, text = json.loads(line)
                    if re.fullmatch(r"[a-z]*\.?\d+", name):
                        self.rank = name.rpartition(".")[2]
                        # A process id of another host means nothing here, even if the hosts have the same name.
                        write(name, "" if name.startswith(PREFIX) else text)

        self._lines, self._closed, self._writing = lines, closed, writing
        # Each rank on another host takes one file descriptor. Children inherit the limit: no higher than needed.
        limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and limit < (needed := ranks + _OTHER_FILES):
            needed = needed if highest == resource.RLIM_INFINITY else min(needed, highest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, highest))
        self._server = socketserver.ThreadingTCPServer(("", 0), Line)
        self._server.daemon_threads, self._server.block_on_close = True, False
        threading.Thread(target=self._server.serve_forever, args=[0.1], daemon=True).start()
        # The host's name first: in most clusters it is reachable, while not all of the host's networks are.
        self.address = ",".join(map(str, [token, self._server.server_address[1], platform.node(), *_addresses()]))

    def send(self, number: int) -> int:
        """Send a signal to all these ranks, and return their number."""
        for line in (lines := list(self._lines)):
            with contextlib.suppress(OSError):  # it ended meanwhile
                line.sendall(f"{number}\n".encode())
        return len(lines)

    def wait(self) -> None:
        """Receive the last reports of ranks that have ended."""
        limit = time.monotonic() + _CONNECTION_TIME
        while self._lines and time.monotonic() < limit:
            time.sleep(0.01)

    def close(self) -> None:
        """Take no more reports. Late ones write nothing; the thread of a connection ends with it."""
        self._server.shutdown()
        self._server.server_close()
        with self._writing:
            self._closed.set()


def _addresses() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def open_report(environ: Mapping[str, str]) -> Report:
    """Return this rank's function to report to ``mpikv run``; it does nothing under another launcher.

    Each rank calls this once, before its script. From then on it also takes signals from other hosts.
    """
    token, port, *places = (environ.get("MPIKV_RUN_AT") or ",").split(",")
    directory = run_directory(environ)
    if directory is not None and (not places or places[0] == platform.node()):
        return lambda name, text: _write(directory / name, text)
    if not places:
        return lambda name, text: None
    for place in places:
        with contextlib.suppress(OSError):
            line = socket.create_connection((place, int(port)), _CONNECTION_TIME)
            line.sendall(f"{token}\n".encode())
            # Another program may listen there, on a host that this one mistakes for that of mpikv run.
            if line.recv(2) == b"0\n":
                line.settimeout(None)
                threading.Thread(target=_take_signals, args=[line], daemon=True).start()
                return lambda name, text: line.sendall(json.dumps([name, text]).encode() + b"\n")
            line.close()
    print(
        f"mpikv run cannot be reached from {platform.node()} at {', '.join(places)}, port {port}: it passes no signal "
        "on to this rank, and takes its end for a failure",
        file=sys.stderr,
    )
    return lambda name, text: None


def _write(file: Path, text: str) -> None:
    """Write a file that readers see whole or not at all: the launcher may kill this process between two steps."""
    part = file.with_name("." + file.name)
    part.write_text(text)
    part.replace(file)


def _take_signals(line: socket.socket) -> None:
    with line.makefile() as numbers, contextlib.suppress(OSError):  # the network is cut
        for number in numbers:
            os.kill(os.getpid(), int(number))
