"""Checkpoints: a store, or its optimizer's state, in one file; any number of ranks can load it.

``header`` defines the format, ``files`` uses the file system. ``extents`` maps values in memory to the file, ``chunks``
writes, reads and sums them. ``gathering`` brings whole chunks to their writers where ranks are many. ``ahead`` and
``saving`` save in the background. ``compatibility`` compares a file with a store. ``residuals`` adds the state of
compression. ``program`` adds that of the user's program, which ``trees`` turns into JSON and arrays. ``checkpoints``
holds the calls. The package imports ``engine`` and ``cluster``. A load changes no value before all ranks have found the
file good.
"""
