"""What training loops use: the ``Trainer``, and parameters, local updates and loss scaling with it or without.

It imports ``create`` and ``store``, of which the Trainer uses a few methods that are not public. It knows nothing of
transports and placements.
"""
