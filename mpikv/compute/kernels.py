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
        pass

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        return updater.bind(total, value, state)

    def bind_adding(self, updater: Updater, value: Array, state: Mapping[str, Array]) -> None:
        return None  # numpy gains nothing: a sum is one more pass over memory, as each operation of a rule is

    def bind_list(self, arrays: Sequence[Array]) -> None:
        return None

    def codec(self, codec: Codec) -> Codec:
        return codec


def find_kernels(name: str) -> Kernels:
    """Return the kernels of a name in :data:`mpikv.config.KERNELS`; import numba if named, or TransportUnavailable.

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
