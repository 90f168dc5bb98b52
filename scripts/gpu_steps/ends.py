"""Ranks that stop, are killed, raise, or leave."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .step import MB, SCRIPT, Numbers, own_rank, store

STRIKE = 0.5
"""Seconds after the first sum."""


def strike_later(kv: Any, act: Callable[[], None]) -> None:
    """Make a first sum, and have the second rank do something in the midst of those that follow."""
    add_up(kv, init=True)
    if kv.rank == 1:
        threading.Timer(STRIKE, act).start()


def add_up(kv: Any, init: bool = False) -> None:
    """Make a sum, and wait for it."""
    import cupy

    gradient = cupy.full(MB, kv.rank + 1, "f4")
    if init:
        kv.init("w", gradient)
    kv.push("w", gradient)
    if not (kv.pull("w")[:: MB // 8].get() == kv.size * (kv.size + 1) / 2).all():
        # A sum that was aborted leaves anything behind, and the next call says why.
        kv.push("w", gradient)
        raise AssertionError("a sum is wrong")


def add_until(kv: Any, enough: Callable[[], bool]) -> None:
    begin = time.perf_counter()
    while not enough():
        add_up(kv)
        assert time.perf_counter() - begin < 20, "nothing has happened"


def missed(error: Exception) -> Numbers:
    """Return what was raised, and whether NCCL's abort has returned."""
    aborting = any(thread.name == "mpikv-nccl-abort" for thread in threading.enumerate())
    return {"raised": f"{type(error).__name__}: {error}", "abort": "hangs" if aborting else "returned"}


# --- Programs of two ranks, one of which ends in some way


def die(how: str) -> None:
    """Run the program of a rank."""
    from mpikv.errors import MPIKVError

    if how == "lost" and own_rank() == 1:
        die_unseen()
        return
    kv = store(timeout=5.0, warn_after=2.0)
    gone = threading.Event()
    strike_later(kv, partial(strike, SIGNALS[how]) if how in SIGNALS else gone.set)
    try:
        if how == "unclosed":
            for _ in range(5):
                add_up(kv)
        else:
            add_until(kv, gone.is_set)
    except MPIKVError as error:
        say(missed(error))
        raise
    if how == "raised":
        say({"struck": time.time()})
        raise RuntimeError("planted")
    say({"left": time.time()})


def die_unseen() -> None:
    """Have a child be the rank, and be killed: the launcher, who would end the job at once, does not see it."""
    subprocess.run([sys.executable, SCRIPT, "--die", "killed"], close_fds=False, check=False)
    time.sleep(40)


def strike(number: int) -> None:
    say({"struck": time.time()})
    os.kill(os.getpid(), number)


def say(found: Numbers) -> None:
    print("said " + json.dumps({"at": time.time(), **found}), flush=True)


SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
DEATHS = ("stopped", "killed", "lost", "raised", "unclosed")
"""How a rank ends. The job is to fail, but where only the store is not closed."""


def deaths() -> Numbers:
    """Time the end of jobs: a rank is stopped or killed in a sum, seen by the launcher or not; raises an error, and
    nobody catches it; or leaves without closing its store.
    """
    found: Numbers = {}
    for how in DEATHS:
        status, said, ended = job(how)
        found |= {f"{how}_{what}": value for what, value in told(status, said, ended).items()}
        text = f"{how}: exit status {status}: {said[-2000:]}"
        assert status is not None, text
        assert (status == 0) == (how == "unclosed"), text
        assert found.get("stopped_others_raised", "Stalled").startswith("Stalled"), text
    return found


def job(how: str, seconds: float = 40) -> tuple[int | None, str, float]:
    """Run a program on two ranks; return its exit status, None where it had to be ended, what it said, and when it was
    over.
    """
    line = [sys.executable, "-m", "mpikv", "run", "-n", "2", str(SCRIPT), "--die", how]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends its ranks
        said, _ = process.communicate()
        return None, said, time.time()
    return process.returncode, said, time.time()


def told(status: int | None, said: str, ended: float) -> Numbers:
    r"""Return what happened in a job, by what its ranks said.

    >>> told(137, 'noise\nsaid {"at": 5.0, "struck": 5.0}', 5.5)
    {'status': 137, 'job_ended_after_s': 0.5, 'others_raised': 'nothing before the job was ended'}
    """
    lines = [json.loads(line.partition("said ")[2]) for line in said.splitlines() if "said {" in line]
    struck = next((line["at"] for line in lines if {"struck", "left"} & line.keys()), None)
    found: Numbers = {"status": "hangs" if status is None else status}
    if struck is None:
        return found
    found["job_ended_after_s"] = round(ended - struck, 3)
    raised = next((line for line in lines if "raised" in line), None)
    if raised is not None:
        found |= {"others_raised": raised["raised"], "others_raised_after_s": round(raised["at"] - struck, 3)}
        found["abort"] = raised["abort"]
    elif any("struck" in line for line in lines):
        found["others_raised"] = "nothing before the job was ended"
    return found
