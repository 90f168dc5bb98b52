"""Times an exchange of ResNet-50's gradients between virtual hosts, beside gloo and MPI's Allreduce.

    scripts/bench --hosts 2 --rate 1gbit
    scripts/bench --hosts 2 --rate 1gbit --delay 0.5 --ways mpikv "mpikv transport=mpi" allreduce
    scripts/bench --hosts 2 --rate 100mbit --ways sums "sums compression=2bit"
    scripts/bench --hosts 2 --model resnet18

The hosts are namespaces of this machine, as in the tests; this needs root. ``mpikv`` and ``gloo`` sum and update by SGD
with momentum, ``sums`` and MPI's ``allreduce`` sum alone. ``mpikv`` and ``sums`` take options of ``mpikv.create``. Ways
take turns, and the slowest rank's time counts. The floor is the time of the bytes alone: 2 (H-1)/H of all on each
cable. With ``--model`` training steps of PyTorch are timed, as without hosts.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpikv.cli.bench.keysets import KeySet, gradients, key_set
from mpikv.cli.bench.peers import Allreduce
from mpikv.cli.bench.rounds import Case, Contender, measure
from mpikv.cli.bench.rules import SGD
from mpikv.cli.bench.stores import PrivateArrays
from mpikv.protocols import Array

from .torch_peer import TorchBuckets, gloo_problem

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

RANK = f"import sys; sys.path.insert(1, {str(ROOT / 'scripts')!r}); from benchmark."


def contender(comm: Any, way: str, keys: KeySet, given: Sequence[Array], outs: Sequence[Array]) -> Contender:
    name, *options = way.split()
    if name == "gloo":
        return TorchBuckets(comm, given, SGD)
    if name == "allreduce":
        return Allreduce(comm, np.concatenate([gradient.reshape(-1) for gradient in given]))
    settings = {key: _value(text) for key, _, text in (option.partition("=") for option in options)}
    return PrivateArrays(keys, None if name == "sums" else SGD, {"timeout": 300, **settings}, given, outs)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def work(arguments: Sequence[str]) -> None:
    """Measure, as one of the ranks; the first one prints."""
    from mpi4py import MPI

    comm, (size, rounds, *ways) = MPI.COMM_WORLD, arguments
    keys = key_set("resnet50", quick=size == "quick")
    given, outs = list(gradients(comm.rank, keys.shapes)), [np.empty(shape, np.float32) for shape in keys.shapes]
    if "gloo" in ways and (why := gloo_problem(comm)):
        ways.remove("gloo")
        print(f"gloo is left out: {why}", file=sys.stderr)
    cases = [Case(way, contender(comm, way, keys, given, outs)) for way in ways]
    expected: dict[bool, Array] = {}
    for case in cases:
        case.run_once()
        # After one step all ways agree; so a way that leaves out the work cannot win.
        last = np.concatenate([array.reshape(-1) for array in case.contender.results()])
        if "compression" not in case.name:
            wanted = expected.setdefault(case.name[:4] in ("sums", "allr"), last)
            np.testing.assert_allclose(last, wanted, 1e-5, err_msg=case.name)
    measure(comm, cases, int(rounds))
    for case in cases:
        case.contender.close()
    if comm.rank == 0:
        seconds = {case.name: case.seconds for case in cases}
        print("found " + json.dumps({"library": MPI.get_vendor()[0], "nbytes": keys.nbytes, "seconds": seconds}))


def main(arguments: Sequence[str]) -> int:
    from support.hosts import bits_per_second, virtual_hosts

    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--hosts", type=int, required=True, help="how many hosts")
    add("-n", dest="ranks", type=int, help="ranks of all hosts together (default one each)")
    add("--rate", default="1gbit", help="of each host's cable, each way, as tc writes it (default 1gbit)")
    add("--delay", type=float, default=0.0, help="milliseconds from host to host (default 0)")
    add("--loss", type=float, default=0.0, help="per cent of the packets that are lost (default 0)")
    add("--ways", nargs="+", default=["mpikv", "gloo", "allreduce"], help="what is timed (default: %(default)s)")
    add("--model", choices=("resnet18", "bert-small"), help="training steps of this model are timed instead")
    add("--rounds", type=int, default=7)
    add("--quick", action="store_true", help="an eighth of the channels, to check that it works")
    add("--limit", type=float, default=900, help="seconds for all of it (default 900)")
    add("--json", type=Path, help="write all rounds to a file")
    chosen = parser.parse_args(arguments)
    # By an exception, which removes the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(
            RANK + ("program import main; main()" if chosen.model else "hosts import work; work(sys.argv[1:])")
        )
        network = chosen.rate, chosen.delay / 1e3, chosen.loss / 100
        with virtual_hosts(Path(folder), chosen.hosts, *network) as hosts:
            given = ["quick" if chosen.quick else "whole", str(chosen.rounds), *chosen.ways]
            if chosen.model:
                given = ["--only", chosen.model, "--rounds", str(chosen.rounds)] + ["--quick"] * chosen.quick
            job = hosts.start(chosen.ranks or chosen.hosts, [str(script), *given])
            try:
                job.wait(chosen.limit)
            except subprocess.TimeoutExpired:
                print(f"the job has not ended after {chosen.limit:g} s", file=sys.stderr)
            *before, last = ["", *hosts.output.read_text().splitlines()]
            if chosen.model:
                print("\n".join([*before, last]))
                return job.returncode
    print("\n".join(filter(None, before)), file=sys.stderr)
    if not last.startswith("found "):
        print(last, file=sys.stderr)
        return 1
    found = json.loads(last.removeprefix("found "))
    floor = 2 * (chosen.hosts - 1) / chosen.hosts * found["nbytes"] * 8 / bits_per_second(chosen.rate)
    if chosen.json:
        chosen.json.write_text(json.dumps({**vars(chosen), "json": None, **found, "floor": floor}, indent=1) + "\n")
    print(f"{found['library']}, {chosen.ranks or chosen.hosts} ranks on {chosen.hosts} hosts, {chosen.rate},", end=" ")
    print(f"{chosen.delay:g} ms, {chosen.loss:g} % lost; {chosen.rounds} rounds; floor {floor * 1e3:.1f} ms")
    print(f"{'':32}{'ms':>8}{'/ floor':>9}   all rounds")
    for way, seconds in found["seconds"].items():
        ratios = [each / floor for each in seconds]
        middle = statistics.median(seconds)
        print(f"{way:32}{middle * 1e3:>8.1f}{middle / floor:>9.2f}   {min(ratios):.2f} to {max(ratios):.2f}")
    return 0
