"""How a program ends that has not closed its store."""

import pytest
from support.commands import python

PROGRAM = """
import numpy as np
import mpikv

def bad(key, received, stored):
    raise ValueError("bad")

kv = mpikv.create()
kv.init("w", np.zeros(2))
kv.set_updater(bad)
work = kv.push("w", np.ones(2), wait=False)
"""
ABANDONED = """
while not work.done:
    pass
kv.abandon("another rank may wait for this one")
"""


@pytest.mark.parametrize("program", [PROGRAM, PROGRAM + ABANDONED], ids=["open", "abandoned"])
def test_what_nobody_has_seen_is_told_and_the_exit_status_too(program: str) -> None:
    done = python("-c", program)
    assert done.returncode == 1
    assert "mpikv: at the end of the program: ValueError: bad; updating key 'w'" in done.stderr
    assert "for which nobody has waited" in done.stderr
