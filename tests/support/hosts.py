"""Two hosts on one machine: network namespaces that a cable joins, with host names of their own.

MPI believes it: ranks of different hosts share no memory and talk by TCP. Needs root, ``ip`` and ``unshare``; nothing
is made outside of the two namespaces, whose names hold this process's number.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpikv.cli.launchers import clean

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NETWORK = "10.77.0.0/24"

# Launchers call it as they would call ssh: options, a host, a command.
AGENT = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
case $1 in {first}) name={names[0]} ;; {second}) name={names[1]} ;; *) echo "no host $1" >&2; exit 1 ;; esac
shift
exec {ip} netns exec $name {unshare} --uts bash -c "hostname $name; $*"
"""


@dataclass(frozen=True)
class Hosts:
    """Two hosts."""

    names: tuple[str, str]
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """What makes Open MPI and MPICH reach the other host, by the network that there is."""
        agent = str(self.folder / "agent")
        return {
            "TWO_HOSTS": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PRTE_MCA_plm_ssh_agent": agent,
            "PRTE_MCA_prte_if_include": NETWORK,
            "OMPI_MCA_btl_tcp_if_include": NETWORK,
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": agent,
            "HYDRA_IFACE": "eth0",
            # Else UCX finds the memory that the two hosts share in truth, and a cut has no effect.
            "UCX_TLS": "tcp,self",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": "eth0",
        }

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on the first host; :attr:`output` is what it prints."""
        script = 'hostname "$0"; exec "$@"'
        inside = [tool("unshare"), "--uts", "bash", "-c", script, self.names[0], *command]
        # Not a pipe: what stays behind on the other host would keep it open.
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [tool("ip"), "netns", "exec", self.names[0], *inside],
                env={**clean(os.environ), **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def cut(self) -> None:
        """Pull the cable out."""
        run("ip", "-n", self.names[1], "link", "set", "eth0", "down")

    def slow_down(self, rate: str) -> None:
        """Let the cable carry so much each way, as ``100mbit``.

        Raises:
            OSError: ``tc`` is missing, or the kernel has no token buckets.
        """
        for name in self.names:
            limits = ["rate", rate, "burst", "32kbit", "latency", "400ms"]
            run("ip", "netns", "exec", name, tool("tc"), "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)

    def processes(self) -> list[int]:
        """Return the processes that were started on either host and are still there."""
        mark = f"TWO_HOSTS={self.folder}\0".encode()
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            # Processes end meanwhile.
            with contextlib.suppress(OSError):
                if mark in environment.read_bytes():
                    found.append(int(environment.parent.name))
        return found

    def kill(self) -> None:
        """End what was started on either host."""
        limit, absent = time.monotonic() + 5, 0
        # A process that is just becoming another program has no environment for a moment.
        while absent < 3 and time.monotonic() < limit:
            found = self.processes()
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            absent = 0 if found else absent + 1
            time.sleep(0.05)

    def remove(self) -> None:
        """End what was started on either host, and remove both."""
        self.kill()
        for name in self.names:
            if Path("/run/netns", name).exists():
                # The cable goes with the namespaces.
                run("ip", "netns", "del", name)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make two hosts, and remove them and all their processes, whatever happens.

    Raises:
        OSError: they cannot be made here; the message says why.
    """
    names = (f"mpikv-{os.getpid()}a", f"mpikv-{os.getpid()}b")
    hosts = Hosts(names, folder)
    try:
        connect(names)
        agent = folder / "agent"
        text = AGENT.format(
            names=names, first=ADDRESSES[0], second=ADDRESSES[1], ip=tool("ip"), unshare=tool("unshare")
        )
        agent.write_text(text)
        agent.chmod(0o755)
        yield hosts
    finally:
        hosts.remove()


def connect(names: tuple[str, str]) -> None:
    """Make two namespaces and a cable between them."""
    if os.geteuid():
        raise PermissionError("network namespaces need root")
    tool("unshare")
    ends = [f"mk{os.getpid()}{letter}" for letter in "ab"]
    for name in names:
        run("ip", "netns", "add", name)
    run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        run("ip", "link", "set", end, "netns", name, "name", "eth0")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")


def run(name: str, *arguments: str) -> None:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{name} {' '.join(arguments)}: {done.stderr.strip()}")


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(f"there is no command {name!r} (on Debian: apt install iproute2 util-linux)")
    return found
