"""Runs a command on GPUs that are none: ``python tests/support/cuda COMMAND ...``.

CuPy, its compiler and all that uses them are the real ones; beneath them is this folder's driver, which is compiled
when it is first needed. The page ``docs/explanation/emulated-gpu.md`` tells what it shows and what not.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
BUILT = Path(os.environ.get("EMULATED_CUDA_BUILT", HERE.parents[2] / "build" / "emulated-cuda"))
"""What is compiled stays there, for all copies of the sources that name it."""
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def build() -> Path:
    """Return the folder with the two libraries, compiled where their sources are new."""
    for compiler in ("cc", "g++"):
        if shutil.which(compiler) is None:
            raise SystemExit(f"the emulated CUDA needs the compiler {compiler}, and it is missing: apt install g++")
    folders = [
        include
        for package in ("nvidia.cu13", "nvidia.nccl")
        for place in _places(package)
        if (include := Path(place) / "include").is_dir()
    ]
    if len(folders) != 2:
        raise SystemExit("the emulated CUDA needs headers of CUDA, NCCL: scripts/venv .venv-cuda mpich,test,gpu-test")
    folder = BUILT / f"libraries-{digest('*.h', '*.cpp', 'headers/**/*')}"
    if not (folder / "libnccl.so.2").exists():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{each}" for each in (HERE, HERE / "headers", *folders)]
        for name, source, others in (("libcuda.so.1", "cuda.cpp", ()), ("libnccl.so.2", "nccl.cpp", ("libcuda.so.1",))):
            made = folder / f"{name}.{os.getpid()}"
            links = [*(folder / each for each in others), f"-Wl,-soname,{name}", "-ldl", "-lrt", "-lpthread"]
            subprocess.run(["g++", *FLAGS, *includes, "-o", made, HERE / source, *links], check=True)
            made.rename(folder / name)  # another process may make the same one
    return folder


def digest(*patterns: str) -> str:
    """Return what changes with the content of files of this folder."""
    paths = sorted(path for pattern in patterns for path in HERE.glob(pattern) if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _places(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a process and those that it starts find the emulated GPUs."""

    def before(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [environ.get(name)])])

    kernels = BUILT / f"kernels-{digest('ptx.*', 'grid.h')}"
    kernels.mkdir(parents=True, exist_ok=True)
    return {
        **environ,
        "EMULATED_CUDA": str(folder),
        "EMULATED_CUDA_KERNELS": str(kernels),
        "EMULATED_CUDA_PYTHON": sys.executable,
        "EMULATED_CUDA_TRANSLATOR": str(HERE / "ptx.py"),
        "CUPY_COMPILE_WITH_PTX": "1",
        "CUPY_ACCELERATORS": "",  # CUB is a library of machine code
        "CUPY_CACHE_DIR": str(BUILT / "cupy"),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", folder),
        "PYTHONPATH": before("PYTHONPATH", HERE / "site"),
    }


if __name__ == "__main__":
    made = environment(build(), os.environ)
    os.execvpe(sys.argv[1], sys.argv[1:], made)
