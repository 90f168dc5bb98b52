"""How the project's kernels use memory: each read and write of a launch is looked at, and launches are counted."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.watching import Uses, lend, watched

from mpikv import codecs, optimizers
from mpikv.compute.cuda import copies, layerwise, norms, rows
from mpikv.compute.cuda.codes import CudaCodec
from mpikv.compute.cuda.kernels import CudaKernels
from mpikv.optimizers.updaters import Assign
from mpikv.protocols import Whole
from mpikv.testing.updater import available, wide

# Kernels are compiled first.
pytestmark = pytest.mark.deadline(120)

FLOATS = {dtype.name: dtype for dtype in available()}
RULES = {
    "descent": optimizers.SGD(),
    "momentum": optimizers.SGD(momentum=0.9),
    "rmsprop_centered": optimizers.RMSProp(centered=True, momentum=0.5),
    "adam": optimizers.Adam(),
    "ftrl": optimizers.FTRL(),
}
LAYERWISE = {"lars": optimizers.LARS(momentum=0.9), "lamb": optimizers.LAMB()}
CODES = ("2bit", "1bit", "fp16", "bf16")
CASTS = [("float32", "float16"), ("float16", "float32"), ("float64", "int8"), ("complex64", "complex128")]
PLACES = list(product([1, 3, 4, 130, 4096, 4099, 9000], [0, 1]))
# The last is a cell and some, whose parts are added up by threads together.
LARGE = [*PLACES, *product([65536, 65536 + 4099], [0, 1])]
MOVED = {"total": (1, 0), "value": (1, 1)}


def placed(size: int, dtype: Any, offset: int = 0, fill: float = 1) -> Any:
    """Return an array of the GPU that begins so many elements behind a multiple of 256 bytes."""
    import cupy

    dtype = np.dtype(dtype)
    memory = cupy.empty(size * dtype.itemsize + 512, np.uint8)
    array = memory[offset * dtype.itemsize : (offset + size) * dtype.itemsize].view(dtype)
    array.set(np.full(size, fill, dtype))
    return array


def shuffled(high: int, count: int, seed: int = 0) -> Any:
    ids = placed(count, np.int64)
    ids.set(np.random.default_rng(seed).permutation(high)[:count])
    return ids


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the memory that layers take for their sums."""
    arrays, take = list[Any](), layerwise.allocate_floats
    monkeypatch.setattr(layerwise, "allocate_floats", lambda count: arrays.append(take(count)) or arrays[-1])
    return arrays


def run(call: Callable[[], object], last: int = 0) -> list[Uses]:
    """Return what the launches of a call use."""
    with watched(last) as uses:
        call()
    return uses


def one(call: Callable[[], object]) -> Uses:
    (launch,) = run(call)
    return launch


def check(uses: Uses, arrays: Mapping[Any, Any], **moved: tuple[float, float]) -> None:
    """Raise if a launch is wrong; and if it does not read and write each array as often as said."""
    uses.check(arrays)
    for name, expected in moved.items():
        assert uses.moved(arrays[name]) == expected, name


def update(optimizer: Any, value: Any, offset: int = 0, at: Mapping[str, int] | None = None) -> tuple[Any, Any]:
    """Return what an update uses, and its arrays, each so many elements behind a good place as ``at`` says."""
    kinds = {"total": wide(value.dtype), **optimizer.slots(value.dtype)}
    arrays = {
        name: placed(value.size, dtype, (at or {}).get(name, offset if name != "total" else 0))
        for name, dtype in kinds.items()
    }
    state = {name: array for name, array in arrays.items() if name != "total"}
    bound = CudaKernels().bind(optimizer, arrays["total"], value, state)
    return run(lambda: bound(optimizer.step("key", 1))), {**arrays, "value": value}


@pytest.mark.parametrize("rule", RULES)
def test_an_update_reads_and_writes_each_number_once(rule: str) -> None:
    for size, offset in PLACES:
        (launch,), arrays = update(RULES[rule], placed(size, np.float32, offset), offset)
        check(launch, arrays, **{name: MOVED.get(name, (1, 1)) for name in arrays})


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_update_of_each_dtype(dtype: str, masters: bool) -> None:
    """A GPU moves sectors of 32 bytes. A warp's threads ask for theirs together, 16 bytes each at most."""
    value = placed(8192, FLOATS[dtype])
    (launch,), arrays = update(optimizers.Adam(multi_precision=masters), value)
    moved = {name: MOVED.get(name, (1, 1)) for name in arrays}
    check(launch, arrays, **moved | {"value": (0 if "master" in arrays else 1, 1)})
    if dtype in ("float32", "bfloat16"):
        del arrays["value"]
        aligned(launch, arrays)
        aligned(launch, {"value": value}, 4 * value.itemsize)


@pytest.mark.parametrize("ends", [[4096, 8192, 8256], [1, 5000, 5001, 9001], list(range(3, 600, 3))])
def test_ranges_of_a_table(ends: list[int]) -> None:
    optimizer, arrays = optimizers.Adam(), {name: placed(ends[-1], np.float32) for name in ("total", "value")}
    state = {name: placed(ends[-1], np.float32) for name in ("mean", "variance")}
    memory: Any = SimpleNamespace(zeros=lambda nbytes: arrays.setdefault("table", placed(nbytes, np.uint8)))
    table = CudaKernels().step_table(optimizer, memory, len(ends), [])
    steps = [optimizer.step("key", 1 + place % 8) for place in range(len(ends))]
    check(one(lambda: table.write(steps)), {"table": arrays["table"]})
    bound = CudaKernels().bind_ranges(optimizer, arrays["total"], arrays["value"], state, ends)
    check(one(lambda: bound(table.rows)), {**arrays, **state}, **MOVED, **dict.fromkeys(state, (1, 1)))


# --- How much at once


def aligned(uses: Uses, arrays: Mapping[str, Any], width: int = 16) -> None:
    """Raise if a launch moves any of the arrays in smaller pieces than can be, or a sector for less than it has."""
    for name, array in arrays.items():
        assert (uses.share_of(width, array), uses.sectors(array)) == (1, 1), name


def test_copies_and_looks_move_16_bytes_at_once() -> None:
    whole, half, flags = placed(8192, np.float32), placed(8192, np.float16), placed(1, np.uint8, fill=0)
    for source, target, width in ((half, whole, 8), (whole, half, 16)):
        cast = one(lambda source=source, target=target: copies.copy([target], [source]))
        aligned(cast, {"source": source}, width)
        # NVRTC makes four stores of the four numbers of a cast, and one of those of other kernels.
        assert cast.share_of(target.itemsize, target) == 1
    aligned(one(lambda: copies.copy([whole[:4096]], [whole[4096:]])), {"whole": whole})
    aligned(one(lambda: copies.flag_exceeding([whole], flags, 4.0)), {"whole": whole})


@pytest.mark.parametrize("name", ["2bit", "fp16", "bf16"])
def test_codes_move_16_bytes_at_once(name: str) -> None:
    codec = CudaCodec(codecs.create(name))
    gradient, residual, total = (placed(8192, np.float32) for _ in range(3))
    payload = placed(codec.nbytes(8192), np.uint8)
    packing = one(lambda: codec.encode(gradient, payload, residual))
    adding = one(lambda: codec.decode_add(payload, total))
    aligned(packing, {"gradient": gradient, "residual": residual})
    aligned(adding, {"total": total})
    for launch in (packing, adding):
        aligned(launch, {"payload": payload}, 4 * payload.size // 8192 or 1)


def test_rows_move_16_bytes_at_once() -> None:
    table, some, ids = placed(64 * 64, np.float32), placed(32 * 64, np.float32), shuffled(64, 32)
    for move in (rows.take, rows.put, rows.add):
        moved = one(lambda move=move: move(table.reshape(64, 64), ids, some.reshape(32, 64)))
        aligned(moved, {"table": table, "some": some})


@pytest.mark.parametrize("rule", LAYERWISE)
def test_norms_and_layers_move_16_bytes_at_once(rule: str) -> None:
    value = placed(65536, np.float32)
    aligned(one(lambda: norms.measure([value], [value.dtype])), {"value": value})
    aligned(one(lambda: norms.scale([value], 2.0)), {"value": value})
    (first, _, descent), arrays = update(LAYERWISE[rule], value)
    for launch in (first, descent):
        aligned(launch, {"value": value, "total": arrays.pop("total", value)})
    del arrays["value"]
    aligned(descent if rule == "lars" else first, arrays)


@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_one_array_that_is_not_aligned(taken: list[Any], rule: str) -> None:
    for shifted in ("total", "value", "master", "mean", "variance"):
        taken.clear()
        value = placed(5000, FLOATS["bfloat16"], shifted == "value")
        launches, arrays = update(optimizers.create(rule, multi_precision=True), value, at={shifted: 1})
        for launch in launches:
            launch.check({**arrays, **dict(enumerate(taken))})
        assert launches[0].share_of(16, arrays["total"]) == 0


def test_what_is_not_aligned_moves_side_by_side() -> None:
    """A warp then needs one sector more for its four."""
    (launch,), arrays = update(optimizers.Adam(), placed(8192, np.float32, 1), 1)
    assert (launch.share_of(4, arrays["value"]), launch.sectors(arrays["value"])) == (1, 1.25)
    assert launch.sectors(arrays["total"]) == 1


# --- Copies


@pytest.mark.parametrize(("source", "target"), [(0, 0), (16, 0), (8, 8), (4, 12), (2, 0), (0, 1), (3, 3)])
def test_copies_of_any_bytes(source: int, target: int) -> None:
    for nbytes in (1, 15, 16, 17, 5000, 1 << 15, (1 << 15) + 16, (3 << 15) + 7):
        arrays = {"source": placed(nbytes, np.uint8, source), "target": placed(nbytes, np.uint8, target)}
        launch = one(lambda arrays=arrays: copies.copy([arrays["target"]], [arrays["source"]]))
        check(launch, arrays, source=(1, 0), target=(0, 1))


@pytest.mark.parametrize("dtypes", CASTS, ids="-".join)
def test_casts(dtypes: tuple[str, str]) -> None:
    for (size, offset), other in product(PLACES, (0, 2)):
        arrays = {"source": placed(size, dtypes[0], offset), "target": placed(size, dtypes[1], other)}
        launch = one(lambda arrays=arrays: copies.copy([arrays["target"]], [arrays["source"]]))
        check(launch, arrays, source=(1, 0), target=(0, 1))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_are_looked_at_until_one_is_too_large(dtype: str, offset: int) -> None:
    for fill, size in ((1, 9001), (9, 9001), (1, 2)):
        array, flags = placed(size, FLOATS[dtype], offset, fill), placed(1, np.uint8, fill=0)
        launch = one(lambda array=array, flags=flags: copies.flag_exceeding([array], flags, 4.0))
        # All that write to the flag write the same.
        launch.check({"array": array, "flags": flags}, unordered=("flags",))
        assert flags[0] == (fill > 4)
        if fill < 4:
            assert (launch.moved(array), launch.moved(flags)) == ((1, 0), (0, 0))


# --- Codes


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("name", CODES)
def test_codes(name: str, feedback: bool) -> None:
    codec = CudaCodec(codecs.create({"type": name, "error_feedback": feedback}))
    for size, offset in PLACES:
        gradient, residual, total = (placed(size, np.float32, offset) for _ in range(3))
        payload, kept = placed(codec.nbytes(size), np.uint8), {"residual": residual} if feedback else {}
        packing = one(lambda g=gradient, p=payload, kept=kept: codec.encode(g, p, **kept))
        arrays = {"gradient": gradient, "payload": payload, **kept}
        check(packing, arrays, gradient=(1, 0), payload=(0, 1), **dict.fromkeys(kept, (1, 1)))
        adding = one(lambda p=payload, t=total: codec.decode_add(p, t))
        check(adding, {"payload": payload, "total": total}, total=(1, 1))


# --- Rows


@pytest.mark.parametrize("width", [1, 3, 4, 64, 300])
def test_rows_are_moved_and_added(width: int) -> None:
    for dtype in ("int8", "float16", "float32", "float64", "complex128"):
        arrays = {"table": placed(40 * width, dtype), "some": placed(17 * width, dtype), "ids": shuffled(40, 17)}
        whole, ids, some = arrays["table"].reshape(40, width), arrays["ids"], arrays["some"].reshape(17, width)
        for call, moved in (
            (lambda w, i, s: rows.take(w, i, s), (0, 1)),
            (lambda w, i, s: rows.put(w, i, s), (1, 0)),
            (lambda w, i, s: rows.put(w, i, None), (0, 0)),
        ):
            check(one(lambda c=call, w=whole, i=ids, s=some: c(w, i, s)), arrays, some=moved)
    for dtype, offset in product(("float16", "float32"), (0, 1)):
        arrays = {"table": placed(40 * width, np.float32, offset), "some": placed(17 * width, dtype, offset)}
        some, ids = arrays["some"].reshape(17, width), shuffled(40, 17)
        adding = one(lambda a=arrays, i=ids, s=some: rows.add(a["table"].reshape(40, width), i, s))
        check(adding, {**arrays, "ids": ids}, some=(1, 0))
        sums, starts, order = placed(5 * width, dtype), placed(6, np.int64), shuffled(17, 17)
        starts.set(np.array([0, 1, 4, 9, 16, 17]))
        summing = one(lambda s=some, o=order, b=starts, t=sums: rows.sum_runs(s, o, b, t.reshape(5, width)))
        used = {"some": arrays["some"], "order": order, "starts": starts, "sums": sums}
        check(summing, used, some=(1, 0), sums=(0, 1))


# --- Norms


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_and_scaling(dtype: str) -> None:
    for size, offset in LARGE:
        array, found = placed(size, FLOATS[dtype], offset), list[Any]()
        launch = one(lambda array=array, found=found: found.append(norms.measure([array], [array.dtype])[0]))
        check(launch, {"array": array, "sums": found[0]}, array=(1, 0), sums=(0, 1))
        check(one(lambda array=array: norms.scale([array], 2.0)), {"array": array}, array=(1, 1))


@pytest.mark.parametrize("rule", LAYERWISE)
def test_layers_are_walked_through_twice(taken: list[Any], rule: str) -> None:
    """Once for the norms, which nobody knows before all numbers are read, and once for the descent."""
    kept = dict.fromkeys(LAYERWISE[rule].slots(np.dtype(np.float32)))
    for size, offset in LARGE:
        taken.clear()
        (first, rates, descent), arrays = update(LAYERWISE[rule], placed(size, np.float32, offset), offset)
        arrays["sums"] = taken[0]
        check(rates, arrays)
        directs = rule == "lamb"  # the first pass leaves the direction in the sum's place
        check(first, arrays, total=(1, int(directs)), value=(1, 0), **dict.fromkeys(kept, (directs, directs)))
        check(descent, arrays, total=(1, 0), value=(1, 1), **dict.fromkeys(kept, (not directs, not directs)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", LAYERWISE)
def test_layers_of_each_dtype(taken: list[Any], rule: str, dtype: str) -> None:
    optimizer = optimizers.create(rule, multi_precision=True)
    wholes = [whole_of(optimizer, size, FLOATS[dtype]) for size in (70_000, 1, 4099)]
    bound = CudaKernels().bind_whole(optimizer, wholes)
    launches = run(lambda: bound([optimizer.step("key", 1)] * 3))
    arrays = [*taken, *(array for total, value, state in wholes for array in (total, value, *state.values()))]
    assert len(launches) == 3
    for launch in launches:
        check(launch, dict(enumerate(arrays)))


def whole_of(optimizer: Any, size: int, dtype: np.dtype[Any]) -> Whole:
    state = {name: placed(size, kind) for name, kind in optimizer.slots(dtype).items()}
    return Whole(placed(size, wide(dtype)), placed(size, dtype), state)


# --- As few launches as can be


@pytest.mark.parametrize(
    ("keys", "launched"), [([0] * 500, 3), ([0, 1] * 100, 1), ([*range(17)] * 2, 3), ([0] * 10 + [*range(1, 20)], 2)]
)
def test_launches_of_ranges(keys: Sequence[int], launched: int) -> None:
    """Of 200 ranges at most, with 16 different steps."""
    optimizer = optimizers.SGD(lr_mult={key: 1.0 + key for key in range(20)})
    total, value = (placed(10 * len(keys), np.float32) for _ in range(2))
    ends = [10 * (1 + number) for number in range(len(keys))]
    bound = CudaKernels().bind_ranges(optimizer, total, value, {}, ends)
    assert len(run(lambda: bound([optimizer.step(key, 1) for key in keys]))) == launched


def test_launches_of_copies() -> None:
    """What is alike goes together, 127 pairs at a time; nothing takes none, nor does a sum in its place."""
    value = placed(3, np.float64)
    CudaKernels().prepare(Assign(), value.dtype, False)
    assert run(lambda: CudaKernels().bind(Assign(), value, value, {})(None)) == []
    for wanted in (np.float32, np.float16):
        sources = [placed(size, np.float32) for size in range(300)]
        targets = [placed(size, wanted) for size in range(300)]
        assert len(run(lambda s=sources, t=targets: copies.copy(t, s))) == 3
        assert run(lambda s=sources, t=targets: copies.copy(t[:1], s[:1])) == []
    kinds = [(np.float32, np.float32), (np.int64, np.int64), (np.float32, np.float64), (np.bool_, np.float64)] * 2
    pairs = [(placed(5, wanted), placed(5, dtype)) for dtype, wanted in kinds]
    assert len(run(lambda: copies.copy(*zip(*pairs, strict=True)))) == 3
    assert len(run(lambda: norms.measure([pairs[0][0]] * 380, [np.dtype(np.float32)] * 380))) == 3


@pytest.mark.parametrize(("count", "different", "launched"), [(44, 1, 3), (45, 1, 6), (40, 40, 9), (0, 1, 0)])
def test_launches_of_layers(count: int, different: int, launched: int) -> None:
    optimizer = optimizers.LARS(wd=0.5, lr_mult={number: number for number in range(different)})
    bound = CudaKernels().bind_whole(optimizer, [whole_of(optimizer, 3, np.dtype("f4"))] * count)
    steps = [optimizer.step(number % different, 1) for number in range(count)]
    assert len(run(lambda: bound(steps))) == launched


def test_what_is_in_a_table_is_not_written_again() -> None:
    adam, memory = optimizers.Adam(), SimpleNamespace(zeros=lambda nbytes: placed(nbytes, np.uint8))
    table = CudaKernels().step_table(adam, memory, 3, [])  # type: ignore[arg-type]  # of a Memory it takes zeros alone
    for counts, launched in (([1], 1), ([1], 0), ([2], 1), ([2, 2, 3], 1), ([2, 2, 3], 0), ([2, 3, 3], 1), ([2], 1)):
        steps = [adam.step("a", count) for count in counts]
        assert len(run(lambda steps=steps: table.write(steps))) == launched
    adam.rescale_grad = 0.5
    assert len(run(lambda: table.write([adam.step("a", 2)]))) == 1


# --- Large arrays

NORESERVE = 0x4000  # Linux's MAP_NORESERVE, of which mmap has no name
LARGER = (1 << 32) + 4099
"""More elements than 32 bits count. Of their memory only what is used is there, and of a launch the last blocks run."""
TAIL = slice(LARGER - 4099, LARGER)
"""What the last two blocks have, of 4096 elements."""
_kept: list[mmap.mmap] = []


def vast(dtype: Any, size: int = LARGER) -> Any:
    """Return zeros."""
    import cupy

    dtype = np.dtype(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    _kept.append(pages := mmap.mmap(-1, size * dtype.itemsize, flags))
    address = np.frombuffer(pages, np.uint8).ctypes.data
    lend(address, len(pages))
    memory = cupy.cuda.UnownedMemory(address, len(pages), pages, 0)
    return cupy.ndarray(size, dtype, cupy.cuda.MemoryPointer(memory, 0))


def is_zero(*arrays: Any) -> bool:
    """Return whether nothing was written where an index would be without its upper bits."""
    places = [slice(0, 1 << 14), slice((1 << 31) - (1 << 14), (1 << 31) + (1 << 14))]
    return not any(array[place].any() for array in arrays for place in places)


def test_an_update_of_a_vast_value() -> None:
    optimizer, value, total = optimizers.SGD(momentum=0.5, learning_rate=0.25), vast(np.float32), vast(np.float32)
    momentum = vast(np.float32)
    total[TAIL] = 4
    bound = CudaKernels().bind(optimizer, total, value, {"momentum": momentum})
    run(lambda: bound(optimizer.step("key", 1)), 2)
    assert (value[TAIL] == -1).all()
    assert is_zero(value, momentum)


def test_vast_copies() -> None:
    halves, whole, copied, flags = vast(np.float16), vast(np.float32), vast(np.float16), placed(1, np.uint8, fill=0)
    halves[-20_000:] = 3
    run(lambda: copies.copy([whole, copied], [halves, halves]), 2)
    assert (whole[TAIL] == 3).all()
    assert (copied[-20_000:] == 3).all()
    assert is_zero(whole, copied)
    run(lambda: copies.flag_exceeding([halves], flags, 2.0), 2)
    assert flags[0] == 1


@pytest.mark.parametrize("name", CODES)
def test_vast_gradients_are_coded(name: str) -> None:
    codec, gradient, total = CudaCodec(codecs.create(name)), vast(np.float32), vast(np.float32)
    residual, payload = vast(np.float32), vast(np.uint8, codecs.create(name).nbytes(LARGER))
    gradient[TAIL] = 1
    run(lambda: (codec.encode(gradient, payload, residual), codec.decode_add(payload, total)), 2)
    assert (total[TAIL] + residual[TAIL] == 1).all()
    assert is_zero(residual, *([total] if name != "1bit" else []))


def test_rows_of_a_vast_table() -> None:
    # Of 16 bytes, too, it has more pieces than 32 bits count.
    table, ids, some = vast(np.float32, (1 << 34) + 640).reshape(-1, 64), placed(3, np.int64), placed(192, np.float32)
    ids.set(np.array([len(table) - 1, 7, len(table) - 2]))
    rows.put(table, ids, some.reshape(3, 64))
    rows.add(table, ids, some.reshape(3, 64))
    taken = placed(192, np.float32)
    rows.take(table, ids, taken.reshape(3, 64))
    assert (taken == 2).all()
    assert (table[-2:] == 2).all()
    assert not table[:7].any()
    assert not table[8:16].any()


def test_norms_and_scaling_of_a_vast_array() -> None:
    array, found = vast(np.float16), list[Any]()
    array[TAIL] = 2
    run(lambda: found.extend(norms.measure([array], [array.dtype])), norms.PIECES)
    assert found[1] == [65537]
    # The last cell has 4099 elements.
    assert norms.join_pieces(found[0].get()[-2 * norms.PIECES :])[-1].tolist() == [4 * 4099, 0]
    run(lambda: norms.scale([array], 3.0), norms.PIECES)
    assert (array[TAIL] == 6).all()
    assert is_zero(array)


@pytest.mark.parametrize("rule", LAYERWISE)
def test_vast_layers(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(layerwise, "allocate_floats", lambda count: placed(count, np.float64, fill=0))
    optimizer = optimizers.create(rule, learning_rate=0.5)
    value, total = vast(np.float32), vast(np.float32)
    state = {name: vast(dtype) for name, dtype in optimizer.slots(value.dtype).items()}
    value[TAIL], total[TAIL] = 2, 2
    bound = CudaKernels().bind(optimizer, total, value, state)
    run(lambda: bound(optimizer.step("key", 1)), 16)
    assert (value[-4099:] != 2).all()
    assert is_zero(value, total, *state.values())
