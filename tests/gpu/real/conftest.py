"""Before CuPy is imported: ranks that are more than the GPUs share them."""

import os

from mpikv.cli.gpus import survey
from mpikv.cluster.environment import launch_of, visible_gpus
from mpikv.testing.gpus import sharing

LAUNCH = launch_of()
if LAUNCH is not None and LAUNCH.size > 1 and len(survey(visible_gpus()).devices) < LAUNCH.size:
    os.environ |= sharing(LAUNCH.rank)
