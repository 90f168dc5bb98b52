"""The seam of kernels: what runs the rules of updaters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from .arrays import Array
from .codec import Codec
from .memory import Memory
from .updater import Updater

__all__ = ["BoundList", "GpuKernels", "Kernels", "ListKernels", "StepTable", "Whole"]


class Whole(NamedTuple):
    """A whole value that is to be updated: flat arrays, or in its shape."""

    total: Array
    value: Array
    state: Mapping[str, Array]


class Kernels(Protocol):
    """Runs the rules of element-wise updaters: in numpy, or as compiled code of the same bits."""

    @property
    def rules(self) -> Sequence[str]:
        """The names of the optimizers that have compiled code. All others run in numpy."""

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        """Compile what the updater, with its present options, needs for values of this dtype, unless it is there: what
        :meth:`bind_adding` needs, or else :meth:`bind`.
        """

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return what :meth:`Updater.bind` does. It heeds the options that the updater has when it is called."""

    def bind_adding(
        self, updater: Updater, value: Array, state: Mapping[str, Array]
    ) -> Callable[[Array, Array, Any], None] | None:
        """Return a function of two arrays and a step that does to their sum what :meth:`bind`'s does to ``total``, and
        does not write to them; or None where it gains nothing that the sum is not written to memory.

        The arrays are flat and contiguous, of the size and the dtype of the value.
        """


class BoundList(Protocol):
    """Arrays that stay where they are, with which others are compared, and between which and others all is copied: one
    each, in order. All methods are local, and return False where they cannot tell: then numpy is to be asked.
    """

    def fits(self, others: Sequence[Any], writable: bool, own: bool) -> bool:
        """Return whether each of the others is contiguous, and of the class, the shape and the dtype of its array; if
        asked for, also writable, or over memory of its own.
        """

    def take(self, others: Sequence[Any]) -> bool:
        """Copy what the others hold to the arrays; return False where others do not fit, and some may be copied."""

    def give(self, others: Sequence[Any]) -> bool:
        """Copy what the arrays hold to the others; return False as :meth:`take` does."""


@runtime_checkable
class ListKernels(Kernels, Protocol):
    """Kernels that look at many arrays of the host in less time than numpy takes to be called for each."""

    def bind_list(self, arrays: Sequence[Array]) -> BoundList | None:
        """Return these arrays of numpy's own class, bound; or None where it gains nothing."""


class StepTable(Protocol):
    """Memory of a GPU for the steps of updates, which then are read when an update runs, not when it is queued."""

    rows: Sequence[Any]
    """What a function of :meth:`Kernels.bind` takes in place of a step."""

    def fits(self, step: Any) -> bool:
        """Return whether what was queued with a row is the update that this step asks for, but for its numbers."""

    def write(self, steps: Sequence[Any]) -> None:
        """Queue that the first rows be these steps, from the updates on that are queued next."""


@runtime_checkable
class GpuKernels(Kernels, Protocol):
    """What runs on a GPU."""

    def has_rule(self, updater: Updater) -> bool:
        """Return whether there is compiled code for an updater, which then is an optimizer. Others are Python."""

    def bind_ranges(
        self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array], ends: Sequence[int]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function of a step for each of some ranges, which follow one another and end at ``ends``, that makes
        one update of each: what functions that :meth:`~Kernels.bind` returns for each would do.
        """

    def bind_whole(self, updater: Updater, wholes: Sequence[Whole]) -> Callable[[Sequence[Any]], None]:
        """Return a function of a step for each value that makes one update of each of them, as :meth:`Updater.update`
        does. It heeds the options that the updater has when it is called.
        """

    def codec(self, codec: Codec) -> Codec:
        """Return what does on arrays of the GPU what a codec does on the host's, with the same bits, compiled when this
        returns; or the codec itself, where there is no kernel for it.
        """

    def table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> StepTable:
        """Return memory for ``count`` steps of an optimizer with its present options, which has a rule, and compile its
        updates of values of these dtypes, which :meth:`~Kernels.prepare` was called for. Local.

        Raises:
            MemoryError: there is too little.
        """
