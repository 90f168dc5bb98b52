"""The measured keys: shapes of well known networks by formula, and gradients that any rank can make again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...protocols import Array

Shape = tuple[int, ...]

# Divisors of --quick: for the widths of networks, and for the number of small keys.
_NARROW, _FEW = 8, 50
_SEED = 20


@dataclass(frozen=True)
class KeySet:
    """Shapes of float32 values; their keys are 0, 1, 2 and so on."""

    title: str
    shapes: tuple[Shape, ...]

    @property
    def keys(self) -> list[int]:
        """The keys, in order."""
        return list(range(len(self.shapes)))

    @property
    def elements(self) -> int:
        """The number of floats of all values."""
        return sum(map(math.prod, self.shapes))

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return 4 * self.elements


def resnet50(narrow: int = 1) -> list[Shape]:
    """Return ResNet-50's parameters: convolutions, each with scale and shift, and a head for 1000 classes.

    ``narrow`` divides the number of channels.

    >>> len(resnet50()), sum(map(math.prod, resnet50()))
    (161, 25557032)
    """
    channels = 64 // narrow
    shapes: list[Shape] = [(channels, 3, 7, 7), (channels,), (channels,)]
    for width, blocks in ((64 // narrow, 3), (128 // narrow, 4), (256 // narrow, 6), (512 // narrow, 3)):
        for block in range(blocks):
            layers = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                layers.append((4 * width, channels, 1, 1))
            for layer in layers:
                shapes += [layer, layer[:1], layer[:1]]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def bert_base(narrow: int = 1) -> list[Shape]:
    """Return BERT-base's parameters: three embeddings with a norm, twelve layers of sixteen, and the pooler.

    ``narrow`` divides the widths.

    >>> len(bert_base()), sum(map(math.prod, bert_base()))
    (199, 109482240)
    """
    h, f = 768 // narrow, 3072 // narrow
    layer: list[Shape] = [*[(h, h), (h,)] * 4, (h,), (h,), (f, h), (f,), (h, f), (h,), (h,), (h,)]
    return [(30522, h), (512, h), (2, h), (h,), (h,), *layer * 12, (h, h), (h,)]


def many_small(count: int = 10_000) -> list[Shape]:
    """Return ``count`` vectors of 1 to 100 floats, the same at every call."""
    return [(int(size),) for size in np.random.default_rng(_SEED).integers(1, 101, count)]


def key_set(name: str, *, quick: bool) -> KeySet:
    """Return the set ``resnet50``, ``bert-base`` or ``many``; ``quick`` makes it small."""
    if name == "many":
        shapes = many_small(10_000 // _FEW if quick else 10_000)
        return KeySet(f"{len(shapes):,} keys of 1-100 floats", tuple(shapes))
    formula, title = _NETWORKS[name]
    if quick:
        return KeySet(f"{title}, 1/{_NARROW} as wide", tuple(formula(_NARROW)))
    return KeySet(title, tuple(formula(1)))


_NETWORKS: dict[str, tuple[Callable[[int], list[Shape]], str]] = {
    "resnet50": (resnet50, "ResNet-50"),
    "bert-base": (bert_base, "BERT-base"),
}


def gradients(rank: int, shapes: Sequence[Shape]) -> Iterator[Array]:
    """Yield a rank's gradients, float32 in [0.5, 1.5), the same at every call.

    All are positive. Sums that nearly cancel would turn another order's rounding into large differences, where an
    optimizer divides by the gradient's own size.
    """
    random = np.random.default_rng([_SEED, rank])
    for shape in shapes:
        gradient = random.random(shape, np.float32)
        gradient += 0.5
        yield gradient
