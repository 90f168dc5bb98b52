"""The order of streams, with work that is slow."""

from __future__ import annotations

from typing import Any
from unittest import mock

from .step import MB, Numbers, store
from .timing import fill_late, spin

SLOW = 20.0
"""Milliseconds."""


def waits() -> Numbers:
    """Leave out each of a store's two waits, and count wrong elements. If there are none, no test of order on this GPU
    would find a missing wait.
    """
    found = {f"wrong_elements_without_the_{which}_wait": wrong_without(which) for which in ("store's", "caller's")}
    found["wrong_elements_with_both"] = wrong_without("")
    assert found["wrong_elements_with_both"] == 0
    return found


def wrong_without(left_out: str) -> int:
    """Return how many elements of a pushpull are wrong, on whose both sides work is slow."""
    import cupy

    from mpikv.compute.cuda.gpu import CupyStream

    real = CupyStream.wait
    with store() as kv, cupy.cuda.Stream(non_blocking=True) as caller:

        def wait(self: Any, event: Any) -> None:
            whose = "caller's" if self.handle == caller.ptr else "store's"
            if whose != left_out:
                real(self, event)
            if whose == "store's" and left_out == "caller's":
                with self:
                    spin(SLOW)

        gradient, out = cupy.zeros(MB, "f4"), cupy.zeros(MB, "f4")
        kv.init("w", gradient)
        kv.pushpull("w", gradient, out=out)
        caller.synchronize()
        with mock.patch.object(CupyStream, "wait", wait):
            fill_late(gradient, 3, 0 if left_out == "caller's" else SLOW)
            kv.pushpull("w", gradient, out=out)
            seen = out.copy()
            caller.synchronize()
        return int((seen.get() != 3 * kv.size).sum())
