"""What the ranks of a job of ``scripts/chaos`` do, and what they leave for the judge.

A rank writes to the job's folder who it is, what it raised and when; ``scripts/chaos`` judges.
"""

import itertools
import json
import logging
import os
import random
import re
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chaos_faults import ALL, LEAVE, TIMEOUT, End, Mistake, Wrong
from chaos_program import Program

import mpikv
from mpikv.cluster.runtime import present
from mpikv.errors import MPIKVError
from mpikv.testing.faulty import Planned, store_over

STEPS = 300
PLANTED_AT = 5
CALIBRATIONS = 5
"""Saves without a fault; their median tells how long one takes."""
SAVES = 2
"""The fault comes within the time of so many saves, however long they take then."""
SHAPES = {"matrix": (1000, 300), "wide": (70_001,), "half": (5_003,), **{f"small{n}": (3,) for n in range(50)}}
DTYPES = {"matrix": np.float32, "wide": np.float64, "half": np.float16}
_OURS = re.compile(r"/(?:dev/shm|tmp/ompi[^/\s]*)/\S+")


@dataclass
class Task:
    """What a job is to do."""

    faults: list[str]
    """One end, or mistakes."""
    size: int
    transport: str = "auto"
    culprit: int = 0
    seed: str = "0"
    number: int = 0
    """Which repetition it is."""


def perform(task: Task, comm: Any, folder: Path) -> None:
    """Do a task on this rank."""
    # It warns of each call that fails aside, and of each value of 2 bytes that is updated.
    logging.getLogger("mpikv").setLevel(logging.ERROR)
    trial = Trial(task, comm, folder)
    chosen = [ALL[name] for name in task.faults]
    for fault in chosen:
        if isinstance(fault, Mistake):
            trial.run_mistake(fault)
            trial.introduce()
        else:
            trial.run_end(fault)


class Trial:
    """One rank of a job."""

    def __init__(self, task: Task, comm: Any, folder: Path) -> None:
        self.task, self.comm, self.folder = task, comm, folder
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self.odd = self.rank == task.culprit
        self.options = {"root": task.culprit, "transport": task.transport, "timeout": TIMEOUT, "warn_after": 100.0}

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Leave a record for the judge, whole or not at all."""
        path = self.folder / f"{name}.{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps({"at": present().now(), **record}))
        path.with_suffix(".part").replace(path)

    def introduce(self) -> None:
        """Write this process and the files that it shares with other ranks."""
        files = sorted(set(_OURS.findall(Path("/proc/self/maps").read_text())))
        self.write("rank", {"pid": os.getpid(), "files": [file for file in files if os.path.exists(file)]})

    # --- Mistakes

    def run_mistake(self, mistake: Mistake) -> None:
        """Make the mistake in a store of its own, push, and record what came of it."""
        options = {"placement": "auto", **self.options, **dict(mistake.needs.options)}
        program, error = Program(self.comm, f"{self.task.seed} {mistake.name}", **options), None
        program.start({"a": np.arange(4.0), "b": np.ones(4)})
        try:
            mistake.needs.provide(program)
            program.check("the beginning")
            error, problems = program.mistake(mistake, self.task.culprit, ["a", "b"])
            program.no_updater()
            program.step(aside=False)
        except Wrong as wrong:
            problems = [str(wrong)]
        program.kv.close()
        kind = type(error).__name__ if error else None
        self.write(mistake.name, {"seconds": program.slowest, "kind": kind, "problems": problems})

    # --- Ends

    def run_end(self, end: End) -> None:
        """Work until the culprit ends it, and record what the other ranks raise."""
        self.introduce()
        try:
            if end.moment == "create":
                self.plant(end)
            {"exchange": self.run_over, "save": self.save}.get(end.moment, self.train)(end)
        except Wrong as wrong:
            self.write("wrong", {"text": str(wrong)})
            raise
        except MPIKVError as error:
            self.write("end", {"kind": type(error).__name__, "text": str(error)})
            self.wait_for_errors(self.size if end.comes else self.size - 1)
            if not end.in_peace:
                raise
        else:
            # A culprit that comes here has left in peace; its store is closed at exit.
            self.write("end", {"kind": None, "text": "" if self.odd else "no error: all steps were made"})

    def wait_for_errors(self, number: int) -> None:
        """Wait until so many ranks have raised, but not long: the first that ends takes the others with it."""
        limit = present().now() + 2.0
        while len(list(self.folder.glob("end.*.json"))) < number and present().now() < limit:
            present().sleep(0.01)

    def plant(self, end: End) -> Any:
        """Let the fault happen, on the culprit."""
        if not self.odd:
            return None
        if not list(self.folder.glob("end.*.json")):
            self.write("fault", {})
        return end.act(self)

    def train(self, end: End) -> None:
        """Push in a loop."""
        program = Program(self.comm, self.task.seed, **{"placement": "auto", **self.options})
        program.start({"a": np.zeros(1000)})
        self.introduce()
        for step in range(2 * STEPS):
            if step == PLANTED_AT and end.moment == "updater":
                program.use_function(returns=False)
                program.functions[0].before = lambda key: self.plant(end)
            if end.moment == "call" and step == PLANTED_AT:
                if self.plant(end) is LEAVE:
                    return
                self.write("ready", {})
            program.step(end.aside)
            if step > PLANTED_AT:
                present().sleep(0.01)

    def run_over(self, end: End) -> None:
        """Run a random program, in one of whose exchanges it happens."""
        trial = self

        class Planting(Planned):
            def strike(self, call: str) -> None:
                trial.plant(end)

        def make(**options: Any) -> mpikv.KVStore:
            planned = random.Random(self.task.seed).randint(1, STEPS)
            return store_over(lambda t: Planting(t, rank=self.task.culprit, call=planned), **options)

        options = {name: self.options[name] for name in ("transport", "timeout")}
        Program(self.comm, self.task.seed, make, mistakes=False, **options).run(calls=STEPS)

    def save(self, end: End) -> None:
        """Save one new state after the other to the same path; the fault comes at a random moment of a save. Of one
        aside, ranks push before they wait for it.
        """
        del self.options["root"]
        kv, path, seconds, delay = mpikv.create(comm=self.comm, **self.options), self.folder / "checkpoint", [], 0.0
        for number in itertools.count():
            fill(kv, number)
            if number == CALIBRATIONS:
                kv.load(path)
                fill(kv, number)
                delay = random.Random(self.task.seed).uniform(0, SAVES) * statistics.median(seconds)
            if kv.is_root:
                (self.folder / "begun").write_text(str(number))
            kv.barrier()
            began, saved = time.perf_counter(), threading.Event()
            if self.odd and number >= CALIBRATIONS:
                threading.Thread(target=self.plant_unless, args=(saved, delay, end), daemon=True).start()
            work = kv.save(path, wait=not end.aside)
            if work is not None:
                kv.push({key: np.ones(shape, DTYPES.get(key, np.float32)) for key, shape in SHAPES.items()})
                work.wait()
            saved.set()
            seconds.append(time.perf_counter() - began)
            delay = max(delay - seconds[-1], 0.0)

    def plant_unless(self, saved: threading.Event, delay: float, end: End) -> None:
        if not saved.wait(delay):
            self.plant(end)


def fill(kv: mpikv.KVStore, number: int) -> None:
    """Give the store state ``number``, whose bits do not depend on the number of ranks: all sums are exact."""
    chances = np.random.default_rng(number)
    dtypes = {key: DTYPES.get(key, np.float32) for key in SHAPES}
    kv.init({key: chances.normal(size=shape).astype(dtypes[key]) for key, shape in SHAPES.items()}, overwrite=True)
    kv.set_optimizer("adam", learning_rate=1 / (2 + number), multi_precision=True)
    for _ in range(2):
        whole = {key: chances.integers(-8, 9, shape).astype(dtypes[key]) for key, shape in SHAPES.items()}
        kv.push({key: array if kv.is_root else np.zeros_like(array) for key, array in whole.items()})
