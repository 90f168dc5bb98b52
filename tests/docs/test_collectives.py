"""Functions that need all ranks say so: the one fact that a caller cannot see.

The call graph is read from syntax trees: a function that calls a transport's collective, or a function marked as
collective in its own class or module, is marked itself. A marked docstring holds the word *Collective*. In a class
whose docstring says that its methods are collective, the public ones are marked by it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mpikv"
MODULES = [
    PACKAGE / "cluster" / "agreement.py",
    *(path for package in ("transports", "engine", "collectives") for path in PACKAGE.glob(f"{package}/*.py")),
]
CALLS = {"reduce", "allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "fence", "agree"}
CONTRACT = CALLS | {"allocate", "close"}
"""Methods that the Transport protocol marks for all transports."""
OTHERS = ("np", "functools")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def offences(source: str) -> list[str]:
    tree = ast.parse(source)
    scopes = [(tree, functions_of(tree))]
    scopes += [(node, functions_of(node)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    top = scopes[0][1]
    marked = {
        id(function)
        for scope, functions in scopes
        for function in functions.values()
        if function.name in CONTRACT or is_marked(scope, function)
    }
    return [
        f"{function.lineno}: {function.name} calls {name}"
        for _, functions in scopes
        for function in functions.values()
        if id(function) not in marked and (name := next(collectives(function, functions, top, marked), None))
    ]


def functions_of(scope: ast.Module | ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in scope.body if isinstance(node, Function)}


def is_marked(scope: ast.Module | ast.ClassDef, function: Function) -> bool:
    text = ast.get_docstring(function) or ""
    if isinstance(scope, ast.ClassDef) and not function.name.startswith("_") and "Local" not in text:
        text += ast.get_docstring(scope) or ""
    return "collective" in text.lower()


def collectives(
    function: Function, own: dict[str, Function], top: dict[str, Function], marked: set[int]
) -> Iterator[str]:
    """Yield the collective functions that a function calls or passes on."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            if base == "self" and node.attr in own:
                if id(own[node.attr]) in marked:
                    yield node.attr
            elif node.attr in CALLS and base.partition(".")[0] not in OTHERS:
                yield f"{base}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in top and id(top[node.id]) in marked:
            yield node.id


def test_collective_functions_say_so() -> None:
    found = [f"{path.relative_to(PACKAGE)}:{text}" for path in MODULES for text in offences(path.read_text())]
    assert not found, "\n" + "\n".join(found)
