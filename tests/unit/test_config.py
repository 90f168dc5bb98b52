"""Settings: arguments, then variables, then defaults."""

import re

import pytest

from mpikv.cli.allocation import Allocation, find_allocation, parse_counts
from mpikv.cluster.environment import advise_start, launch_of, offered_protocols, place_on_host, tasks_set_aside
from mpikv.config import Config, unknown_variables
from mpikv.errors import ConfigError

ENVIRON = {
    "MPIKV_TRANSPORT": "mpi",
    "MPIKV_PLACEMENT": "root",
    "MPIKV_BUCKET_BYTES": "8192",
    "MPIKV_TIMEOUT": "2.5",
    "MPIKV_DETERMINISTIC": "on",
    "MPIKV_KERNELS": "numba",
    "MPIKV_ABORT": "No",
    "MPIKV_SIMULATE_RANKS_PER_HOST": "2",
    "MPIKV_TRACE": "traces",
    "MPIKV_SINGLE_COPY": "no",
    "MPIKV_GPU_SHARING": "1",
    "MPIKV_FULL_TRACEBACK": "1",
    "PATH": "/bin",
}


def test_defaults():
    assert Config.read({}) == Config()
    assert (Config().transport, Config().placement, Config().bucket_bytes) == ("auto", "auto", 1 << 20)
    assert (Config().timeout, Config().deterministic, Config().abort) == (60.0, False, True)
    assert (Config().kernels, Config().simulate_ranks_per_host, Config().single_copy) == ("numpy", 0, True)
    assert not Config().gpu_sharing


@pytest.mark.feature("variables-own")
def test_variables():
    config = Config.read(ENVIRON)
    assert (config.transport, config.placement, config.bucket_bytes) == ("mpi", "root", 8192)
    assert (config.timeout, config.deterministic, config.abort, config.kernels) == (2.5, True, False, "numba")
    assert (config.simulate_ranks_per_host, config.single_copy, config.trace) == (2, False, "traces")
    assert config.gpu_sharing
    assert config.full_traceback


def test_arguments_come_first():
    config = Config.read(ENVIRON, transport="shm", timeout=7, deterministic=False, placement=None)
    assert (config.transport, config.timeout, config.deterministic, config.placement) == ("shm", 7, False, "root")


@pytest.mark.parametrize("text", ["1", "true", "ON", "Yes", "0", "False", "off", "no"])
def test_switches(text):
    assert Config.read({"MPIKV_DETERMINISTIC": text}).deterministic is (text.lower() in ("1", "true", "on", "yes"))


@pytest.mark.parametrize(
    ("variable", "text", "pattern"),
    [
        ("MPIKV_TIMEOUT", "soon", "MPIKV_TIMEOUT='soon' is not a float"),
        ("MPIKV_BUCKET_BYTES", "1e6", "MPIKV_BUCKET_BYTES='1e6' is not an int"),
        (
            "MPIKV_DETERMINISTIC",
            "maybe",
            "MPIKV_DETERMINISTIC='maybe' is not a switch \\(1, true, on, yes, 0, false, off, no\\)",
        ),
        ("MPIKV_TIMEOUT", "-1", r"timeout=-1.0 is not a number in .*\(from MPIKV_TIMEOUT of the environment\)"),
        ("MPIKV_PLACEMENT", "shards", r"unknown placement 'shards' .*did you.*\(from MPIKV_PLACEMENT of"),
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
        {"bucket_bytes": 8192.0},
        {"simulate_ranks_per_host": -1},
        {"single_copy": 1},
        {"gpu_sharing": 1},
        {"full_traceback": 1},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"deterministic": "no"},
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
    mistyped, other = unknown_variables({"MPIKV_XYZZY": "5", "MPIKV_TIMEOT": "5"})
    assert re.fullmatch(r"unknown variable 'MPIKV_TIMEOT' \(known: .*\); did you mean 'MPIKV_TIMEOUT'\?", mistyped)
    assert re.fullmatch(r"unknown variable 'MPIKV_XYZZY' \(known: MPIKV_ABORT, .*, MPIKV_WARN_AFTER\)", other)
    assert Config.read({"MPIKV_TIMEOT": "5"}) == Config()


def test_the_launchers_own_variable_does_not_warn():
    assert unknown_variables({"MPIKV_RUN": "1", **{f"MPIKV_{name.upper()}": "" for name in vars(Config())}}) == []


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


@pytest.mark.parametrize(
    ("text", "numbers"), [("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2(x2),3(x1)", (1, 2, 2, 3)), ("16(x2)", (16, 16))]
)
def test_counts_that_slurm_writes_in_short(text, numbers):
    assert parse_counts("SLURM_TASKS_PER_NODE", text) == numbers


@pytest.mark.parametrize("text", ["", "2(x3", "x", "-1", "2,", "2(3)", "2 (x3)", "\u0664"])
def test_counts_of_another_form_are_refused(text):
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_TASKS_PER_NODE={text!r} is not in Slurm's form")):
        parse_counts("SLURM_TASKS_PER_NODE", text)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_NTASKS": "8"}, None),
        ({"SLURM_JOB_ID": "7"}, Allocation((1,), (1,), 1, False)),
        (
            {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"},
            Allocation((2, 2), (8, 8), 4, False),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1", "SLURMD_NODENAME": "a"},
            Allocation((2, 1), (1,), 3, True),
        ),
    ],
)
def test_allocations(environ, expected):
    assert find_allocation(environ) == expected


@pytest.mark.parametrize(
    ("tasks", "cpus", "cores"),
    [((2, 2), (8, 8), 8), ((2, 1), (2, 1), 2), ((4, 1), (8, 8), 8), ((2,), (1,), 0), ((3,), (), 3)],
)
def test_the_cores_of_a_node(tasks, cpus, cores):
    assert Allocation(tasks, cpus, sum(tasks), False).cores == cores


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_PROCID": "0", "PMIX_MCA_gds": "hash", "PMIX_VERSION": "4"}, set()),
        ({"PMI_RANK": "0"}, {"PMI"}),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, {"PMIx"}),
    ],
)
def test_the_protocols_of_launchers(environ, expected):
    assert offered_protocols(environ) == expected


@pytest.mark.parametrize(
    ("library", "srun"),
    [
        ("MPICH 5.0.2", ", or  srun --mpi=pmi2 -n 4 python SCRIPT  if 'srun --mpi=list' shows pmi2"),
        (
            "Open MPI 5.0.11",
            ", or  srun --mpi=pmix -n 4 python SCRIPT  if 'srun --mpi=list' shows pmix, and Open MPI was built "
            "for this cluster",
        ),
        (
            "Intel(R) MPI Library 2021.11",
            ", or  srun --mpi=pmi2 -n 4 python SCRIPT  if 'srun --mpi=list' shows pmi2, and I_MPI_PMI_LIBRARY is set "
            "to Slurm's libpmi2.so",
        ),
        ("CRAY MPICH 8.1", ", or  srun --mpi=cray_shasta -n 4 python SCRIPT  if 'srun --mpi=list' shows cray_shasta"),
        ("", ""),
    ],
)
def test_the_advice_in_a_job_of_slurm_is_by_library(library, srun):
    advice = advise_start(4, library, {"SLURM_JOB_ID": "7"})
    assert advice == f"mpikv run -n 4 SCRIPT  without srun, inside of salloc or sbatch{srun}"


@pytest.mark.parametrize("text", ["abc", "", "4(x2)", "-1", "1.0", "\u0664", "0x4"])
@pytest.mark.parametrize(
    ("read", "variables"),
    [
        (launch_of, ("PMI_SIZE", "PMI_RANK")),
        (launch_of, ("PMI_RANK", "PMI_SIZE")),
        (launch_of, ("WORLD_SIZE", "RANK")),
        (launch_of, ("SLURM_STEP_NUM_TASKS", "PMIX_RANK")),
        (launch_of, ("PMIX_RANK",)),
        (place_on_host, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
        (place_on_host, ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
        (tasks_set_aside, ("SLURM_NTASKS",)),
    ],
)
def test_a_variable_of_a_launcher_that_is_no_number(read, variables, text):
    environ = dict.fromkeys(variables, "1") | {variables[0]: text}
    with pytest.raises(ConfigError, match=re.escape(f"{variables[0]}={text!r} is not a number from 0")):
        read(environ)
