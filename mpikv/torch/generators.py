"""The generators of random numbers that belong to no object of the program."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..keep.state import ObjectState


class RandomState:
    """The generators that PyTorch's programs draw from by default: PyTorch's on the host, numpy's and Python's."""

    def object_state(self) -> ObjectState:
        """Return the functions that get and set the generators' states, for :meth:`mpikv.KVStore.keep`. Local."""
        return ObjectState(self._state, self._take_state, draws=True)

    def _state(self) -> dict[str, Any]:
        """Return a dict of the states of PyTorch's, numpy's and Python's generators. Local."""
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(legacy=False), "python": random.getstate()}

    def _take_state(self, state: Mapping[str, Any]) -> None:
        """Set the generators to a result of :meth:`_state`. Local."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
