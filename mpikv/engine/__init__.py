"""What pushes and pulls do once all ranks have agreed: sum, update, and give back values.

Here: the key table, arenas (which give keys their memory and take it back, small values side by side), plans (what goes
in one message, and which are kept), placements (who owns what), the pipeline of a push, with every copy of a caller's
array, and compression by messages. It keeps residuals for codecs, and puts them back after a call that failed on any
rank. It imports ``memory``, ``optimizers``, ``codecs`` and ``compute``, and knows transports by their Protocol alone.
It refuses what it has no room or no means for, before ranks agree; ``verbs`` refuse what is wrong with arguments.
"""
