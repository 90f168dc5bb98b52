"""Arrays of any library as numpy arrays, and the rules of dtypes."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.arrays.arrays import castable, check_apart, disjoint, is_array, local_sum, source, storable, target
from mpikv.errors import Unsupported, ValueMismatch

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = np.dtype(ml_dtypes.bfloat16)


class Foreign:
    """An array of a library that mpikv does not know, over numpy's memory."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_dlpack_shares_memory():
    array = np.zeros((2, 3), np.float32)
    foreign = Foreign(array)
    assert is_array(foreign)
    array[0, 0] = 5
    assert source(foreign)[0, 0] == 5
    target(foreign)[1, 1] = 7
    assert array[1, 1] == 7
    assert np.shares_memory(source(foreign), array)


def test_dlpack_of_pinned_memory_and_of_a_gpu():
    assert is_array(Foreign(np.ones(2), (3, 0)))
    for call in (source, target):
        with pytest.raises(Unsupported, match=r"on a GPU \(DLPack device type 2\)") as caught:
            call(Foreign(np.ones(2), (2, 0)))
        assert caught.type is Unsupported  # a name that users know


def test_read_only_targets():
    array = np.ones(2)
    array.flags.writeable = False
    assert source(array) is array
    for out in (array, np.broadcast_to(np.ones(1), 3), Foreign(array)):
        with pytest.raises((TypeError, BufferError), match=r"read-only|readonly"):
            target(out)


@pytest.mark.parametrize("value", [[1, 2], 3, "text", None, (np.ones(2),)])
def test_what_is_not_an_array(value):
    assert not is_array(value)
    with pytest.raises(TypeError, match="expected an array"):
        source(value)
    with pytest.raises(TypeError, match="not an array that can be filled"):
        target(value)


def test_what_makes_an_array_of_a_gpu():
    with pytest.raises(TypeError, match=r"expected an array, got SimpleNamespace; cupy\.asarray\(value\) makes one"):
        source(SimpleNamespace(__cuda_array_interface__={}))


def test_foreign_byte_order():
    array = np.arange(3, dtype=">i4")
    assert source(array).dtype == np.dtype(np.int32)
    np.testing.assert_array_equal(source(array), [0, 1, 2])


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "i4,f4", "V2"])
def test_dtypes_that_cannot_be_stored(dtype):
    with pytest.raises(ValueMismatch, match=r"cannot be stored \(known: bool, int8"):
        storable(np.dtype(dtype))


def test_long_double_is_not_stored():
    if np.dtype(np.longdouble) != np.dtype(np.float64):
        with pytest.raises(ValueMismatch):
            storable(np.dtype(np.longdouble))


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        ("f8", "f4", True),
        ("f4", "f8", True),
        ("f8", BF16, True),
        (BF16, "f2", True),
        ("i8", "i1", False),
        ("u2", "i4", True),
        ("i4", "u4", False),
        ("i8", "f8", False),
        ("f4", "i4", False),
        ("?", "i4", False),
        ("i4", "?", False),
        ("c16", "c8", True),
        ("f8", "c16", False),
        ("c8", "f4", False),
        ("V2", BF16, False),
        ("O", "f8", False),
        ("O", "O", True),
        (">f4", "f4", True),
    ],
)
def test_castable(given, wanted, expected):
    assert castable(np.dtype(given), np.dtype(wanted)) is expected


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ("int64", ["int64", "uint32"]),
        ("int64", ["uint32", "int8", "uint32"]),
        ("int32", ["int32", "uint16", "int8"]),
        ("int16", ["uint8", "int8"]),
        ("uint64", ["uint8", "uint64"]),
        ("float16", ["float64", "float16", "bfloat16"]),
        ("float32", ["float64", "float32"]),
        ("complex64", ["complex128", "complex64"]),
    ],
)
def test_local_sums_of_several_dtypes(stored, given):
    """Whatever may be pushed alone may be pushed in a list."""
    dtypes = [BF16 if name == "bfloat16" else np.dtype(name) for name in given]
    assert all(castable(dtype, np.dtype(stored)) for dtype in dtypes)
    total = local_sum([np.full(2, 2).astype(dtype) for dtype in dtypes], np.dtype(stored))
    np.testing.assert_array_equal(total, np.full(2, 2 * len(given)))


MEMORY = np.zeros(100)
A, B = MEMORY[:50], MEMORY[50:]


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        ([[A], [B]], [[np.zeros(50)], [np.zeros(50)]], True),
        ([[A], [B]], [[A], [B]], True),
        ([[A], [B]], [[B], [A]], False),
        ([[A], [A]], [[A], [B]], False),
        ([[A], [A]], [[B], [A]], False),
        ([[A], [A]], [[np.zeros(50)], [np.zeros(50)]], True),
        ([[A]], [[MEMORY[1:51]]], False),
        ([[MEMORY[1:51]]], [[A]], False),
        ([[A, B]], [[A, B]], True),
        ([[A], [B]], [[np.zeros(50)], [A]], False),
        ([[np.zeros(50)], [np.zeros(50)]], [[A], [A]], False),
        ([[np.zeros(50)], [np.zeros(50)]], [[A], [MEMORY[49:99]]], False),
        ([[MEMORY]], [[MEMORY[40:60]]], False),
        ([[A[:0]], [B]], [[A[:0]], [B]], True),
        ([], [], True),
    ],
)
def test_disjoint(sources, targets, expected):
    assert disjoint(sources, targets) is expected


def test_disjoint_does_not_take_long_to_tell():
    """Arrays with gaps may interleave without meeting; nobody looks."""
    assert disjoint([[MEMORY[::2]]], [[MEMORY[1::2]]]) is False


@given(st.data())
def test_arrays_whose_elements_lie_apart(data):
    """None is taken of which two elements lie in the same place, and all that slices and transpositions make."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    strides = data.draw(st.lists(st.integers(-12, 12), min_size=len(shape), max_size=len(shape)))
    memory = np.zeros(200, np.uint8)
    array = np.lib.stride_tricks.as_strided(memory[100:], shape, strides)
    places = [100 + sum(map(operator.mul, index, strides)) for index in np.ndindex(*shape)]
    try:
        check_apart(array)
    except TypeError:
        return
    assert len(set(places)) == len(places)


@given(st.data())
def test_slices_and_transpositions_lie_apart(data):
    array = np.zeros(data.draw(st.lists(st.integers(0, 5), max_size=4)), np.float32)
    array = array[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1, -3]))) for _ in array.shape)]
    check_apart(array.transpose(data.draw(st.permutations(range(array.ndim)))))
