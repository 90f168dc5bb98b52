"""Time pushes and pulls of ResNet-50's gradients between two hosts that a slow cable joins.

    python scripts/bench_link.py                       as root, on Linux: 100 Mbit/s, one rank on each host
    python scripts/bench_link.py --rate 1gbit --ranks 4

The hosts are network namespaces of this machine, as in the tests, and the cable is slowed down by ``tc``. Every round
makes a pushpull of all keys in each way that follows, one after the other; what counts is the time of the slowest rank.
A ratio is the median, over rounds, of the time of the first way divided by that of another in the same round. Bytes are
what the first host's end of the cable has sent.

``sums``: without an updater, so that every rank receives the sum; ``weights``: with momentum SGD, at the owners, so
that every rank receives the new values, or on every rank (``replicated``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.hosts import ADDRESSES, two_hosts  # noqa: E402

TWO_BITS = {"type": "2bit", "threshold": 0.5}
WAYS: Mapping[str, tuple[str, Any, str]] = {
    "sums": ("none", None, "auto"),
    "sums, 2bit": ("none", TWO_BITS, "auto"),
    "sums, bf16": ("none", "bf16", "auto"),
    "weights": ("sgd", None, "auto"),
    "weights, 2bit": ("sgd", TWO_BITS, "auto"),
    "weights, 2bit, replicated": ("sgd", TWO_BITS, "replicated"),
    "weights, bf16": ("sgd", "bf16", "auto"),
}
"""How gradients are exchanged: the updater, the compression and the placement."""


def bytes_sent() -> int:
    """Return how many bytes have left this host by the cable."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError("this host has no eth0")


def work(rounds: int, kernels: str, ways: list[str]) -> None:
    """Measure, as one of the ranks; the first one prints."""
    from mpi4py import MPI

    import mpikv
    from mpikv.cli.bench.keysets import resnet50

    comm = MPI.COMM_WORLD
    shapes = {str(number): shape for number, shape in enumerate(resnet50())}
    random = np.random.default_rng(comm.rank)
    grads = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    outs = {key: np.empty(shape, np.float32) for key, shape in shapes.items()}
    stores = {}
    for way in ways:
        updater, compression, placement = WAYS[way]
        options: dict[str, Any] = {"compression": compression, "placement": placement, "kernels": kernels}
        stores[way] = kv = mpikv.create(timeout=300, **options)
        kv.init({key: np.zeros(shape, np.float32) for key, shape in shapes.items()})
        if updater != "none":
            kv.set_optimizer(updater, learning_rate=0.01, momentum=0.9)
    times: dict[str, list[float]] = {way: [] for way in stores}
    sent: dict[str, list[int]] = {way: [] for way in stores}
    for _ in range(rounds):
        for way, kv in stores.items():
            comm.Barrier()
            before, started = bytes_sent(), time.perf_counter()
            kv.pushpull(grads, out=outs)
            times[way].append(comm.allreduce(time.perf_counter() - started, MPI.MAX))
            sent[way].append(bytes_sent() - before)
    facts = next(iter(stores.values()))
    placements = {way: kv.placement for way, kv in stores.items()}
    for kv in stores.values():
        kv.close()
    if comm.rank == 0:
        found = {"transport": facts.transport, "placements": placements, "seconds": times, "bytes": sent}
        print("found " + json.dumps(found), flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Make the hosts, slow the cable down, and return what the ranks found."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        hosts.slow_down(options.rate)
        places = ",".join(f"{address}:{-(-options.ranks // 2)}" for address in ADDRESSES)
        launch = [sys.executable, "-m", "mpikv", "run", "-n", str(options.ranks), "--hosts", places]
        script = [str(Path(__file__).resolve()), "--work", "--rounds", str(options.rounds)]
        job = hosts.start([*launch, *script, "--kernels", options.kernels, "--ways", *options.ways])
        # Its processes end with the hosts, and what they have printed is shown.
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(options.limit)
        output = hosts.output.read_text()
    lines = [line for line in output.splitlines() if line.startswith("found ")]
    if not lines:
        raise SystemExit(f"the job did not end well:\n{output}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("found "))
    return found


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a table."""
    first = next(iter(found["seconds"]))
    print(f"ResNet-50's gradients, {options.ranks} ranks on 2 hosts, {options.rate}, transport {found['transport']},")
    print(f"{options.rounds} rounds in turns, kernels {options.kernels}")
    print(f"{'':32}{'placement':12}{'seconds':>9}{'MB sent':>9}{'times as fast':>15}   of all rounds")
    for way, times in found["seconds"].items():
        ratios = [plain / took for plain, took in zip(found["seconds"][first], times, strict=True)]
        sent = np.median(found["bytes"][way]) / 1e6
        print(
            f"{way:32}{found['placements'][way]:12}{np.median(times):>9.2f}{sent:>9.1f}{np.median(ratios):>15.1f}"
            f"   {min(ratios):.1f} to {max(ratios):.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the cable, as tc understands it (default 100mbit)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of both hosts together (default 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", default="numpy")
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="ways to compare; the first counts as 1"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for all of it (default 600)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.rounds, options.kernels, options.ways)
        return
    # By an exception, which removes the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        found = run(options)
    except OSError as error:
        raise SystemExit(f"two hosts cannot be made here: {error}") from error
    print(json.dumps({**vars(options), **found})) if options.json else show(found, options)


if __name__ == "__main__":
    main()
