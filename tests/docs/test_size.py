"""The size of the project and the plainness of its language: limits that only go down.

A change that lowers a figure lowers its limit in ``LIMITS``. No change raises one: what a feature adds, another part
gives up. ``python -m pytest tests/docs/test_size.py -rP`` prints the figures.
"""

import ast
import inspect
import io
import subprocess
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from .test_layers import own_imports
from .test_prose import relatives

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpikv"

LIMITS = {
    "lines of code in the core": 20_206,
    "lines of code in tests, scripts and commands": 39_305,
    "longest chain of imports in the core": 20,
    "relative words per 100 sentences of docstrings": 4,
    "relative words per 100 sentences of decisions": 2,
    "relative words per 100 sentences of the changelog": 2,
    "private names that tests read": 101,
    "patches in tests": 101,
}
"""The most that each figure may be."""
FEWEST_COMMENTS = 0.070
"""Comments per line of code in the core. Where a reader stops to think, one gives the reason or the danger."""


# --- Which files


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def core() -> list[Path]:
    return tracked("mpikv/*.py", ":!mpikv/cli", ":!mpikv/testing")


def list_tools() -> list[Path]:
    """Return them, and mpikv's commands: what moves out of the wheel into scripts, or back, changes no figure."""
    found = tracked("tests", "scripts", "mpikv/cli")
    return [path for path in found if path.suffix == ".py" or _is_script(path)]


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline().startswith(b"#!") and b"python" in path.read_bytes().partition(b"\n")[0]


# --- Figures


def count_code(source: str) -> int:
    """Return how many lines are neither blank, nor comments, nor part of a text that stands alone."""
    lines = source.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
    for text in docstrings(ast.parse(source)):
        code.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(code)


def count_comments(source: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline))


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts that stand alone: docstrings, and those below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def lines_of_code(paths: Iterable[Path]) -> int:
    return sum(count_code(path.read_text()) for path in paths)


def comments_per_line(paths: Sequence[Path]) -> float:
    return sum(count_comments(path.read_text()) for path in paths) / lines_of_code(paths)


def prose_of_docstrings(paths: Iterable[Path]) -> str:
    texts = (text.value for path in paths for text in docstrings(ast.parse(path.read_text())))
    return "\n\n".join(inspect.cleandoc(str(text)) for text in texts)


def longest_chain(imports: dict[str, set[str]]) -> int:
    """Return how many modules the longest chain of imports has.

    Raises:
        CycleError: modules import each other.
    """
    lengths = dict[str, int]()
    for module in TopologicalSorter(imports).static_order():
        lengths[module] = 1 + max((lengths[other] for other in imports.get(module, ())), default=0)
    return max(lengths.values())


def imports_of(paths: Iterable[Path], for_types: bool) -> dict[str, set[str]]:
    """Return the imports of each module of the package, anywhere in it; ``for_types``: also under TYPE_CHECKING."""
    found = dict[str, set[str]]()
    for path in paths:
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        tree: ast.AST = ast.parse(path.read_text())
        if not for_types:
            tree = _WithoutTypes().visit(tree)
        others = {target for _, target in own_imports(tree, module)}
        found[_name(module)] = {_name(other) for other in others} - {_name(module)}
    return found


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)


def _name(module: str) -> str:
    return module.removesuffix("/__init__")


def private_names(tree: ast.AST) -> int:
    """Return how often a private name of something else is read or imported."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += _is_private(node.attr) and not own
        elif isinstance(node, ast.ImportFrom):
            found += sum(_is_private(alias.name) for alias in node.names)
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def patches(tree: ast.AST) -> int:
    """Return how often something is replaced by ``monkeypatch``."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr in ("setattr", "setitem", "delattr")
        and isinstance(node.value, ast.Name)
        and node.value.id == "monkeypatch"
        for node in ast.walk(tree)
    )


def of_tests(count: Callable[[ast.AST], int]) -> int:
    return sum(count(ast.parse(path.read_text())) for path in tracked("tests/*.py"))


def of_pages(*patterns: str) -> float:
    return relatives("\n\n".join(path.read_text() for path in tracked(*patterns)))


FIGURES: dict[str, Callable[[], float]] = {
    "lines of code in the core": lambda: lines_of_code(core()),
    "lines of code in tests, scripts and commands": lambda: lines_of_code(list_tools()),
    "longest chain of imports in the core": lambda: longest_chain(imports_of(core(), for_types=False)),
    "relative words per 100 sentences of docstrings": lambda: relatives(prose_of_docstrings(core())),
    "relative words per 100 sentences of decisions": lambda: of_pages("docs/decisions/*.md"),
    "relative words per 100 sentences of the changelog": lambda: of_pages("CHANGELOG.md"),
    "private names that tests read": lambda: of_tests(private_names),
    "patches in tests": lambda: of_tests(patches),
}


# --- Tests


@pytest.mark.deadline(60)
@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_is_within_its_limit(name: str) -> None:
    figure = FIGURES[name]()
    print(f"{figure:.1f} {name}")
    assert figure <= LIMITS[name]


@pytest.mark.deadline(60)
def test_the_core_has_comments() -> None:
    figure = comments_per_line(core())
    print(f"{figure:.3f} comments per line of code in the core")
    assert figure >= FEWEST_COMMENTS


def test_no_modules_import_each_other() -> None:
    longest_chain(imports_of(core(), for_types=True))
