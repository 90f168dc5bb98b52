"""What users import is there, explained and typed; importing it is cheap; its examples are true."""

import doctest
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mpikv

from .test_layers import FRAMEWORKS, NUMBA

PACKAGE = Path(__file__).parents[2] / "mpikv"
PUBLIC = sorted(getattr(mpikv, "__all__", ()))


def module_names() -> list[str]:
    # From the files: importing to find out would turn one broken module into no tests at all.
    paths = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))]
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in paths]


def functions_of(thing: Any) -> dict[str, Callable[..., Any]]:
    """Return a function, or the methods and properties of a class that this package defines, by name."""
    if inspect.isfunction(thing):
        return {thing.__name__: thing}
    if not inspect.isclass(thing):
        return {}
    found: dict[str, Callable[..., Any]] = {}
    for owner in thing.__mro__:
        if owner.__module__.partition(".")[0] == "mpikv":
            for name, member in vars(owner).items():
                function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", None) or member)
                # Python writes some methods of dataclasses and Protocols itself.
                if inspect.isfunction(function) and function.__module__ == owner.__module__:
                    found.setdefault(name, function)
    return found


def is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_the_package_says_what_is_public() -> None:
    # Modules become attributes of the package when they are imported; they are not public by that.
    visible = {name for name, value in vars(mpikv).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert PUBLIC
    assert visible <= set(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(mpikv, name)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_explained(name: str) -> None:
    thing = getattr(mpikv, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert (thing.__doc__ or "").strip()
    if inspect.isclass(thing):
        names = [method for method in functions_of(thing) if not method.startswith("_")]
        assert [method for method in names if not inspect.getdoc(getattr(thing, method))] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_typed(name: str) -> None:
    functions = functions_of(getattr(mpikv, name))
    assert [
        gap for method, function in functions.items() if not is_hidden(method) for gap in gaps(method, function)
    ] == []


def gaps(name: str, function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    missing = [f"{name}({p.name})" for p in parameters if p.annotation is p.empty]
    return missing + [f"{name} -> ?"] * (signature.return_annotation is signature.empty)


@pytest.fixture
def module(name: str) -> ModuleType:
    if name.removeprefix("mpikv.").replace(".", "/") in NUMBA:
        pytest.importorskip("numba", reason="numba is not installed: pip install 'mpikv[numba]'")
    if (framework := name.split(".")[1:2]) and framework[0] in FRAMEWORKS:
        pytest.importorskip(
            framework[0], reason=f"{framework[0]} is not installed: pip install 'mpikv[{framework[0]}]'"
        )
    return importlib.import_module(name)


@pytest.mark.parametrize("name", module_names())
def test_a_module_has_what_it_names(module: ModuleType) -> None:
    names = getattr(module, "__all__", [])
    assert module.__doc__
    assert len(names) == len(set(names))
    assert [each for each in names if not hasattr(module, each)] == []


@pytest.mark.parametrize("name", module_names())
def test_examples_are_true(module: ModuleType) -> None:
    # What doctest prints about a failure is in the captured output.
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_import_leaves_out_what_few_programs_need() -> None:
    """It is there all the same, and a name is the same object however it is reached."""
    late = ["async_store", "checkpoint", "codecs", "schedules", "store.capture", "train"]
    code = (
        "import json, sys, mpikv\n"
        f"print(json.dumps([name for name in {late} if f'mpikv.{{name}}' in sys.modules]))\n"
        "assert set(mpikv.__all__) <= set(dir(mpikv))\n"
        "from mpikv.train.trainer import Trainer\n"
        "assert mpikv.Trainer is Trainer and mpikv.codecs is sys.modules['mpikv.codecs']\n"
        "from mpikv import *\n"
        "assert not [name for name in mpikv.__all__ if name not in globals()]\n"
        "assert not hasattr(mpikv, 'Nothing')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert json.loads(ran.stdout) == []


@pytest.mark.feature("no-roles")
def test_import_loads_numpy_and_the_standard_library_only() -> None:
    code = "import json, sys; old = set(sys.modules); import mpikv; print(json.dumps(sorted(set(sys.modules) - old)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    libraries = {name.partition(".")[0] for name in json.loads(ran.stdout)} - sys.stdlib_module_names
    # Names with an underscore are parts of CPython that it does not list, such as its build configuration.
    assert {name for name in libraries if not name.startswith("_")} <= {"mpikv", "numpy"}
