"""The steps of ``scripts/gpu_check``: a function each, which returns numbers, raises Skip, or fails.

``python scripts/gpu_steps.py NAME`` runs one and prints a line of JSON; ``mpikv run -n 2 scripts/gpu_steps.py NAME``
runs one on several ranks, the first of which prints. Ranks that are more than the GPUs share them, of which no number
says how fast anything is: those of several ranks are there to show that it works.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
Numbers: TypeAlias = "dict[str, Any]"
MB = 1 << 20


class Skip(Exception):
    """The step cannot be done on this machine."""


@dataclass(frozen=True)
class Step:
    """What to run, on how many ranks, and for how many seconds at most."""

    run: Callable[[], Numbers]
    seconds: float
    ranks: int = 1
    dies: bool = False
    """Whether a rank is killed, so that the job's exit status is none of success."""


def command(*arguments: str, seconds: float = 20) -> str:
    """Return what a command prints, or why there is none."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({type(error).__name__})"
    return done.stdout.strip()


def version_of(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> Numbers:
    """Say what the machine has."""
    import cupy

    from mpikv.cli.launchers import environment, find_launcher, find_library
    from mpikv.gpu import survey

    found = survey()
    library = find_library(environment())
    gpu = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "gpus": found.devices,
        "compute_capability": f"{gpu['major']}.{gpu['minor']}",
        "memory_GB": round(gpu["totalGlobalMem"] / 1e9, 1),
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cuda_of_driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda_of_cupy": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": found.cupy,
        "nccl": found.nccl,
        "mpi": library.version,
        "launcher": str(find_launcher(library, environment()).path),
        "python": sys.version.split()[0],
        "numpy": version_of("numpy"),
        "torch": version_of("torch"),
        "problems": found.problems,
    }


def gpu_seconds(run: Callable[[], object], repeat: int = 20) -> float:
    """Return how long the GPU takes for a call, of the present stream, in the mean of several."""
    import cupy

    run()
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record()
    for _ in range(repeat):
        run()
    last.record()
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3 / repeat


def host_seconds(run: Callable[[], object], repeat: int = 200) -> float:
    """Return how long a call takes until it returns, the median of several."""
    import cupy

    taken = []
    for number in range(repeat):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
        if number % 20 == 0:
            cupy.cuda.get_current_stream().synchronize()  # the queue is not to fill
    return sorted(taken)[repeat // 2]


def one_communicator() -> Numbers:
    """Use NCCL by itself, on one rank."""
    import cupy

    from mpikv.gpu import find_nccl

    nccl = find_nccl()
    buffer, stream = cupy.ones(MB, "f4"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    free = cupy.cuda.runtime.memGetInfo()[0]
    begin = time.perf_counter()
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    found: Numbers = {"init_ms": (time.perf_counter() - begin) * 1e3}
    for name in ("first_us", "second_us"):
        begin = time.perf_counter()
        comm.allReduce(buffer.data.ptr, buffer.data.ptr, buffer.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        stream.synchronize()
        found[name] = (time.perf_counter() - begin) * 1e6
    found["call_us"] = 1e6 * host_seconds(
        lambda: comm.allReduce(buffer.data.ptr, buffer.data.ptr, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
    )
    stream.synchronize()
    found["memory_MB"] = (free - cupy.cuda.runtime.memGetInfo()[0]) / MB
    comm.destroy()
    assert float(buffer.sum()) == MB
    return found


def tests(ranks: int) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Run ``pytest -m gpu`` on a number of ranks, of which some must pass and none be skipped for want of a GPU."""
        from mpikv.gpu import survey

        if problems := survey().problems:
            raise AssertionError("; ".join(problems))
        only = ["-k", f"ranks={ranks}"] if ranks > 1 else []
        arguments = ["-m", "pytest", "tests/gpu", "-m", "gpu", f"--ranks={ranks}", *only, "-q", "--no-header"]
        arguments += ["-p", "no:cacheprovider", "--color=no", "--tb=short"]
        # The limit of the step ends it: what is said here must be said before.
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines() or [done.stderr[-500:]]
        if done.returncode or " passed" not in lines[-1]:
            raise AssertionError(
                "\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")))[-3000:]
            )
        return {"pytest": lines[-1].strip("= "), "skipped": [line for line in lines if line.startswith("SKIPPED")]}

    return run


def store(**options: Any) -> Any:
    import mpikv

    return mpikv.create("nccl", **options)


def sums() -> Numbers:
    """Say how long a store, and sums of three sizes, take on ranks that share a GPU: that they work, no more."""
    import cupy

    begin = time.perf_counter()
    with store() as kv:
        found: Numbers = {"create_s": time.perf_counter() - begin}
        for size, name in ((1, "4_B_ms"), (MB // 4, "1_MB_ms"), (4 * MB, "16_MB_ms")):
            kv.init(name, cupy.zeros(size, "f4"))
            gradient = cupy.full(size, kv.rank + 1, "f4")
            found[name] = gpu_seconds(lambda name=name, gradient=gradient: kv.push(name, gradient), 10) * 1e3
            assert (kv.pull(name).get() == kv.size * (kv.size + 1) / 2).all()
    return found


def bits() -> Numbers:
    """In a fixed order a store on GPUs adds as one on the host does, to the bit, and so does the next one."""
    import numpy as np

    import mpikv

    random = np.random.default_rng(own_rank())
    sent = random.standard_normal(100_003).astype(np.float32)
    found = []
    for name in ("nccl", "nccl", "dist_sync"):
        with mpikv.create(name, deterministic=True) as kv:
            kv.init("w", np.zeros_like(sent))
            kv.push("w", sent)
            value = kv.pull("w")
            found.append(value.get() if hasattr(value, "get") else value)
    for what, other in (("from one run to the next", found[1]), ("from the host's", found[2])):
        assert found[0].tobytes() == other.tobytes(), f"{(found[0] != other).sum()} elements differ {what}"
    return {"elements": sent.size}


def refused() -> Numbers:
    """What cannot work is refused on every rank, and soon."""
    from mpikv.errors import MPIKVError

    found: Numbers = {}
    own = os.environ.pop("NCCL_HOSTID", "")
    for name, variables, why in (
        ("two_ranks_on_a_gpu", {}, "ranks 0 and 1 use one GPU"),
        ("not_blocking", {"NCCL_COMM_BLOCKING": "0", "NCCL_HOSTID": own}, "NCCL_COMM_BLOCKING=0 is set"),
    ):
        os.environ.update(variables)
        begin = time.perf_counter()
        try:
            store(timeout=20.0).close()
        except MPIKVError as error:
            if why not in str(error):
                raise
            found[name] = f"{type(error).__name__}: {error}"
            found[f"{name}_s"] = time.perf_counter() - begin
        else:
            raise AssertionError(f"{name} was not refused")
    return found


def stopped() -> Numbers:
    """A rank that is stopped between two pushes is missed at the deadline."""
    import cupy

    from mpikv.errors import TransportError

    with store(timeout=5.0, warn_after=2.0) as kv:
        victim = int(kv.comm.bcast(os.getpid(), root=1))
        kv.init("w", cupy.zeros(MB, "f4"))
        for step in range(1000):
            if kv.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGSTOP)
            begin = time.perf_counter()
            try:
                kv.push("w", cupy.ones(MB, "f4"))
            except TransportError as error:
                found = {"seconds": time.perf_counter() - begin, "raised": f"{type(error).__name__}: {error}"}
                tell(found)  # the job is about to end
                os.kill(victim, signal.SIGKILL)
                os._exit(1)
    raise AssertionError("nothing was raised")


def host_cost() -> Numbers:
    """Say how long calls take to be queued, on one rank."""
    import cupy

    found: Numbers = {}
    with store() as kv:
        for count in (1, 160, 1000):
            keys = [f"{count}/{number}" for number in range(count)]
            arrays = [cupy.ones(256, "f4") for _ in keys]
            kv.init(keys, arrays)
            for name, call in (("push", lambda k, a: kv.push(k, a)), ("pull", lambda k, a: kv.pull(k, out=a))):
                call(keys, arrays)
                found[f"{name}_{count}_us"] = host_seconds(lambda: call(keys, arrays), 100) * 1e6  # noqa: B023
    return found


def compiled_cost() -> Numbers:
    """Say how long a step of a thousand keys takes to be queued: compiled, as a list, and key by key."""
    import cupy

    keys = [str(number) for number in range(1000)]
    with store() as kv:
        sent, outs = [cupy.ones(1024, "f4") for _ in keys], [cupy.ones(1024, "f4") for _ in keys]
        kv.init(keys, outs)
        kv.set_optimizer("adam")
        step = kv.compile(keys, sent, outs)

        def key_by_key() -> None:
            for key, gradient, out in zip(keys, sent, outs, strict=True):
                kv.pushpull(key, gradient, out=out)

        for _ in range(3):
            step()
        assert step.captured, step.reason
        kv.pushpull(keys, sent, out=outs)
        key_by_key()
        return {
            "compiled_us": host_seconds(step, 100) * 1e6,
            "list_us": host_seconds(lambda: kv.pushpull(keys, sent, out=outs), 100) * 1e6,
            "key_by_key_us": host_seconds(key_by_key, 5) * 1e6,
            "compiled_gpu_us": gpu_seconds(step) * 1e6,
            "list_gpu_us": gpu_seconds(lambda: kv.pushpull(keys, sent, out=outs)) * 1e6,
        }


def kernels() -> Numbers:
    """Say at what bandwidth updates run beside a copy on the device: bytes that must move, by the time."""
    import cupy

    from mpikv import optimizers
    from mpikv.arrays import bfloat16
    from mpikv.cuda.copies import copy
    from mpikv.cuda.kernels import CudaKernels

    size = 64 * MB
    total, value = cupy.full(size, 1e-3, "f4"), cupy.ones(size, "f4")
    found: Numbers = {"copy_GB_s": 8 * size / gpu_seconds(lambda: cupy.copyto(value, total)) / 1e9}
    parts = [total[start : start + size // 160] for start in range(0, size // 160 * 160, size // 160)]
    targets = [value[start : start + size // 160] for start in range(0, size // 160 * 160, size // 160)]
    found["copies_of_160_GB_s"] = 8 * size / gpu_seconds(lambda: copy(targets, parts)) / 1e9
    half = cupy.empty(size, "f2")
    found["cast_to_float16_GB_s"] = 6 * size / gpu_seconds(lambda: copy([half], [total])) / 1e9
    narrow = value.astype(bfloat16())
    for name, updater, weight, moved in (
        ("momentum", optimizers.SGD(learning_rate=1e-3, momentum=0.9), value, 20),
        ("adam", optimizers.Adam(learning_rate=1e-3), value, 28),
        # Of 4 bytes a sum, and a master, a mean and a variance, which are written, too; of 2 a value.
        ("adam_bfloat16_with_master", optimizers.Adam(learning_rate=1e-3, multi_precision=True), narrow, 30),
    ):
        on_gpu = CudaKernels()
        on_gpu.prepare(updater, weight.dtype, False)
        state = {key: cupy.zeros(size, dtype) for key, dtype in updater.slots(weight.dtype).items()}
        update, step = on_gpu.bind(updater, total, weight, state), updater.step("w", 1)
        found[f"{name}_GB_s"] = moved * size / gpu_seconds(lambda: update(step)) / 1e9  # noqa: B023
    return found


def codes() -> Numbers:
    """Say at what bandwidth gradients are looked at, packed and unpacked, and how long compressed pushes take."""
    import cupy

    from mpikv import codecs
    from mpikv.cuda.codes import CudaRanges
    from mpikv.cuda.copies import exceeding

    size = 64 * MB
    gradient, residual, total = cupy.full(size, 1e-3, "f4"), cupy.zeros(size, "f4"), cupy.zeros(size, "f4")
    flags = cupy.zeros(1, "u1")
    found: Numbers = {"look_GB_s": 4 * size / gpu_seconds(lambda: exceeding([gradient], flags, 2.0**100)) / 1e9}
    with store() as kv:
        kv.init("w", gradient)
        for name in ("2bit", "1bit", "fp16", "bf16"):
            codec = CudaRanges(codecs.create(name))
            payload = cupy.empty(codec.nbytes(size), "u1")
            pack = gpu_seconds(lambda: codec.encode(gradient, payload, residual))  # noqa: B023
            found[f"{name}_pack_GB_s"] = (12 * size + payload.size) / pack / 1e9
            unpack = gpu_seconds(lambda: codec.decode_add(payload, total))  # noqa: B023
            found[f"{name}_unpack_GB_s"] = (8 * size + payload.size) / unpack / 1e9
            kv.set_gradient_compression(name)
            found[f"{name}_push_ms"] = gpu_seconds(lambda: kv.push("w", gradient)) * 1e3
    return found


def torch_updates() -> Numbers:
    """Say the same of torch's fused optimizers."""
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skip("this torch has no CUDA")
    found: Numbers = {"torch": torch.__version__}
    for name, kind, options, moved in (
        ("momentum", torch.optim.SGD, {"momentum": 0.9}, 20),
        ("adam", torch.optim.Adam, {}, 28),
    ):
        weight = torch.ones(64 * MB, device="cuda", requires_grad=True)
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = kind([weight], lr=1e-3, fused=True, **options)
        found[f"{name}_GB_s"] = moved * weight.numel() / gpu_seconds(optimizer.step) / 1e9
    return found


def large() -> Numbers:
    """Push and pull 256 MB on one rank, beside the copies that this takes."""
    import cupy

    size = 64 * MB
    gradient, out = cupy.ones(size, "f4"), cupy.empty(size, "f4")
    found: Numbers = {"one_copy_ms": gpu_seconds(lambda: cupy.copyto(out, gradient)) * 1e3}
    with store() as kv:
        kv.init("w", gradient)
        found["push_ms"] = gpu_seconds(lambda: kv.push("w", gradient)) * 1e3
        found["pull_ms"] = gpu_seconds(lambda: kv.pull("w", out)) * 1e3
        found["pushpull_ms"] = gpu_seconds(lambda: kv.pushpull("w", gradient, out=out)) * 1e3
    return found


def staging() -> Numbers:
    """Say how fast arrays of the host come and go."""
    import numpy as np

    from mpikv.config import visible_gpus
    from mpikv.gpu import find_gpu

    gpu, array = find_gpu(0, 1, visible=visible_gpus()), np.ones(64 * MB // 4, np.float32)
    there = gpu.upload(array)
    found = {}
    for name, call in (("upload", lambda: gpu.upload(array)), ("download", lambda: gpu.download(there, array))):
        begin = time.perf_counter()
        for _ in range(10):
            call()
        gpu.current().synchronize()
        found[f"{name}_GB_s"] = 10 * array.nbytes / (time.perf_counter() - begin) / 1e9
    return found


def launches() -> Numbers:
    """Say how long the host takes to queue a kernel that does nothing, and whether one takes 20,000 bytes by value."""
    import cupy
    import numpy as np

    small = cupy.RawKernel('extern "C" __global__ void nothing(int) {}', "nothing")
    found: Numbers = {"launch_us": 1e6 * host_seconds(lambda: small((1,), (32,), (np.int32(0),)))}
    array = cupy.ones(32, "f4")
    found["elementwise_us"] = 1e6 * host_seconds(lambda: cupy.add(array, 1, out=array))
    large = (
        'struct Large { int many[5000]; }; extern "C" __global__ void last(Large l, int* out) { *out = l.many[4999]; }'
    )
    given, out = np.zeros(1, np.dtype([("many", np.int32, 5000)])), cupy.zeros(1, np.int32)
    given["many"][0, 4999] = 7
    try:
        cupy.RawKernel(large, "last")((1,), (1,), (given, out))
        found["by_value_20000_B"] = "yes" if int(out[0]) == 7 else "wrong"
    except (cupy.cuda.compiler.CompileException, cupy.cuda.driver.CUDADriverError) as error:
        found["by_value_20000_B"] = f"no: {error}"[:200]
    return found


def ends() -> Numbers:
    """A forked child cannot use a store, and a program may end without closing it."""
    import cupy

    from mpikv.errors import Closed

    kv = store(timeout=20.0)
    kv.init("w", cupy.zeros(MB, "f4"))
    kv.push("w", cupy.ones(MB, "f4"))
    child = os.fork()
    if not child:
        status = 1
        try:
            kv.push("w", cupy.ones(MB, "f4"))
        except Closed:
            status = 0
        finally:
            os._exit(status)
    refused = os.waitpid(child, 0)[1] == 0
    assert refused, "a forked child used the store"
    assert (kv.pull("w").get() == kv.size).all()
    return {"forked_child": "refused", "closed": "by the end of the program"}


def several_on_one() -> Numbers:
    """NCCL from 2.30 on joins ranks of one GPU without names of hosts, by itself: a store refuses it."""
    import cupy
    from mpi4py import MPI

    from mpikv.gpu import find_nccl

    nccl, ranks = find_nccl(), MPI.COMM_WORLD
    if nccl.get_version() < 23000:
        raise Skip(f"NCCL is {nccl.get_version()}, of 2.30 or later this is known")
    cupy.cuda.Device(ranks.rank % cupy.cuda.runtime.getDeviceCount()).use()
    array, stream = cupy.full(MB, ranks.rank + 1, "f4"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    identity = ranks.bcast(nccl.get_unique_id() if ranks.rank == 0 else None)
    begin = time.perf_counter()
    comm = nccl.NcclCommunicator(ranks.size, identity, ranks.rank)
    found: Numbers = {"init_s": time.perf_counter() - begin}
    begin = time.perf_counter()
    comm.allReduce(array.data.ptr, array.data.ptr, MB, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
    stream.synchronize()
    found["first_4_MB_ms"] = (time.perf_counter() - begin) * 1e3
    assert (array.get() == ranks.size * (ranks.size + 1) / 2).all()
    ranks.Barrier()
    comm.destroy()
    return found


def bench(ranks: int, *arguments: str) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Run ``mpikv bench`` on GPUs, shortly, whose results it checks."""
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            path = Path(folder) / "bench.json"
            line = ["bench", "--device", "gpu", "-n", str(ranks), *arguments, "--json", str(path)]
            said = said_by([sys.executable, "-m", "mpikv", *line])
            if not path.exists():
                raise AssertionError(said)
            return bench_numbers(json.loads(path.read_text()))

    return run


# The cases of a group that are the store's, by their first word.
OURS = ("store", "push", "pull", "pushpull", "update", "pack")


def bench_numbers(document: Numbers) -> Numbers:
    """Return of each case of ``mpikv bench`` its time on the GPU, and its bandwidth where that is known."""
    (job,) = document["jobs"]
    found: Numbers = {"label": job["functional_only"]} if job["functional_only"] else {}
    for group in job["groups"]:
        for case in group["cases"]:
            name = f"{group['name']} {case['name']}"
            found[f"{name} us"] = case["median"] * 1e6
            if case.get("algbw") is not None:
                found[f"{name} algbw_GB_s"] = case["algbw"]
            if case.get("floor"):
                found[f"{name} GB_s"] = 1e-9 * case["floor"] * group["elements"] / case["median"]
        # Any error of a store leaves out its cases; only where peers may be missing is that well.
        lost = {case: why for case, why in group["skipped"].items() if case.split()[0] in OURS and "LAMB" not in why}
        if lost:
            raise AssertionError(f"{group['name']}: {lost}")
        found |= {f"{group['name']} {case} skipped": why for case, why in group["skipped"].items()}
    return found


def synthetic(ranks: int, gigabytes: float) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Train layers whose optimizer state fills gigabytes, and check the values."""
        start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "mpikv", "run", "-n", str(ranks)]
        options = ["--device", "gpu", "--gigabytes", str(gigabytes), "--steps", "5"]
        return synthetic_numbers(said_by([*start, str(ROOT / "scripts/train_synthetic.py"), *options]))

    return run


def synthetic_numbers(said: str) -> Numbers:
    """Return the figures that ``train_synthetic.py`` has printed: a name and a number each."""
    if "check passed" not in said:
        raise AssertionError(said[-3000:])
    words = said.split()
    names = ("values_bytes", "state_bytes", "step_ms", "update_GB_s")
    return {name: float(words[words.index(name) + 1]) for name in names}


def said_by(line: list[str]) -> str:
    """Return what a program prints that ends well. The limit of the step ends it."""
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


# Cheap and safe ones first.
STEPS = {
    "versions": Step(versions, 60),
    "one_communicator": Step(one_communicator, 60),
    "tests_1": Step(tests(1), 120),
    "kernels": Step(kernels, 60),
    "codes": Step(codes, 60),
    "torch_updates": Step(torch_updates, 60),
    "large": Step(large, 40),
    "host_cost": Step(host_cost, 60),
    "compiled_cost": Step(compiled_cost, 60),
    "staging": Step(staging, 40),
    "launches": Step(launches, 30),
    "bench_1": Step(bench(1, "--quick", "--rounds", "5"), 90),
    "synthetic_1": Step(synthetic(1, 4.0), 60),
    "sums_2": Step(sums, 60, ranks=2),
    "sums_4": Step(sums, 60, ranks=4),
    "bits_2": Step(bits, 40, ranks=2),
    "bits_4": Step(bits, 40, ranks=4),
    "refused_2": Step(refused, 60, ranks=2),
    "ends_2": Step(ends, 40, ranks=2),
    "several_on_one_2": Step(several_on_one, 40, ranks=2),
    "bench_2": Step(bench(2, "--quick", "--rounds", "1", "--only", "sizes,small", "--optimizer", "adam"), 90),
    "synthetic_2": Step(synthetic(2, 0.2), 60),
    "stopped_2": Step(stopped, 60, ranks=2, dies=True),
    "tests_2": Step(tests(2), 240),
    "tests_4": Step(tests(4), 120),
}


def own_rank() -> int:
    from mpikv.config import launch_of

    launch = launch_of()
    return launch.rank if launch is not None else 0


def tell(found: Numbers) -> None:
    """Print a record, on the first rank."""
    if own_rank() == 0:
        print(json.dumps(found), flush=True)


def main(name: str) -> None:
    from mpikv.config import launch_of, visible_gpus
    from mpikv.gpu import survey
    from mpikv.testing.gpus import sharing

    if name == "refused_2":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # before CUDA looks there
    launch = launch_of()
    if name in ("bench_2", "synthetic_2") and len(survey(visible_gpus()).devices) < 2:
        os.environ["MPIKV_GPU_SHARING"] = "1"  # these make ranks of their own
    if launch is not None and len(survey(visible_gpus()).devices) < launch.size:
        os.environ |= sharing(launch.rank)
        if name == "several_on_one_2":
            del os.environ["NCCL_HOSTID"]
            os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"}
    try:
        tell(STEPS[name].run())
    except Skip as reason:
        tell({"skip": str(reason)})


if __name__ == "__main__":
    main(sys.argv[1])
