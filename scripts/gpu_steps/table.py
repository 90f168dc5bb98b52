"""All steps, by their names, in the order of their worth: right sums, the aims, the tests, ends, more figures."""

from . import costs, ends, kernels, machine, order, programs, stores
from .step import Step

# Each process takes about 2 s to begin, and a job about 4 s with NCCL's start; a collective of ranks that share a GPU
# takes some 10 ms.
STEPS = {
    "versions": Step(machine.versions, 60, expected=2),
    "sums_2": Step(stores.sums, 60, expected=5, ranks=2),
    "bits_2": Step(stores.bits, 40, expected=5, ranks=2),
    "graph": Step(stores.graph, 30, expected=2),
    "graph_2": Step(stores.graph, 60, expected=5, ranks=2),
    "waits": Step(order.waits, 30, expected=2),
    "kernels": Step(kernels.kernels, 60, expected=4),
    "compiled_cost": Step(costs.compiled_cost, 60, expected=4),
    "torch_cost": Step(costs.torch_cost, 60, expected=11),
    "large": Step(costs.large, 40, expected=1),
    "tests_1": Step(programs.tests(1), 120, expected=50),
    "tests_2": Step(programs.tests(2), 240, expected=139, jobs=True),
    "stopped_2": Step(ends.stopped, 60, expected=15, ranks=2, dies=True),
    "deaths_2": Step(ends.deaths, 120, expected=26, jobs=True),
    "host_cost": Step(costs.host_cost, 60, expected=2),
    "host_cost_2": Step(costs.host_cost, 60, expected=10, ranks=2),
    "synthetic_1": Step(programs.synthetic(4.0), 60, expected=10),
    "rows": Step(kernels.rows, 40, expected=1),
    "codes": Step(kernels.codes, 60, expected=2),
    "staging": Step(machine.staging, 40, expected=1),
    "bench_1": Step(programs.bench(1, "--quick", "--rounds", "5"), 90, expected=20, jobs=True),
    "bench_2": Step(
        programs.bench(2, "--quick", "--rounds", "1", "--only", "sizes,small", "--optimizer", "adam"),
        90,
        expected=20,
        jobs=True,
    ),
    "tests_4": Step(programs.tests(4), 60, expected=15, jobs=True),
}
