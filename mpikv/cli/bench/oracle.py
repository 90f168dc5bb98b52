"""The correct results, computed on each rank alone: sums in rank order, then the rule, once per step of a case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...protocols import Array
from .keysets import KeySet, gradients
from .rounds import Case
from .rules import EPSILON, Rule


class _Trajectory:
    """The value of one key after any number of steps; callers ask in ascending order."""

    def __init__(self, total: Array, size: int, rule: Rule | None) -> None:
        self._total, self._size, self._rule, self._count = total, size, rule, 0
        self._weight = np.ones(total.size, np.float32)
        self._states = [np.zeros(total.size, np.float32) for _ in range(rule.states if rule else 0)]
        self._largest = float(np.max(np.abs(total)))

    def at(self, steps: int) -> tuple[Array, float]:
        """Return the value, and the tolerance for another order of summing."""
        if self._rule is None:
            return self._total, self._size * EPSILON * self._largest
        while self._count < steps:
            self._count += 1
            self._rule.apply(self._count, self._total.flatten(), self._weight, self._states)
        weight = float(np.max(np.abs(self._weight)))
        return self._weight.reshape(self._total.shape), self._rule.tolerance(steps, self._largest, weight)


def mismatches(cases: Sequence[Case], keys: KeySet, size: int, rule: Rule | None) -> dict[str, str]:
    """Return the error in each case's results, by name; correct cases are left out.

    Every rank compares all keys, also after a mismatch: reading a result may be collective. Without a ``rule`` the
    values are sums. An exact case must have the oracle's bits; others may differ by rounding.
    """
    found: dict[str, str] = {}
    checked = sorted((case for case in cases if case.contender.exact is not None), key=lambda case: case.steps)
    results = [iter(case.contender.results()) for case in checked]
    for key, total in enumerate(_sums(keys, size)):
        trajectory = _Trajectory(total, size, rule)
        for case, arrays in zip(checked, results, strict=True):
            expected, allowed = trajectory.at(case.steps)
            wrong = _difference(next(arrays), expected, 0.0 if case.contender.exact else allowed)
            if wrong:
                found.setdefault(case.name, f"key {key} after {case.steps} steps: {wrong}")
    return found


def _sums(keys: KeySet, size: int) -> Iterator[Array]:
    for first, *others in zip(*(gradients(rank, keys.shapes) for rank in range(size)), strict=True):
        for other in others:
            first += other
        yield first


def _difference(result: Array, expected: Array, allowed: float) -> str:
    """Return the worst difference above the tolerance; empty if there is none."""
    # Not the opposite comparison: it is false for nan.
    good = np.abs(result - expected) <= allowed
    if good.all():
        return ""
    place = int(np.argmin(good))
    found, wanted = result.reshape(-1)[place], expected.reshape(-1)[place]
    return f"element {place} is {found!s} and not {wanted!s} (± {allowed:.1g}), and {np.sum(~good)} are wrong in all"
