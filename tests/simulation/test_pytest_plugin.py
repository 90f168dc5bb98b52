"""Marked tests run on simulated ranks, once for each seed, and say by which seed they fail."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.fixture
def found():
    return []

@pytest.mark.cluster(3, hosts=2, seeds=range(4))
def test_passes(comm, found):
    assert comm.allgather(comm.rank) == [0, 1, 2]
    found.append(comm.rank)
    comm.Barrier()
    assert sorted(found) == [0, 1, 2]

@pytest.mark.cluster(2, seeds=[5, 6])
def test_fails(comm):
    comm.Barrier()
    if comm.rank == 1:
        pytest.fail("as planned")
    comm.Barrier()

@pytest.mark.cluster(2)
@pytest.mark.parametrize("number", [1, 2])
def test_without_a_communicator(number):
    assert number < 2

def test_makes_clusters(cluster):
    assert cluster(2).run(lambda comm: comm.rank) == [0, 1]
    assert cluster(2).seed in (0, 6)
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    pytester.makepyfile(TESTS)
    pytester.makeconftest('pytest_plugins = ["mpikv.testing.pytest_plugin"]')
    return pytester.runpytest_subprocess("--strict-markers", *options)


def test_a_marked_test_runs_on_all_ranks_for_each_seed(pytester: pytest.Pytester) -> None:
    ran = run(pytester, "-v")
    ran.assert_outcomes(passed=4 + 1 + 1, failed=2 + 1)
    ran.stdout.fnmatch_lines(["*test_passes?seed=3? PASSED*", "*test_fails?seed=5? FAILED*"])


def test_a_failure_says_how_to_have_it_again_and_what_ranks_did(pytester: pytest.Pytester) -> None:
    ran = run(pytester, "-k", "test_fails", "--cluster-seed=6")
    ran.assert_outcomes(failed=1, deselected=4)
    ran.stdout.fnmatch_lines(
        [
            "*Failed: as planned",
            "*in cluster(2, hosts=1, seed=6)",
            "*rank 1 raised this",
            "*rank 0:",
            "* s  test_a_failure_says_*:19 in test_fails",
        ]
    )


def test_one_seed_is_for_all(pytester: pytest.Pytester) -> None:
    run(pytester, "--cluster-seed=6", "-k", "passes or makes").assert_outcomes(passed=2, deselected=3)


def test_the_marker_is_explained(pytester: pytest.Pytester) -> None:
    run(pytester, "--markers").stdout.fnmatch_lines(
        ["@pytest.mark.cluster(size, *, hosts=1, seeds=(0,), faults=()): *"]
    )


def test_an_async_test_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.cluster(2)\nasync def test_waits(comm): assert 0")
    pytester.makeconftest('pytest_plugins = ["mpikv.testing.pytest_plugin"]')
    ran = pytester.runpytest_subprocess()
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["*TypeError: *test_waits* is async*"])


WRONG = {
    "cluster": "missing 1 required positional argument: 'size'",
    "cluster(2, host=2)": "unexpected keyword argument 'host'",
    "cluster(2, seeds=5)": "'int' object is not iterable",
    "cluster(2, seeds=[])": "there are no seeds",
    "cluster(2, hosts=3)": "2 ranks on 3 hosts",
    "cluster('2')": "size is '2'; pass an integer",
}


def test_a_wrong_marker_is_explained(pytester: pytest.Pytester) -> None:
    for number, marker in enumerate(WRONG):
        test = f"import pytest\n@pytest.mark.{marker}\ndef test_it(comm): pass"
        pytester.makepyfile(**{f"test_{number}": test})
    pytester.makeconftest('pytest_plugins = ["mpikv.testing.pytest_plugin"]')
    ran = pytester.runpytest_subprocess()
    ran.assert_outcomes(errors=len(WRONG))
    for text in WRONG.values():
        ran.stdout.fnmatch_lines_random([f"*test_it: *{text.replace('[', '[[]')}*The marker is cluster(size, *"])


ONE_RANK = """
import unittest, pytest

def test_unmarked(comm): pass

class TestCase(unittest.TestCase):
    @pytest.mark.cluster(2)
    def test_marked(self): pass
"""


def test_a_test_that_would_run_on_no_ranks_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ONE_RANK)
    pytester.makeconftest('pytest_plugins = ["mpikv.testing.pytest_plugin"]')
    ran = pytester.runpytest_subprocess()
    ran.assert_outcomes(errors=2)
    ran.stdout.fnmatch_lines(["*mark the test with cluster(size)", "*unittest.TestCase cannot run on simulated ranks*"])
