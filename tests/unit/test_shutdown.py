"""How an asynchronous store takes its leave of the other ranks."""

from types import SimpleNamespace

from mpikv.async_store.async_kvstore import AsyncKVStore
from mpikv.store.kvstore import KVStore


def test_what_is_on_its_way_arrives_before_a_rank_parts(monkeypatch):
    parted, around = [], [[2], [], []]
    monkeypatch.setattr(KVStore, "_begin_handshake", lambda store: parted.append("said") or (lambda: [0]))
    monkeypatch.setattr(KVStore, "rank", 1)
    store = object.__new__(AsyncKVStore)
    store._endpoint = SimpleNamespace(answering=True, discard=lambda: around.pop(0))
    absent = store._begin_handshake()
    assert absent() == [1]  # its thread still answers
    store._endpoint.answering = False
    assert absent() == [2]
    assert parted == []
    assert [absent(), absent()] == [[0], [0]]
    assert parted == ["said"]
