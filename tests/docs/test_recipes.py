"""The scripts of the pages on torch and JAX print what the pages show, where these libraries are installed."""

import ast
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.commands import ROOT, mpikv

LIBRARIES = ("torch", "jax")


def read_pages(library: str) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/how-to").glob(f"{library}*.md")))


def find_recipes(library: str) -> dict[str, tuple[str, str]]:
    """Return the scripts of a library's pages by name, each with what the page shows of its runs."""
    pairs = re.findall(
        r"^```python\n(.*?)^```\n\n```console\n(.*?)^```$", read_pages(library), re.MULTILINE | re.DOTALL
    )
    return {re.findall(r"\b\w+\.py\b", shown)[0]: (script, shown) for script, shown in pairs}


RECIPES = [(library, name) for library in LIBRARIES for name in find_recipes(library)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_script_is_found_and_compiles(library: str) -> None:
    recipes = find_recipes(library)
    assert len(recipes) == read_pages(library).count("```python\n") > 1
    for name, (script, _) in recipes.items():
        assert f"import {library}" in script
        compile(script, name, "exec")


def test_pages_install_from_this_folder() -> None:
    """As no index has the package. What is installed is completed by its name, and so is it from a folder of wheels."""
    lines = [line for page in (ROOT / "docs").glob("**/*.md") for line in page.read_text("utf-8").splitlines()]
    installing = [line for line in lines if "$ pip install" in line]
    assert any("[mpich,torch]" in line for line in installing)
    assert [line for line in installing if "mpikv[" in line] == []


@pytest.mark.deadline(100)
@pytest.mark.parametrize(("library", "name"), RECIPES)
def test_a_script_prints_what_the_page_shows(library: str, name: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script, shown = find_recipes(library)[name]
    (tmp_path / name).write_text(script)
    printed = []
    for line in shown.splitlines():
        if not line.startswith("$ "):
            continue
        ran = mpikv(*shlex.split(line.removeprefix("$ mpikv ")), cwd=tmp_path, timeout=120)
        assert ran.returncode == 0, ran.stderr
        printed += [line, *ran.stdout.splitlines()]
    assert printed == shown.splitlines()


def test_the_messages_on_the_page_on_torch_are_those_of_the_package() -> None:
    text = (ROOT / "docs/how-to/torch.md").read_text(encoding="utf-8").partition("| it says |")[2].partition("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    nodes = [node for path in (ROOT / "mpikv/torch").glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert len(quoted) > 10
    assert [one for one in quoted if not any(one in text for text in texts)] == []
