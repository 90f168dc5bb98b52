"""Optimizers with any options, and what they are to update: what compiled rules are compared with numpy on."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from mpikv import optimizers
from mpikv.compute.kernels import NumpyKernels
from mpikv.optimizers import BLOCK
from mpikv.testing.updater import wide

# Around the widths of SIMD registers, and around a block.
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 1000, BLOCK - 1, BLOCK, BLOCK + 1]))

POSITIVE = st.one_of(st.sampled_from([1e-50, 1e-8, 0.3, 1.0, 1e30, 1e300]), st.floats(1e-12, 1e12))
NOT_NEGATIVE = st.one_of(st.just(0.0), POSITIVE)
SHARE = st.one_of(st.sampled_from([0.0, 1e-50, 0.9, 0.999]), st.floats(0, 1, exclude_max=True))
COMMON = {
    "learning_rate": NOT_NEGATIVE,
    "wd": NOT_NEGATIVE,
    "rescale_grad": st.one_of(st.just(1.0), NOT_NEGATIVE, NOT_NEGATIVE.map(float.__neg__)),
    "clip_gradient": st.one_of(st.none(), POSITIVE),
}
SOME_SHARE = SHARE.filter(bool)
BETAS = {"beta1": SHARE, "beta2": SHARE, "epsilon": POSITIVE}
CLIPPED = {"rho": SHARE, "epsilon": POSITIVE, "clip_weights": st.one_of(st.none(), POSITIVE)}

# What each loop is reached by, and all options that it reads.
RULES = {
    "sgd": ("sgd", {}),
    "sgd-momentum": ("sgd", {"momentum": SOME_SHARE}),
    "sgd-nesterov": ("sgd", {"momentum": SOME_SHARE, "nesterov": st.just(True)}),
    "test": ("test", {}),
    "signum": ("signum", {"momentum": SOME_SHARE, "wd_lh": NOT_NEGATIVE}),
    "signum-plain": ("signum", {"momentum": st.just(0.0), "wd_lh": NOT_NEGATIVE}),
    "adagrad": ("adagrad", {"epsilon": POSITIVE}),
    "rmsprop": ("rmsprop", CLIPPED),
    "rmsprop-centered": ("rmsprop", {"centered": st.just(True), "momentum": SHARE, **CLIPPED}),
    "adadelta": ("adadelta", {"rho": SHARE, "epsilon": POSITIVE}),
    "adam": ("adam", BETAS),
    "adamw": ("adamw", {"correct_bias": st.booleans(), **BETAS}),
    "nadam": ("nadam", {"schedule_decay": NOT_NEGATIVE, **BETAS}),
    "adamax": ("adamax", BETAS),
    "ftrl": ("ftrl", {"lamda1": NOT_NEGATIVE, "beta": POSITIVE}),
}
# Those of whole values, whose rate depends on their norms.
LAYERWISE = {
    "lars": ("lars", {"eta": POSITIVE, "epsilon": POSITIVE}),
    "lars-momentum": ("lars", {"eta": POSITIVE, "epsilon": POSITIVE, "momentum": SOME_SHARE}),
    "lamb": (
        "lamb",
        {
            "lower_bound": st.one_of(st.none(), POSITIVE),
            "upper_bound": st.one_of(st.none(), POSITIVE),
            "bias_correction": st.booleans(),
            **BETAS,
        },
    ),
}
# What only ever grows from zero by squares and magnitudes.
MAGNITUDES = {"variance", "history", "largest", "n", "gradient", "delta"}


def numbers(random, size, dtype, wild):
    """Return ordinary numbers, and among them a share of those at the edges of the dtype."""
    facts = np.finfo(np.float32 if dtype.itemsize == 2 else dtype)
    edges = [0.0, np.inf, np.nan, facts.max, facts.tiny, facts.smallest_subnormal, 3 * facts.smallest_subnormal]
    if dtype.itemsize == 2:  # those of float16
        edges += [65519.0, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25]
    array = random.standard_normal(size) * 10.0 ** random.uniform(-3, 3, size)
    at = random.random(size) < wild
    array[at] = random.choice(edges, size)[at] * random.choice([-1, 1], size)[at]
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def bits(array):
    """Return the bytes, with one NaN for all: which one comes out of an operation of two is not said by IEEE 754."""
    return np.where(np.isnan(array), np.nan, array).astype(array.dtype).tobytes()


def plain(rule):
    """Return an optimizer's name and the fewest options that reach a rule."""
    name, _, kind = rule.partition("-")
    options = {
        "momentum": {"momentum": 0.9},
        "nesterov": {"momentum": 0.9, "nesterov": True},
        "plain": {"momentum": 0.0},
        "centered": {"centered": True},
        "master": {"multi_precision": True},
    }
    return name, options.get(kind, {})


@st.composite
def training(draw, rule, dtype):
    """Return an optimizer of a rule, a weight and the terms of the sums of three updates, its state, and the numbers of
    these updates.
    """
    name, options = (RULES | LAYERWISE)[rule]
    optimizer = optimizers.create(name, **draw(st.fixed_dictionaries({**COMMON, **options})))
    optimizer.multi_precision = dtype.itemsize == 2 and draw(st.booleans())
    size, wild = draw(SIZES), draw(st.sampled_from([0.0, 0.1, 0.9]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    updates = [1, 2, draw(st.integers(3, 10**6))]
    arrays = [numbers(random, size, dtype, wild) for _ in range(2 + len(updates))]
    state = {name: numbers(random, size, kind, wild) for name, kind in optimizer.slots(dtype).items()}
    state = {name: np.abs(array) if name in MAGNITUDES else array for name, array in state.items()}
    return optimizer, arrays, state, updates


def sum_of(left, right):
    return np.add(left, right, dtype=wide(left.dtype))


def in_numpy(optimizer, left, right, weight, state, step):
    NumpyKernels().bind(optimizer, sum_of(left, right), weight, state)(step)


def run(update, optimizer, arrays, state, updates):
    """Return the bits after each update by the sum of two neighbours of the arrays after the first."""
    weight, *terms = (array.copy() for array in arrays)
    state = {name: array.copy() for name, array in state.items()}
    seen = []
    for count, (left, right) in zip(updates, pairwise(terms), strict=True):
        with np.errstate(all="ignore"):
            update(optimizer, left, right, weight, state, optimizer.step("key", count))
        seen.append({name: bits(array) for name, array in {"weight": weight, **state}.items()})
    return seen
