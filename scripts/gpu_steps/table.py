"""All steps, by their names: what says most first; suites last, as time may be up for them."""

from __future__ import annotations

from . import communicators, costs, ends, kernels, machine, order, programs, questions, stores
from .step import Step, Variables

NCCL_CHOOSES: Variables = {"NCCL_ALGO": None, "NCCL_PROTO": None}
ONE_HOST: Variables = {"NCCL_HOSTID": None, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"}
"""What NCCL is told instead of names of hosts, from 2.30 on."""

# Each process takes about 2 s to begin, and a job about 4 s with NCCL's start; a collective of ranks that share a GPU
# takes some 10 ms.
STEPS = {
    "versions": Step(machine.versions, 60, expected=4),
    "communicator": Step(communicators.communicator, 60, expected=4),
    "kernels": Step(kernels.kernels, 60, expected=6),
    "graph": Step(stores.graph, 30, expected=3),
    "compiled_cost": Step(costs.compiled_cost, 60, expected=8),
    "torch_cost": Step(costs.torch_cost, 60, expected=8),
    "host_cost": Step(costs.host_cost, 60, expected=6),
    "communicator_2": Step(communicators.communicator, 60, expected=6, ranks=2),
    "sums_2": Step(stores.sums, 60, expected=6, ranks=2),
    "bits_2": Step(stores.bits, 40, expected=6, ranks=2),
    "graph_2": Step(stores.graph, 60, expected=8, ranks=2),
    "large": Step(costs.large, 40, expected=3),
    "torch_updates": Step(kernels.torch_updates, 60, expected=6),
    "launches": Step(costs.launches, 30, expected=3),
    "staging": Step(machine.staging, 40, expected=3),
    "waits": Step(order.waits, 30, expected=3),
    "pool_hazard": Step(order.pool_hazard, 30, expected=3),
    "imports": Step(order.imports, 30, expected=3),
    "torch_imports": Step(order.torch_imports, 40, expected=6),
    "rows": Step(kernels.rows, 40, expected=3),
    "codes": Step(kernels.codes, 60, expected=5),
    "synthetic_1": Step(programs.synthetic(1, 4.0), 60, expected=10),
    "nccl_alone": Step(questions.alone, 40, expected=6),
    "refused_2": Step(stores.refused, 60, expected=5, ranks=2, one_gpu=True),
    "ends_2": Step(ends.ends, 40, expected=5, ranks=2),
    "stopped_2": Step(ends.stopped, 60, expected=14, ranks=2, dies=True),
    "host_cost_2": Step(costs.host_cost, 60, expected=10, ranks=2),
    "sums_2_as_nccl_chooses": Step(stores.sums, 60, expected=7, ranks=2, environ=NCCL_CHOOSES),
    "dtypes_2": Step(communicators.dtypes, 40, expected=5, ranks=2),
    "sums_4": Step(stores.sums, 60, expected=9, ranks=4),
    "sums_4_as_nccl_chooses": Step(stores.sums, 60, expected=10, ranks=4, environ=NCCL_CHOOSES),
    "bits_4": Step(stores.bits, 40, expected=8, ranks=4),
    "several_on_one_2": Step(communicators.several_on_one, 40, expected=6, ranks=2, environ=ONE_HOST, one_gpu=True),
    "several_on_one_2_as_nccl_chooses": Step(
        communicators.several_on_one, 40, expected=6, ranks=2, environ={**ONE_HOST, **NCCL_CHOOSES}, one_gpu=True
    ),
    "deaths_2": Step(ends.deaths, 120, expected=26, jobs=True),
    **{
        name: Step(questions.together(name), question.seconds + 10, expected)
        for (name, question), expected in zip(questions.TOGETHER.items(), (4, 6, 4, 14, 8), strict=True)
    },
    "bench_1": Step(programs.bench(1, "--quick", "--rounds", "5"), 90, expected=20, jobs=True),
    "synthetic_2": Step(programs.synthetic(2, 0.2), 60, expected=8, jobs=True),
    "bench_2": Step(
        programs.bench(2, "--quick", "--rounds", "1", "--only", "sizes,small", "--optimizer", "adam"),
        90,
        expected=20,
        jobs=True,
    ),
    "tests_1": Step(programs.tests(1), 120, expected=45),
    "tests_2": Step(programs.tests(2), 150, expected=55, jobs=True),
    "tests_4": Step(programs.tests(4), 60, expected=15, jobs=True),
}
