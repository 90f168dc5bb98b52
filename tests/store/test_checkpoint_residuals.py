"""What compressed pushes have left out, in checkpoints: the same bits on as many ranks, zeros on others."""

import logging

import numpy as np
import pytest

import mpikv
from mpikv.checkpoint.files import inspect
from mpikv.cluster.mpi_library import library_of

from .test_compression import gradients, residuals

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

F32 = np.float32
CODECS = (
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit"},
    {"type": "bf16"},
    {"type": "topk", "ratio": 0.1},
    {"type": "lowrank", "rank": 2},
)
VALUES = {"m": np.zeros((40, 30), F32), "v": np.zeros(7, F32), "h": np.zeros((3, 5), np.float16), "e": np.zeros(0, F32)}


@pytest.fixture(params=["auto", "mpi"])
def transport(request, comm):
    if comm is None and request.param == "mpi":
        pytest.skip("one rank needs no transport")
    return request.param


def push(kv, step, positions=1):
    lists = {
        key: list(gradients(value.shape or 1, step, kv.size, positions)[kv.rank].astype(value.dtype))
        for key, value in VALUES.items()
    }
    kv.push(list(lists), list(lists.values()))


def of_ranks(comm, count):
    """Return a communicator of the first ranks; None on the others."""
    if comm is None:
        return None
    part = comm.Split(0 if comm.rank < count else library_of(comm).UNDEFINED)
    return part if comm.rank < count else None


@pytest.mark.feature("compression-residuals-in-checkpoints")
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["type"])
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_a_run_goes_on_as_if_it_had_not_stopped(comm, transport, folder, codec, placement):
    options = {"comm": comm, "transport": transport, "placement": placement, "compression": codec}
    with mpikv.create(**options) as kv, mpikv.create(**options) as other:
        kv.init(VALUES)
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.5)
        for step in range(3):
            push(kv, step, positions=1 + step % 2)
        kv.save(folder / "checkpoint")
        saved = [each.tobytes() for arrays in residuals(kv).values() for each in arrays]
        assert kv.size == 1 or any(map(any, saved))
        for target in (other, kv):
            target.load(folder / "checkpoint")
            assert [each.tobytes() for arrays in residuals(target).values() for each in arrays] == saved
        for step in range(3, 6):
            for store in (kv, other):
                push(store, step, positions=1 + step % 2)
            for key in VALUES:
                assert kv.pull(key).tobytes() == other.pull(key).tobytes()
                mine, restored = residuals(kv)[key], residuals(other)[key]
                assert [each.tobytes() for each in mine] == [each.tobytes() for each in restored]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["type"])
def test_other_stores_start_with_zeros(comm, folder, caplog, codec):
    """Fewer ranks, other codecs, and none; the file is checked to its last byte all the same."""
    path, others = folder / "checkpoint", [None, {**CODECS[0], "threshold": 0.25}]
    with mpikv.create(comm=comm, compression=codec) as kv:
        kv.init(VALUES)
        push(kv, 0, positions=2)
        kv.save(path)
        values, size = {key: kv.pull(key) for key in VALUES}, kv.size
    for count, compression in [(size, each) for each in others] + [(size - 1, codec)] * (size > 1):
        part = of_ranks(comm, count)
        if part is None and comm is not None:
            continue
        with mpikv.create(comm=part, compression=compression) as kv, caplog.at_level(logging.WARNING, "mpikv"):
            for _ in range(2):  # into a store without keys, and over what it has left out
                caplog.clear()
                kv.load(path)
                log = caplog.text
                assert log.count("residuals start at zero") + log.count("'mpikv.residuals' of") == kv.is_root
                assert not any(each.any() for arrays in residuals(kv).values() for each in arrays)
                for key, value in values.items():
                    np.testing.assert_array_equal(kv.pull(key), value)
                push(kv, 1)
        if part is not None:
            part.Free()


def test_what_is_in_the_file(comm, folder):
    with mpikv.create(comm=comm, compression={"type": "lowrank", "rank": 2}) as kv:
        kv.init({"m": np.zeros((40, 30), F32), "half": np.zeros(5, np.float16)})
        kv.save(folder / "before")
        kv.push(["m", "half"], [np.full((40, 30), 0.25, F32), np.ones(5, np.float16)])
        kv.save(folder / "after")
        kv.save(folder / "without", residuals=False)
        size = kv.size
        if comm is not None:
            comm.Barrier()
    before, after, without = (inspect(str(folder / name)).header for name in ("before", "after", "without"))
    assert not without.program
    names = [f"program/{rank}/mpikv.residuals" for rank in range(size)]
    assert after.nbytes - before.nbytes > size * 4 * (1205 + 2 * 30)
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = safetensors.load_file(folder / "after")
    assert sorted(arrays) == sorted(["value/m", "value/half", *names])
    assert {arrays[name].dtype for name in names} == {np.dtype(np.uint8)}


def test_a_program_has_no_state_of_that_name(comm, folder):
    with mpikv.create(comm=comm) as kv, pytest.raises(TypeError, match="names of its own"):
        kv.save(folder / "checkpoint", state={"mpikv.residuals": 1})


@pytest.mark.ranks(2, 3)
def test_a_rank_that_saves_without(comm, folder):
    with mpikv.create(comm=comm, compression=CODECS[0]) as kv:
        kv.init("w", np.zeros(3, F32))
        with pytest.raises(mpikv.RankMismatch, match="with residuals"):
            kv.save(folder / "checkpoint", residuals=kv.is_root)
        assert not list(folder.iterdir())
