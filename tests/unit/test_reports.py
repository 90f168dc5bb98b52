"""Reports of ranks on other hosts whose connections end in an unusual way."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import struct
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from mpikv.cli.reports import Reports, open_report


def connect(reports: Reports) -> socket.socket:
    token, port, *_ = reports.address.split(",")
    line = socket.create_connection(("127.0.0.1", int(port)), 5)
    line.sendall(f"{token}\n".encode())
    assert line.recv(2) == b"0\n"
    return line


def reset(line: socket.socket, folder: Any) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def report_late(line: socket.socket, folder: Any) -> None:
    shutil.rmtree(folder)
    line.sendall(json.dumps(["1", "0"]).encode() + b"\n")


@pytest.mark.parametrize("end", [reset, report_late])
def test_no_traceback_of_a_rank_that_is_killed_or_late(tmp_path, capfd, end) -> None:
    with closing(Reports(tmp_path, 2)) as reports:
        line, threads = connect(reports), threading.active_count()
        end(line, tmp_path)
        line.close()
        limit = time.monotonic() + 5
        while threading.active_count() >= threads and time.monotonic() < limit:
            time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_a_rank_that_ends_within_its_report_has_reported_nothing(tmp_path) -> None:
    report = open_report({"MPIKV_RUN": str(tmp_path)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The write fails after the file has been made: what a kill at that point leaves behind.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            report("2", "0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "2").exists()
