"""Checks that calls of rows on a GPU take no memory beyond what all ranks agreed on."""

from __future__ import annotations

from typing import Any

import pytest

from mpikv.memory.device import GpuWorkspace


def forbid_more_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a call fail that takes more once it has memory on all ranks; return the sizes of arrays that were checked."""
    empty, checked = GpuWorkspace.empty, list[int]()

    def within(tables: GpuWorkspace, shape: tuple[int, ...], dtype: Any) -> Any:
        array: Any = empty(tables, shape, dtype)
        if tables._memory is not None and array.size:
            checked.append(array.size)
            assert array._block is tables._memory._block, f"{tables._used} of {tables._memory.size} bytes are used"
        return array

    monkeypatch.setattr(GpuWorkspace, "empty", within)
    return checked
