"""Arrays, keys, and the state that an optimizer has for each element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
"""A numpy array. In a store with the :class:`Memory` of a GPU, an array of that GPU, as CuPy's."""

Key: TypeAlias = "int | str"
"""The name of a stored value. One store holds keys of one type."""

Slots: TypeAlias = "Mapping[str, np.dtype[Any]]"
"""The optimizer state that one element of a value needs: the name and the dtype of each state array."""
