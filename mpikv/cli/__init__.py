"""The subcommands of ``mpikv``, with the parts of ``run`` (launchers, job, rank, watch) and ``bench``.

It may import all of the package, and prints.
"""

from .. import __version__

__all__ = ["__version__"]
