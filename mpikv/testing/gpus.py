"""Several ranks on one GPU, where a test needs more ranks than the machine has GPUs."""

from __future__ import annotations

from ..compute.cuda.sharing import sharing

__all__ = ["sharing"]
