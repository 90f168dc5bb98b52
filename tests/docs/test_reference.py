"""The reference names all that is public: names, options, variables, commands and calls."""

import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import mpikv
from mpikv.__main__ import COMMANDS
from mpikv.config import VARIABLES_ONLY, Config
from mpikv.testing import Communicator

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
MODULES = ["optimizers", "schedules", "codecs", "testing"]
FRAMEWORKS = ["jax", "torch"]


def listed(page: str) -> list[str]:
    """Return the names in the lists of a page, of which Sphinx makes a page each."""
    text = (REFERENCE / "api" / f"{page}.md").read_text(encoding="utf-8")
    lists = re.findall(r"^\.\. autosummary::\n   :toctree: \.\n(?:   :.*\n)*\n((?:   \w+\n)+)", text, re.MULTILINE)
    return [name for each in lists for name in each.split()]


def rows(page: str) -> list[list[str]]:
    """Return the cells of all tables of a page."""
    lines = (REFERENCE / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_every_public_name_has_a_page() -> None:
    inner = [name for name in mpikv.__all__ if inspect.ismodule(getattr(mpikv, name))]
    assert sorted([*listed("index"), *inner]) == sorted(mpikv.__all__)
    assert set(inner) <= set(MODULES)


@pytest.mark.parametrize("module", [*MODULES, *FRAMEWORKS])
def test_every_public_name_of_a_module_has_a_page(module: str) -> None:
    if module in FRAMEWORKS:
        pytest.importorskip(module, reason=f"{module} is not installed: pip install 'mpikv[{module}]'")
    assert sorted(listed(module)) == sorted(import_module(f"mpikv.{module}").__all__)


def test_every_argument_of_create_is_there_with_its_default() -> None:
    table = {argument.strip("`"): default for argument, _, default, _ in (r for r in rows("options.md") if len(r) == 4)}
    known = {name: parameter.default for name, parameter in inspect.signature(mpikv.create).parameters.items()}
    known |= {option.name: option.default for option in fields(Config) if option.name in known}
    del table["argument"]
    assert table == {
        name: f"`{default:g}`" if type(default) is float else f"`{default}`" for name, default in known.items()
    }


def test_every_variable_is_there() -> None:
    cells = {cell for row in rows("options.md") for cell in row[:2]}
    assert {f"`MPIKV_{option.name.upper()}`" for option in fields(Config)} <= cells
    variables = {row[0]: row[1] for row in rows("options.md") if len(row) == 3}
    shown = {option.name: str(option.default) for option in fields(Config) if option.name in VARIABLES_ONLY}
    assert {name: variables[f"`MPIKV_{name.upper()}`"].strip("`") for name in shown} == {**shown, "trace": "empty"}


def test_every_name_of_a_store_is_there() -> None:
    named = {name for row in rows("options.md") if len(row) == 2 for name in re.findall(r"`([a-z_0-9]+)`", row[0])}
    assert named == set(import_module("mpikv.creation")._NAMES)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        import_module(f"mpikv.cli.{command}").main(["--help"])
    text = capsys.readouterr().out
    known = {option for line in re.findall(r"^  (-.*)", text, re.MULTILINE) for option in options_of(line)}
    page = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## mpikv {command}\n")[2].partition("\n## ")[0]
    table = {option for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for option in options_of(row)}
    # The module of a rank is in the usage of mpikv run alone.
    assert table | {"-h", "--help"} == known | ({"-m"} if command == "run" else set())


def test_every_measurement_is_there() -> None:
    rows = dict(re.findall(r"^\| `--(only|suite) (.*?) \|$", (REFERENCE / "command-line.md").read_text(), re.MULTILINE))
    options = import_module("mpikv.cli.bench.options")
    assert set(re.findall(r"`([a-z0-9-]+)`", rows["only"])) == {
        one for suite in options.SUITES.values() for one in suite
    }
    assert rows["suite"].startswith(f"{{{','.join((*options.SUITES, 'all'))}}}")


def options_of(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text.partition("  ")[0])


# For the end of the program, and MXNet's class attributes.
INNER = {"OPTIMIZER", "abandon", "announce_shutdown", "count_failed", "drain", "kv_registry", "register", "unseen"}


@pytest.mark.parametrize("kind", [mpikv.KVStore, mpikv.Trainer])
def test_every_call_is_there(kind: type) -> None:
    text = (REFERENCE / "calls.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {'Store' if kind is mpikv.KVStore else 'Trainer'}\n")[2].partition("\n## ")[0]
    named = {name for code in re.findall(r"`([^`]+)`", section) for name in re.findall(r"\w+", code)}
    assert {name for name in dir(kind) if not name.startswith("_")} - INNER <= named


def called(name: str) -> str:
    """Return a call of a simulated communicator as the page on it shows it."""
    parameters = list(inspect.signature(getattr(Communicator, name)).parameters.values())[1:]
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return f"{name}({', '.join(str(each) for each in shown)})"


def test_every_call_of_a_simulated_communicator_is_listed() -> None:
    page = REFERENCE.parent / "how-to" / "test-spmd-code.md"
    section = page.read_text(encoding="utf-8").split("## Calls of the communicator")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+\(.*?\))` \|", section, re.MULTILINE)
    names = [name for name, member in vars(Communicator).items() if name[0] != "_" and inspect.isfunction(member)]
    # It combines ranks' objects for other parts of the simulation.
    assert sorted(listed) == sorted(called(name) for name in names if name != "together")
