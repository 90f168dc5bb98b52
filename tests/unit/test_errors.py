"""The tree of errors, and how they read."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import mpikv
from mpikv import errors

# As the docstring of the module draws it, and the built-in error that old code may expect.
TREE = {
    "ConfigError": ("MPIKVError", ValueError),
    "KeyNotInitialized": ("MPIKVError", KeyError),
    "KeyAlreadyInitialized": ("MPIKVError", ValueError),
    "ValueMismatch": ("MPIKVError", ValueError),
    "CheckpointError": ("MPIKVError", ValueError),
    "NotFinite": ("MPIKVError", ValueError),
    "Unsupported": ("MPIKVError", NotImplementedError),
    "TransportUnavailable": ("MPIKVError", ImportError),
    "TransportError": ("MPIKVError", RuntimeError),
    "StaleGradient": ("MPIKVError", UserWarning),
    "Stalled": ("TransportError", TimeoutError),
    "RankMismatch": ("MPIKVError", RuntimeError),
    "PeerFailed": ("MPIKVError", RuntimeError),
    "Closed": ("MPIKVError", ValueError),
}


@pytest.mark.parametrize("name", TREE)
def test_the_tree(name):
    parent, builtin = TREE[name]
    kind = getattr(errors, name)
    assert issubclass(kind, getattr(errors, parent))
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.MPIKVError)
    assert kind.__doc__


def test_nothing_is_missing():
    assert {*TREE, "MPIKVError"} == {*vars(errors)} & {*mpikv.__all__}
    assert issubclass(errors.MPIKVError, RuntimeError)
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted(drawn) == sorted(TREE)
    for name, (_, builtin) in TREE.items():
        if builtin is not RuntimeError:
            assert f"{name}({builtin.__name__})" in errors.__doc__


@pytest.mark.parametrize("name", [*TREE, "MPIKVError"])
def test_errors_can_be_sent_to_another_process(name):
    error = pickle.loads(pickle.dumps(getattr(errors, name)("text")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "text"


def test_what_errors_carry():
    stalled = errors.Stalled("late", [2, 3])
    assert stalled.missing == (2, 3)
    assert errors.Stalled("late").missing == ()
    assert pickle.loads(pickle.dumps(stalled)).missing == (2, 3)
    failed = errors.PeerFailed("raised", 1)
    assert failed.rank == 1
    assert pickle.loads(pickle.dumps(failed)).rank == 1


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("adm", ["sgd", "adam"], "unknown optimizer 'adm' (known: adam, sgd); did you mean 'adam'?"),
        ("ADAM", ["sgd", "adam"], "unknown optimizer 'ADAM' (known: adam, sgd); did you mean 'adam'?"),
        ("zzz", ["sgd", "adam"], "unknown optimizer 'zzz' (known: adam, sgd)"),
        (3, ["sgd"], "unknown optimizer 3 (known: sgd)"),
    ],
)
def test_unknown_names(name, known, text):
    assert errors.known_names("optimizer", name, known) == text


@pytest.mark.parametrize("arguments", [(), ("dist_sync",)])
def test_a_store_is_made_by_create(arguments):
    with pytest.raises(TypeError, match=r"a KVStore is made by mpikv.create\(\)"):
        mpikv.KVStore(*arguments)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (3, "an int"),
        (np.zeros(1), "an ndarray"),
        (errors, "a module"),
        (None, "None"),
        (0.5, "a float"),
        ({}, "a dict"),
    ],
)
def test_articles(value, named):
    assert errors.a_kind(value) == named


def test_no_message_has_an_article_of_its_own_before_a_type():
    """``a {type(value).__name__}`` is "a int" one day."""
    package = Path(mpikv.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\ban? \{[^{}]*__name__\}", line)
    ]
    assert found == []
