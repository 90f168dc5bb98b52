"""The table "A thousand ranks" of the page on several hosts is what the classes of a store compute."""

import json
import math
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.checkpoint import checkpoints, chunks
from mpikv.checkpoint.chunks import Piece
from mpikv.checkpoint.extents import Extent
from mpikv.checkpoint.gathering import Gathering
from mpikv.checkpoint.header import CHUNK, Header, Kind
from mpikv.cli.bench.keysets import resnet50
from mpikv.config import Config
from mpikv.engine.arena import Arena
from mpikv.engine.placement import Sharded
from mpikv.memory.host import HOST
from mpikv.testing import cluster
from mpikv.transports.routes import routes_of

PAGE = Path(__file__).parents[2] / "docs/explanation/several-hosts.md"
FLOAT, LIMIT, PER_HOST = np.dtype(np.float32), Config().bucket_bytes, 8


def seat(size: int, rank: int) -> SimpleNamespace:
    """Return what the classes ask of a transport of this rank."""
    flying = dict.fromkeys(("apart", "sent", "wait_for", "note_read"), len)
    facts = {"size": size, "rank": rank, "ahead": 4, "limit": LIMIT, "memory": HOST, **flying}
    return SimpleNamespace(**facts, allocate=lambda n: np.empty(n, np.uint8))


def buckets(size: int) -> list[tuple[int, ...]]:
    """Return how many elements each rank owns of each message of a ResNet-50."""
    transport = seat(size, 0)
    places = Arena(transport).place([(FLOAT, math.prod(shape)) for shape in resnet50()])
    ends: dict[object, tuple[int, int]] = {}
    for place in places:
        low, high = ends.get(place.block, (place.start, place.start))
        ends[place.block] = min(low, place.start), max(high, place.start + place.size)
    placement = Sharded(transport)
    cut = [(block.grid, *part) for block, span in ends.items() for part in block.grid.cut(*span)]
    return [grid.shard(placement, low, high).counts for grid, low, high in cut]


@pytest.mark.deadline(60)
@pytest.mark.parametrize("size", [128, 1024, 10_000])
def test_the_table_of_a_thousand_ranks(size: int) -> None:
    counts = buckets(size)
    owned = np.array(counts)
    busiest = int((owned > 0).sum(axis=0).argmax())
    hosts = [tuple(range(first, first + PER_HOST)) for first in range(0, size, PER_HOST)]
    routes = {each: routes_of(busiest, hosts, each) for each in set(counts)}
    messages = [route.high - route.low for each in counts for half in routes[each] for route in half]
    # A push sends as a carrier and receives as an owner, a pull the other way round.
    requests, mean = 2 * len(messages), sum(messages) * FLOAT.itemsize / len(messages) / 1024
    shares = owned.sum(axis=0) / owned.sum() * size
    # Messages in flight together: so many hosts receive at a time.
    flights = [owned[at : at + 4].sum(axis=0).reshape(-1, PER_HOST).any(axis=1).sum() for at in range(len(counts) - 3)]
    spread = f"{shares.min():.2f} to {shares.max():.2f} | {min(flights)} to {max(flights)}"
    # Memory of six messages, with what each other host sends for the longest.
    memory = 6 * (len(hosts) - 1) * owned.max() * FLOAT.itemsize / (1 << 20)
    row = f"| {size:,} | {requests:,} | {mean:.1f} KiB | {spread} | {memory:.1f} MiB |"
    assert row in PAGE.read_text(), row


@pytest.mark.deadline(60)
@pytest.mark.parametrize("size", [128, 1024, 10_000])
def test_each_write_of_a_save_is_a_mebibyte(size: int) -> None:
    """Values and momentum of a ResNet-50, on the first ranks of each size."""
    kinds = [Kind("float32", shape, 0, 0, {"momentum": "float32"}) for shape in resnet50()]
    header = Header(tuple(range(len(kinds))), tuple(kinds), tuple(range(len(kinds))), True, {})
    written = 0
    for rank in range(8):
        transport, came = seat(size, rank), list[int]()
        transport.control = SimpleNamespace(
            carry=lambda _, those, came=came: came.extend(one.nbytes for _, one in those)
        )
        places = Arena(transport).place([(FLOAT, math.prod(kind.shape)) for kind in kinds])
        for block, *_ in places:
            block.state = {"momentum": block.values}
        table = SimpleNamespace(find=lambda _, places=places: [SimpleNamespace(place=place) for place in places])
        values, placement = SimpleNamespace(table=table), Sharded(transport)
        store = SimpleNamespace(transport=transport, placement=placement, values=values)
        gathering, writes = Gathering(store, header, lambda n: np.empty(n, np.uint8), True), list[Piece]()
        for window in gathering.windows:
            gathering.prepare(window, writes)()
        written += len(writes)
        # Evenly: of n ranks the first one writes one n-th of the chunks, the first two twice as much, rounded up.
        assert written == -(-(rank + 1) * header.chunks // size)
        assert all(piece.end in (piece.offset + CHUNK, header.nbytes) for piece in writes)
        assert not any(piece.offset % CHUNK for piece in writes)
        assert sum(came) == sum(piece.memory.nbytes for piece in writes)


def test_addresses_do_not_grow_with_hosts() -> None:
    """Memory for what comes from other hosts would be a hundred times as large as all else."""
    hosts, limit, sizes = 16, 64 << 20, list[int]()

    def program(comm: Any) -> None:
        with mpikv.create(comm=comm, bucket_bytes=limit) as kv:
            kv.init("w", np.zeros(4096))
            kv.set_optimizer("test", learning_rate=1.0)
            assert kv.pushpull("w", np.ones(4096))[0] == -hosts
            sizes.append(addresses())

    before = addresses()
    cluster(hosts, hosts=hosts).run(program)
    # Six messages to send, eight of MPI's own sums, one of the rank's sums, and some more.
    assert max(sizes) - before < hosts * 24 * limit


def addresses() -> int:
    """Return the bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.deadline(120)
def test_values_and_files_are_right_where_some_ranks_own_a_bucket(tmp_path: Path) -> None:
    size, keys, shapes = 64, [0, 1, 2, 3, 4], [(3,), (300, 7), (70_001,), (0, 2), (300_000,)]
    writes, pwritev = list[int](), os.pwritev

    def recorded(file: int, parts: Any, offset: int) -> int:
        writes.append(sum(part.nbytes for part in parts))
        return pwritev(file, parts, offset)

    def program(comm: Any) -> None:
        with mpikv.create(comm=comm) as kv:
            kv.init(keys, [np.zeros(shape) for shape in shapes])
            kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
            for step, sum_of in enumerate((-1, -2.5)):
                values = kv.pushpull(keys, [gradient(shape, kv.rank / size) for shape in shapes])
                assert all((value == gradient(value.shape, sum_of * (size - 1) / 2)).all() for value in values), step
            # The newest values are with their owners alone.
            kv.push(keys, [gradient(shape, kv.rank / size) for shape in shapes])
            kv.save(tmp_path / "waits", state={"rank": kv.rank})
            work = kv.save(tmp_path / "goes on", wait=False, state={"rank": kv.rank})
            kv.push(keys, [gradient(shape, 1.0) for shape in shapes])
            work.wait()
            assert kv.load(tmp_path / "goes on") == {"rank": kv.rank}
            kv.save(tmp_path / "again", state={"rank": kv.rank})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_WINDOW", 2 * CHUNK)
        patch.setattr(os, "pwritev", recorded)
        cluster(size, hosts=8).run(program)
    assert sum(length == CHUNK for length in writes) == 3 * (sum(map(math.prod, shapes)) * 16 // CHUNK)
    assert len(writes) == 3 * (size + 1 + -(-sum(map(math.prod, shapes)) * 16 // CHUNK))
    raw = (tmp_path / "waits").read_bytes()
    assert raw == (tmp_path / "goes on").read_bytes() == (tmp_path / "again").read_bytes()
    header = json.loads(raw[8 : (start := 8 + int.from_bytes(raw[:8], "little"))])
    for slot, factor in {"value": -4.25, "state/momentum": -1.75}.items():
        for key, shape in zip(keys, shapes, strict=True):
            low, high = header[f"{slot}/{key}"]["data_offsets"]
            assert raw[start + low : start + high] == gradient(shape, factor * (size - 1) / 2).tobytes(), (slot, key)


@pytest.mark.deadline(60)
def test_a_rank_that_cannot_list_what_it_sends_stops_all(tmp_path: Path) -> None:
    """One of them, whichever comes first; no other waits for its messages."""
    planted, find = list[Exception](), Extent.find

    def failing(extent: Extent, low: int, high: int) -> Any:
        if low < high and planted:
            raise planted.pop()
        return find(extent, low, high)

    def program(comm: Any) -> list[str]:
        kinds = list[str]()
        with mpikv.create(comm=comm) as kv:
            kv.init("w", np.arange(300_000.0))
            for wait in (True, False):
                if kv.rank == 0:
                    planted.append(MemoryError("planted"))
                kv.barrier()
                with pytest.raises((MemoryError, mpikv.PeerFailed), match="planted") as raised:
                    kv.save(tmp_path / "failed", wait=wait)
                kinds.append(raised.type.__name__)
            kv.save(tmp_path / "later", wait=False).wait()
            kv.push("w", np.zeros(300_000))
            kv.load(tmp_path / "later")
            assert (kv.pull("w") == np.arange(300_000.0)).all()
        return kinds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_WINDOW", CHUNK)
        patch.setattr(checkpoints, "FEWEST", 4)
        patch.setattr(Extent, "find", failing)
        for kinds in zip(*cluster(4, hosts=2).run(program), strict=True):
            assert sorted(kinds) == ["MemoryError", *["PeerFailed"] * 3]
    assert os.listdir(tmp_path) == ["later"]


def gradient(shape: tuple[int, ...], factor: float) -> np.ndarray:
    return ((np.arange(math.prod(shape)) % 8 + 1) * factor).reshape(shape)
