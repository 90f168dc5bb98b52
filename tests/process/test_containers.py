"""Jobs in what containers make of a host: a call that is refused, and little shared memory."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import launch, mpi, why_no_mpi

from mpikv.cli.launchers import ROOT_VARIABLES, clean

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.deadline(120), pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())]

PROGRAM = """\
import sys
if "first" in sys.argv:
    from mpi4py import MPI
import numpy as np
import mpikv
kv = mpikv.create(transport="mpi" if "mpi" in sys.argv else "auto", timeout=20)
kv.init("w", np.zeros(1 << 18))
kv.push("w", np.ones(1 << 18))
assert kv.pull("w")[-1] == kv.size
print("summed by", kv.transport)
"""

# A filter of system calls, in the language of the kernel: load the call's number; is it this one? allow; refuse.
REFUSING = """\
import ctypes, os, struct, sys
lines = (0x20, 0, 0, 0), (0x15, 1, 0, int(sys.argv[1])), (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
"""
READV = {"x86_64": "310", "aarch64": "270"}.get(platform.machine(), "")
_MOUNT = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
SMALL = ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "_"]
# MPI would look for the other rank's memory, too.
APART = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "OMPI_MCA_btl": "tcp,self"}


def run(tmp_path: Path, inside: list[str], way: str, *words: str) -> tuple[int, str]:
    """Return how a job of two ranks ends inside of something, and what it prints."""
    tried = subprocess.run([*inside, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel refuses it: {tried.stderr.strip()}")
    (tmp_path / "train.py").write_text(PROGRAM)
    program = [str(tmp_path / "train.py"), *words]
    command, environ = launch(2, [sys.executable, *program])
    if way == "mpikv run":
        command, environ = [sys.executable, "-m", "mpikv", "run", "-n", "2", *program], clean(os.environ)
    environ = {name: text for name, text in environ.items() if not name.startswith("MPIR_CVAR")}
    environ |= {"PYTHONPATH": str(ROOT)} | dict.fromkeys(ROOT_VARIABLES, "1")
    if way == "each rank":
        inside, command, environ = [], launch(2, [*inside, sys.executable, *program])[0], environ | APART
    ran = subprocess.run([*inside, *command], env=environ, capture_output=True, text=True, timeout=110, check=False)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.skipif(not READV, reason="the number of process_vm_readv is not known for this processor")
@pytest.mark.parametrize(("way", "words"), [("mpikv run", ("mpi", "first")), ("mpiexec", ("mpi",))])
def test_large_messages_where_no_process_may_read_another(tmp_path: Path, way: str, words: tuple[str, ...]) -> None:
    status, printed = run(tmp_path, [sys.executable, "-c", REFUSING, READV], way, *words)
    assert (status, printed.count("summed"), "process_vm_readv" in printed) == (0, 2, False), printed


@pytest.mark.skipif(not READV, reason="the number of process_vm_readv is not known for this processor")
def test_a_store_warns_where_mpi_has_started_before_it(tmp_path: Path) -> None:
    _, printed = run(tmp_path, [sys.executable, "-c", REFUSING, READV], "mpiexec", "first")
    assert ("MPIR_CVAR_CH4_CMA_ENABLE=0" in printed) == (mpi()[0].kind == "MPICH"), printed
    assert printed.count("summed") == 2, printed


@pytest.mark.parametrize("way", ["mpikv run", "mpiexec"])
def test_little_shared_memory_is_named(tmp_path: Path, way: str) -> None:
    status, printed = run(tmp_path, SMALL, way)
    assert status, printed
    assert "--shm-size" in printed
    assert "SIG" not in printed


def test_ranks_with_other_shared_memory_are_on_other_hosts(tmp_path: Path) -> None:
    """In one boot, as containers of one machine."""
    status, printed = run(tmp_path, [part.replace("size=1m", "size=1g") for part in SMALL], "each rank")
    assert (status, printed.count("summed by hierarchical")) == (0, 2), printed
