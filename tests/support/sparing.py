"""Checks that calls of rows on a GPU take no memory beyond what all ranks agreed on."""

from __future__ import annotations

from typing import Any

import pytest

from mpikv.spare import SpareTables


def forbid_more_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a call fail that takes more once it has memory on all ranks; return the sizes of arrays that were checked."""
    empty, checked = SpareTables.empty, list[int]()

    def within(tables: SpareTables, shape: tuple[int, ...], dtype: Any) -> Any:
        array: Any = empty(tables, shape, dtype)
        if tables._spare is not None and array.size:
            checked.append(array.size)
            assert array._block is tables._spare._block, f"{tables._used} of {tables._spare.size} bytes are used"
        return array

    monkeypatch.setattr(SpareTables, "empty", within)
    return checked
