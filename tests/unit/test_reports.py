"""Reports of ranks on other hosts whose connections end in an unusual way."""

import json
import resource
import shutil
import socket
import struct
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.launching import wait

from mpikv.cli.reports import Reports, open_report


def connect(reports: Reports, file: Path) -> socket.socket:
    """Return the connection of a rank that has reported its begin."""
    token, port, *_ = reports.address.split(",")
    line = socket.create_connection(("127.0.0.1", int(port)), 5)
    line.sendall(f"{token}\n".encode())
    assert line.recv(2) == b"0\n"
    line.sendall(json.dumps([file.name, "1"]).encode() + b"\n")
    assert wait(file.exists, 5)
    return line


def reset(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def report_late(line: socket.socket) -> None:
    line.sendall(json.dumps(["0", "0"]).encode() + b"\n")


@pytest.mark.parametrize("end", [reset, report_late])
def test_a_rank_that_outlives_the_job_leaves_no_traceback_and_no_thread(tmp_path, capfd, end) -> None:
    threads, began, lost = threading.active_count(), time.time_ns(), tmp_path / "lost.1"
    with closing(Reports(tmp_path, 2)) as reports:
        line = connect(reports, tmp_path / "rank.0")
        connect(reports, tmp_path / "rank.1").close()
        assert wait(lost.exists, 5)
        assert began < int(lost.read_text()) < time.time_ns()
    shutil.rmtree(tmp_path)
    end(line)
    line.close()
    assert wait(lambda: threading.active_count() <= threads, 5)
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
