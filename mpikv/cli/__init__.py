"""The subcommands of ``mpikv``, one module each, and the parts of ``mpikv run``: launchers, job, rank."""

from .. import __version__

__all__ = ["__version__"]
