"""What pushes and pulls do once all ranks have agreed: sum, update, and give back values.

Here: the key table, arenas (which give keys their memory and take it back, small values side by side), plans (what
goes in one message), placements (who owns what), the pipeline of a push, compression and its residuals. It imports
``memory``, ``optimizers``, ``codecs`` and ``compute``, and knows transports by their Protocol alone. What it refuses,
it refuses before ranks agree.
"""
