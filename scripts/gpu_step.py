"""Run a step of ``scripts/gpu_check``, and print a line of JSON: ``python scripts/gpu_step.py NAME``.

``mpikv run -n 2 scripts/gpu_step.py NAME`` runs one on several ranks, the first of which prints. With ``--die`` it is a
process that a step has started.
"""

import sys

from gpu_steps import ends
from gpu_steps.step import Skip, prepare, tell
from gpu_steps.table import STEPS


def main(arguments: list[str]) -> None:
    from mpikv.cluster.environment import launch_of

    launch = launch_of()
    prepare(*((launch.rank, launch.size) if launch is not None else (0, 1)))
    if arguments[0] == "--die":
        ends.die(arguments[1])
        return
    try:
        tell(STEPS[arguments[0]].run())
    except Skip as reason:
        tell({"skip": str(reason)})


if __name__ == "__main__":
    main(sys.argv[1:])
