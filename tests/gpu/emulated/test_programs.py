"""What is timed on GPUs is right; and the script of a page, as a whole job."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Done, mpikv
from support.launching import cleaned
from support.pages import ROOT, blocks, read_tutorial

pytestmark = pytest.mark.deadline(300)

SCRIPTS = ROOT / "scripts"
SETS = "from gpu_steps import sets, step\nstep.tell(sets.sets(quick=True))"

Job = Callable[..., Done]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Return a function that runs a program on several ranks, and cleans up after it."""

    def job(ranks: int, program: str) -> Done:
        script = tmp_path / "program.py"
        script.write_text(f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\n{program}\n")
        return mpikv("run", "-n", ranks, script, cwd=tmp_path, timeout=240, TMPDIR=str(tmp_path))

    with cleaned(tmp_path):
        yield job


@pytest.mark.parametrize("size", [1, 3])
def test_sets_are_timed_and_right(job: Job, size: int) -> None:
    done = job(size, SETS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    timed = ["pushpull_us", "copy_us", "allReduce_us"][: 2 + (size > 1)]
    assert [key for key in found if "64 B" in key] == [f"sum of 64 B: {one}" for one in timed]
    assert len(found) == (3 + 3) * len(timed)
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.parametrize("size", [1, 4])
def test_the_script_of_the_page_on_gpus_prints_what_is_shown(job: Job, size: int) -> None:
    page, command = read_tutorial("gpus"), "$ mpikv run -n 4 train.py\n"
    done = job(size, next(block for block in blocks(page, "python") if "import cupy" in block))
    (output,) = (block.removeprefix(command) for block in blocks(page, "console") if block.startswith(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.replace("4 ranks", f"{size} ranks")
