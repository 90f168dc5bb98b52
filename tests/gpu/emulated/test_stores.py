"""The promises of stores in each placement. ``tests/gpu/real`` has those of the usual one."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

import mpikv
from mpikv.testing import StoreContract

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2), pytest.mark.deadline(60)]


class TestInAFixedOrder(StoreContract):
    options: Mapping[str, Any] = MappingProxyType({"deterministic": True})

    def create(self, **options: Any) -> mpikv.KVStore:
        return mpikv.create("nccl", **{"bucket_bytes": 1 << 14, **self.options, **options})


class TestReplicas(TestInAFixedOrder):
    options = MappingProxyType({"placement": "replicated"})
    callables = False


class TestAtTheRoot(TestInAFixedOrder):
    options = MappingProxyType({"placement": "root"})
