"""What training loops use: the ``Trainer``, and parameters, local updates and loss scaling with it or without.

It imports ``create`` and the store's public methods. It knows nothing of transports and placements.
"""
