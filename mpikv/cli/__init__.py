"""The subcommands of ``mpikv``: ``run``, ``bench``, ``info`` and ``trace``.

``launchers``, ``job``, ``rank`` and ``watch`` are parts of ``run``. ``trace`` joins the files that ``store`` writes.

It may import all of the package, and prints.
"""

from .. import __version__ as __version__
