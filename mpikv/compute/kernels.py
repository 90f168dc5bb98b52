"""Finds the code for optimizer rules and codecs by the name of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import TransportUnavailable
from ..protocols import Array, Codec, Kernels, Updater


class NumpyKernels:
    """The rules of the optimizers in numpy."""

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        """Do nothing: numpy needs no compilation."""

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return the updater's own function, which updates these arrays in place, given a step."""
        return updater.bind(total, value, state)

    def bind_adding(self, updater: Updater, value: Array, state: Mapping[str, Array]) -> None:
        """Return None: numpy gains nothing, as a sum is one more pass over memory, like each operation of a rule."""

    def bind_list(self, arrays: Sequence[Array]) -> None:
        """Return None: numpy has no code for a list of arrays."""

    def codec(self, codec: Codec) -> Codec:
        """Return the codec itself."""
        return codec


def find_kernels(name: str) -> Kernels:
    """Return numpy's kernels, or import numba and return its kernels; TransportUnavailable if that fails.

    Raises:
        TransportUnavailable: numba cannot be imported.
    """
    if name == "numpy":
        return NumpyKernels()
    try:
        # Only on request: numba takes long to import, and may not be installed.
        from .numba import rules as compiled
    except ImportError as error:
        raise TransportUnavailable(
            f"kernels='numba' needs the package numba ({error}): pip install 'mpikv[numba]', or leave kernels='numpy', "
            "which gives the same bits"
        ) from error
    return compiled
