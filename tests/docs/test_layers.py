"""Modules import downwards only, and some powers belong to few of them.

The rules are tables, and `violations` reads any package by its syntax trees. It is run on mpikv, and on planted
offences: a rule that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mpikv"

# A module, or a whole subpackage, imports from lines above its own.
LAYERS = (
    ("errors", "options", "runtime", "typing"),
    (
        "arrays",
        "compiling",
        "config",
        "device",
        "float16",
        "memory",
        "mpi_library",
        "process_group",
        "sharing",
        "shutdown",
        "stream_order",
        "tracebacks",
        "waiting",
        "windows",
        "work",
        "workspace",
    ),
    (
        *(
            "arena",
            "board",
            "clocks",
            "codecs",
            "optimizers",
            "passing",
            "plugins",
            "rowsparse",
            "schedules",
        ),
        *("transports", "updaters"),
    ),
    ("cuda", "kernels", "keys", "plan", "renewed", "wrapped"),
    (
        "agreement",
        "arguments",
        "asking",
        "compression",
        "gpu",
        "ledger",
        "pipeline",
        "placement",
        "publication",
        "scope",
        "values",
    ),
    (
        *("autotune", "checkpoint", "door", "exchange", "located", "replay", "rowarguments", "rowmessages", "rows"),
        *("store", "verbs"),
    ),
    ("asynchronous", "endings", "parameter", "storeless", "tracing"),
    ("create", "gradients", "updating"),
    ("trainer",),
    ("__init__", "__main__", "cli", "testing"),
)
LEVELS = {unit: level for level, units in enumerate(LAYERS) for unit in units}

# The imports inside one layer, besides those inside a subpackage.
SIDEWAYS = {
    ("arrays", "float16"),
    ("device", "arrays"),
    ("device", "stream_order"),
    ("device", "workspace"),
    ("memory", "arrays"),
    ("memory", "stream_order"),
    ("memory", "work"),
    ("tracebacks", "config"),
    ("work", "tracebacks"),
    ("options", "errors"),
    ("mpi_library", "config"),
    ("windows", "arrays"),
    ("windows", "mpi_library"),
    ("shutdown", "config"),
    ("shutdown", "mpi_library"),
    ("shutdown", "tracebacks"),
    ("shutdown", "waiting"),
    ("process_group", "config"),
    ("process_group", "mpi_library"),
    ("process_group", "shutdown"),
    ("process_group", "waiting"),
    ("process_group", "windows"),
    ("optimizers", "schedules"),
    ("updaters", "rowsparse"),
    ("plan", "keys"),
    ("verbs", "exchange"),
    ("verbs", "rowarguments"),
    ("verbs", "rows"),
    ("pipeline", "compression"),
    ("pipeline", "publication"),
    ("pipeline", "values"),
    ("values", "publication"),
    ("rows", "exchange"),
    ("rows", "rowmessages"),
    ("checkpoint", "exchange"),
    ("verbs", "autotune"),
    ("door", "verbs"),
    ("replay", "door"),
    ("replay", "exchange"),
    ("replay", "rowarguments"),
    ("replay", "verbs"),
    ("store", "replay"),
    ("store", "door"),
    ("store", "verbs"),
    ("store", "checkpoint"),
    ("store", "exchange"),
    ("store", "rows"),
    ("__main__", "cli"),
    ("cli", "__init__"),
    ("cli", "testing"),
    ("testing", "__init__"),
}

NUMBA = {"codecs/compiled", "compiling", "optimizers/compiled", "optimizers/compiled_halves"}
CUPY = {"cuda/loading", "gpu"}
MPI = {"mpi_library", "transports/shm", "cli/rank", "cli/info", "cli/bench/worker"}
ENVIRONMENT = {"config", "cli/launchers", "cli/rank", "cli/bench/torch_peer", "sharing"}
SPEAKING = {"__main__", "cli", "testing/explore"}


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).with_suffix("").as_posix()
        tree = ast.parse(path.read_text(), str(path))
        for rule in (layers, foreign_imports, environment, speech, handlers):
            found += [f"{module}.py:{line}: {text}" for line, text in rule(tree, module, package)]
    return found


Offences = Iterator[tuple[int, str]]


def layers(tree: ast.Module, module: str, package: Path) -> Offences:
    unit = module.partition("/")[0]
    if unit not in LEVELS:
        yield 1, f"{unit} has no layer"
        return
    for line, target in own_imports(tree, module, package):
        other = target.partition("/")[0]
        allowed = other == unit or (unit, other) in SIDEWAYS or LEVELS.get(other, len(LAYERS)) < LEVELS[unit]
        if not allowed:
            yield line, f"layer {LEVELS[unit]} imports {target} of layer {LEVELS.get(other, 'unknown')}"


def own_imports(tree: ast.Module, module: str, package: Path) -> Offences:
    """Yield the modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == package.name:
                    yield node.lineno, rest.replace(".", "/") or "__init__"
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node, module, package.name)
            if base is not None:
                # A dict, as many names may come from one module.
                for target in dict.fromkeys(resolve([*base, alias.name], package) for alias in node.names):
                    yield node.lineno, target


def base_of(node: ast.ImportFrom, module: str, package: str) -> list[str] | None:
    """Return the path inside the package from which names are imported, or None when it is another package."""
    names = node.module.split(".") if node.module else []
    if node.level:
        # One dot is the module's own package, each further dot one above.
        return [*module.split("/")[: -node.level], *names]
    return names[1:] if names[:1] == [package] else None


def resolve(parts: list[str], package: Path) -> str:
    """Return the module that `from parts[:-1] import parts[-1]` loads."""
    path = package.joinpath(*parts)
    if not path.is_dir() and not path.with_suffix(".py").exists():
        parts = parts[:-1]
    return "/".join(parts) or "__init__"


def foreign_imports(tree: ast.Module, module: str, package: Path) -> Offences:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            library = name.partition(".")[0]
            allowed = {"mpi4py": MPI, "numba": NUMBA, "llvmlite": NUMBA, "cupy": CUPY}.get(library)
            if allowed is not None and module not in allowed:
                yield node.lineno, f"imports {library}"


def environment(tree: ast.Module, module: str, package: Path) -> Offences:
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


def speech(tree: ast.Module, module: str, package: Path) -> Offences:
    if module in SPEAKING or module.partition("/")[0] in SPEAKING:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "prints"


def handlers(tree: ast.Module, module: str, package: Path) -> Offences:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node.lineno, "catches everything"
        broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        if broad and all(isinstance(statement, ast.Pass) for statement in node.body):
            yield node.lineno, "ignores all errors"


def test_mpikv_keeps_the_rules() -> None:
    found = violations(PACKAGE)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("errors", "from .typing import Key", "layer 0 imports typing of layer 0"),
        ("arrays", "from . import config", "layer 1 imports config of layer 1"),
        ("config", "def late():\n    from .process_group import connect", "layer 1 imports process_group of layer 1"),
        ("keys", "from .plan import Plan", "layer 3 imports plan of layer 3"),
        ("store", "import mpikv.create", "layer 5 imports create of layer 7"),
        ("store", "from mpikv import KVStoreBase", "layer 5 imports __init__ of layer 9"),
        ("store", "from .utils import anything", "layer 5 imports utils of layer unknown"),
        ("transports/shm", "from ..optimizers import Adam", "layer 2 imports optimizers of layer 2"),
        ("transports/shm", "from ..store import KVStore", "layer 2 imports store of layer 5"),
        ("placement", "if TYPE_CHECKING:\n    from .store import KVStore", "layer 4 imports store of layer 5"),
        ("utils", "", "utils has no layer"),
        ("store", "def late():\n    from mpi4py import MPI", "imports mpi4py"),
        ("cli/run", "import mpi4py.MPI", "imports mpi4py"),
        ("arrays", "import cupy", "imports cupy"),
        ("kernels", "def late():\n    import numba", "imports numba"),
        ("optimizers/adam", "import llvmlite.binding", "imports llvmlite"),
        ("store", "os.environ.get('HOME')", "reads the environment"),
        ("store", "os.getenv('HOME')", "reads the environment"),
        ("store", "from os import environ", "reads the environment"),
        ("store", "print('hello')", "prints"),
        ("store", "try:\n    pass\nexcept:\n    raise", "catches everything"),
        ("store", "try:\n    pass\nexcept Exception:\n    pass", "ignores all errors"),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, module: str, source: str, complaint: str) -> None:
    assert offences(tmp_path, module, source) == [complaint]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mpi_library", "from .config import Config\nfrom mpi4py import MPI"),
        ("config", "import os\nos.environ"),
        ("gpu", "def late():\n    import cupy\n    from cupy.cuda import nccl"),
        ("plan", "from .keys import Entry\nfrom .errors import MPIKVError"),
        ("transports/shm", "from . import local\nfrom .local import LocalTransport\nfrom ..typing import Array"),
        ("cli/run", "from .. import __version__\nfrom . import launchers\nprint()"),
        ("store", "try:\n    pass\nexcept Exception as error:\n    raise ValueError from error"),
        ("store", "import numpy\nfrom os import path\nself.print()"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, module: str, source: str) -> None:
    assert offences(tmp_path, module, source) == []


def offences(folder: Path, module: str, source: str) -> list[str]:
    """Return the complaints about one module in a package that has a module, or a subpackage, for each name."""
    package = folder / "mpikv"
    for unit in LEVELS:
        path = package / unit
        is_package = unit in ("checkpoint", "cli", "codecs", "cuda", "optimizers", "testing", "transports")
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (package / "transports/local.py").touch()
    (package / "cli/launchers.py").touch()
    (package / f"{module}.py").write_text(source)
    return [text.partition(": ")[2] for text in violations(package)]
