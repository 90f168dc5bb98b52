"""All steps, by their names, in the order of their worth: right sums, the aims, the tests, ends, sets of keys."""

from . import costs, ends, kernels, machine, programs, sets, stores
from .step import Step

# Each process takes about 2 s to begin, and a job about 4 s with NCCL's start; a collective of ranks that share a GPU
# takes some 10 ms.
STEPS = {
    "versions": Step(machine.versions, 60, expected=2),
    "sums_2": Step(stores.sums, 60, expected=5, ranks=2),
    "kernels": Step(kernels.kernels, 60, expected=4),
    "compiled_cost": Step(costs.compiled_cost, 60, expected=4),
    "torch_cost": Step(costs.torch_cost, 60, expected=11),
    "large": Step(costs.large, 40, expected=1),
    "tests_1": Step(programs.tests(1), 120, expected=50),
    "tests_2": Step(programs.tests(2), 240, expected=139, jobs=True),
    "deaths_2": Step(ends.deaths, 160, expected=45, jobs=True),
    "sets": Step(sets.sets, 90, expected=40),
    "sets_2": Step(sets.sets, 120, expected=60, ranks=2),
    "tests_4": Step(programs.tests(4), 60, expected=15, jobs=True),
}
