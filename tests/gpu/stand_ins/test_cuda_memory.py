"""How the CUDA kernels use memory, without a GPU: each read and write of a launch is looked at."""

from __future__ import annotations

import mmap
import sys
from functools import partial

import numpy as np
import pytest
from support.emulation import RULED, OnDevice, cupy_on_host, on_demand
from support.watching import Watch, watched

from mpikv import codecs, optimizers
from mpikv.compute.cuda import copies, layerwise, loading, norms, rows
from mpikv.compute.cuda.codes import CudaCodec
from mpikv.compute.cuda.kernels import CudaKernels
from mpikv.protocols import Whole
from mpikv.testing.updater import available, wide

FLOATS = {dtype.name: dtype for dtype in available()}
RULES = {
    "descent": optimizers.SGD(),
    "momentum": optimizers.SGD(momentum=0.9),
    "rmsprop_centered": optimizers.RMSProp(centered=True, momentum=0.5),
    "adam": optimizers.Adam(),
    "ftrl": optimizers.FTRL(),
}
CODES = {"2bit": "two_bits", "1bit": "one_bit", "fp16": "float16_code", "bf16": "bfloat16_code"}
CASTS = [("float32", "float16"), ("float16", "float32"), ("float64", "int8"), ("complex64", "complex128")]
NAMES = {
    "copies.cu": [
        "copy_bytes",
        *(f"cast<{source}_kind, {target}_kind>" for source, target in CASTS),
        *(f"exceeding<{dtype}_kind>" for dtype in FLOATS),
    ],
    "codes.cu": [f"{verb}<{code}>" for verb in ("encode", "decode_add") for code in CODES.values()],
    "rows.cu": [
        *("take_rows", "put_rows", "add_rows<float16_kind, float32_kind>", "add_rows<float32_kind, float32_kind>"),
        *("sum_runs<float32_kind>", "sum_runs<float16_kind>"),
    ],
    "norms.cu": [
        *(f"measure<{dtype}_kind, {dtype}_kind>" for dtype in FLOATS),
        *(f"scale<{dtype}_kind>" for dtype in FLOATS),
    ],
    "steps.cu": ["write_numbers"],
}
SIZES = [1, 3, 4, 130, 4096, 4099, 9000]
# The last is a cell and some, whose parts are added up by threads together.
LARGE = [*SIZES, 65536, 65536 + 4099]

# The first of them compiles the kernels.
pytestmark = pytest.mark.deadline(120)


@pytest.fixture(scope="module")
def uses(tmp_path_factory):
    """Launches run on the host; they are listed, and what they use."""
    folder, uses = tmp_path_factory.mktemp("watched"), Watch()
    programs = {name: watched(name, loading.source(name), names, folder, uses) for name, names in NAMES.items()}
    programs |= {name: on_demand(partial(watched, name, folder=folder, watch=uses)) for name in RULED}
    with pytest.MonkeyPatch.context() as patch:
        loading.loaded.cache_clear()
        patch.delitem(sys.modules, "cupyx", raising=False)
        patch.setitem(sys.modules, "cupy", cupy_on_host(programs, []))
        yield uses
    loading.loaded.cache_clear()


@pytest.fixture(autouse=True)
def none_yet(uses):
    uses.clear()


@pytest.fixture
def taken(monkeypatch):
    """The memory that layers took for their sums."""
    arrays, take = [], layerwise.room
    monkeypatch.setattr(layerwise, "room", lambda count: arrays.append(take(count)) or arrays[-1])
    return arrays


def placed(size, dtype, offset=0, fill=1):
    """Return an array of a GPU that begins so many bytes behind a multiple of 256."""
    dtype = np.dtype(dtype)
    memory = np.full(size * dtype.itemsize + 512, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 256 + offset
    array = memory[begin : begin + size * dtype.itemsize].view(dtype)
    array[...] = fill
    return array.view(OnDevice)


def state_of(optimizer, value, offset):
    return {
        name: placed(value.size, dtype, offset * np.dtype(dtype).itemsize)
        for name, dtype in optimizer.slots(value.dtype).items()
    }


def check(uses, arrays, **moved):
    """Raise if a launch is wrong; and if it does not read and write each array as often as said, and at once."""
    uses.check(arrays)
    for name, expected in moved.items():
        assert uses.moved(arrays[name]) == expected, name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_an_update_reads_and_writes_each_number_once(uses, rule, size, offset):
    optimizer, value = RULES[rule], placed(size, np.float32, 4 * offset)
    total, state = placed(size, np.float32), state_of(optimizer, value, offset)
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    (launch,) = uses
    check(launch, {"total": total, "value": value, **state}, total=(1, 0), value=(1, 1), **dict.fromkeys(state, (1, 1)))


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_update_of_each_dtype(uses, dtype, masters):
    optimizer, value = optimizers.Adam(multi_precision=masters), placed(5000, FLOATS[dtype])
    total, state = placed(5000, wide(value.dtype)), state_of(optimizer, value, 0)
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    (launch,) = uses
    moved = dict.fromkeys(state, (1, 1)) | {"total": (1, 0), "value": (0 if "master" in state else 1, 1)}
    check(launch, {"total": total, "value": value, **state}, **moved)


@pytest.mark.parametrize("ends", [[4096, 8192, 8256], [1, 5000, 5001, 9001], list(range(3, 600, 3))])
def test_ranges_of_a_table(uses, ends):
    optimizer, value = optimizers.Adam(), placed(ends[-1], np.float32)
    total, state, tables = placed(value.size, np.float32), state_of(optimizer, value, 0), []
    memory = type("Memory", (), {"zeros": lambda _, nbytes: tables.append(placed(nbytes, np.uint8)) or tables[0]})()
    table = CudaKernels().table(optimizer, memory, len(ends), [])
    table.write([optimizer.step("key", 1 + place % 8) for place in range(len(ends))])
    CudaKernels().bind_ranges(optimizer, total, value, state, ends)(table.rows)
    writing, launch = uses
    check(writing, {"table": tables[0]})
    moved = dict.fromkeys(state, (1, 1)) | {"total": (1, 0), "value": (1, 1)}
    check(launch, {"total": total, "value": value, "table": tables[0], **state}, **moved)


# --- How much at once
#
# A GPU moves sectors of 32 bytes. A warp's threads ask for theirs together, 16 bytes each at most.


def aligned(uses, arrays, width=16):
    """Raise if a launch moves any of the arrays in smaller pieces than can be, or a sector for less than it has."""
    for name, array in arrays.items():
        assert (uses.share_of(width, array), uses.sectors(array)) == (1, 1), name


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_move_16_bytes_at_once(uses, dtype, masters):
    optimizer, value = optimizers.Adam(multi_precision=masters), placed(8192, FLOATS[dtype])
    total, state = placed(value.size, np.float32), state_of(optimizer, value, 0)
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    aligned(uses[0], {"total": total, **state})
    aligned(uses[0], {"value": value}, 4 * value.itemsize)


def test_copies_and_looks_move_16_bytes_at_once(uses):
    wide, half, flags = placed(8192, np.float32), placed(8192, np.float16), placed(1, np.uint8, fill=0)
    copies.copy([half], [wide])
    aligned(uses[-1], {"wide": wide})
    aligned(uses[-1], {"half": half}, 8)
    copies.copy([wide[:4096]], [wide[4096:]])
    aligned(uses[-1], {"wide": wide})
    copies.exceeding([wide], flags, 4.0)
    aligned(uses[-1], {"wide": wide})


@pytest.mark.parametrize("name", ["2bit", "fp16", "bf16"])
def test_codes_move_16_bytes_at_once(uses, name):
    codec = CudaCodec(codecs.create(name))
    gradient, residual, total = (placed(8192, np.float32) for _ in range(3))
    payload = placed(codec.nbytes(8192), np.uint8)
    codec.encode(gradient, payload, residual)
    codec.decode_add(payload, total)
    aligned(uses[0], {"gradient": gradient, "residual": residual})
    aligned(uses[1], {"total": total})
    for launch in uses:
        aligned(launch, {"payload": payload}, 4 * payload.size // 8192 or 1)


def test_rows_move_16_bytes_at_once(uses):
    table, some, ids = placed(64 * 64, np.float32), placed(32 * 64, np.float32), placed(32, np.int64)
    ids[...] = np.random.default_rng(0).permutation(64)[:32]
    whole, rows_of_it = table.reshape(64, 64), some.reshape(32, 64)
    rows.take(whole, ids, rows_of_it)
    rows.put(whole, ids, rows_of_it)
    rows.add(whole, ids, rows_of_it)
    for launch in uses:
        aligned(launch, {"table": table, "some": some})


@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_norms_and_layers_move_16_bytes_at_once(uses, taken, rule):
    optimizer = optimizers.LARS(momentum=0.9) if rule == "lars" else optimizers.LAMB()
    value = placed(65536, np.float32)
    total, state = placed(value.size, np.float32), state_of(optimizer, value, 0)
    norms.measure([value], [value.dtype])
    norms.scale([value], 2.0)
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    for launch in (*uses[:3], uses[-1]):
        aligned(launch, {"value": value})
    for launch in (uses[2], uses[-1]):
        aligned(launch, {"total": total})
    for name, array in state.items():
        aligned(uses[-1] if rule == "lars" else uses[2], {name: array})


@pytest.mark.parametrize("shifted", ["total", "value", "master", "mean", "variance"])
@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_one_array_that_is_not_aligned(uses, taken, rule, shifted):
    optimizer, dtype = optimizers.create(rule, multi_precision=True), FLOATS["bfloat16"]
    kinds = {"total": np.dtype(np.float32), "value": dtype, **optimizer.slots(dtype)}
    arrays = {name: placed(5000, kind, kind.itemsize * (name == shifted)) for name, kind in kinds.items()}
    state = {name: arrays[name] for name in optimizer.slots(dtype)}
    CudaKernels().bind(optimizer, arrays["total"], arrays["value"], state)(optimizer.step("key", 1))
    for launch in uses:
        launch.check({**arrays, **dict(enumerate(taken))})
    assert uses[0].share_of(16, arrays["total"]) == 0


def test_what_is_not_aligned_moves_side_by_side(uses):
    """A warp then needs one sector more for its four."""
    optimizer, value = optimizers.Adam(), placed(8192, np.float32, 4)
    total, state = placed(value.size, np.float32), state_of(optimizer, value, 1)
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    assert (uses[0].share_of(4, value), uses[0].sectors(value)) == (1, 1.25)
    assert uses[0].sectors(total) == 1


# --- Copies


@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 5000, 1 << 15, (1 << 15) + 16, (3 << 15) + 7])
@pytest.mark.parametrize(("source", "target"), [(0, 0), (16, 0), (8, 8), (4, 12), (2, 0), (0, 1), (3, 3)])
def test_copies_of_any_bytes(uses, nbytes, source, target):
    arrays = {"source": placed(nbytes, np.uint8, source), "target": placed(nbytes, np.uint8, target)}
    copies.copy([arrays["target"]], [arrays["source"]])
    check(*uses, arrays, source=(1, 0), target=(0, 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offsets", [(0, 0), (0, 1), (3, 2)])
@pytest.mark.parametrize("dtypes", CASTS, ids="-".join)
def test_casts(uses, dtypes, offsets, size):
    source, target = (
        placed(size, dtype, offset * np.dtype(dtype).itemsize) for dtype, offset in zip(dtypes, offsets, strict=True)
    )
    copies.copy([target], [source])
    check(*uses, {"source": source, "target": target}, source=(1, 0), target=(0, 1))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_are_looked_at_until_one_is_too_large(uses, dtype, offset):
    for fill, size in ((1, 9001), (9, 9001), (1, 2)):
        array, flags = placed(size, FLOATS[dtype], offset * FLOATS[dtype].itemsize, fill), placed(1, np.uint8, fill=0)
        uses.clear()
        copies.exceeding([array], flags, 4.0)
        (launch,) = uses
        # All that write to the flag write the same.
        launch.check({"array": array, "flags": flags}, unordered=("flags",))
        assert flags[0] == (fill > 4)
        if fill < 4:
            assert (launch.moved(array), launch.moved(flags)) == ((1, 0), (0, 0))


# --- Codes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("name", CODES)
def test_codes(uses, name, feedback, offset, size):
    codec = CudaCodec(codecs.create({"type": name, "error_feedback": feedback}))
    gradient, residual, total = (placed(size, np.float32, 4 * offset) for _ in range(3))
    payload = placed(codec.nbytes(size), np.uint8)
    codec.encode(gradient, payload, residual if feedback else None)
    codec.decode_add(payload, total)
    packing, adding = uses
    kept = {"residual": residual} if feedback else {}
    arrays = {"gradient": gradient, "payload": payload, **kept}
    check(packing, arrays, gradient=(1, 0), payload=(0, 1), **dict.fromkeys(kept, (1, 1)))
    check(adding, {"payload": payload, "total": total}, total=(1, 1))


# --- Rows


@pytest.mark.parametrize("width", [1, 3, 4, 64, 300])
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "complex128"])
def test_rows_are_taken_and_put(uses, dtype, width):
    table, some, ids = (placed(size, kind) for size, kind in ((40 * width, dtype), (17 * width, dtype), (17, np.int64)))
    ids[...] = np.random.default_rng(width).permutation(40)[:17]
    whole, rows_of_it = table.reshape(40, width), some.reshape(17, width)
    rows.take(whole, ids, rows_of_it)
    rows.put(whole, ids, rows_of_it)
    rows.put(whole, ids, None)
    arrays = {"table": table, "some": some, "ids": ids}
    for launch, moved in zip(uses, ((0, 1), (1, 0), (0, 0)), strict=True):
        check(launch, arrays, some=moved)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("width", [1, 3, 4, 64, 300])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_added(uses, dtype, width, offset):
    some = placed(17 * width, dtype, offset * np.dtype(dtype).itemsize)
    table, sums = placed(40 * width, np.float32, 4 * offset), placed(5 * width, dtype)
    ids, starts = placed(17, np.int64), placed(6, np.int64)
    ids[...] = np.random.default_rng(width).permutation(40)[:17]
    starts[...] = [0, 1, 4, 9, 16, 17]
    rows.add(table.reshape(40, width), ids, some.reshape(17, width))
    adding, arrays = uses.pop(), {"table": table, "some": some, "ids": ids}
    check(adding, arrays, some=(1, 0))
    ids[...] = np.random.default_rng(width).permutation(17)
    rows.sum_runs(some.reshape(17, width), ids, starts, sums.reshape(5, width))
    check(uses.pop(), {"some": some, "ids": ids, "starts": starts, "sums": sums}, some=(1, 0), sums=(0, 1))


# --- Norms


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_and_scaling(uses, dtype, offset, size):
    array = placed(size, FLOATS[dtype], offset * FLOATS[dtype].itemsize)
    sums, _ = norms.measure([array], [array.dtype])
    check(uses.pop(), {"array": array, "sums": sums}, array=(1, 0), sums=(0, 1))
    norms.scale([array], 2.0)
    check(uses.pop(), {"array": array}, array=(1, 1))


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_layers_are_walked_through_twice(uses, taken, rule, offset, size):
    """Once for the norms, which nobody knows before all numbers are read, and once for the descent."""
    optimizer = optimizers.LARS(momentum=0.9) if rule == "lars" else optimizers.LAMB()
    value = placed(size, np.float32, 4 * offset)
    total, state = placed(size, np.float32), state_of(optimizer, value, offset)
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    arrays = {"total": total, "value": value, "sums": taken[0], **state}
    first, rates, descent = uses
    check(rates, arrays)
    if rule == "lars":
        check(first, arrays, total=(1, 0), value=(1, 0), momentum=(0, 0))
        check(descent, arrays, total=(1, 0), value=(1, 1), momentum=(1, 1))
    else:
        check(first, arrays, total=(1, 1), value=(1, 0), mean=(1, 1), variance=(1, 1))
        check(descent, arrays, total=(1, 0), value=(1, 1), mean=(0, 0), variance=(0, 0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_layers_of_each_dtype(uses, taken, rule, dtype):
    optimizer = optimizers.create(rule, multi_precision=True)
    values = [placed(size, FLOATS[dtype]) for size in (70_000, 1, 4099)]
    totals = [placed(value.size, wide(value.dtype)) for value in values]
    states = [state_of(optimizer, value, 0) for value in values]
    wholes = [Whole(*each) for each in zip(totals, values, states, strict=True)]
    CudaKernels().bind_whole(optimizer, wholes)([optimizer.step("key", 1)] * 3)
    arrays = [*totals, *values, *taken, *(array for state in states for array in state.values())]
    assert len(uses) == 3
    for launch in uses:
        check(launch, dict(enumerate(arrays)))


# --- Large arrays

NORESERVE = 0x4000  # Linux's MAP_NORESERVE, of which mmap has no name
LARGER = (1 << 32) + 4099
"""More elements than 32 bits count. Of their memory only what is used is there."""


@pytest.fixture
def last_blocks(uses):
    """Of each launch only these run."""
    uses.last = 2
    yield uses
    uses.last = None


def vast(dtype, size=LARGER):
    """Return zeros of a GPU."""
    dtype = np.dtype(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return np.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags), dtype).view(OnDevice)


def is_zero(*arrays):
    """Return whether nothing was written where an index would be without its upper bits."""
    places = [slice(0, 1 << 14), slice((1 << 31) - (1 << 14), (1 << 31) + (1 << 14))]
    return not any(array[place].any() for array in arrays for place in places)


TAIL = slice(LARGER - 4099, LARGER)
"""What the last two blocks have, of 4096 elements."""


def test_an_update_of_a_vast_value(last_blocks):
    optimizer, value, total = optimizers.SGD(momentum=0.5, learning_rate=0.25), vast(np.float32), vast(np.float32)
    state = {"momentum": vast(np.float32)}
    total[TAIL] = 4
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    assert (value[TAIL] == -1).all()
    assert is_zero(value, state["momentum"])


def test_vast_copies(last_blocks):
    halves, wide, copied = vast(np.float16), vast(np.float32), vast(np.float16)
    halves[-20_000:] = 3
    copies.copy([wide], [halves])
    copies.copy([copied], [halves])
    assert (wide[TAIL] == 3).all()
    assert (copied[-20_000:] == 3).all()
    assert is_zero(wide, copied)


def test_a_vast_array_is_looked_at(last_blocks):
    array, flags = vast(np.float16), placed(1, np.uint8, fill=0)
    array[-1] = 5
    copies.exceeding([array], flags, 4.0)
    assert flags[0] == 1


@pytest.mark.parametrize("name", CODES)
def test_vast_gradients_are_coded(last_blocks, name):
    codec, gradient, total = CudaCodec(codecs.create(name)), vast(np.float32), vast(np.float32)
    residual, payload = vast(np.float32), vast(np.uint8, codecs.create(name).nbytes(LARGER))
    gradient[TAIL] = 1
    codec.encode(gradient, payload, residual)
    codec.decode_add(payload, total)
    assert (total[TAIL] + residual[TAIL] == 1).all()
    assert is_zero(residual, *([total] if name != "1bit" else []))


def test_rows_of_a_vast_table(uses):
    # Of 16 bytes, too, it has more pieces than 32 bits count.
    table, ids, some = vast(np.float32, (1 << 34) + 640).reshape(-1, 64), placed(3, np.int64), placed(192, np.float32)
    ids[...] = [len(table) - 1, 7, len(table) - 2]
    rows.put(table, ids, some.reshape(3, 64))
    rows.add(table, ids, some.reshape(3, 64))
    taken = placed(192, np.float32)
    rows.take(table, ids, taken.reshape(3, 64))
    assert (taken == 2).all()
    assert (table[-2:] == 2).all()
    assert not table[:7].any()
    assert not table[8:16].any()


def test_norms_and_scaling_of_a_vast_array(last_blocks):
    array = vast(np.float16)
    array[TAIL] = 2
    last_blocks.last = norms.PIECES
    sums, counts = norms.measure([array], [array.dtype])
    assert counts == [65537]
    # The last cell has 4099 elements.
    assert norms.joined(np.asarray(sums))[-1].tolist() == [4 * 4099, 0]
    norms.scale([array], 3.0)
    assert (array[TAIL] == 6).all()
    assert is_zero(array)


@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_vast_layers(last_blocks, monkeypatch, rule):
    monkeypatch.setattr(layerwise, "room", lambda count: placed(count, np.float64, fill=0))
    optimizer = optimizers.create(rule, learning_rate=0.5)
    value, total = vast(np.float32), vast(np.float32)
    state = {name: vast(dtype) for name, dtype in optimizer.slots(value.dtype).items()}
    value[TAIL], total[TAIL] = 2, 2
    last_blocks.last = 16
    CudaKernels().bind(optimizer, total, value, state)(optimizer.step("key", 1))
    assert (value[-4099:] != 2).all()
    assert is_zero(value, total, *state.values())
