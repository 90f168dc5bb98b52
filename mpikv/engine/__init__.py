"""What pushes and pulls do once all ranks have agreed: sum, update, and give back values.

Here: the key table, arenas (small values side by side), plans (what goes in one message), placements (who owns what),
the pipeline of a push, compression and its residuals. It imports ``memory``, ``optimizers`` and ``codecs``, and knows
transports by their protocol alone. It never looks at a caller's arguments, and refuses nothing any more.
"""
