"""Stores of other makes are found by their names."""

import sys
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, KVStoreBase, Unsupported


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    _ = mpikv.create  # registers the stores of this package, if nothing has loaded them before
    monkeypatch.setattr(KVStoreBase, "kv_registry", dict(KVStoreBase.kv_registry))


@pytest.mark.feature("plug-in-register")
def test_a_registered_class_is_made_by_its_name() -> None:
    @KVStoreBase.register
    class MyStore(KVStoreBase):
        def __init__(self, **options: Any) -> None:
            self.options = options

    store: Any = mpikv.create("MYSTORE", timeout=3, deterministic=True)
    assert isinstance(store, MyStore)
    assert (store.type, store.options) == ("mystore", {"timeout": 3, "deterministic": True})
    assert KVStoreBase.register(MyStore) is MyStore  # not a second one


@pytest.mark.feature("plug-in-register")
def test_a_second_class_of_a_name_takes_its_place() -> None:
    kinds = [type("Twice", (KVStoreBase,), {}) for _ in range(2)]
    KVStoreBase.register(kinds[0])
    with pytest.warns(UserWarning, match="'twice' is now"):
        KVStoreBase.register(kinds[1])
    assert type(mpikv.create("twice")) is kinds[1]


@pytest.mark.feature("plug-in-entry-point")
def test_an_installed_package_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_make.py").write_text("import mpikv\nclass Store(mpikv.KVStoreBase):\n    pass\n")
    about = tmp_path / "other_make-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-make\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[mpikv.stores]\nOther = other_make:Store\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(mpikv.create("other")).__module__ == "other_make"
    monkeypatch.delitem(sys.modules, "other_make")


@pytest.mark.parametrize(("value", "text"), [("no_such_make:Store", "cannot be loaded"), ("os:path", "no subclass")])
def test_an_installed_package_that_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    about = tmp_path / "bad_make-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-make\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[mpikv.stores]\nBad = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"the store 'Bad'.*{text}"):
        mpikv.create("bad")


@pytest.mark.feature("plug-in-surface")
def test_what_a_subclass_leaves_out_says_so() -> None:
    store = KVStoreBase()
    for call in ("broadcast", "pushpull"):
        with pytest.raises(Unsupported, match=f"{call}: the store 'kvstorebase' has no such call"):
            getattr(store, call)("w", np.ones(1))
    for call in ("set_optimizer", "set_gradient_compression"):
        with pytest.raises(Unsupported, match=call):
            getattr(store, call)("sgd")
    with pytest.raises(ValueError, match="mine"):
        store.raise_on_all_ranks(ValueError("mine"))
    store.check_equal("anything")
    assert (store.any_rank(True), store.keys(), store._assigns, store.optimizer) == (True, (), True, None)
    assert (store.rank, store.num_workers, store.is_capable("optimizer")) == (0, 1, False)
    store.close()


def test_a_plug_in_of_several_ranks_has_to_vote_itself() -> None:
    class Several(KVStoreBase):
        num_workers = 2  # type: ignore[assignment]

    with pytest.raises(Unsupported, match="any_rank"):
        Several().any_rank(False)


@pytest.mark.feature("names-teststore")
def test_the_store_of_tests() -> None:
    store: Any = mpikv.create("TestStore")
    values, outs = [np.ones(2), np.full(2, 2.0)], [np.zeros(2), np.zeros(2, np.float32)]
    store.pushpull("w", values, out=outs)
    np.testing.assert_array_equal(outs, [[3, 3], [3, 3]])
    store.pushpull("w", values)
    np.testing.assert_array_equal(values, [[3, 3], [3, 3]])
    one = np.ones(2)
    store.pushpull("w", one)
    np.testing.assert_array_equal(one, [1, 1])
    store.broadcast("w", one, out=outs)
    np.testing.assert_array_equal(outs[0], [1, 1])
    for unfit in (np.int8, np.float32):
        with pytest.raises(mpikv.ValueMismatch, match=r"of key 'w' has dtype .* wider ones alone"):
            store.pushpull("w", np.full(2, 300), out=[many := np.zeros(2, np.int64), np.zeros(2, unfit)])
        np.testing.assert_array_equal(many, [0, 0])
    assert store.is_capable(store.OPTIMIZER) is False
    with pytest.raises(Unsupported):
        store.set_optimizer("sgd")
    with mpikv.Trainer({"w": one}, "sgd", {"learning_rate": 0.5}, kvstore="teststore") as trainer:
        trainer.set_grads({"w": np.ones(2)})
        trainer.step(1)
    np.testing.assert_array_equal(one, [0.5, 0.5])


@pytest.mark.feature("names-unknown", "names-not-a-string")
def test_an_unknown_name_still_is_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'horovod'"):
        mpikv.create("horovood")
    with pytest.raises(TypeError, match="must be a string"):
        mpikv.create(3)  # type: ignore[arg-type]
