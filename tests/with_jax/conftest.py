"""What tests with JAX share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """Give JAX 64-bit numbers in all threads: its context manager is for one, and callbacks may run in another."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
