"""The command ``mpikv``, also ``python -m mpikv``. A subcommand is imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

if not __package__:
    # `uv run mpikv` in a copy of the repository runs this folder, from which `import torch` would take mpikv.torch.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mpikv.cli import __version__
from mpikv.cli.output import until_unread
from mpikv.errors import ConfigError, known_names

# The summary lines of --help stand here so that it imports no subcommand.
COMMANDS = {
    "run": "start a script on several ranks with the launcher that belongs to Python's MPI library",
    "info": "show versions, the MPI library, the launcher, the transports and the settings; or what is in a checkpoint",
    "doctor": "find what is wrong on this host before a job or after one, and the command that mends it",
    "top": "show the running jobs of this user on this host, and which rank is late",
    "trace": "merge the traces of MPIKV_TRACE=DIR and show who waited; or show the last calls of a job that failed",
    "bench": "time pushes and pulls beside MPI's collectives and memcpy, and check every result",
}

HELP = """\
usage: mpikv COMMAND ...

A KVStore for distributed training over MPI.

commands:
{commands}

options:
  -h, --help  show this text
  --version   show the version

'mpikv COMMAND --help' tells more about one command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand of ``arguments`` (None: of sys.argv), or print the help; return the exit status. A reader who
    closes the pipe is no error.
    """
    return until_unread(partial(_run, sys.argv[1:] if arguments is None else list(arguments)))


def _run(arguments: list[str]) -> int:
    """Run one subcommand, imported now, or print the help or the version; return the exit status."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())))
        return 0 if arguments else 2
    if name == "--version":
        print(f"mpikv {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"mpikv: {known_names('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(f"mpikv.cli.{name}").main(arguments[1:])
    except ConfigError as error:  # a bad MPIKV_ variable, read far below the command
        print(f"mpikv {name}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
