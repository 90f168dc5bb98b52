"""What runs the rules of optimizers, and codecs, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import TransportUnavailable
from ..protocols import Array, Codec, Kernels, Updater

__all__ = ["NumpyKernels", "find_codec", "find_kernels"]


class NumpyKernels:
    """The rules as they are."""

    rules: Sequence[str] = ()

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        pass

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        return updater.bind(total, value, state)

    def bind_adding(self, updater: Updater, value: Array, state: Mapping[str, Array]) -> None:
        return None  # a sum is one more operation, as all others of a rule


def find_kernels(name: str) -> Kernels:
    """Return the kernels of a name in :data:`mpikv.config.KERNELS`.

    Raises:
        TransportUnavailable: numba cannot be imported.
    """
    if name == "numpy":
        return NumpyKernels()
    try:
        # It is slow to import and may not be installed: only where it is asked for.
        from .numba import rules as compiled
    except ImportError as error:
        raise TransportUnavailable(
            f"kernels='numba' needs the package numba ({error}): pip install 'mpikv[numba]', or leave kernels='numpy', "
            "which gives the same bits"
        ) from error
    return compiled


def find_codec(codec: Codec, kernels: str) -> Codec:
    """Return what does the work of a codec with the kernels of a name, which can be found."""
    if kernels == "numpy":
        return codec
    from .numba import codecs as compiled

    return compiled.compiled(codec)
