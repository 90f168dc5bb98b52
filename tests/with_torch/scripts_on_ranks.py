"""Runs the training scripts on the ranks of this launch, in one process each, and keeps what the root has at the end:
``scripts_on_ranks.py FILE SCRIPT...``.
"""

import runpy
import sys

import torch
from mpi4py import MPI

found = {}
for script in sys.argv[2:]:
    names = runpy.run_path(script)
    found[script] = names.get("weights", names.get("final_loss"))
if MPI.COMM_WORLD.rank == 0:
    torch.save(found, sys.argv[1])
