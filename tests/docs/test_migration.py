"""The blocks of the page on migration are true on any number of ranks."""

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mpikv

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md"


@pytest.mark.ranks(1, 2, 3)
def test_the_page_is_true(comm: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if ">>>" in block]
    assert len(blocks) > 5
    # As the first statement of a program does; a store of the page is made of all ranks of the launch.
    with mpikv.create(comm=comm) as kv:
        kv.barrier()
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, PAGE.name, 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_names_in_the_tables_are_there() -> None:
    """What stands in the right column of the tables, as far as it is an attribute of something of this package."""
    text = PAGE.read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in text.splitlines() if line.startswith("| `")]
    named = re.findall(r"\b(mpikv|kv|trainer|param)\.(\w+)", " ".join(cells))
    homes = {"mpikv": mpikv, "kv": mpikv.KVStore, "trainer": mpikv.Trainer, "param": mpikv.Parameter(_one())}
    assert len(named) > 30
    packages = {"jax", "torch"}  # which are imported by themselves
    assert [f"{home}.{name}" for home, name in named if name not in packages and not hasattr(homes[home], name)] == []


def test_the_names_of_the_package_for_torch_are_there() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'mpikv[torch]'")
    package = import_module("mpikv.torch")
    homes = {"mpikv.torch": package, "attached": package.Attached}
    named = re.findall(r"\b(mpikv\.torch|attached)\.(\w+)", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 15
    assert [f"{home}.{name}" for home, name in named if name != "kv" and not hasattr(homes[home], name)] == []


def _one() -> Any:
    import numpy as np

    return np.ones(1)
