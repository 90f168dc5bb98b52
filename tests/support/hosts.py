"""Several hosts on one machine: each has a network, a name, a /dev/shm, IPC and a boot number of its own.

MPI believes it: ranks of different hosts share no memory and talk by TCP. Needs root, ``ip``, ``nsenter`` and
``unshare``. Nothing is made outside of the namespaces, and their names hold this process's number. All hosts number
processes together: a launcher on one of them could not enter the process namespace of another.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

from mpikv.cli.launchers import clean

from .processes import find_processes

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0.0/24"
ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 9))
SWITCH = Path(__file__).with_name("switch.py")

# Launchers call it as they would call ssh: options, a host, a command.
AGENT = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
case $1 in {cases} *) echo "no host $1" >&2; exit 1 ;; esac
shift
exec {nsenter} -t $process -n -u -m -i --wd="$PWD" bash -c "$*"
"""
# The first process of a host.
KEEPER = """
hostname "$0" && mount -t tmpfs -o size=4g tmpfs /dev/shm && mount --bind "$1" /proc/sys/kernel/random/boot_id || exit
echo ready
exec cat  # until the pipe closes
"""


class Hosts:
    """Hosts, and the cables between them."""

    def __init__(self, folder: Path, count: int, rate: str, delay: float, loss: float) -> None:
        self.folder, self.output = folder, folder / "output"
        self.names = tuple(f"mpikv-{os.getpid()}{letter}" for letter in "abcdefgh"[:count])
        self._rate, self._delay, self._loss = rate, delay, loss
        self._bridge, self._helpers = f"{self.names[0]}-bridge", list[subprocess.Popen[str]]()
        self.keepers: list[int] = []
        """The first process of each."""

    @property
    def variables(self) -> dict[str, str]:
        """What makes Open MPI, MPICH and gloo reach the other hosts, by the network that there is."""
        agent = str(self.folder / "agent")
        return {
            "VIRTUAL_HOSTS": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "GLOO_SOCKET_IFNAME": "eth0",
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
            # Else UCX finds the memory that the hosts share in truth, and a cut has no effect.
            "UCX_TLS": "tcp,self",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": "eth0",
        }

    def start(self, ranks: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a job by ``mpikv run`` on the first host, with equal numbers of ranks on all; :attr:`output` is what it
        prints.
        """
        places = ",".join(f"{address}:{ranks // len(self.names)}" for address in ADDRESSES[: len(self.names)])
        command = [sys.executable, "-m", "mpikv", "run", "-n", str(ranks), "--hosts", places]
        return self.run_on_first([*command, *arguments])

    def run_on_first(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on the first host."""
        enter = [tool("nsenter"), "-t", str(self.keepers[0]), "-n", "-u", "-m", "-i", f"--wd={os.getcwd()}"]
        # Not a pipe: what stays behind on another host would keep it open.
        with self.output.open("wb") as output:
            variables = {**clean(os.environ), **self.variables}
            return subprocess.Popen([*enter, *command], env=variables, stdin=DEVNULL, stdout=output, stderr=output)

    def cut(self, state: str = "down") -> None:
        """Pull the cable of the second host out; with "up", plug it in again."""
        run("ip", "-n", self.names[1], "link", "set", "eth0", state)

    def make(self) -> None:
        """Make the namespaces, the cables between them, and the first process of each."""
        if os.geteuid():
            raise PermissionError("network namespaces need root")
        ends = [f"mk{os.getpid()}{name[-1]}" for name in self.names]
        for name in (*self.names, self._bridge):
            run("ip", "netns", "add", name)
        in_user_space = self._delay or self._loss
        if in_user_space:
            numbers = [str(number) for number in (bits_per_second(self._rate), self._delay, self._loss)]
            self._help([sys.executable, str(SWITCH), *numbers, *ends])
        else:
            run("ip", "-n", self._bridge, "link", "add", "bridge", "up", "type", "bridge")
            for end in ends:
                run("ip", "link", "add", end, "type", "veth", "peer", "name", end, "netns", self._bridge)
                run("ip", "-n", self._bridge, "link", "set", end, "master", "bridge", "up")
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=False):
            run("ip", "link", "set", end, "netns", name, "name", "eth0")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", name, "link", "set", device, "up")
            if self._rate and not in_user_space:
                for namespace, device in (name, "eth0"), (self._bridge, end):
                    limits = ["rate", self._rate, "burst", "256kb", "latency", "50ms"]
                    shape = [tool("tc"), "qdisc", "add", "dev", device, "root", "tbf", *limits]
                    run("ip", "netns", "exec", namespace, *shape)
            boot = self.folder / f"{name}.boot"
            boot.write_text(f"{uuid.uuid4()}\n")
            apart = [tool("unshare"), "--uts", "--mount", "--ipc", "--propagation", "private"]
            command = [tool("ip"), "netns", "exec", name, *apart, "bash", "-c", KEEPER, name, str(boot)]
            self.keepers.append(self._help(command))
        agent = self.folder / "agent"
        known = zip(ADDRESSES, self.keepers, strict=False)
        cases = " ".join(f"{address}) process={process} ;;" for address, process in known)
        agent.write_text(AGENT.format(cases=cases, nsenter=tool("nsenter")))
        agent.chmod(0o755)

    def _help(self, command: Sequence[str]) -> int:
        """Start a process that says when it is ready, and ends with this one; return its number."""
        helper = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True)
        self._helpers.append(helper)
        assert helper.stdout is not None
        if (said := helper.stdout.readline()) != "ready\n":
            raise OSError(f"{command[0]}: {said}{helper.stdout.read()}".strip())
        return helper.pid

    def processes(self, host: int | None = None) -> list[int]:
        """Return the processes that were started on a host, or on any, and are still there."""
        found = find_processes(f"VIRTUAL_HOSTS={self.folder}\0")
        if host is None:
            return found
        there = run("ip", "netns", "pids", self.names[host]).split()
        return [process for process in found if str(process) in there]

    def kill(self, host: int | None = None) -> None:
        """End what was started on a host, or on any."""
        limit, absent = time.monotonic() + 5, 0
        # A process that is just becoming another program has no environment for a moment.
        while absent < 3 and time.monotonic() < limit:
            found = self.processes(host)
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            absent = 0 if found else absent + 1
            time.sleep(0.05)

    def remove(self) -> None:
        """End what was started on any host, and remove all."""
        self.kill()
        for helper in self._helpers:
            helper.communicate()
        for name in (*self.names, self._bridge):
            if Path("/run/netns", name).exists():
                # Its ends of cables go with a namespace.
                run("ip", "netns", "del", name)


@contextlib.contextmanager
def virtual_hosts(folder: Path, count: int = 2, rate: str = "", delay: float = 0, loss: float = 0) -> Iterator[Hosts]:
    """Make hosts, and remove them and all their processes, whatever happens.

    A cable carries ``rate`` each way, as ``100mbit``; "": what the machine can. A packet takes ``delay`` seconds to
    another host, and is lost with the probability ``loss``.

    Raises:
        OSError: they cannot be made here; the message says why.
    """
    hosts = Hosts(folder, count, rate, delay, loss)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def bits_per_second(rate: str) -> float:
    """Return the number of a rate as ``tc`` writes it; 0 for "".

    >>> bits_per_second("1.5gbit"), bits_per_second("")
    (1500000000.0, 0.0)
    """
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]] if rate else 0.0


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{name} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(f"there is no command {name!r} (on Debian: apt install iproute2 util-linux)")
    return found
