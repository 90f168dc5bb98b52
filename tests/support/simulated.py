"""Runs a session of pytest on every rank of a simulated cluster:  python simulated.py SIZE ARGUMENTS-OF-PYTEST

The sessions are threads of one process, so that what they would change in it is here, for all of them together.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest import runner

from mpikv.cluster.runtime import present
from mpikv.testing.simulation import cluster

# What pytest redirects, or watches, for the whole process.
_OFF = ("capture", "faulthandler", "unraisableexception", "threadexception")


class _Patches:
    """What the ranks of a test have patched."""

    def __init__(self) -> None:
        self.patch, self.users = pytest.MonkeyPatch(), 0


_patches: dict[str, _Patches] = {}


@contextmanager
def shared_patches(test: str) -> Iterator[pytest.MonkeyPatch]:
    """Return what all ranks of a test patch with. Collective at the end, where the last of them takes all back."""
    patches = _patches.setdefault(test, _Patches())
    patches.users += 1
    yield patches.patch
    present().world.Barrier()
    patches.users -= 1
    if not patches.users:
        patches.patch.undo()
        del _patches[test]


def main(size: int, arguments: list[str]) -> int:
    # The variable is one for all sessions, and one that ends finds it gone.
    runner._update_current_test_var = lambda item, when: None
    from support.launching import show_stacks

    folder = next(each for each in arguments if each.startswith("--rank-records=")).partition("=")[2]
    show_stacks(Path(folder) / "stacks")
    off = [word for name in _OFF for word in ("-p", f"no:{name}")]
    return max(cluster(size).run(lambda comm: pytest.main([*arguments, *off, f"--basetemp={folder}/tmp.{comm.rank}"])))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
