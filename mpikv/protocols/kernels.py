"""The seam of kernels: code that runs the rules of updaters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from .arrays import Array
    from .codec import Codec
    from .memory import Memory
    from .updater import Updater


class Whole(NamedTuple):
    """A whole value for one update: its arrays are flat, or have its shape."""

    total: Array
    value: Array
    state: Mapping[str, Array]


class Kernels(Protocol):
    """Runs the rules of element-wise updaters: in numpy, or as compiled code with the same bits."""

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        """Compile the code for the updater's present options and values of this dtype, unless it exists or none is
        needed; or raise Unsupported.

        With ``adding`` for :meth:`bind_adding`, otherwise for :meth:`bind`.

        Raises:
            Unsupported: an optimizer's rule cannot be compiled.
        """

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return a function of a step. Each call updates these arrays, or queues that on a GPU, by the updater's
        options of that moment.
        """

    def bind_adding(
        self, updater: Updater, value: Array, state: Mapping[str, Array]
    ) -> Callable[[Array, Array, Any], None] | None:
        """Return a function (a, b, step) that updates value and state by a + b; None if :meth:`bind` is as good.

        It does not write to ``a`` and ``b``: flat, contiguous, of the size and the dtype of the value. It saves a
        write of the sum to memory.
        """

    def bind_list(self, arrays: Sequence[Array]) -> BoundList | None:
        """Return an object that compares and copies lists with these arrays; None if it saves nothing."""

    def codec(self, codec: Codec) -> Codec:
        """Return a compiled codec with the same results; the codec itself if there is no code for it."""


class BoundList(Protocol):
    """Arrays at fixed addresses. It compares other lists with them, array by array, and copies between both.

    All methods are local. They return False if they cannot tell; the caller then asks numpy.
    """

    def fits(self, others: Sequence[Any], writable: bool, own: bool) -> bool:
        """Return whether the others have these arrays' number, classes, shapes and dtypes, and are contiguous; False if
        it cannot tell.

        ``writable`` also requires writable arrays, ``own`` arrays over memory of their own.
        """

    def take(self, others: Sequence[Any]) -> bool:
        """Copy the others into the arrays; return False at the first misfit: earlier ones are copied then."""

    def give(self, others: Sequence[Any]) -> bool:
        """Copy the arrays into the others; return False at the first misfit: earlier ones are copied then."""


class StepTable(Protocol):
    """GPU memory for the steps of updates. An update reads its step when it runs, not when it is queued."""

    rows: Sequence[Any]
    """Pass one of these in place of a step to a function of :meth:`Kernels.bind`."""

    def fits(self, step: Any) -> bool:
        """Return whether an update bound to a row can run this step: by the same rule, with any numbers."""

    def write(self, steps: Sequence[Any]) -> None:
        """Queue a copy of steps to the first rows, one each. Updates queued afterwards read these steps."""


@runtime_checkable
class GpuKernels(Kernels, Protocol):
    """Kernels of a GPU."""

    def bind_ranges(
        self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array], ends: Sequence[int]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function of a list of steps, one per range: it queues the update of each range by its step.

        It does as one function of :meth:`~Kernels.bind` per range would. Ranges are adjacent and end at ``ends``. The
        updater is an optimizer with a rule.
        """

    def bind_whole(self, updater: Updater, wholes: Sequence[Whole]) -> Callable[[Sequence[Any]], None] | None:
        """Return a function of a list of steps, one per value: it queues the update of each value by its step. Return
        None if that saves nothing.

        It updates as :meth:`Updater.update` does, by the updater's options at the time of each call.
        """

    def step_table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> StepTable:
        """Return a table in new GPU memory for steps of ``count`` keys, and compile the updates that read it; or raise
        MemoryError. Call :meth:`~Kernels.prepare` for the dtypes first.
        """
