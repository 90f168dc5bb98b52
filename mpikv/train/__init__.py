"""The ``Trainer``, and its parameters, local updates and loss scaling; a training loop may use each by itself.

The package imports ``create`` and ``store``; the Trainer uses a few private methods of the store. It knows no
transports and no placements.
"""
