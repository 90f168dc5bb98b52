"""Row-sparse arrays: row numbers and rows, as in the gradient of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ..arrays.arrays import is_array
from ..errors import ValueMismatch
from ..protocols import Array, Workspace
from .device import locate, read_to_host
from .host import HOST


class RowSparse:
    """An array given by the numbers and the values of some rows; all other rows are zero.

    :meth:`mpikv.KVStore.init` makes a key row-sparse. :meth:`mpikv.KVStore.push` sends only these rows.
    :meth:`mpikv.KVStore.row_sparse_pull` replaces the rows of its ``out``.

    Args:
        indices: the numbers of the rows, from 0: one-dimensional, of any integer dtype, in any order. Rows with the
            same number are summed: half precision in float32 and rounded once. The host sums in the order of numpy's
            ``add.reduceat``, so many rows are not summed from left to right; a GPU sums from left to right. Numbers on
            a GPU are copied to the host, and the call waits for the copy.
        values: the rows, an array of shape ``(len(indices), *shape[1:])``. They are not copied if the numbers rise.
            Values on a GPU stay there, if this process has a store on it; work on them is queued on the current
            stream.
        shape: the shape of the whole array, of one dimension at least.

    Raises:
        IndexError: a number is negative, or not below ``shape[0]``.
        ValueMismatch: a shape does not fit, or the numbers are no integers.
        TypeError: the values, or the numbers, are no array; the dtype has no sum; or a length is no integer.
        Unsupported: the values or the numbers are on a GPU, and this process has no store there.

    Example:
        >>> import numpy as np
        >>> rows = RowSparse([3, 1, 3], np.array([[1.0, 1.0], [2.0, 2.0], [10.0, 10.0]]), (5, 2))
        >>> rows.indices
        array([1, 3])
        >>> rows.values
        array([[ 2.,  2.],
               [11., 11.]])
        >>> rows.to_dense()[3]
        array([11., 11.])
    """

    __slots__ = ("_indices", "_shape", "_tables", "_values")

    def __init__(self, indices: Any, values: Any, shape: Sequence[int]) -> None:
        """Check numbers and shapes; sort rows by number, and add up those of one number. Rows in order are not
        copied. Local; waits for numbers on a GPU.
        """
        self._shape = tuple(map(index, shape))
        if not self.shape or min(self.shape) < 0:
            raise ValueMismatch(f"a row-sparse array of shape {self.shape} has no rows; it needs a first dimension")
        ids = row_ids(indices, self.shape[0]).copy()  # the caller may go on to write there
        if (dimensions := len(indices.shape) if is_array(indices) else np.ndim(indices)) != 1:
            raise ValueMismatch(f"row numbers must have one dimension, not {dimensions}")
        # Rows may stay on a GPU; their numbers come to the host, where they are planned with.
        rows, gpu = locate(values)
        self._tables: Workspace = HOST if gpu is None else gpu.workspace()
        if rows.shape != (ids.size, *self.shape[1:]):
            raise ValueMismatch(
                f"values of {ids.size} rows of an array of shape {self.shape} have the shape "
                f"{(ids.size, *self.shape[1:])}, not {rows.shape}"
            )
        # The kernels of rows take flat memory. numpy takes any.
        if gpu is not None and not rows.flags.c_contiguous:
            contiguous = gpu.empty(rows.shape, rows.dtype)
            gpu.copy((contiguous,), (rows,))
            rows = contiguous
        self.replace(*_sum_repeated(self._tables, ids, rows))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the class and its arguments, for pickle."""
        # The workspace holds streams and device memory of this process; pickle only rows, and look it up again.
        return RowSparse, (self.indices, self.values, self.shape)

    # Rows are replaced by a new RowSparse only: so numbers are checked once, and not again at each push.

    @property
    def indices(self) -> Array:
        """The numbers of the rows that are there: int64, rising, read-only."""
        return self._indices

    @property
    def values(self) -> Array:
        """The rows, of shape ``(len(indices), *shape[1:])``: a writable array of numpy or of a GPU."""
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def on_host(self) -> bool:
        """Whether the values are numpy's, and not an array of a GPU."""
        return self._tables is HOST

    def __len__(self) -> int:
        """How many rows are there."""
        return int(self.indices.size)

    def __repr__(self) -> str:
        return f"<mpikv.RowSparse {list(self.shape)} {self.dtype.name}, {len(self)} rows>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole as a new array of numpy; TypeError for rows on a GPU, ValueError for ``copy=False``."""
        if not self.on_host:
            raise TypeError("rows on a GPU are not copied to the host implicitly; to_dense() returns an array there")
        if copy is False:
            raise ValueError("a RowSparse becomes an array only by a copy; leave copy=False out")
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)

    def to_dense(self) -> Array:
        """Return a new array of the whole; missing rows are zero. On a GPU it is queued. Local.

        >>> RowSparse([1], np.ones((1, 2)), (2, 2)).to_dense()
        array([[0., 0.],
               [1., 1.]])
        """
        # numpy's zeros take no memory in pages that nobody writes.
        dense = np.zeros(self.shape, self.dtype) if self.on_host else self._tables.empty(self.shape, self.dtype)
        if not self.on_host:
            dense.fill(0)
        self._tables.put_rows(dense, self.indices, self.values)
        return dense

    def replace(self, indices: Array, values: Array) -> None:
        """Replace the numbers and rows of this object by these arrays, without a copy or a check. Local.

        ``indices`` must be int64 and rise. ``values`` must have a row for each, in the same memory (host or GPU) as the
        rows before.
        """
        self._indices: Array = indices.view()
        # A caller who wrote there could make numbers that fall or are out of range, and nothing looks again.
        self._indices.flags.writeable = False
        self._values = values

    @classmethod
    def from_scipy(cls, matrix: Any) -> RowSparse:
        """Return the nonempty rows of scipy's sparse matrix or array, of any format; TypeError for others. Local.

        Raises:
            TypeError: the object is no such matrix, or has not two dimensions.
        """
        if not hasattr(matrix, "tocsr") or len(matrix.shape) != 2:
            raise TypeError(f"expected a matrix of scipy.sparse, got {type(matrix).__name__}")
        compressed = matrix.tocsr()
        ids = np.flatnonzero(np.diff(compressed.indptr))
        return cls(ids, compressed[ids].toarray(), matrix.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> RowSparse:
        """Return the nonempty rows of torch's COO tensor, uncopied if it is coalesced and sparse in rows only. Local.

        Gradients of ``Embedding(sparse=True)`` are sparse in the first dimension only.

        Raises:
            TypeError: it is no sparse COO tensor.
        """
        if str(getattr(tensor, "layout", None)) != "torch.sparse_coo":
            raise TypeError(f"expected a sparse COO tensor of torch's, got {type(tensor).__name__}")
        # Coalesced by torch: it sums rows of one number on the tensor's own device.
        tensor = tensor.detach().coalesce()
        ids, rows = tensor.indices()[0], tensor.values()
        if len(tensor.indices()) > 1:
            ids = ids.unique()
            rows = tensor.index_select(0, ids).to_dense()
        return cls(ids, rows, tuple(tensor.shape))


def row_ids(given: Any, count: int) -> Array:
    """Return row numbers as flat int64, uncopied if they are that; raise for fractions, or outside of [0, count).
    Waits for a GPU's. Local.

    >>> row_ids([[2, 0]], 3)
    array([2, 0])
    """
    array = np.asarray(given) if isinstance(given, (list, tuple)) else read_to_host(given)
    ids: Array = array.reshape(-1)
    if ids.dtype != np.int64:
        known = ids.dtype.kind in "iuf" or not ids.size  # MXNet's numbers of rows are often floats
        with np.errstate(invalid="ignore"):  # a cast of NaN, which equals nothing
            ids = ids.astype(np.int64) if known else ids[:0].astype(np.int64)
        if not np.array_equal(ids, array.reshape(-1)):
            raise ValueMismatch(f"row numbers must be integers, not {array.dtype.name}: {array}")
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        wrong = ids[(ids < 0) | (ids >= count)]
        raise IndexError(f"row {int(wrong[0])} is outside of an array of {count} rows, numbered from 0")
    return ids


def _sum_repeated(tables: Workspace, ids: Array, rows: Array) -> tuple[Array, Array]:
    """Return distinct numbers, rising, and the sums of the rows of each; the arguments if they rise already. Local."""
    if ids.size < 2 or (ids[1:] > ids[:-1]).all():
        return ids, rows
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    if starts.size == ids.size:
        return ids, tables.take_rows(rows, order)
    return ids[starts], tables.sum_runs(rows, order, starts)


def cast_rows(tables: Workspace, rows: Array, dtype: np.dtype[Any]) -> Array:
    """Return rows in another dtype; the array itself, if it has this dtype. Local."""
    if rows.dtype == dtype:
        return rows
    cast = tables.empty(rows.shape, dtype)
    tables.copy((cast,), (rows,))
    return cast


def sum_rows(
    addends: Sequence[tuple[Array, Array]], dtype: np.dtype[Any], in_pairs: bool = False, tables: Workspace = HOST
) -> tuple[Array, Array]:
    """Add up row-sparse arrays by ``tables``, the workspace of their memory; return new numbers and rows. Local.

    Each addend is a pair of rising numbers and rows of ``tables``. Their sum, in ``dtype``, is made from first to last;
    with ``in_pairs``, as a binary tree, like the dense sum of the same ranks.

    >>> sum_rows([(np.array([0, 2]), np.ones((2, 1))), (np.array([2]), np.ones((1, 1)))], np.dtype("float64"))
    (array([0, 2]), array([[1.],
           [2.]]))
    """
    # As dense sums: the tree depends on the number of ranks alone.
    if in_pairs and len(addends) > 2:
        middle = len(addends) // 2
        addends = [sum_rows(half, dtype, True, tables) for half in (addends[:middle], addends[middle:])]
    (ids, rows), *others = addends
    if not others:
        total = tables.empty(rows.shape, dtype)
        tables.copy((total,), (rows,))
        return ids.copy(), total
    # Sorted at once: merging list by list would sort the first one again for each rank.
    every = np.concatenate([ids for ids, _ in addends])
    every.sort(kind="stable")
    every = every[np.concatenate(([True], every[1:] != every[:-1]))] if every.size else every
    total = tables.empty((every.size, *rows.shape[1:]), dtype)
    total.fill(0)
    first, *places = tables.numbers([np.searchsorted(every, ids) for ids, _ in addends])
    tables.put_rows(total, first, rows)
    # One addend has each number once, so add_rows needs no atomics, and the order of the sum is fixed.
    for at, (_, rows) in zip(places, others, strict=True):
        tables.add_rows(total, at, rows)
    return every, total
