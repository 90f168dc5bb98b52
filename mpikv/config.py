"""Settings of a store, from arguments and the environment.

An argument of :func:`mpikv.create` comes first, then the variable ``MPIKV_<FIELD>``, then the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import ConfigError, a_kind, known_names
from .options import choice, count, flag, number, store_checked_fields

TRANSPORTS = ("auto", "hierarchical", "local", "mpi", "shm")
PLACEMENTS = ("auto", "replicated", "root", "sharded")
KERNELS = ("numba", "numpy")
# Fields that are no arguments of create.
VARIABLES_ONLY = (
    *("abort", "full_traceback", "gpu_sharing", "report"),
    *("simulate_ranks_per_host", "single_copy", "threads", "trace"),
)
# Fields in which ranks may differ.
OWN_AFFAIRS = ("abort", "full_traceback", "report", "trace")


@dataclass(frozen=True)
class Config:
    """Settings of a store. All but ``abort``, ``full_traceback``, ``report`` and ``trace`` must be the same on every
    rank; :func:`mpikv.create` compares them.
    """

    transport: str = choice("auto", TRANSPORTS)
    """How bytes move: ``local`` (one rank), ``shm`` (ranks of one host), ``hierarchical`` (several hosts, with ``shm``
    inside of each), ``mpi`` (any hosts); ``auto`` chooses by the hosts of the ranks."""
    placement: str = choice("auto", PLACEMENTS)
    """Where values live: ``root``, ``sharded``, ``replicated``; ``auto`` chooses by the updater."""
    bucket_bytes: int = count(1 << 20)
    """Bytes of the largest message, a multiple of 64 from 4096 to 1 GiB. About the size of a core's cache is best."""
    timeout: float = number(60.0, "[0.001, 1e9]")
    """Seconds that a rank waits for another before it raises ``Stalled``, above 0."""
    warn_after: float = number(5.0, "[0.001, 1e9]")
    """Seconds after which a waiting rank logs the late ranks and their lines of code; above 0."""
    deterministic: bool = flag(False)
    """Whether sums are added in an order that does not depend on the transport, the placement or the buckets, nor on
    the number of ranks, if that is a power of two and all push lists of equally many arrays."""
    native_halves: bool = flag(False)
    """Whether NCCL sums half precision in its own dtype: half of the bytes, and a rounding at each addition."""
    kernels: str = choice("numpy", KERNELS)
    """The code of optimizers' rules: ``numpy``, or ``numba``. numba compiles most rules to code that passes over memory
    once and gives the same bits."""
    check_finite: int = count(0)
    """Look for NaN and infinity in what each rank brings to every so-many-th push, before it is summed; 0: never."""
    threads: int = count(0)
    """Threads with which a rank copies, adds and updates long messages on the host; 0: as many as the rank has cores,
    at most 8. A variable only."""
    single_copy: bool = flag(True)
    """Whether ranks of one host may read each other's large arrays in place, if the system lets them, instead of copies
    in shared memory. A variable only."""
    abort: bool = flag(True)
    """Whether an uncaught exception on one rank ends the whole job. Always off in a notebook."""
    full_traceback: bool = flag(False)
    """Whether tracebacks keep the frames of this package, and every rank prints its own. A variable only."""
    simulate_ranks_per_host: int = count(0)
    """For tests and measurements: treat each group of so many ranks as a host of its own; 0: what shares memory is
    one. A variable only, no argument of :func:`mpikv.create`."""
    gpu_sharing: bool = flag(False)
    """For tests: ranks of a host share its GPUs if there are fewer GPUs than ranks. Measurements then mean nothing. A
    variable only."""
    report: float = number(0.0, "[0, 1e9]")
    """Seconds between lines that name the rank that makes the others wait, and why; 0 for none. A variable only."""
    trace: str = ""
    """A directory for this rank's record of the begin and end of each call, for ``mpikv trace``; empty for none. A
    variable only."""

    def __post_init__(self) -> None:
        """Check all fields, and store the checked values; ConfigError for the first bad one. Local."""
        store_checked_fields(self)
        if self.bucket_bytes % 64 or not 4096 <= self.bucket_bytes <= 1 << 30:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes} is not a multiple of 64 from 4096 to 2**30")

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Config:
        """Return the settings: arguments that are not None, else variables, else defaults; ConfigError if one is bad.

        >>> Config.read({"MPIKV_TIMEOUT": "5"}, placement="root").timeout
        5.0
        """
        config = cls()
        for field in fields(cls):
            if (text := environ.get(variable := f"MPIKV_{field.name.upper()}")) is None:
                continue
            parse = _PARSERS[field.type]
            try:
                config = replace(config, **{field.name: parse(text)})
            except ConfigError as error:
                raise ConfigError(f"{error} (from {variable} of the environment)") from None
            except ValueError as error:
                kind = error if parse is _switch else a_kind(parse("0"))
                raise ConfigError(f"{variable}={text!r} is not {kind}") from None
        return replace(config, **{name: value for name, value in arguments.items() if value is not None})


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning text for each variable MPIKV_… that is no setting and none of the launcher's. Local.

    >>> unknown_variables({"MPIKV_TIMOUT": "5", "MPIKV_TIMEOUT": "5"})
    ["unknown variable 'MPIKV_TIMOUT' (known: MPIKV_ABORT, ...); did you mean 'MPIKV_TIMEOUT'?"]
    """
    known = {f"MPIKV_{field.name.upper()}" for field in fields(Config)}
    unknown = {name for name in environ if name.startswith("MPIKV_")} - known - LAUNCHER_VARIABLES
    return [known_names("variable", name, known) for name in sorted(unknown)]


def aborts(environ: Mapping[str, str] = os.environ) -> bool:
    """Return MPIKV_ABORT: whether the failure of one rank ends the job; True if any setting is bad. Local."""
    try:
        return Config.read(environ).abort
    except ConfigError:  # create() reports the bad variable; a job that could hang is worse
        return True


def keeps_frames(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether tracebacks keep this package's frames: MPIKV_FULL_TRACEBACK now; never raises, bad text is True.

    >>> keeps_frames({"MPIKV_FULL_TRACEBACK": "1"}), keeps_frames({})
    (True, False)
    """
    # A bad text means True: this runs while an error is printed, and must not raise.
    return _SWITCHES.get(environ.get("MPIKV_FULL_TRACEBACK", "0").lower(), True)


def sets_bucket_bytes(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variable MPIKV_BUCKET_BYTES is set, whatever its text. Local.

    >>> sets_bucket_bytes({})
    False
    """
    return "MPIKV_BUCKET_BYTES" in environ


def updates_on_kvstore(environ: Mapping[str, str] = os.environ) -> bool:
    """Return MXNET_UPDATE_ON_KVSTORE, True if unset: whether a Trainer's store updates; ConfigError for other text.

    >>> updates_on_kvstore({"MXNET_UPDATE_ON_KVSTORE": "0"}), updates_on_kvstore({})
    (False, True)
    """
    text = environ.get("MXNET_UPDATE_ON_KVSTORE", "1")
    try:
        return _switch(text)
    except ValueError:
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE={text!r} is neither 0 nor 1") from None


def wants_slices(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether DMLC_PS_VAN_TYPE is ``p3``: MXNet's way to ask for that store under another name.

    >>> wants_slices({"DMLC_PS_VAN_TYPE": "p3"}), wants_slices({"DMLC_PS_VAN_TYPE": "zmq"}), wants_slices({})
    (True, False, False)
    """
    return environ.get("DMLC_PS_VAN_TYPE", "").lower() == "p3"


def slice_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of a ``p3`` message: 4 x MXNET_KVSTORE_SLICE_THRESHOLD; ConfigError if that is no such number.

    Rounded up to a multiple of 64, and 4096 at least.

    >>> slice_bytes({"MXNET_KVSTORE_SLICE_THRESHOLD": "2000"}), slice_bytes({})
    (8000, 160000)
    """
    text = environ.get("MXNET_KVSTORE_SLICE_THRESHOLD", "40000")
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 1 << 28:
        raise ConfigError(f"MXNET_KVSTORE_SLICE_THRESHOLD={text!r} is not a number of elements from 1 to 2**28")
    return max(4096, -(-int(text) * 4 // 64) * 64)


# Variables of the launcher, set for its ranks; not settings of a store.
LAUNCHER_VARIABLES = frozenset({"MPIKV_CHECK", "MPIKV_KEEP", "MPIKV_MASTER", "MPIKV_RUN", "MPIKV_RUN_AT"})
_SWITCHES = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def _switch(text: str) -> bool:
    """Return the truth value of a variable's text; raise ValueError for another text."""
    if text.lower() not in _SWITCHES:
        raise ValueError(f"a switch ({', '.join(_SWITCHES)})")
    return _SWITCHES[text.lower()]


# Annotations are strings here, so the table is keyed by them.
_PARSERS: Mapping[Any, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": _switch}
