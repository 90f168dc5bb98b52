"""The store as a contender: its verbs on private arrays, and without copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import KVStore, create
from ...errors import MPIKVError
from ...protocols import Array
from .keysets import KeySet
from .rules import Rule

Settings = Mapping[str, Any]
"""Arguments of :func:`mpikv.create`, with its name unless that is ``dist_sync``."""


def open_store(keys: KeySet, rule: Rule | None, settings: Settings) -> KVStore:
    """Return a store of ones under the keys, with the optimizer if there is one. Collective."""
    # Override the environment: the oracle sums from left to right.
    kv = create(**{"name": "dist_sync", "deterministic": False, **settings})
    try:
        kv.init(keys.keys, [np.ones(shape, np.float32) for shape in keys.shapes])
        if rule is not None:
            kv.set_optimizer(rule.name, **rule.options)
    except (MPIKVError, MemoryError):
        kv.close()
        raise
    return kv


def _is_exact(kv: KVStore, rule: Rule | None) -> bool:
    # MPI, NCCL and several hosts sum in orders of their own; the oracle's Adam and LAMB round elsewhere.
    return kv.transport in ("local", "shm") and (rule is None or rule.name == "sgd")


class SharedStore:
    """A store for several contenders, made at first use."""

    def __init__(self, keys: KeySet, rule: Rule | None, settings: Settings) -> None:
        self.rule, self._arguments = rule, (keys, rule, settings)
        self._kv: KVStore | None = None

    def store(self) -> KVStore:
        """Return the store. The first call is collective."""
        self._kv = self._kv or open_store(*self._arguments)
        return self._kv


class Verb:
    """One or two calls for a single key of a shared store."""

    def __init__(self, kv: KVStore, rule: Rule | None, verb: str, value: Array, out: Array) -> None:
        """``verb`` is ``push``, ``pull``, ``pushpull`` or ``push, pull``."""
        self.exact, self._kv, self._out = _is_exact(kv, rule), kv, out

        def push_and_pull() -> None:
            kv.push(0, value)
            kv.pull(0, out=out)

        steps: dict[str, Callable[[], object]] = {
            "push": lambda: kv.push(0, value),
            "pull": lambda: kv.pull(0, out=out),
            "pushpull": lambda: kv.pushpull(0, value, out=out),
            "push, pull": push_and_pull,
        }
        self._delivers = verb != "push"
        self.step: Callable[[], object] = steps[verb]

    def results(self) -> list[Array]:
        return [self._out if self._delivers else self._kv.pull(0)]

    def close(self) -> None:
        self._kv.close()


class PrivateArrays:
    """One pushpull of all keys, from private arrays to private arrays."""

    def __init__(
        self, keys: KeySet, rule: Rule, settings: Settings, gradients: Sequence[Array], outs: Sequence[Array]
    ) -> None:
        self._kv = open_store(keys, rule, settings)
        self.exact = _is_exact(self._kv, rule)
        self._keys, self._gradients, self._outs = keys.keys, list(gradients), list(outs)

    def step(self) -> None:
        self._kv.pushpull(self._keys, self._gradients, out=self._outs)

    def results(self) -> list[Array]:
        return self._outs

    def close(self) -> None:
        self._kv.close()


class ZeroCopy:
    """One pushpull of all keys; gradients are written into the store's memory, and values are read there."""

    def __init__(self, keys: KeySet, rule: Rule, settings: Settings, gradients: Sequence[Array]) -> None:
        self._kv, self._keys = open_store(keys, rule, settings), keys.keys
        self.exact = _is_exact(self._kv, rule)
        for buffer, gradient in zip(self._kv.buffer(self._keys), gradients, strict=True):
            np.copyto(buffer, gradient)

    def step(self) -> None:
        self._kv.pushpull(self._keys)

    def results(self) -> list[Array]:
        views: list[Array] = self._kv.view(self._keys)
        return views

    def close(self) -> None:
        self._kv.close()
