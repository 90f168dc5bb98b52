"""Memory of a GPU that calls of rows take at once, where all ranks learn whether there was any."""

from __future__ import annotations

from typing import Any

import pytest

from mpikv.spare import SpareTables


def forbid_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call fail that takes more once it has been given memory on all ranks, whatever the rows are."""
    empty = SpareTables.empty

    def within(tables: SpareTables, shape: tuple[int, ...], dtype: Any) -> Any:
        array: Any = empty(tables, shape, dtype)
        if tables._spare is not None and array.size:
            assert array._block is tables._spare._block, f"{tables._used} of {tables._spare.size} bytes are used"
        return array

    monkeypatch.setattr(SpareTables, "empty", within)
