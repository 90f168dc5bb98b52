"""How ranks tell ``mpikv run`` of their start and their end, and how it sends them signals.

A rank of its host writes files into the directory that MPIKV_RUN names, and has a process id that means something
there. A rank of another host keeps a connection, at what MPIKV_RUN_AT says, for both.
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

from ..config import run_directory
from .watch import PREFIX

__all__ = ["Report", "Reports", "open_report"]

Report = Callable[[str, str], object]
"""Writes a text under a name."""


_ADDRESS_OF_INTERFACE = 0x8915  # of <linux/sockios.h>
_PATIENCE = 5.0


class Reports:
    """The connections of ranks on other hosts. What they report becomes a file, as if they were on this one."""

    def __init__(self, directory: Path) -> None:
        token, lines = os.urandom(16).hex(), set[socket.socket]()

        class Line(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                if self.rfile.readline() != f"{token}\n".encode():
                    return
                self.wfile.write(b"0\n")
                lines.add(self.connection)
                try:
                    for line in self.rfile:
                        name, text = json.loads(line)
                        if re.fullmatch(r"[a-z]*\.?\d+", name):
                            # Its process id means nothing here, even if the hosts have the same name.
                            (directory / name).write_text("" if name.startswith(PREFIX) else text)
                finally:
                    lines.discard(self.connection)

        self._lines = lines
        # A rank of another host takes one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        self._server = socketserver.ThreadingTCPServer(("", 0), Line)
        self._server.daemon_threads, self._server.block_on_close = True, False
        threading.Thread(target=self._server.serve_forever, args=[0.1], daemon=True).start()
        # The ranks' host first: its name leads there in most clusters, and not all of its networks do.
        self.address = ",".join(map(str, [token, self._server.server_address[1], platform.node(), *_addresses()]))

    def send(self, number: int) -> int:
        """Send a signal to all of these ranks, and return how many they are."""
        for line in (lines := list(self._lines)):
            with contextlib.suppress(OSError):  # it ended meanwhile
                line.sendall(f"{number}\n".encode())
        return len(lines)

    def wait(self) -> None:
        """Take what ranks that have ended still have on the way."""
        limit = time.monotonic() + _PATIENCE
        while self._lines and time.monotonic() < limit:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _addresses() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def open_report(environ: Mapping[str, str]) -> Report:
    """Return how this rank reports to ``mpikv run``; it does nothing where another launcher started it.

    Called once by each rank, before its script. From then on signals come from other hosts, too.
    """
    token, port, *places = (environ.get("MPIKV_RUN_AT") or ",").split(",")
    directory = run_directory(environ)
    if directory is not None and (not places or places[0] == platform.node()):
        return lambda name, text: (directory / name).write_text(text)
    if not places:
        return lambda name, text: None
    for place in places:
        with contextlib.suppress(OSError):
            line = socket.create_connection((place, int(port)), _PATIENCE)
            line.sendall(f"{token}\n".encode())
            # Another program may listen there, on a host that this one takes for that of mpikv run.
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


def _take_signals(line: socket.socket) -> None:
    with line.makefile() as numbers, contextlib.suppress(OSError):  # the network is cut
        for number in numbers:
            os.kill(os.getpid(), int(number))
