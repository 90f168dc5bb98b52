"""What pushes make of a store's values, in one process that adds up in the order of the ranks."""

import numpy as np

from mpikv import optimizers
from mpikv.arrays.arrays import accumulator


def swap(key, given, stored):
    """Depend on the key, the sum and the stored value, without growing."""
    stored[...] = np.where(stored == 0, given + len(key), 0)


UPDATERS = {
    "assign": lambda: None,
    "callable": lambda: swap,
    "sgd": lambda: optimizers.SGD(learning_rate=0.25, momentum=0.5),
    "lamb": lambda: optimizers.LAMB(learning_rate=0.125),
    "adam": lambda: optimizers.Adam(multi_precision=True),
}


def adopt(kv, updater):
    if isinstance(updater, optimizers.Optimizer):
        kv.set_optimizer(updater)
    else:
        kv.set_updater(updater)


class Oracle:
    """The values, and all that updates depend on."""

    def __init__(self, values, updater=None):
        self.values = {key: value.copy() for key, value in values.items()}
        self.adopt(updater)

    def adopt(self, updater):
        self.updater, self.counts, self.states = updater, dict.fromkeys(self.values, 0), {}
        for key, value in self.values.items() if isinstance(updater, optimizers.Optimizer) else ():
            slots = updater.slots(value.dtype).items()
            self.states[key] = {name: np.zeros(value.shape, dtype) for name, dtype in slots}
            if "master" in self.states[key]:
                self.states[key]["master"][...] = value

    def push(self, key, arrays):
        value = self.values[key]
        first, *others = (array.astype(accumulator(value.dtype)) for array in arrays)
        for other in others:
            first = np.asarray(first + other)
        self.counts[key] += 1
        if self.updater is None:
            value[...] = first
        elif self.updater is swap:
            swap(key, first.astype(value.dtype), value)
        else:
            self.updater.update(self.updater.step(key, self.counts[key]), first, value, self.states[key])
