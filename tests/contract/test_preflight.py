"""The needs of NCCL, on which ranks agree before it is called, for GPUs that are only described."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpikv.cluster.process_group import ProcessGroup
from mpikv.errors import TransportUnavailable
from mpikv.transports.preflight import preflight

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.one_library]


@pytest.fixture
def group(comm: Any) -> Iterator[ProcessGroup]:
    group = ProcessGroup(comm)
    yield group
    group.close()


def look(group: ProcessGroup, uuid: str = "", version: int = 23203) -> None:
    gpu: Any = SimpleNamespace(name="cuda:1", uuid=uuid or f"GPU-{group.rank}")
    preflight(group, gpu, version)


def refused(group: ProcessGroup, **facts: Any) -> str:
    """Return why all ranks refuse to begin, which all say alike."""
    with pytest.raises(TransportUnavailable) as caught:
        look(group, **facts)
    assert len(set(group.gather(str(caught.value)))) == 1
    return str(caught.value)


def test_ranks_do_not_share_a_gpu(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ranks 0 and 1 use one GPU, cuda:1 (GPU-1) of host" in refused(group, uuid="GPU-1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert "use one GPU" in refused(group, uuid="GPU-1", version=22907)
    look(group, "GPU-1", 23004)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    monkeypatch.setenv("NCCL_HOSTID", f"host-{group.rank}")
    look(group, "GPU-1")


def test_ranks_have_one_version_of_nccl(group: ProcessGroup) -> None:
    said = refused(group, version=23203 - 100 * group.rank)
    assert said.startswith("rank 0 has NCCL 2.32.3 and rank 1 has 2.31.3; install")


def test_ranks_have_the_same_settings(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    if group.rank == 1:
        monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert "rank 0 has {} and rank 1 has {'NCCL_ALGO': 'Ring'}" in refused(group)


def test_calls_that_return_before_they_have_begun_are_refused(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    assert "NCCL_COMM_BLOCKING=0 makes NCCL's calls return" in refused(group)
