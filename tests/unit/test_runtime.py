"""What a process asks of its system."""

from support.commands import python

from mpikv.cluster.runtime import Runtime
from mpikv.testing.simulation.task import Task

FORK = """
import os
from mpikv.cluster.runtime import present

present().busy()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    present().busy()
"""


def test_a_simulated_rank_uses_nothing_of_the_system() -> None:
    assert {name for name in vars(Runtime) if name[0] != "_"} <= {*vars(Task), "world"}


def test_a_forked_process_has_its_own_processor_time() -> None:
    assert python("-c", FORK, timeout=60).returncode == 0
