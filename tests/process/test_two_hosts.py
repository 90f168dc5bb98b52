"""A job on two hosts: the transport and the results are right, and no cut or death leaves a rank waiting."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import ROOT, Hosts, virtual_hosts
from support.launching import wait, why_no_mpi

from mpikv.cli.launchers import clean

VALUES = """
import platform
import numpy as np
import mpikv

for placement in ("auto", "root", "sharded", "replicated"):
    for updater in ("none", "function", "sgd"):
        if updater == "function" and placement in ("sharded", "replicated"):
            continue
        with mpikv.create(placement=placement, timeout=20, bucket_bytes=1 << 16) as kv:
            assert (kv.transport, kv.size) == ("hierarchical", 4), repr(kv)
            kv.init({"large": np.zeros(50_000), "half": np.zeros(7, np.float16)})
            if updater == "function":
                kv.set_updater(lambda key, given, stored: np.copyto(stored, stored + 2 * given))
            elif updater == "sgd":
                kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
            value = momentum = 0.0
            for step in range(3):
                mine, total = float(step + kv.rank), 4 * step + 6
                kv.push({"large": np.full(50_000, mine), "half": np.full(7, mine, np.float16)})
                momentum = 0.5 * momentum - 0.5 * total
                value = {"none": total, "function": value + 2 * total, "sgd": value + momentum}[updater]
                for pulled in kv.pull(["large", "half"]):
                    assert (pulled == value).all(), (placement, updater, step, value, pulled)
with mpikv.create(deterministic=True) as kv:
    assert kv.transport == "mpi", repr(kv)
print(kv.rank, platform.node(), flush=True)
"""

SLOW = """
import time
import numpy as np
import mpikv

with mpikv.create(timeout=20) as kv:
    kv.init("w", np.zeros(500_000, np.float32))
    kv.barrier()
    started = time.perf_counter()
    assert (kv.pushpull("w", np.ones(500_000, np.float32)) == kv.size).all()
    if kv.rank == 0:
        print("took", time.perf_counter() - started, flush=True)
"""

WIRE = """
from pathlib import Path
import numpy as np
import mpikv

def sent():
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if "eth0:" in line)

WAYS = {
    "sums": (None, None), "sums 2bit": (None, "2bit"), "weights": ("sgd", None), "weights bf16": ("sgd", "bf16"),
    "halves": (None, None),
}
for way, (optimizer, compression) in WAYS.items():
    placement = "sharded" if way == "halves" else "auto"
    with mpikv.create(compression=compression, placement=placement, timeout=20) as kv:
        dtype = np.float16 if way == "halves" else np.float32
        grads, out = np.full(1_000_000, 0.5, dtype), np.empty(1_000_000, dtype)
        kv.init("w", np.zeros(1_000_000, dtype))
        if optimizer:
            kv.set_optimizer(optimizer, learning_rate=0.5)
        kv.pushpull("w", grads, out=out)
        kv.barrier()
        before = sent()
        kv.pushpull("w", grads, out=out)
        kv.barrier()
        assert (out == (-0.5 * kv.size if optimizer else 0.5 * kv.size)).all(), (way, out)
        if kv.rank == 0:
            print("sent", way.replace(" ", "-"), sent() - before, kv.transport, flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts; a test's parameters make other ones."""
    if reason := why_no_mpi():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(virtual_hosts(tmp_path, **getattr(request, "param", {})))
        except OSError as error:
            pytest.skip(f"virtual hosts cannot be made here: {error}")


def outputs(hosts: Hosts, text: str, seconds: float, ranks: int = 4) -> list[str]:
    script = hosts.folder / "script.py"
    script.write_text(text)
    status, output = hosts.start(ranks, [str(script)]).wait(seconds), hosts.output.read_text()
    assert status == 0, output
    return output.splitlines()


@pytest.mark.deadline(180)
def test_values(hosts: Hosts) -> None:
    said, lines = outputs(hosts, VALUES, 80), [f"{rank} {hosts.names[rank // 2]}" for rank in range(4)]
    assert sorted(line for line in said if line in lines) == lines, said
    assert hosts.processes() == []


@pytest.mark.deadline(180)
@pytest.mark.parametrize("each", [1, 2])
def test_bytes_on_the_cable(hosts: Hosts, each: int) -> None:
    """What a pushpull of a million elements sends from one host, in bytes, but for headers and what is small."""
    lines = outputs(hosts, WIRE, 80, 2 * each)
    sent = {line.split()[1]: int(line.split()[2]) for line in lines if line.startswith("sent ")}
    # With one rank on each host every rank has a copy of sums, for which codes travel whole, and halves of the others.
    # With more, packed gradients go to each rank that owns them, as nothing is added up inside of a host.
    expected = {
        "sums": 4e6,
        "sums-2bit": 0.25e6 if each == 1 else each * 0.125e6 + 2e6,
        "weights": 4e6,
        "weights-bf16": each * 1e6 + 2e6,
        "halves": 2e6 if each == 1 else 3e6,
    }
    assert sent == {way: pytest.approx(nbytes, rel=0.12, abs=20_000) for way, nbytes in expected.items()}


LATE = """
import logging, time
import numpy as np
import mpikv

def evaluate():
    time.sleep(3)

kv = mpikv.create(timeout=20, warn_after=0.5)
kv.init("w", np.zeros(4))
if kv.rank == 3:
    evaluate()
kv.push("w", np.ones(4))
print("sum", kv.pull("w")[0], flush=True)
kv.close()
"""


@pytest.mark.deadline(120)
def test_a_late_rank_on_the_other_host(hosts: Hosts) -> None:
    """Ranks of both hosts name it, with its last call and its line; nothing of that disturbs the values, nor is left
    for MPI to complain of at its end.
    """
    lines = outputs(hosts, LATE, 50)
    assert sum("sum 4.0" in line for line in lines) == 4, lines
    for rank in range(3):
        (line,) = [line for line in lines if f"rank {rank} has waited" in line]
        assert "in call #2 push('w'): rank 3 began call #1 init('w') last and is now at" in line
        assert line.endswith("in evaluate")
    assert not any("unexpected" in line for line in lines)


@pytest.mark.deadline(120)
@pytest.mark.parametrize("hosts", [{"rate": "20mbit", "delay": 0.1, "loss": 0.01}], indirect=True)
def test_a_slow_cable(hosts: Hosts) -> None:
    """Two megabytes take what they take at that rate, and two ways, no less; what is lost comes again."""
    lines = outputs(hosts, SLOW, 50, len(hosts.names))
    (took,) = [float(line.split()[1]) for line in lines if line.startswith("took ")]
    assert 0.9 < took < 20, lines


@pytest.mark.deadline(330)  # the command itself waits up to 270 s for one fault
@pytest.mark.parametrize("fault", ["cut and healed", "cut for ever", "second host killed", "first host killed"])
def test_a_fault(hosts: Hosts, fault: str) -> None:
    """What the command promises; docs/explanation/several-hosts.md says more."""
    print(run_here(300, "scripts/hosts_faults", "--only", fault))


def run_here(seconds: float, *arguments: str) -> str:
    """Run a script, which makes hosts of its own; return what it prints."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    job = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=clean(os.environ), text=True, **pipes)
    try:
        output, errors = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        job.terminate()  # not SIGKILL: the script removes its hosts first
        output, errors = job.communicate(timeout=20)
    assert job.returncode == 0, output + errors
    return output


RESTARTS = """
import os, signal, sys, time
import numpy as np
import mpikv

kv = mpikv.create(timeout=20)
kv.init("w", np.zeros(1000))
kv.set_optimizer("sgd", learning_rate=1.0)
for step in kv.steps(20):
    if step == 10 and kv.rank == int(sys.argv[1]) and kv.restored is None:
        os.kill(os.getpid(), signal.SIGKILL)
    kv.push("w", np.ones(1000))
    time.sleep(0.02)
assert (kv.pull("w") == -20 * kv.size).all(), kv.pull("w")
print("attempt", kv.restored.attempt, kv.restored.step > 0, flush=True)
"""


@pytest.mark.deadline(180)
@pytest.mark.feature("restarts-hosts")
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_dies(hosts: Hosts, rank: int) -> None:
    """On either host, all ranks start again, and go on from commits that both hosts see."""
    (hosts.folder / "script.py").write_text(RESTARTS)
    command = [str(hosts.folder / "script.py"), str(rank)]
    refused = hosts.start(4, ["--restarts", "1", *command])
    assert refused.wait(60) == 2
    assert "needs --keep DIR, a folder on a file system that they share" in hosts.output.read_text()
    status = hosts.start(4, ["--restarts", "1", "--keep", str(hosts.folder / "keep"), *command]).wait(90)
    output = hosts.output.read_text()
    assert status == 0, output
    assert output.count("attempt 1 True") == 4, output
    assert re.search(rf"mpikv run: .*\branks? (?:\d, )*{rank}\b.*; restart 1 from", output), output
    assert not list((hosts.folder / "keep").iterdir())
    assert hosts.processes() == []


@pytest.mark.deadline(120)
def test_a_folder_that_hosts_do_not_share(hosts: Hosts) -> None:
    """Each has a /dev/shm of its own."""
    (hosts.folder / "script.py").write_text(RESTARTS)
    command = [str(hosts.folder / "script.py"), "9"]
    assert hosts.start(4, ["--keep", f"/dev/shm/keep-{os.getpid()}", *command]).wait(90) == 1
    assert re.search(rf"host {hosts.names[1]} does not see /dev/shm/keep-\d+/4-ranks", hosts.output.read_text())


@pytest.mark.deadline(120)
def test_the_benchmark_between_hosts(hosts: Hosts) -> None:
    """It compares the results of its ways, and prints a line for each."""
    ways = ["mpikv", "mpikv compression=2bit", "sums", "allreduce"]
    lines = run_here(90, "scripts/benchmark", "--hosts", "2", "--quick", "--rounds", "1", "--ways", *ways).splitlines()
    assert [line[:32].rstrip() for line in lines[2:]] == ways


def test_nothing_stays_behind(hosts: Hosts) -> None:
    sleeper = hosts.run_on_first(["sleep", "60"])
    assert wait(lambda: sleeper.pid in hosts.processes(), 5)
    hosts.remove()
    assert sleeper.wait(5) == -9
    assert not any(Path("/run/netns", name).exists() for name in hosts.names)
