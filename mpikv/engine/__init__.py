"""Sums, updates and gives back values, once all ranks have agreed on a call.

``keys`` is the key table. ``arena`` gives keys their memory and takes it back. ``plan`` cuts the keys of a call into
messages and caches the result. ``placement`` says who owns each element. ``pipeline`` runs pushes and pulls and makes
every copy of a caller's array; a ``team`` of threads shares out long ones. ``compression`` sums by codecs, and rolls
their residuals back after a call that failed on any rank. The engine imports ``memory``, ``optimizers``, ``codecs`` and
``compute``, and knows transports by their Protocol alone. It refuses a call that memory or hardware cannot serve,
before ranks agree; ``verbs`` refuse wrong arguments.
"""
