"""Settings: arguments, then variables, then defaults."""

from __future__ import annotations

import warnings

import pytest

from mpikv.config import Config, launch_of
from mpikv.errors import ConfigError

ENVIRON = {
    "MPIKV_TRANSPORT": "mpi",
    "MPIKV_PLACEMENT": "root",
    "MPIKV_BUCKET_BYTES": "8192",
    "MPIKV_TIMEOUT": "2.5",
    "MPIKV_CHECK": "off",
    "MPIKV_KERNELS": "numba",
    "MPIKV_ABORT": "No",
    "MPIKV_RANKS_PER_HOST": "2",
    "MPIKV_TRACE": "traces",
    "MPIKV_SINGLE_COPY": "no",
    "MPIKV_GPU_SHARING": "1",
    "PATH": "/bin",
}


def test_defaults():
    assert Config.read({}) == Config()
    assert (Config().transport, Config().placement, Config().bucket_bytes) == ("auto", "auto", 1 << 20)
    assert (Config().timeout, Config().check, Config().abort) == (60.0, True, True)
    assert (Config().kernels, Config().ranks_per_host, Config().single_copy) == ("numpy", 0, True)
    assert not Config().gpu_sharing


@pytest.mark.feature("variables-own")
def test_variables():
    config = Config.read(ENVIRON)
    assert (config.transport, config.placement, config.bucket_bytes) == ("mpi", "root", 8192)
    assert (config.timeout, config.check, config.abort, config.kernels) == (2.5, False, False, "numba")
    assert (config.ranks_per_host, config.single_copy, config.trace) == (2, False, "traces")
    assert config.gpu_sharing


def test_arguments_come_first():
    config = Config.read(ENVIRON, transport="shm", timeout=7, check=True, placement=None)
    assert (config.transport, config.timeout, config.check, config.placement) == ("shm", 7, True, "root")


@pytest.mark.parametrize("text", ["1", "true", "ON", "Yes", "0", "False", "off", "no"])
def test_switches(text):
    assert Config.read({"MPIKV_CHECK": text}).check is (text.lower() in ("1", "true", "on", "yes"))


@pytest.mark.parametrize(
    ("variable", "text", "pattern"),
    [
        ("MPIKV_TIMEOUT", "soon", "MPIKV_TIMEOUT='soon' is not a float"),
        ("MPIKV_BUCKET_BYTES", "1e6", "MPIKV_BUCKET_BYTES='1e6' is not a int"),
        ("MPIKV_CHECK", "maybe", "MPIKV_CHECK='maybe' is not a switch \\(1, true, on, yes, 0, false, off, no\\)"),
        ("MPIKV_TIMEOUT", "-1", r"timeout=-1.0 is not a number from .*\(from the environment\)"),
        (
            "MPIKV_PLACEMENT",
            "shards",
            r"unknown placement 'shards' .*did you mean 'sharded'.*\(from the environment\)",
        ),
    ],
)
def test_bad_variables(variable, text, pattern):
    with pytest.raises(ConfigError, match=pattern):
        Config.read({variable: text})


@pytest.mark.parametrize(
    "arguments",
    [
        {"transport": "gpu"},
        {"transport": 3},
        {"placement": "everywhere"},
        {"kernels": "cython"},
        {"bucket_bytes": 4095},
        {"bucket_bytes": 4096 + 32},
        {"bucket_bytes": 1 << 31},
        {"bucket_bytes": "4096"},
        {"bucket_bytes": 8192.0},
        {"bucket_bytes": True},
        {"ranks_per_host": -1},
        {"single_copy": 1},
        {"gpu_sharing": 1},
        {"ranks_per_host": True},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": "5"},
        {"check": "no"},
        {"check": 2},
    ],
    ids=str,
)
def test_bad_arguments(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigError, match=f"{name}.*{value!r}".replace("(", r"\(")):
        Config.read({}, **arguments)


@pytest.mark.parametrize("bucket_bytes", [4096, 4160, 1 << 30])
def test_limits_of_buckets(bucket_bytes):
    assert Config(bucket_bytes=bucket_bytes).bucket_bytes == bucket_bytes


@pytest.mark.feature("variables-own")
def test_an_unknown_variable_warns_with_the_nearest_name():
    with pytest.warns(UserWarning, match="unknown variable MPIKV_TIMEOT; did you mean MPIKV_TIMEOUT"):
        assert Config.read({"MPIKV_TIMEOT": "5"}) == Config()
    with pytest.warns(UserWarning, match="unknown variable MPIKV_XYZZY$"):
        Config.read({"MPIKV_XYZZY": "5"})


def test_the_launchers_own_variable_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.read({"MPIKV_RUN": "1"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, (4, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, (2, 0)),
        ({"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8"}, (8, 3)),
        ({"PMIX_RANK": "3"}, (0, 3)),
        ({"PMI_SIZE": "4"}, None),
        ({"SLURM_NTASKS": "8"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2", "SLURM_NTASKS": "9"}, (8, 2)),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "4", "PMI_RANK": "3"}, (4, 3)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, (4, 3)),
    ],
)
def test_launches(environ, expected):
    launch = launch_of(environ)
    assert (launch and (launch.size, launch.rank)) == expected
