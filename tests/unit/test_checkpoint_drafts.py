"""The files of checkpoints that are being written: whole or not there, whatever else happens in their folder."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import CheckpointError
from mpikv.checkpoint.files import NONCE, Draft, inspect
from mpikv.checkpoint.header import Header

LEFT = "checkpoint.0123456789abcdef.mpikv-part"


def create(path: Path) -> Draft:
    draft = Draft(str(path))
    draft.create(np.zeros(NONCE, np.uint8))
    return draft


def commit(draft: Draft, text: str) -> None:
    """Make a checkpoint of no keys."""
    draft.commit(Header((), (), (), True, {"kind": "function", "settings": text}), np.zeros(0, np.uint32))


def held(path: Path) -> str:
    """Return what ``commit`` has put there."""
    settings: str = inspect(str(path)).header.updater["settings"]
    return settings


def before(monkeypatch: pytest.MonkeyPatch, name: str, happens: Callable[[], Any], where: Any = os) -> None:
    """Let something happen before the next call of a function."""
    function, waiting = getattr(where, name), [happens]

    def late(*arguments: Any, **options: Any) -> Any:
        if waiting:
            waiting.pop()()
        return function(*arguments, **options)

    monkeypatch.setattr(where, name, late)


def test_a_leftover_that_another_job_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has opened as a leftover, the other removes before it is locked, and goes on to a draft of its own."""
    path, others = tmp_path / "checkpoint", list[Draft]()
    (tmp_path / LEFT).write_bytes(bytes(9))
    before(monkeypatch, "flock", lambda: others.append(create(path)), fcntl)
    mine, (other,) = create(path), others
    assert len(os.listdir(tmp_path)) == 2
    commit(other, "other")
    assert held(path) == "other"
    commit(mine, "mine")
    other.close()
    mine.close()
    assert held(path) == "mine"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_draft_that_is_taken_for_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is locked it looks like one; its maker notices."""
    path, others = tmp_path / "checkpoint", list[Draft]()
    before(monkeypatch, "flock", lambda: others.append(create(path)), fcntl)
    mine = Draft(str(path))
    with pytest.raises(CheckpointError, match="was removed, by another store"):
        mine.create(np.zeros(NONCE, np.uint8))
    mine.close()
    commit(others[0], "other")
    others[0].close()
    assert held(path) == "other"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_draft_that_somebody_removes(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_text("old")
    draft = create(path)
    (name,) = set(os.listdir(tmp_path)) - {"checkpoint"}
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("not ours")
    with pytest.raises(CheckpointError, match="was removed, by another store"):
        commit(draft, "new")
    draft.close()
    assert (path.read_text(), (tmp_path / name).read_text()) == ("old", "not ours")


def test_leftovers_do_not_grow_in_number(tmp_path: Path) -> None:
    others = ["checkpoints.0123456789abcdef.mpikv-part", "checkpoint.mpikv-part", "checkpoint.01.mpikv-part"]
    for name in (LEFT, LEFT.replace("0", "f"), *others):
        (tmp_path / name).write_bytes(bytes(9))
    draft = create(tmp_path / "checkpoint")
    commit(draft, "new")
    draft.close()
    assert set(os.listdir(tmp_path)) == {"checkpoint", *others}


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a leftover may be somebody's draft, and stays."""

    def none(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / LEFT).write_bytes(bytes(9))
    draft = create(tmp_path / "checkpoint")
    commit(draft, "new")
    draft.close()
    assert held(tmp_path / "checkpoint") == "new"
    assert set(os.listdir(tmp_path)) == {"checkpoint", LEFT}


def test_the_order_of_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power between any two of these leaves the old checkpoint, or the new one with all of its bytes."""
    path, calls = tmp_path / "checkpoint", list[tuple[str, str]]()

    def record(name: str, target: Callable[..., str]) -> None:
        function = getattr(os, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            calls.append((name, target(*arguments)))
            return function(*arguments, **options)

        monkeypatch.setattr(os, name, recorded)

    def kind(file: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"

    with mpikv.create() as kv:
        kv.init("w", np.ones(10))
        record("pwritev", lambda file, content, offset: "arrays" if offset else "header")
        record("fdatasync", kind)
        record("fsync", kind)
        record("replace", lambda old, new: new)
        kv.save(path)
        monkeypatch.undo()
    assert calls == [
        ("pwritev", "arrays"),
        ("fdatasync", "file"),
        ("pwritev", "header"),
        ("fsync", "file"),
        ("replace", str(path)),
        ("fsync", "folder"),
    ]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path, fsync = tmp_path / "checkpoint", os.fsync

    def failing(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(file)

    with mpikv.create() as kv:
        kv.init("w", np.ones(10))
        kv.save(path)
        kv.push("w", np.full(10, 2.0))
        monkeypatch.setattr(os, "fsync", failing)
        if code == errno.EIO:
            with pytest.raises(OSError, match="the new checkpoint is saved, but a power failure may lose it") as caught:
                kv.save(path)
            assert (caught.value.errno, caught.value.filename) == (code, str(path))
        else:
            kv.save(path)
        monkeypatch.undo()
        kv.set("w", np.zeros(10))
        kv.load(path)
        np.testing.assert_array_equal(kv.pull("w"), np.full(10, 2.0))
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o664, 0o640])
def test_the_mode_of_the_file_that_is_replaced(tmp_path: Path, mode: int) -> None:
    path, umask = tmp_path / "checkpoint", os.umask(0o022)
    try:
        with mpikv.create() as kv:
            kv.init("w", np.ones(3))
            kv.save(path)
            assert path.stat().st_mode & 0o777 == 0o644
            path.chmod(mode)
            kv.save(path)
        assert path.stat().st_mode & 0o777 == mode
        draft = create(path)
        (name,) = set(os.listdir(tmp_path)) - {"checkpoint"}
        assert (tmp_path / name).stat().st_mode & 0o777 & ~(mode | 0o600) == 0
        draft.close()
    finally:
        os.umask(umask)


def test_long_names(tmp_path: Path) -> None:
    """A file system allows 255 bytes, and a draft adds 28 to its checkpoint's name."""
    with mpikv.create() as kv:
        kv.init("w", np.ones(3))
        kv.save(tmp_path / ("n" * 227))
        with pytest.raises(OSError, match="too long"):
            kv.save(tmp_path / ("n" * 228))
    assert os.listdir(tmp_path) == ["n" * 227]
