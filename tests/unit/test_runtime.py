"""What a process asks of its system."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_forked_process_has_its_own_processor_time() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
