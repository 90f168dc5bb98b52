"""Files that are no checkpoints: a clear error for each, before memory is taken, and the store is as it was."""

import contextlib
import functools
import json
import operator
import os
import random
import re
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support.commands import python

import mpikv
from mpikv import CheckpointError, Unsupported, schedules
from mpikv.checkpoint.chunks import shift_crcs
from mpikv.checkpoint.files import inspect
from mpikv.checkpoint.header import CHUNK

Tree = dict[str, Any]
OPTIONS = ("updater", "options")
VALUES = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32)}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good"
    with mpikv.create() as kv:
        kv.init(VALUES)
        kv.set_optimizer("sgd", momentum=0.5, lr_scheduler=schedules.Factor(10, base_lr=0.5))
        kv.push(VALUES)
        kv.save(path)
    return path


# Writes a header in the one form in which it is read.
dump = json.JSONEncoder(separators=(",", ":")).encode
ELSEWHERE = "its arrays lie elsewhere than its description says"


def parts(path: Path) -> tuple[Tree, Tree, bytes]:
    """Return the header, the description in it, and the arrays of a file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    return header, json.loads(header["__metadata__"]["mpikv_checkpoint"]), raw[start:]


def forge(path: Path, header: Tree, described: Any, arrays: bytes) -> Path:
    """Write a file with checksums that are right."""
    text = described if isinstance(described, str) else json.dumps(described)
    sums = [
        zlib.crc32(text.encode()),
        *(zlib.crc32(arrays[at : at + (1 << 20)]) for at in range(0, len(arrays), 1 << 20)),
    ]
    header = {"__metadata__": {"mpikv_checkpoint": text, "mpikv_crc32": "".join(f"{s:08x}" for s in sums)}} | {
        name: entry for name, entry in header.items() if name != "__metadata__"
    }
    return write(path, dump(header), arrays)


def write(path: Path, header: str, arrays: bytes = b"", length: int | None = None) -> Path:
    text = header.encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + arrays)
    return path


def complaint(path: Path, kind: type[Exception] = CheckpointError) -> str:
    """Load the file, which must fail; return what the error says."""
    with mpikv.create() as kv:
        tracemalloc.start()
        try:
            with pytest.raises(kind) as caught:
                kv.load(path)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
        assert (len(kv), kv.optimizer) == (0, None)
        kv.init("w", np.ones(2))
        np.testing.assert_array_equal(kv.pull("w"), np.ones(2))
    return str(caught.value)


def loaded(path: Path) -> Any:
    # Closed after an error, too: thousands of stores that are left keep so much address space that no fork succeeds.
    with contextlib.closing(mpikv.create()) as kv:
        kv.load(path)
        values = {
            key: (value.dtype, value.tobytes()) for key, value in zip(kv.keys(), kv.pull(list(kv.keys())), strict=True)
        }
        kv.push(VALUES)
        after = {key: kv.pull(key).tobytes() for key in kv}
        return values, after, kv.optimizer.settings(), [kv.version(key) for key in kv]


def test_a_forged_file_is_as_good(good: Path, tmp_path: Path) -> None:
    """What the tests below do to it is what is wrong with it, and not the forging."""
    assert loaded(forge(tmp_path / "forged", *parts(good))) == loaded(good)


@pytest.mark.deadline(120)
def test_every_truncation(good: Path, tmp_path: Path) -> None:
    raw, path = good.read_bytes(), tmp_path / "cut"
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"'.*/cut' cannot be loaded: "):
            inspect(str(path))
    path.write_bytes(raw[: len(raw) - 1])
    assert f"it has {len(raw) - 1} bytes, but its arrays need {len(raw)}" in complaint(path)
    path.write_bytes(raw + b"\0")
    assert "but its arrays need" in complaint(path)


@pytest.mark.deadline(120)
def test_every_byte_counts(good: Path, tmp_path: Path) -> None:
    """With any byte changed, the file is refused, or means the same."""
    raw, path, chances = good.read_bytes(), tmp_path / "changed", random.Random(0)
    whole, same = loaded(good), 0
    for offset in range(len(raw)):
        changed = bytearray(raw)
        changed[offset] ^= 1 << chances.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            assert loaded(path) == whole, offset
            same += 1
    # The padding, where a blank may become another white character; the letter case of a digit of a checksum.
    assert same < 64


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, 100_000_001, 50_000_000, 0, 7])
def test_absurd_lengths(good: Path, tmp_path: Path, length: int) -> None:
    raw = good.read_bytes()
    path = tmp_path / "absurd"
    path.write_bytes(length.to_bytes(8, "little") + raw[8:])
    assert ("not a safetensors file, or is truncated" if length > 7 else "not a checkpoint of mpikv") in complaint(path)


def test_a_long_file_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(((1 << 40) - 8).to_bytes(8, "little"))
        file.truncate(1 << 40)
    assert "announces a header of" in complaint(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"a": 1}{}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a": 1, "a": 2}',
        '{"__metadata__": []}',
        '{"__metadata__": {}}',
        '{"__metadata__": {"mpikv_checkpoint": 1, "mpikv_crc32": 2}}',
        '{"__metadata__": {"mpikv_checkpoint": "{}", "mpikv_crc32": ""}}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": "\udc80"}'.encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
    ids=lambda text: text[:20],
)
def test_headers_that_are_none(tmp_path: Path, text: str) -> None:
    complaint(write(tmp_path / "none", text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "none"
    path.write_bytes((4).to_bytes(8, "little") + b'{"\xff"')
    assert "not JSON" in complaint(path)


def change(*where: Any, to: Any) -> Callable[[Tree, Tree], None]:
    """Return a function that replaces what is at a place in the description."""

    def run(header: Tree, described: Tree) -> None:
        tree: Any = described
        for step in where[:-1]:
            tree = tree[step]
        tree[where[-1]] = to

    return run


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    path = tmp_path / "compressed"
    with mpikv.create(compression={"type": "lowrank", "rank": 1}) as kv:
        kv.init("w", np.zeros((5, 4), np.float32))
        kv.push("w", np.ones((5, 4), np.float32))
        kv.save(path)
    return path


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (change("program", "mpikv.residuals", to=[10**15]), ELSEWHERE),
        (change("program", "mpikv.residuals", to=[1 << 62] * 2), f"its arrays need {(1 << 63) + 80} bytes"),
        (change("program", "mpikv.residuals", to=[True]), "a value of the wrong type"),
        (change("program", to={}), ELSEWHERE),
    ],
)
def test_forged_residuals(compressed: Path, tmp_path: Path, spoil: Callable[[Tree, Tree], None], text: str) -> None:
    header, described, arrays = parts(compressed)
    spoil(header, described)
    assert text in complaint(forge(tmp_path / "forged", header, described, arrays))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (b'["float32", [20]]', b'["float32", [19]]', "they are of other lengths than the values"),
        (b'"left"', b'"gone"', "'left'"),
        (b'["codec"', b'{"codec"', "cannot be read"),
    ],
)
def test_residuals_that_do_not_fit(compressed: Path, tmp_path: Path, before: bytes, after: bytes, text: str) -> None:
    header, described, arrays = parts(compressed)
    assert before in arrays
    path = forge(tmp_path / "forged", header, described, arrays.replace(before, after))
    with mpikv.create(compression={"type": "lowrank", "rank": 1}) as kv:
        for _ in range(2):  # into a store without keys, and over a value
            with pytest.raises(mpikv.CheckpointError, match=re.escape(text)):
                kv.load(path)
            kv.init("w", np.zeros((5, 4), np.float32), overwrite=True)
        assert not kv.pull("w").any()


def factor(**arguments: Any) -> Callable[[Tree, Tree], None]:
    """Return a function that gives the schedule in the description other arguments."""
    return change(*OPTIONS, "lr_scheduler", to={"schedule": ["Factor", {"dict": [*map(list, arguments.items())]}]})


def header_change(name: str, to: Any) -> Callable[[Tree, Tree], None]:
    return lambda header, described: header.__setitem__(name, to)


def no_array(header: Tree, described: Tree) -> None:
    del header["value/w"]


def no_key(header: Tree, described: Tree) -> None:
    del described["kinds"][0]["shape"]


def twice(header: Tree, described: Tree) -> None:
    described["keys"][1] = described["keys"][0]


def nested(depth: int) -> Any:
    """Return what JSON can still hold and a recursion in Python can not."""
    return {"tuple": [nested(depth - 1)]} if depth else 1


@mpikv.optimizers.register
class Refusing(mpikv.optimizers.SGD):
    """An optimizer of a user's own that raises an error of its own."""

    def __init__(self, **options: Any) -> None:
        raise ImportError("it needs the package fast")


W = {"dtype": "F64", "shape": [2, 3]}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (header_change("value/w", {**W, "data_offsets": [0, 1 << 60]}), ELSEWHERE),
        (header_change("value/w", {**W, "dtype": "F32", "data_offsets": [0, 48]}), ELSEWHERE),
        (header_change("more", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), ELSEWHERE),
        (no_array, ELSEWHERE),
        (no_key, "lacks 'shape'"),
        (twice, "not all different"),
        (change("version", to=3), "version 3 of the format; this mpikv reads version 7"),
        (change("program", to=None), "a value of the wrong type"),
        (change("program", to={"epoch": [-1]}), "-1 is not a length"),
        (change("program", to={"epoch": [1 << 62] * 3}), "its arrays need"),
        (change("program", to={"epoch": [3]}), ELSEWHERE),
        (change("values", to=False), ELSEWHERE),
        (change("keys", 0, to=3), "all numbers or all strings"),
        (change("kind_of", to={}), "a value of the wrong type"),
        (change("kind_of", to=[0, 2]), "does not say of each of 2 keys which of 2 kinds"),
        (change("kind_of", to=[1, 0]), ELSEWHERE),
        (change("kinds", 0, "dtype", to="object"), "unknown dtype 'object'"),
        (change("kinds", 0, "shape", to=[2, -3]), "-3 is not a length"),
        (change("kinds", 0, "shape", to=[1 << 70]), "is not a length"),
        (change("kinds", 0, "shape", to=[1 << 40, 1 << 40]), "has an impossible shape"),
        (change("kinds", 0, "shape", to=[1 << 40, 1 << 40, 0]), "has an impossible shape"),
        (change("kinds", 0, "shape", to=[1] * 65), "has an impossible shape"),
        (change("kinds", 0, "shape", to=[1 << 40]), ELSEWHERE),
        (change("kinds", 0, "updates", to=-1), "impossible update counts -1 and 0"),
        (change("kinds", 0, "updates", to=(1 << 63) - 1), "impossible update counts"),
        (change("kinds", 0, "earlier", to=-2), "impossible update counts 1 and -2"),
        (change("kinds", 0, "state", to={}), ELSEWHERE),
        (change("kinds", 0, "state", to={"a/b": "float64"}), "has an invalid state name"),
        (change("kinds", 0, "state", to={"momentum": "object"}), "unknown dtype"),
        (change("updater", "kind", to="pickle"), "unknown kind 'pickle'"),
        (change("updater", "divides_by_ranks", to=-1), "-1 is not a length"),
        (change("updater", to={"kind": "assign", "divides_by_ranks": None}), "a value of the wrong type"),
        (change("updater", "name", to="os.system"), "unknown optimizer 'os.system'"),
        (change("updater", "name", to="adam"), "unknown option of Adam 'momentum'"),
        (change("updater", "name", to="Refusing"), "'Refusing' of the checkpoint cannot be made here: ImportError: it"),
        (change(*OPTIONS, "momentum", to=1.5), "momentum=1.5 is not a number"),
        (change(*OPTIONS, "revision", to=1), "unknown option of SGD 'revision'"),
        (change(*OPTIONS, "lr_scheduler", to={"schedule": ["math", {"dict": []}]}), "no schedule is called 'math'"),
        (change(*OPTIONS, "lr_scheduler", to={"schedule": ["Factor", {"dict": [["setp", 1]]}]}), "cannot be made"),
        (factor(step=1 << 63), "is not a whole number in [1, 2**63)"),
        (factor(step=1, base_lr=10**400), "cannot be made"),
        (change(*OPTIONS, "lr_mult", to={"dict": [[[], 1]]}), "cannot be made"),
        (change(*OPTIONS, "lr_mult", to={"dict": [[None, 1.0], [3, 2.0]]}), "lr_mult has the key None"),
        (change(*OPTIONS, "lr_mult", to={"items": [[1, 2]]}), "no kind of value is called 'items'"),
        (change(*OPTIONS, "lr_mult", to=nested(300)), "cannot be made"),
        (change(*OPTIONS, "momentum", to=0.0), "has the states {'momentum': 'float64'} for key 'w'"),
    ],
)
def test_forgeries(good: Path, tmp_path: Path, spoil: Callable[[Tree, Tree], None], text: str) -> None:
    header, described, arrays = parts(good)
    spoil(header, described)
    assert text in complaint(forge(tmp_path / "forged", header, described, arrays))


LONG = "long" * 100_000
WRONG = [None, True, -1, 3, 1.5, 1 << 63, 10**4000, "x", LONG, [], [LONG], {}, {LONG: "float64"}, {LONG + "/": 1}]


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something is in a description."""
    for name, below in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, name)
        yield from places(below, (*at, name))


def may_be(before: Any, wrong: Any) -> bool:
    """Return whether a description may say this instead."""
    numbers = [type(value) in (int, float) for value in (before, wrong)]
    empty = (before, wrong) == ([], {})  # a list of pairs
    return before is None or wrong is None or type(before) is type(wrong) or all(numbers) or empty


@pytest.mark.deadline(120)
def test_any_value_at_any_place(good: Path, tmp_path: Path) -> None:
    """It is refused in a short text, whatever it is, or may be there."""
    header, described, arrays = parts(good)
    kept = json.dumps(described)
    for where in places(described):
        for wrong in WRONG:
            spoilt, refusal = json.loads(kept), ""
            before = functools.reduce(operator.getitem, where, spoilt)
            change(*where, to=wrong)(header, spoilt)
            path = forge(tmp_path / "forged", header, spoilt, arrays)
            with mpikv.create() as kv:
                try:
                    kv.load(path)
                except CheckpointError as error:
                    refusal = str(error)
                assert len(kv) == (0 if refusal else len(VALUES)), (where, before, wrong)
                assert refusal or may_be(before, wrong), (where, before, wrong)
                assert len(refusal) < 2000, where


@pytest.mark.parametrize("spoil", [header_change(LONG, None), header_change("value/w", {**W, "dtype": LONG})])
def test_long_texts_are_not_repeated(good: Path, tmp_path: Path, spoil: Callable[[Tree, Tree], None]) -> None:
    header, described, arrays = parts(good)
    spoil(header, described)
    assert len(complaint(forge(tmp_path / "forged", header, described, arrays))) < 2000


def test_halves_of_surrogate_pairs(good: Path, tmp_path: Path) -> None:
    """In JSON they may stand, but they are no text."""
    header, described, arrays = parts(good)
    text = json.dumps(described, ensure_ascii=False).replace('"w"', '"w\udc80"')
    checksums = f"{zlib.crc32(text.encode(errors='replace')):08x}" + header["__metadata__"]["mpikv_crc32"][8:]
    header["__metadata__"] = {"mpikv_checkpoint": text, "mpikv_crc32": checksums}
    complaint(write(tmp_path / "forged", dump(header), arrays))
    described["keys"][0] = "w\udc80"
    forge(tmp_path / "forged", {}, described, arrays)
    complaint(tmp_path / "forged")


def test_descriptions_that_are_none(good: Path, tmp_path: Path) -> None:
    header, described, arrays = parts(good)
    for text in ("", "[]", "{}", "{" * 10_000, json.dumps(described) * 2):
        complaint(forge(tmp_path / "forged", header, text, arrays))


def test_checksums_of_another_number(good: Path, tmp_path: Path) -> None:
    header, _, arrays = parts(good)
    sums = header["__metadata__"]["mpikv_crc32"]
    for other in (sums[:8], sums + "00000000", sums[:-1], sums[:-1] + "x", sums[:-8] + " 0 0 0 0"):
        header["__metadata__"]["mpikv_crc32"] = other
        assert "its checksums are not 1 numbers" in complaint(write(tmp_path / "forged", dump(header), arrays))
    header["__metadata__"]["mpikv_crc32"] = "00000000" + sums[8:]
    assert "the checksum of its description does not match" in complaint(
        write(tmp_path / "forged", dump(header), arrays)
    )
    header["__metadata__"]["mpikv_crc32"] = sums[:8] + "00000000"
    assert "the checkpoint is damaged: the checksum of its bytes" in complaint(
        write(tmp_path / "forged", dump(header), arrays)
    )


def test_a_damaged_chunk_names_what_lies_in_it(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    with mpikv.create() as kv:
        kv.init({"a": np.zeros(CHUNK // 4, np.float32), "b": np.ones(3, np.float32)})
        kv.save(path)
    raw, arrays = path.read_bytes(), parts(path)[2]
    for offset, names in ((CHUNK - 1, "value/a"), (CHUNK, "value/b")):
        place = len(raw) - len(arrays) + offset
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert f", of {names}, does not match" in complaint(path)


def test_many_small_keys_are_few_calls_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of keys, in memory and in the file."""
    calls = []

    def counted(name: str) -> None:
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments: calls.append(name) or function(*arguments))

    values = {f"k{number}": np.full(number % 5, number, np.float32) for number in range(3000)}
    shuffled = {key: values[key] for key in random.Random(0).sample(list(values), len(values))}
    with mpikv.create() as kv, mpikv.create() as other:
        for store, given in ((kv, values), (other, shuffled)):
            store.init(given)
            store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
            store.push(given)
        counted("pwritev")
        counted("preadv")
        kv.save(tmp_path / "kv")
        assert calls == ["pwritev"] * 2, "of arrays, and of the header"
        other.save(tmp_path / "other")
        calls.clear()
        kv.load(tmp_path / "kv")
        assert calls == ["preadv"] * 2, "to find it good, and to load it"
        calls.clear()
        for store, path in ((kv, "other"), (other, "kv")):
            store.set("k1", np.zeros(1))
            store.load(tmp_path / path)
            for key, value in zip(values, store.pull(list(values)), strict=True):
                np.testing.assert_array_equal(value, values[key] / 2)
            assert len(calls) < 20
            calls.clear()


def test_a_header_that_something_else_has_written(good: Path, tmp_path: Path) -> None:
    """The order of entries and blanks count."""
    header, _, arrays = parts(good)
    backwards = dump(dict([*header.items()][::-1]))
    for text, error in ((backwards, "not a checkpoint of mpikv"), (dump(header).replace('},"', '}, "'), ELSEWHERE)):
        assert error in complaint(write(tmp_path / "other", text, arrays))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is not a file" in complaint(tmp_path / "pipe")
    assert "it is not a file" in complaint(tmp_path)
    complaint(tmp_path / "missing", FileNotFoundError)


def test_bfloat16_without_its_package(tmp_path: Path, hide: Callable[[str], object]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with mpikv.create() as kv:
        kv.init("w", np.ones(3, ml_dtypes.bfloat16))
        kv.save(tmp_path / "checkpoint")
    hide("ml_dtypes")
    assert "pip install 'mpikv[bf16]'" in complaint(tmp_path / "checkpoint", Unsupported)


def test_an_optimizer_that_is_not_registered_here(tmp_path: Path) -> None:
    script = (
        "import sys, numpy, mpikv\n"
        "from dataclasses import dataclass, field\n"
        "@mpikv.optimizers.register\n"
        "@dataclass(kw_only=True, eq=False, repr=False)\n"
        "class Elsewhere(mpikv.optimizers.SGD):\n"
        "    strength: float = mpikv.optimizers.number(0.5, '[0, 1)')\n"
        "    own: object = field(default=None, metadata={'check': lambda where, value: value})\n"
        "kv = mpikv.create()\n"
        "kv.init('w', numpy.ones(3))\n"
        "kv.set_optimizer('elsewhere', strength=0.25, own=[numpy.float32(0.5), {'b': numpy.int8(1), 'a': 2}])\n"
        "kv.save(sys.argv[1])\n"
        "other = mpikv.create()\n"
        "other.load(sys.argv[1])\n"
        "assert other.optimizer.strength == 0.25, other.optimizer\n"
        "assert repr(other.optimizer.own) == \"[0.5, {'a': 2, 'b': 1}]\"\n"
        "assert other.optimizer.settings() == kv.optimizer.settings()\n"
    )
    assert python("-c", script, tmp_path / "checkpoint", timeout=40).returncode == 0
    text = complaint(tmp_path / "checkpoint")
    assert "unknown optimizer 'Elsewhere'" in text
    assert "register an optimizer of your own first" in text


@hypothesis.given(st.lists(st.binary(max_size=300), max_size=8))
def test_shifted_crcs(texts: list[bytes]) -> None:
    ends = [sum(map(len, texts[: number + 1])) for number in range(len(texts))]
    following = np.array([ends[-1] - end for end in ends], np.int64) if texts else np.zeros(0, np.int64)
    sums = np.array([zlib.crc32(text) for text in texts], np.uint32)
    assert int(np.bitwise_xor.reduce(shift_crcs(sums, following))) == zlib.crc32(b"".join(texts))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtypes = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    dtypes += ["float16", "float32", "float64", ml_dtypes.bfloat16, "complex64", "complex128"]
    values = {np.dtype(name).name: np.asarray(np.arange(6).reshape(2, 3) % 2 * 1.5).astype(name) for name in dtypes}
    values |= {"none": np.zeros((0, 4)), "one": np.float32(3.0), 'a "strange"/näme\n': np.ones(5, np.int8)}
    with mpikv.create() as kv:
        kv.init(values)
        kv.save(tmp_path / "checkpoint")
    found = dict(safetensors.deserialize((tmp_path / "checkpoint").read_bytes()))
    assert found.keys() == {f"value/{key}" for key in values}
    for key, value in values.items():
        entry = found[f"value/{key}"]
        pairs = (2,) if value.dtype.kind == "c" else ()
        assert (tuple(entry["shape"]), bytes(entry["data"])) == (value.shape + pairs, value.tobytes())


# --- What no reader would take is not written


def unsaved(kv: Any, path: Path, text: str) -> None:
    """Save, which must fail, and change nothing."""
    path.write_text("old")
    with pytest.raises(Unsupported, match=text):
        kv.save(path)
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("dimensions", [32, 33, 64])
def test_many_dimensions(tmp_path: Path, dimensions: int) -> None:
    if dimensions > 32 and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("this numpy has at most 32 dimensions")
    for dtype in (np.float32, np.complex64):
        value = np.arange(3, dtype=dtype).reshape((1,) * (dimensions - 1) + (3,))
        with mpikv.create() as kv, mpikv.create() as other:
            kv.init("w", value)
            kv.save(tmp_path / "checkpoint")
            other.load(tmp_path / "checkpoint")
            np.testing.assert_array_equal(other.pull("w"), value)


class Slots(mpikv.optimizers.SGD):
    """State of any name and dtype."""

    given: Any = ("momentum", "float32")

    def slots(self, dtype: np.dtype[Any]) -> Any:
        return {self.given[0]: np.dtype(self.given[1])}


@pytest.mark.parametrize(
    ("state", "text"),
    [(("a/b", "float32"), "has an invalid state name"), (("a", "datetime64[s]"), r"unknown dtype 'datetime64\[s\]'")],
)
def test_state_that_no_reader_would_take(tmp_path: Path, state: Any, text: str) -> None:
    with mpikv.create() as kv:
        kv.init("w", np.ones(3))
        optimizer = Slots()
        type(optimizer).given = state
        kv.set_optimizer(optimizer)
        unsaved(kv, tmp_path / "checkpoint", text)


# --- mpikv info PATH


info = functools.partial(python, "-m", "mpikv", "info")


def test_info(good: Path) -> None:
    report = json.loads(info(str(good), "--json").stdout)
    assert report["bytes"] == good.stat().st_size
    assert report["keys"][0] == {
        "key": "w",
        "dtype": "float64",
        "shape": [2, 3],
        "version": 1,
        "updates": 1,
        "state": {"momentum": "float64"},
    }
    assert report["updater"]["options"]["momentum"] == 0.5
    lines = info(str(good)).stdout.splitlines()
    assert lines[0] == f"checkpoint  {good}"
    assert lines[3].startswith("updater     SGD(")
    assert lines[-2:] == [
        "  'w'  float64[2, 3]  version 1, 1 updates, momentum float64",
        "  'b'  float32[3]  version 1, 1 updates, momentum float32",
    ]


def test_info_obeys_no_file(tmp_path: Path) -> None:
    """What a terminal would obey is escaped."""
    strange = "w\x1b[2J\x9b\u202e\n\r"
    with mpikv.create() as kv:
        kv.init(strange, np.ones(3))
        kv.set_optimizer("sgd", lr_mult={strange: 2.0})
        kv.save(tmp_path / "checkpoint")
    header, described, arrays = parts(tmp_path / "checkpoint")
    described["updater"]["settings"] += strange
    forged = forge(tmp_path / strange, header, described, arrays)
    for shown in (info(str(forged)).stdout, info(str(tmp_path / ("no" + strange))).stderr):
        assert "\\x1b[2J" in shown
        assert all(one.isprintable() for one in shown.replace("\n", "")), shown
    assert len(info(str(forged)).stdout.splitlines()) == 6


def test_info_of_no_checkpoint(tmp_path: Path) -> None:
    done = info(str(tmp_path / "missing"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "No such file" in done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be loaded" in info(str(Path(__file__))).stderr
