"""Modules import downwards only, and some powers belong to few of them.

The rules are tables, and `violations` reads the package by its syntax trees.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpikv"

LAYERS = (
    "errors",
    "options",
    "config",
    "protocols",
    "arrays",
    "cluster",
    "memory",
    "transports",
    "schedules",
    "optimizers",
    "codecs",
    "compute",
    "engine",
    "collectives",
    "sparse",
    "verbs",
    "checking",
    "checkpoint",
    "keep",
    "store",
    "async_store",
    "creation",
    "train",
    "torch_backend",
    "torch",
    "jax",
    "__init__",
    "testing",
    "cli",
    "__main__",
)
"""A module imports from its own package, and from those above it in this list."""

LEVELS = {unit: level for level, unit in enumerate(LAYERS)}
MODULES = {"errors", "options", "config", "schedules", "creation", "torch_backend", "__init__", "__main__"}

UNSEEN = {*((unit, "transports") for unit in ("engine", "collectives", "sparse", "verbs")), ("memory", "compute")}
"""What knows the implementations of a seam by their Protocol alone."""

NUMBA = {f"compute/numba/{name}" for name in ("codecs", "compiling", "rules", "half_rules", "lists")}
CUPY = {"compute/cuda/loading", "compute/cuda/gpu"}
FRAMEWORKS = {"torch": ("torch", "torch_backend"), "jax": ("jax",)}
MPI = {"cluster/mpi_library", "cli/bench/worker"}
ENVIRONMENT = {"config", "cluster/environment", "cli/launchers", "cli/rank", "compute/cuda/sharing"}
SPEAKING = {"__main__", "cli", "testing/explore"}
LOG = "cluster/printing"


def violations() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        tree = ast.parse(path.read_text(), str(path))
        for rule in (layers, foreign_imports, environment, speech, handlers):
            found += [f"{module}.py:{line}: {text}" for line, text in rule(tree, module)]
    return found


Offences = Iterator[tuple[int, str]]


def layers(tree: ast.Module, module: str) -> Offences:
    unit = module.partition("/")[0]
    if unit not in LEVELS:
        yield 1, f"{unit} has no layer"
        return
    for line, target in own_imports(tree, module):
        other = target.partition("/")[0]
        above = LEVELS.get(other, len(LAYERS)) < LEVELS[unit] and (unit, other) not in UNSEEN
        if other != unit and not above:
            yield line, f"{unit} imports {target}" + ("" if other in LEVELS else ", which has no layer")


def own_imports(tree: ast.Module, module: str) -> Offences:
    """Yield the modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == PACKAGE.name:
                    yield node.lineno, rest.replace(".", "/") or "__init__"
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node, module)
            if base is not None:
                # A dict, as many names may come from one module.
                for target in dict.fromkeys(resolve([*base, alias.name]) for alias in node.names):
                    yield node.lineno, target


def base_of(node: ast.ImportFrom, module: str) -> list[str] | None:
    """Return the path inside the package from which names are imported, or None when it is another package."""
    names = node.module.split(".") if node.module else []
    if node.level:
        # One dot is the module's own package, each further dot one above.
        return [*module.split("/")[: -node.level], *names]
    return names[1:] if names[:1] == [PACKAGE.name] else None


def resolve(parts: list[str]) -> str:
    """Return the module that `from parts[:-1] import parts[-1]` loads."""
    path = PACKAGE.joinpath(*parts)
    if not path.is_dir() and not path.with_suffix(".py").exists():
        parts = parts[:-1]
    return "/".join(parts) or "__init__"


def foreign_imports(tree: ast.Module, module: str) -> Offences:
    for library, line in libraries(tree).items():
        allowed = {"mpi4py": MPI, "numba": NUMBA, "llvmlite": NUMBA, "cupy": CUPY}.get(library)
        if allowed is not None and module not in allowed:
            yield line, f"imports {library}"
        if library in FRAMEWORKS and module.partition("/")[0] not in FRAMEWORKS[library]:
            yield line, f"imports {library}"


def libraries(tree: ast.Module) -> dict[str, int]:
    """Return what a module imports of other packages, anywhere in it, and on which line."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found.update({name.partition(".")[0]: node.lineno for name in names})
    return found


def environment(tree: ast.Module, module: str) -> Offences:
    if module in ENVIRONMENT:
        return
    powers = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        direct = isinstance(node, ast.Attribute) and node.attr in powers and getattr(node.value, "id", "") == "os"
        named = (
            isinstance(node, ast.ImportFrom) and node.module == "os" and powers & {alias.name for alias in node.names}
        )
        if direct or named:
            yield node.lineno, "reads the environment"


def speech(tree: ast.Module, module: str) -> Offences:
    if module in SPEAKING or module.partition("/")[0] in SPEAKING:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "prints"
        if isinstance(node, ast.Attribute) and node.attr == "getLogger" and module != LOG:
            yield node.lineno, "logs without cluster/printing"


def handlers(tree: ast.Module, module: str) -> Offences:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node.lineno, "catches everything"
        broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        if broad and all(isinstance(statement, ast.Pass) for statement in node.body):
            yield node.lineno, "ignores all errors"


def test_mpikv_keeps_the_rules() -> None:
    found = violations()
    assert not found, "\n" + "\n".join(found)


def test_every_package_has_a_charter() -> None:
    for unit in set(LAYERS) - MODULES:
        charter = ast.get_docstring(ast.parse((PACKAGE / unit / "__init__.py").read_text()))
        assert charter, f"{unit}/__init__.py does not say what lives there"


def test_the_picture_is_that_of_the_layers() -> None:
    picture = (ROOT / "docs" / "explanation" / "layers.svg").read_text()
    drawn = [name for box in re.findall('<text class="code"[^>]*>([^<]*)<', picture) for name in box.split()]
    assert sorted(drawn) == sorted(LAYERS)
