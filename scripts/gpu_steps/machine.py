"""What the machine has."""

import subprocess
import sys

from .step import Numbers


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


def loaded(name: str) -> str:
    """Return where a library that this process has loaded lies."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if f"/{name}" in line}
    return ", ".join(sorted(paths)) or "not loaded"


def versions() -> Numbers:
    """List the GPUs, the driver, and the versions of libraries."""
    import cupy

    from mpikv.cli.gpus import survey
    from mpikv.cli.launchers import environment, find_launcher, find_library
    from mpikv.errors import MPIKVError

    found = survey()
    try:
        library = find_library(environment())
        mpi, launcher = library.version, str(find_launcher(library, environment()).path)
    except MPIKVError as error:
        mpi, launcher = "none", str(error)
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
        "nccl_file": loaded("libnccl"),
        "mpi": mpi,
        "launcher": launcher,
        "python": sys.version.split()[0],
        "numpy": version_of("numpy"),
        "torch": version_of("torch"),
        "nccl_wheel": version_of("nvidia-nccl-cu13") or version_of("nvidia-nccl-cu12"),
        "problems": found.problems,
    }
