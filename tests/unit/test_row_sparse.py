"""RowSparse by itself: what it takes, what it makes of it, and what it refuses."""

import copy
import pickle

import hypothesis.extra.numpy as nps
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store.test_deterministic import paired

from mpikv import RowSparse, ValueMismatch
from mpikv.memory.row_sparse import sum_rows
from mpikv.verbs.row_arguments import asks_rows


@st.composite
def some_rows(draw):
    shape = draw(nps.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    ids = draw(st.lists(st.integers(0, shape[0] - 1), max_size=12)) if shape[0] else []
    dtype = draw(st.sampled_from(["float64", "float16", "int8", "bool", "complex64"]))
    values = draw(nps.arrays(np.int8, (len(ids), *shape[1:]), elements=st.integers(-8, 8)))
    return ids, values.astype(dtype), shape


@given(some_rows())
def test_it_is_the_sum_of_what_was_given(rows):
    ids, values, shape = rows
    dense = np.zeros(shape, values.dtype)
    np.add.at(dense, np.array(ids, np.int64), values)
    sparse = RowSparse(ids, values, shape)
    assert sparse.indices.tolist() == sorted(set(ids))
    assert (sparse.indices.dtype, sparse.dtype, len(sparse)) == (np.int64, values.dtype, len(set(ids)))
    np.testing.assert_array_equal(sparse.to_dense(), dense)
    np.testing.assert_array_equal(np.asarray(sparse), dense)


@given(st.lists(st.lists(st.integers(0, 6), unique=True).map(sorted), min_size=1, max_size=6), st.booleans())
def test_sums_of_several(every, in_pairs):
    terms = [(np.array(ids, np.int64), np.full((len(ids), 2), (number + 1) / 7)) for number, ids in enumerate(every)]
    ids, total = sum_rows(terms, np.dtype(np.float64), in_pairs)
    whole = [RowSparse(*term, (7, 2)).to_dense() for term in terms]
    dense = paired(whole) if in_pairs else sum(whole)
    assert ids.tolist() == sorted({each for one in every for each in one})
    np.testing.assert_array_equal(total, dense[ids])
    assert not any(np.shares_memory(total, rows) for _, rows in terms)


def test_lengths_and_numbers_are_not_bent_into_shape():
    with pytest.raises(TypeError, match="float"):
        RowSparse([0], np.ones((1, 2)), (6.9, 2))
    with pytest.raises(ValueMismatch, match="must have one dimension, not 2"):
        RowSparse(np.array([[0, 1]]), np.ones((2, 2)), (6, 2))
    assert RowSparse([0], np.ones((1, 2)), np.array([6, 2])).shape == (6, 2)


def test_half_precision_is_rounded_once():
    rows = RowSparse([0] * 3, np.array([[2048], [1], [1]], np.float16), (1, 1))
    assert rows.values.tolist() == [[2050]]


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([-1], IndexError, "row -1 is outside of an array of 3 rows"),
        ([0, 3], IndexError, "row 3 is outside of an array of 3 rows"),
        ([0.5], ValueMismatch, "row numbers must be integers"),
        ([float("nan")], ValueMismatch, "row numbers must be integers"),
        (np.array([2**63 + 1], np.uint64), ValueMismatch, "row numbers must be integers"),
        (["a"], ValueMismatch, "row numbers must be integers"),
        ([True], ValueMismatch, "row numbers must be integers"),
        ("ab", TypeError, "expected an array, got str"),
    ],
)
def test_bad_numbers_of_rows(ids, error, text):
    with pytest.raises(error, match=text):
        RowSparse(ids, np.zeros((len(ids), 2)), (3, 2))


@pytest.mark.parametrize(("shape", "values"), [((), 0), ((3, 2), (1, 3)), ((3, 2), (2, 2)), ((-1, 2), (1, 2))])
def test_bad_shapes(shape, values):
    with pytest.raises(ValueMismatch):
        RowSparse([0], np.zeros(values), shape)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda rows: pickle.loads(pickle.dumps(rows))])
def test_copies_are_as_good(again):
    """As a loader's process sends one."""
    rows = RowSparse([3, 1], np.array([[1.0], [2.0]]), (5, 1))
    other = again(rows)
    assert (other.on_host, other.shape) == (True, (5, 1))
    np.testing.assert_array_equal(np.asarray(other), rows.to_dense())


def test_it_keeps_no_numbers_of_the_caller():
    ids = np.array([0, 2])
    rows = RowSparse(ids, np.ones((2, 1)), (3, 1))
    ids[:] = 7
    assert rows.indices.tolist() == [0, 2]


@pytest.mark.parametrize("form", ["csr", "coo", "bsr", "csc"])
def test_matrices_of_scipy(form):
    sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    dense = np.zeros((6, 4))
    dense[1, 2], dense[4] = 3, [1, 0, 2, 0]
    rows = RowSparse.from_scipy(sparse.coo_matrix(dense).asformat(form))
    assert rows.indices.tolist() == [1, 4] or form == "bsr"  # whose blocks hold zeros, too
    np.testing.assert_array_equal(rows.to_dense(), dense)
    twice = sparse.coo_matrix(([1.0, 2.0], ([5, 5], [0, 0])), shape=(6, 4))
    assert RowSparse.from_scipy(twice).values.tolist() == [[3, 0, 0, 0]]
    with pytest.raises(TypeError, match=r"expected a matrix of scipy\.sparse, got ndarray"):
        RowSparse.from_scipy(dense)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    layer = torch.nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([4, 1, 4])).sum().backward()
    assert RowSparse.from_torch(layer.weight.grad).to_dense().tolist() == layer.weight.grad.to_dense().tolist()
    flat = torch.sparse_coo_tensor([[2, 2, 0], [1, 1, 0]], [1.0, 2.0, 5.0], (3, 2), check_invariants=True)
    rows = RowSparse.from_torch(flat)
    assert (rows.indices.tolist(), rows.values.tolist()) == ([0, 2], [[5, 0], [0, 3]])
    with pytest.raises(TypeError, match="expected a sparse COO tensor"):
        RowSparse.from_torch(torch.zeros(2))


def test_what_was_checked_stays_so():
    rows = RowSparse([1, 2], np.ones((2, 3)), (4, 3))
    for name in ("indices", "values", "shape"):
        with pytest.raises(AttributeError):
            setattr(rows, name, getattr(rows, name)[:1])
    with pytest.raises(ValueError, match="read-only"):
        rows.indices[0] = 99
    rows.values[:] = 2
    np.testing.assert_array_equal(rows.to_dense()[1], [2, 2, 2])


def test_what_asks_for_rows():
    rows, whole = RowSparse([0], np.ones((1, 2)), (3, 2)), np.zeros((3, 2))
    for out in (rows, [rows], [whole, rows], [[whole], [whole, rows]], {"a": whole, "b": rows}):
        assert asks_rows(out)
    for out in (None, whole, [whole], [[whole], [whole, whole]], {"a": whole}, []):
        assert not asks_rows(out)
