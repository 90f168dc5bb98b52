"""Traces: each call of each rank, in its place, with what it waited for."""

import json
import time

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, KeyNotInitialized, PeerFailed
from mpikv.__main__ import main
from mpikv.store.tracing import SUFFIX, open_tracer

# A process has one file for each folder.
pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.processes]

LATE = 0.3


@pytest.fixture
def folder(folder, monkeypatch):
    """Return the folder of all ranks, in which they write their traces."""
    monkeypatch.setenv("MPIKV_TRACE", str(folder))
    return folder


def traced(comm, folder):
    """Return the events of all ranks, as the command puts them together on one of them."""
    if comm is not None:
        comm.Barrier()
    if comm is None or comm.rank == 0:
        assert main(["trace", str(folder)]) == 0
    if comm is not None:
        comm.Barrier()
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def spans(events):
    """Return name, start, end, depth and arguments of all that began, by rank and thread; check that it nests."""
    found, stacks = {}, {}
    for event in events:
        if event["ph"] == "M":
            continue
        place = event["pid"], event["tid"]
        stack = stacks.setdefault(place, [])
        if event["ph"] == "B":
            stack.append((event, len(found.setdefault(place, []))))
            found[place].append(None)
        else:
            begun, at = stack.pop()
            assert begun["name"] == event["name"]
            assert begun["ts"] <= event["ts"]
            arguments = {**begun["args"], **event["args"]}
            found[place][at] = (begun["name"], begun["ts"], event["ts"], len(stack), arguments)
    assert not any(stacks.values())
    return found


@pytest.mark.feature("profiler-trace")
def test_calls_of_all_ranks_are_there_and_nest(comm, folder, capsys):
    with mpikv.create(comm=comm, timeout=10) as kv:
        kv.init(["w", "b"], [np.zeros(1000), np.zeros((), np.float32)])
        if kv.rank == kv.size - 1:
            time.sleep(LATE)
        kv.push(["w", "b"], [np.ones(1000), np.ones((), np.float32)])
        with pytest.raises(KeyNotInitialized if kv.is_root else PeerFailed):
            kv.pull("v" if kv.is_root else "w")
        work = kv.pushpull("w", np.ones(1000), wait=False)
        work.wait()
        size = kv.size
    events = traced(comm, folder)
    if comm is None or comm.rank == 0:
        assert f"of {size} ranks" in capsys.readouterr().out
    titles = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(titles) == list(range(size))
    assert titles[0].startswith(f"rank 0 of {size} on ")
    found = spans(events)
    for rank in range(size):
        mine = [one for place, several in found.items() if place[0] == rank for one in several]
        calls = sorted((one for one in mine if one[3] == 0), key=lambda one: one[1])
        names = [one[0] for one in calls if one[0] != "next"]
        assert names == ["init", "push", "pull", "pushpull", "close"]
        push = next(one for one in calls if one[0] == "push")
        assert push[4]["keys"] == "['w', 'b']"
        assert push[4]["bytes"] == 8004
        assert push[4]["store"] == "local #0"
        pull = next(one for one in calls if one[0] == "pull")
        assert pull[4]["error"] == ("KeyNotInitialized" if rank == 0 else "PeerFailed")
        waits = [one for one in mine if one[3] == 1]
        assert {one[0] for one in waits} == {"wait"}
        inside = next(one for one in waits if push[1] <= one[1] <= push[2])
        assert inside[2] <= push[2]
        # The clock of this number stands inside of the two events.
        assert inside[2] - inside[1] - LATE * 2e5 < push[4]["waited_us"] <= inside[2] - inside[1]
        late = rank == size - 1
        assert (push[4]["waited_us"] < LATE * 5e5) if late else (push[4]["waited_us"] > LATE * 8e5)
        aside = {place for place in found if place[0] == rank}
        assert len(aside) == 2, "the thread of calls with wait=False is another"


@pytest.mark.feature("profiler-trace")
def test_clocks_are_one(comm, folder):
    """Nobody leaves a barrier before all have come."""
    with mpikv.create(comm=comm, timeout=10) as kv:
        for _ in range(3):
            if kv.rank == 0:
                time.sleep(0.02)
            kv.barrier()
        size = kv.size
    found = spans(traced(comm, folder))
    barriers = [[one for one in several if one[0] == "barrier"] for several in found.values()]
    assert [len(several) for several in barriers] == [3] * size
    for together in zip(*barriers, strict=True):
        assert max(one[1] for one in together) <= min(one[2] for one in together)


def test_stores_of_some_ranks_keep_the_numbers_of_the_launch(comm, folder):
    with mpikv.create(comm=comm, timeout=10) as kv:
        last = kv.size - 1
        part = kv.group([last])
        if part is not None:
            part.init("mine", np.zeros(1))
            part.close()
        kv.barrier()
    found = spans(traced(comm, folder))
    ranks = {place[0] for place, several in found.items() for one in several if one[4].get("store") == "local #1"}
    assert ranks == {last}


@pytest.mark.feature("profiler-off")
def test_nothing_is_there_without_the_variable(comm, folder, monkeypatch):
    monkeypatch.delenv("MPIKV_TRACE")
    with mpikv.create(comm=comm, timeout=10) as kv:
        kv.init("w", np.zeros(1))
        assert type(kv) is mpikv.KVStore
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(2, 3)
def test_one_rank_may_trace_alone(comm, folder, monkeypatch):
    if comm.rank:
        monkeypatch.delenv("MPIKV_TRACE")
    with mpikv.create(comm=comm, timeout=10) as kv:
        kv.barrier()
    assert {event["pid"] for event in traced(comm, folder)} == {0}


def test_a_directory_that_cannot_be_made_on_one_rank(comm, folder, monkeypatch):
    if comm is None or comm.rank == 0:
        (folder / "file").touch()
        monkeypatch.setenv("MPIKV_TRACE", str(folder / "file" / "below"))
        expected = ConfigError
    else:
        expected = PeerFailed
    with pytest.raises(expected, match=r"MPIKV_TRACE=.*no file can be made there"):
        mpikv.create(comm=comm)
    monkeypatch.delenv("MPIKV_TRACE")
    mpikv.create(comm=comm).close()


@pytest.mark.ranks(1)
def test_what_a_killed_job_has_left(folder, capsys):
    kv = mpikv.create()
    kv.barrier()
    (file,) = folder.glob(f"*{SUFFIX}")
    before = file.read_text()
    assert before.count("\n") == 5
    file.write_text(before + '{"ph": "B", "na')
    assert main(["trace", str(folder), "-o", str(folder / "other.json")]) == 0
    assert "2 events of 1 ranks" in capsys.readouterr().out
    assert spans(json.loads((folder / "other.json").read_text())["traceEvents"])
    kv.close()


@pytest.mark.ranks(1)
def test_a_process_that_made_no_store(folder, capsys):
    with pytest.raises(ConfigError, match="nope"):
        mpikv.create(compression="nope")
    mpikv.create().close()
    (folder / f"empty{SUFFIX}").touch()
    (folder / f"torn{SUFFIX}").write_text('{"ph": "mpi')
    assert main(["trace", str(folder)]) == 0
    assert "2 events of 1 ranks" in capsys.readouterr().out


def test_a_line_that_was_written_in_part_ends_the_trace(comm, folder, monkeypatch, caplog):
    """What comes after it, when the disk has space again, would be on the same line."""
    with mpikv.create(comm=comm, timeout=10) as kv:
        file = open_tracer(str(folder))._file

        class Narrow:
            def write(self, line):
                return file.write(line[:9])

        monkeypatch.setattr(open_tracer(str(folder)), "_file", Narrow())
        kv.barrier()
        monkeypatch.undo()
        kv.barrier()
        size = kv.size
    assert [one.getMessage() for one in caplog.records if "tracing of calls has stopped" in one.getMessage()] == [
        "tracing of calls has stopped: only a part of a line could be written"
    ]
    assert {event["pid"] for event in traced(comm, folder)} == set(range(size))


@pytest.mark.ranks(1)
def test_mistakes_of_the_command(folder, capsys):
    assert main(["trace", str(folder / "missing")]) == 1
    assert "run the job with MPIKV_TRACE=" in capsys.readouterr().err
    head = json.dumps({"ph": "mpikv", "rank": 0, "size": 1, "host": "h", "ahead": 0}) + "\n"
    for name in ("one", "two"):
        (folder / f"{name}{SUFFIX}").write_text(head)
    assert main(["trace", str(folder)]) == 1
    assert "two files of rank 0, so they are of several jobs" in capsys.readouterr().err
    for file in folder.iterdir():
        file.write_text("")
    assert main(["trace", str(folder)]) == 1
    assert "created no store" in capsys.readouterr().err
