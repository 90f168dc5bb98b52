"""The update rules: against PyTorch's, against their formulas in float64, and against the contract of updaters."""

import copy
import inspect
import pickle
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from mpikv import optimizers
from mpikv.errors import ConfigError, Unsupported
from mpikv.optimizers import Optimizer, create
from mpikv.optimizers.recording import call_of
from mpikv.schedules import Cosine, Factor
from mpikv.testing.updater import UpdaterContract

GOLDEN = np.load(Path(__file__).parents[1] / "support" / "golden" / "optimizers.npz")

NAMES = ["adadelta", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lars", "nadam", "rmsprop", "sgd", "signum"]
NAMES += ["test"]

COMMON = {"rescale_grad": 0.5, "clip_gradient": 0.75, "wd": 0.01}

VARIANTS = {
    **{name: (name, {}) for name in NAMES},
    **{f"{name}-common": (name, COMMON) for name in NAMES},
    "sgd-momentum": ("sgd", {"momentum": 0.9, **COMMON}),
    "sgd-nesterov": ("sgd", {"momentum": 0.9, "nesterov": True, **COMMON}),
    "sgd-master": ("sgd", {"momentum": 0.9, "multi_precision": True}),
    "adam-master": ("adam", {"multi_precision": True, **COMMON}),
    "adamw-uncorrected": ("adamw", {"correct_bias": False, **COMMON}),
    "signum-plain": ("signum", {"momentum": 0.0, "wd_lh": 0.1, **COMMON}),
    "rmsprop-centered": ("rmsprop", {"centered": True, "clip_weights": 1.0, **COMMON}),
    "lars-momentum": ("lars", {"momentum": 0.9, **COMMON}),
    "lars-master": ("lars", {"momentum": 0.9, "multi_precision": True}),
    "lamb-bounds": ("lamb", {"lower_bound": 0.1, "upper_bound": 10.0, **COMMON}),
    "lamb-master": ("lamb", {"multi_precision": True, **COMMON}),
}


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


class TestContract(UpdaterContract):
    @pytest.fixture(autouse=True)
    def settle(self, variant):
        self.name, self.options = variant

    def updater(self):
        return create(self.name, **self.options)

    def other(self):
        return create(self.name, **{**self.options, "learning_rate": 0.0123})


def path(optimizer, weight, gradients):
    """Return the weights after each gradient."""
    weight = weight.copy()
    state = {name: np.zeros(weight.shape, dtype) for name, dtype in optimizer.slots(weight.dtype).items()}
    weights = []
    for count, gradient in enumerate(gradients, 1):
        optimizer.update(optimizer.step("key", count), gradient.astype(weight.dtype), weight, state)
        weights.append(weight.copy())
    return np.array(weights)


# torch's case -> our name and options for the same rule
SAME_AS_TORCH = {
    "sgd": ("sgd", {"learning_rate": 0.1}),
    "sgd_momentum_wd": ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}),
    "sgd_nesterov_wd": ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True, "wd": 0.01}),
    "adagrad_wd": ("adagrad", {"learning_rate": 0.1, "wd": 0.01}),
    "rmsprop_wd": ("rmsprop", {"learning_rate": 0.01, "wd": 0.01}),
    "adadelta_wd": ("adadelta", {"wd": 0.01}),
    "adam": ("adam", {"learning_rate": 0.01}),
    "adam_wd_epsilon": ("adam", {"learning_rate": 0.01, "wd": 0.01, "epsilon": 1e-2}),
    "adamw": ("adamw", {"learning_rate": 0.01, "wd": 0.1}),
    "nadam_wd": ("nadam", {"learning_rate": 0.01, "wd": 0.01}),
    "adamax_wd": ("adamax", {"learning_rate": 0.01, "wd": 0.01}),
}


@pytest.mark.parametrize("clip", ["plain", "clip"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("case", SAME_AS_TORCH)
@pytest.mark.feature("optimizer-base-options")
def test_same_weights_as_torch(case, dtype, tolerance, clip):
    name, options = SAME_AS_TORCH[case]
    optimizer = create(name, clip_gradient=float(GOLDEN["clip"]) if clip == "clip" else None, **options)
    weights = path(optimizer, GOLDEN["weight"].astype(dtype), GOLDEN["gradients"])
    np.testing.assert_allclose(
        weights[GOLDEN["kept"]], GOLDEN[f"{case}/{dtype}/{clip}"], rtol=tolerance, atol=tolerance
    )


def gradient_of(gradient, weight, *, wd=COMMON["wd"]):
    return np.clip(COMMON["rescale_grad"] * gradient, -0.75, 0.75) + wd * weight


def formula_test(weight, gradients):
    for gradient in gradients:
        weight = weight - 0.1 * gradient_of(gradient, weight)
        yield weight


def formula_signum(weight, gradients, momentum=0.9):
    mean = np.zeros_like(weight)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient_of(gradient, weight)
        weight = (1 - 0.1 * 0.05) * weight - 0.1 * np.sign(mean)
        yield weight


def formula_centered(weight, gradients):
    mean, square, velocity = np.zeros_like(weight), np.zeros_like(weight), np.zeros_like(weight)
    for gradient in gradients:
        g = gradient_of(gradient, weight)
        mean = 0.95 * mean + 0.05 * g
        square = 0.95 * square + 0.05 * g**2
        velocity = 0.9 * velocity - 0.1 * g / np.sqrt(square - mean**2 + 1e-4)
        weight = np.clip(weight + velocity, -1.5, 1.5)
        yield weight


def formula_ftrl(weight, gradients):
    z, n = np.zeros_like(weight), np.zeros_like(weight)
    for gradient in gradients:
        g = gradient_of(gradient, weight, wd=0.0)
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / 0.1
        z, n = z + g - sigma * weight, n + g**2
        shrunk = -(z - np.sign(z) * 0.3) / ((1.0 + np.sqrt(n)) / 0.1 + COMMON["wd"])
        weight = np.where(np.abs(z) <= 0.3, 0.0, shrunk)
        yield weight


def formula_lars(weight, gradients, momentum=0.9):
    velocity = np.zeros_like(weight)
    for gradient in gradients:
        weight_norm = np.sqrt((weight**2).sum())
        gradient_norm = np.sqrt(((COMMON["rescale_grad"] * gradient) ** 2).sum())
        trust = 0.02 * weight_norm / (gradient_norm + COMMON["wd"] * weight_norm + 1e-8)
        velocity = momentum * velocity - 0.1 * trust * gradient_of(gradient, weight)
        weight = weight + velocity
        yield weight


def formula_lamb(weight, gradients, corrected=True, bound=np.inf):
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for t, gradient in enumerate(gradients, 1):
        g = gradient_of(gradient, weight, wd=0.0)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        first, second = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1, 1)
        u = mean / first / (np.sqrt(square / second) + 1e-6) + COMMON["wd"] * weight
        weight = weight - 0.1 * min(np.linalg.norm(weight), bound) / np.linalg.norm(u) * u
        yield weight


def formula_adamw_uncorrected(weight, gradients):
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for gradient in gradients:
        g = gradient_of(gradient, weight, wd=0.0)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        weight = weight - 0.1 * (mean / (np.sqrt(square) + 1e-6) + COMMON["wd"] * weight)
        yield weight


FORMULAS = [
    (formula_test, "test", {}),
    (formula_signum, "signum", {"wd_lh": 0.05}),
    (partial(formula_signum, momentum=0.0), "signum", {"wd_lh": 0.05, "momentum": 0.0}),
    (formula_centered, "rmsprop", {"centered": True, "rho": 0.95, "epsilon": 1e-4, "clip_weights": 1.5}),
    (formula_ftrl, "ftrl", {"lamda1": 0.3}),
    (formula_lars, "lars", {"momentum": 0.9, "eta": 0.02}),
    (partial(formula_lars, momentum=0.0), "lars", {"eta": 0.02}),
    (formula_lamb, "lamb", {}),
    (partial(formula_lamb, corrected=False, bound=2.0), "lamb", {"bias_correction": False, "upper_bound": 2.0}),
    (formula_adamw_uncorrected, "adamw", {"correct_bias": False}),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-12)])
@pytest.mark.parametrize(("formula", "name", "options"), FORMULAS)
@pytest.mark.feature("optimizer-test")
def test_same_weights_as_formula(formula, name, options, dtype, tolerance):
    random = np.random.default_rng(3)
    # Rounded to float32 first, or else rules with a jump (sign, threshold) could differ for good reason.
    weight = random.standard_normal(40).astype(np.float32).astype(np.float64)
    gradients = random.standard_normal((25, 40)).astype(np.float32).astype(np.float64)
    weights = path(create(name, learning_rate=0.1, **COMMON, **options), weight.astype(dtype), gradients)
    np.testing.assert_allclose(weights, list(formula(weight, gradients)), rtol=tolerance, atol=tolerance)


@pytest.mark.feature("optimizer-sgd-order")
def test_sgd_has_the_documented_order_of_operations():
    random = np.random.default_rng(4)
    weight, gradient = random.standard_normal((2, 1000)).astype(np.float32)
    momentum = random.standard_normal(1000).astype(np.float32)
    g = np.clip(np.float32(0.3) * gradient, np.float32(-0.5), np.float32(0.5)) + np.float32(0.01) * weight
    expected_momentum = np.float32(0.9) * momentum - np.float32(0.1) * g
    expected = weight + expected_momentum
    optimizer = optimizers.SGD(learning_rate=0.1, momentum=0.9, wd=0.01, rescale_grad=0.3, clip_gradient=0.5)
    optimizer.update(optimizer.step(0, 1), gradient, weight, {"momentum": momentum})
    np.testing.assert_array_equal(weight, expected)
    np.testing.assert_array_equal(momentum, expected_momentum)


def test_wd_is_not_rounded_away_in_float32():
    weight = np.linspace(1, 2, 1001, dtype=np.float32)
    optimizer = optimizers.AdamW(learning_rate=1e-4, wd=0.01)
    decayed = path(optimizer, weight, np.zeros((1000, 1001)))[-1]
    np.testing.assert_allclose(np.mean(1 - decayed / weight), 1e-3, rtol=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_of_zero_freezes_the_key(name):
    weight = np.random.default_rng(5).standard_normal((5, 7))
    optimizer = create(name, lr_mult={"key": 0.0}, wd=0.1)
    assert np.array_equal(path(optimizer, weight, np.ones((3, 5, 7)))[-1], weight)


@pytest.mark.parametrize("name", NAMES)
def test_zero_gradients_from_the_start_keep_zero(name):
    assert np.array_equal(path(create(name), np.zeros(4), np.zeros((3, 4)))[-1], np.zeros(4))


class TestStep:
    @pytest.mark.feature("optimizer-factors-per-key")
    def test_multipliers_act_by_key(self):
        optimizer = optimizers.SGD(learning_rate=0.5, wd=0.25, lr_mult={"a": 2.0}, wd_mult={"b": 0.0})
        steps = [optimizer.step(key, 1) for key in "abc"]
        assert [(step.rate, step.wd) for step in steps] == [(1.0, 0.25), (0.5, 0.0), (0.5, 0.25)]
        optimizer.set_lr_mult({3: 4})
        optimizer.set_wd_mult({})
        assert optimizer.step(3, 1).rate == 2.0
        assert optimizer.step("a", 1) is optimizer.step("b", 1)

    def test_equal_at_any_count_where_nothing_depends_on_it(self):
        assert optimizers.SGD().step("a", 1) == optimizers.SGD().step("a", 2)
        assert optimizers.Adam().step("a", 1) != optimizers.Adam().step("a", 2)
        assert hash(optimizers.Adam().step("a", 1)) == hash(optimizers.Adam().step("b", 1))

    @pytest.mark.feature("optimizer-base-options", "optimizer-schedules")
    def test_scheduler_counts_from_begin_num_update(self):
        schedule = Factor(10, factor=0.5, base_lr=1.0)
        optimizer = optimizers.Adam(lr_scheduler=schedule, begin_num_update=10)
        assert optimizer.step("a", 1).rate == optimizer.rate(1) == schedule(11) == 0.5
        assert optimizer.step("a", 1).correction == optimizers.Adam().step("a", 1).correction

    def test_cache_is_bounded(self):
        optimizer = optimizers.Adam()
        for count in range(1, 2000):
            optimizer.step("a", count)
        assert len(optimizer._steps) <= 256

    def test_nadam_is_quick_and_finite_late(self):
        assert np.all(np.isfinite(optimizers.Nadam().step("a", 10**9).correction))

    def test_lars_skips_biases(self):
        optimizer = optimizers.LARS(learning_rate=1.0)
        weight = np.ones(3)
        optimizer.update(optimizer.step("layer0_bias", 1), np.full(3, 0.5), weight, {})
        assert np.array_equal(weight, np.full(3, 0.5))

    @pytest.mark.parametrize("rate", [float("nan"), "fast", None, [0.1]])
    def test_a_scheduler_that_returns_nonsense_is_named(self, rate):
        text = re.escape(f"lr_scheduler(3) returned {rate!r}, which is not a ")
        with pytest.raises(ConfigError, match=rf"SGD\(.*{text}"):
            optimizers.SGD(lr_scheduler=lambda number: rate).step("a", 3)


class TestOptions:
    def test_every_change_raises_the_revision(self):
        optimizer = optimizers.SGD()
        for change in ({"learning_rate": 0.2}, {"momentum": 0.5}, {"lr_mult": {"a": 2.0}}, {"lr_scheduler": Factor(3)}):
            before, settings = optimizer.revision, optimizer.settings()
            for name, value in change.items():
                setattr(optimizer, name, value)
            assert optimizer.revision > before
            assert optimizer.settings() != settings

    @pytest.mark.feature("optimizer-rate-and-schedule")
    def test_rate_comes_from_one_place(self):
        optimizer = optimizers.SGD(lr_scheduler=Cosine(100))
        assert optimizer.learning_rate is None
        with pytest.raises(ConfigError, match="set lr_scheduler = None first"):
            optimizer.learning_rate = 0.5
        optimizer.lr_scheduler = None
        assert optimizer.learning_rate == 0.1
        optimizer.learning_rate = 0.5
        assert optimizer.rate(1) == 0.5

    @pytest.mark.feature("optimizer-rate-beside-schedule")
    @pytest.mark.parametrize("make", [optimizers.SGD, lambda **options: create("sgd", **options)])
    def test_a_rate_beside_a_schedule_is_its_base(self, make, caplog):
        schedule = Factor(2, factor=0.5)
        one, other = (make(learning_rate=rate, lr_scheduler=schedule) for rate in (1, 4))
        assert [one.rate(count) for count in (1, 2, 3, 5)] == [1.0, 1.0, 0.5, 0.25]
        assert other.rate(3) == 2.0
        assert schedule.base_lr == 0.01
        assert one.learning_rate is None
        assert not caplog.text  # nobody has asked for that rate
        make(learning_rate=1, lr_scheduler=Factor(2, base_lr=3.0))
        assert caplog.text.count("SGD: learning_rate=1.0 replaces base_lr=3.0 of its lr_scheduler") == 1
        assert copy.copy(one).settings() == one.settings() == make(lr_scheduler=one.lr_scheduler).settings()
        caplog.clear()
        make(learning_rate=0.5, lr_scheduler=Cosine(100, base_lr=0.5))
        make(learning_rate=None, lr_scheduler=Cosine(100, base_lr=0.5))
        assert not caplog.text

    def test_a_schedule_whose_rate_cannot_be_set(self):
        class Fixed:
            base_lr = property(lambda self: 0.1)

            def __call__(self, count):
                return 0.1

        with pytest.raises(ConfigError, match="cannot be set; leave learning_rate out"):
            optimizers.SGD(learning_rate=0.5, lr_scheduler=Fixed())

    def test_a_schedule_of_ones_own_beside_a_rate(self):
        class Halving:
            base_lr = 1.0

            def __call__(self, number):
                return self.base_lr / 2**number

        schedule = Halving()
        assert optimizers.SGD(learning_rate=4.0, lr_scheduler=schedule).rate(1) == 2.0
        assert schedule.base_lr == 1.0
        with pytest.raises(ConfigError, match=r"learning_rate=0.1 would not be used.* has no base_lr; leave one out"):
            optimizers.SGD(learning_rate=0.1, lr_scheduler=lambda number: 1.0)
        with pytest.raises(ConfigError, match=r"warmup_begin_lr=0.5 is above base_lr=0.25"):
            optimizers.SGD(learning_rate=0.25, lr_scheduler=Cosine(9, base_lr=1, warmup_steps=3, warmup_begin_lr=0.5))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"momentum": 1.0}, r"SGD: momentum=1.0 is not a number in \[0, 1\)"),
            ({"momentum": "much"}, "momentum='much'"),
            ({"learning_rate": -1}, r"learning_rate=-1 .*\[0, inf\)"),
            ({"learning_rate": float("nan")}, "learning_rate=nan"),
            ({"clip_gradient": 0}, r"clip_gradient=0 .*\(0, inf\) or None"),
            ({"wd": None}, "wd=None"),
            ({"rescale_grad": float("inf")}, "rescale_grad=inf"),
            ({"multi_precision": 3}, "multi_precision=3"),
            ({"begin_num_update": 0.5}, "begin_num_update=0.5"),
            ({"lr_mult": [1.0]}, "lr_mult="),
            ({"wd_mult": {"a": -1.0}}, r"wd_mult\['a'\]=-1.0"),
            ({"lr_scheduler": 0.1}, "lr_scheduler=0.1"),
            ({"lr_scheduler": Factor}, "lr_scheduler is the class Factor; pass an object"),
        ],
    )
    def test_bad_values_are_named(self, options, message):
        with pytest.raises(ConfigError, match=message):
            optimizers.SGD(**options)
        optimizer = optimizers.SGD()
        before = optimizer.settings()
        with pytest.raises(ConfigError, match=message):
            setattr(optimizer, *next(iter(options.items())))
        assert optimizer.settings() == before

    @pytest.mark.parametrize(
        ("name", "option", "hint"),
        [
            ("sgd", "lr", "did you mean 'learning_rate'?"),
            ("adam", "weight_decay", "did you mean 'wd'?"),
            ("adamw", "betas", "did you mean 'beta1' and 'beta2'?"),
            ("adagrad", "eps", "did you mean 'epsilon'?"),
            ("rmsprop", "alpha", "did you mean 'rho'?"),
            ("rmsprop", "gamma2", "did you mean 'momentum'?"),
            ("nadam", "momentum_decay", "did you mean 'schedule_decay'?"),
            ("sgd", "param_dict", "did you mean 'lr_mult' and 'wd_mult'?"),
            ("sgd", "lazy_update", "leave it out: a push of RowSparse"),
            ("lamb", "aggregate_num", "leave it out"),
            ("ftrl", "use_fused_step", "leave it out"),
            ("adam", "nesterov", "SGD has it, and Nadam"),
        ],
    )
    def test_names_of_other_libraries(self, name, option, hint):
        kind = optimizers.kind_of(name)
        text = re.escape(f"unknown option of {kind.__name__} {option!r} ") + ".*" + re.escape(f"; {hint}")
        for make in (lambda **options: create(name, **options), lambda **options: setattr(kind(), option, 1)):
            with pytest.raises(ConfigError, match=text):
                make(**{option: 0.5})

    def test_a_class_with_arguments_of_its_own(self, monkeypatch):
        monkeypatch.setattr(optimizers, "_REGISTERED", {})

        @optimizers.register
        class Slow(optimizers.SGD):
            def __init__(self, slowness, **options):
                super().__init__(learning_rate=1 / slowness, **options)

        @optimizers.register
        class Fixed(optimizers.SGD):
            def __init__(self, slowness=4):
                super().__init__(learning_rate=1 / slowness)

        assert create("slow", slowness=2, wd=0.5).rate(1) == 0.5
        assert create("fixed", slowness=8).rate(1) == 0.125
        with pytest.raises(ConfigError, match="unknown option of Fixed 'lr'"):
            create("fixed", lr=1)
        assert list(inspect.signature(Fixed).parameters) == ["slowness"]
        assert set(inspect.signature(optimizers.Adam).parameters) == set(optimizers.Adam.options())

    def test_the_mean_is_noted(self):
        optimizer = optimizers.SGD(rescale_grad=0.5, average=True)
        assert optimizer.rescale == 0.5
        optimizer.sums_over(4)
        assert optimizer.rescale == 0.125
        assert call_of(optimizer, optimizer.step("a", 1))[1][1] == 0.125  # what compiled code is given
        with optimizer.having(rescale_grad=2.0):
            assert optimizer.rescale == 0.5
        assert optimizer.rescale == 0.125
        optimizer.average = False
        assert optimizer.rescale == 0.5
        other = optimizers.SGD(average=True)
        other.take_options(optimizer)
        assert other.settings() == optimizer.settings()
        with pytest.raises(ConfigError, match="unknown option of SGD 'rescale'"):
            optimizer.rescale = 1.0

    def test_multipliers_cannot_change_unnoticed(self):
        factors = {"a": 2}
        optimizer = optimizers.SGD(lr_mult=factors)
        factors["a"] = 3
        assert optimizer.lr_mult == {"a": 2.0}
        with pytest.raises(TypeError):
            optimizer.lr_mult["a"] = 3

    def test_settings_do_not_depend_on_how_they_were_written(self):
        left = optimizers.SGD(learning_rate=1, lr_mult={"a": 1, "b": 2})
        right = optimizers.SGD(learning_rate=np.float64(1.0), lr_mult={"b": 2.0, "a": 1.0})
        assert left.settings() == right.settings()
        assert "0x" not in optimizers.SGD(lr_scheduler=lambda number: 0.1).settings()

    def test_repr_shows_what_was_changed(self):
        assert repr(optimizers.SGD()) == "SGD()"
        assert repr(optimizers.Adam(beta1=0.5, wd_mult={"b": 0})) == "Adam(wd_mult={'b': 0.0}, beta1=0.5)"
        assert repr(optimizers.Signum(momentum=0)) == "Signum(momentum=0.0)"
        assert repr(optimizers.AdamW(correct_bias=False)) == "AdamW(correct_bias=False)"

    @pytest.mark.parametrize(
        "duplicate", [copy.copy, copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]
    )
    def test_copies_are_equal_and_separate(self, duplicate):
        optimizer = optimizers.Adam(beta1=0.5, lr_scheduler=Cosine(100), lr_mult={"a": 2.0})
        optimizer.update(optimizer.step("a", 1), np.ones(3), np.ones(3), {"mean": np.ones(3), "variance": np.ones(3)})
        other = duplicate(optimizer)
        assert other.settings() == optimizer.settings()
        of_both = (one.scratch(np.dtype(np.float64), 1)[0] for one in (other, optimizer))
        assert not np.may_share_memory(*of_both)
        other.beta1 = 0.6
        assert optimizer.beta1 == 0.5

    def test_refused_dtype_says_what_to_do(self):
        with pytest.raises(Unsupported, match=r"Adam cannot update values of int32 \(known: float16.*; store"):
            optimizers.Adam().slots(np.dtype(np.int32))

    def test_state_follows_the_options(self):
        optimizer = optimizers.SGD()
        assert optimizer.slots(np.dtype(np.float32)) == {}
        optimizer.momentum = 0.9
        assert optimizer.slots(np.dtype(np.float64)) == {"momentum": np.float64}
        optimizer.multi_precision = True
        assert optimizer.slots(np.dtype(np.float64)) == {"momentum": np.float64}
        assert optimizer.slots(np.dtype(np.float16)) == {"momentum": np.float32, "master": np.float32}


def test_missing_state_raises_before_anything_is_written():
    weight, state = np.ones(3), {"mean": np.zeros(3)}
    optimizer = optimizers.Adam()
    with pytest.raises(KeyError, match="variance"):
        optimizer.update(optimizer.step("a", 1), np.ones(3), weight, state)
    assert np.array_equal(weight, np.ones(3))
    assert np.array_equal(state["mean"], np.zeros(3))


@pytest.mark.feature("optimizer-custom")
def test_a_rule_of_your_own(monkeypatch):
    """That of the documentation, which runs as it stands there, and beside it other pages with rules of that name."""
    monkeypatch.setattr(optimizers, "_REGISTERED", {})
    text = optimizers.__doc__
    assert text is not None
    exec(
        dedent(text[text.index("    from dataclasses") : text.index("\nEvery operation writes")]),
        {"__name__": __name__},
    )
    optimizer = create("lion", wd=0.5, learning_rate=0.1)
    assert repr(optimizer) == "Lion(learning_rate=0.1, wd=0.5)"
    np.testing.assert_allclose(path(optimizer, np.ones(2), [np.array([3.0, -3.0])]), [[0.85, 1.05]])

    class Adam(Optimizer):
        pass

    with pytest.raises(ConfigError, match="'adam' exists already"):
        optimizers.register(Adam)


def test_a_class_whose_defaults_would_not_count_is_refused():
    class Plain(Optimizer):
        learning_rate: float | None = optimizers.rate(0.5)
        scale: float = 2.0
        table: object = (0, 1)
        names: list[str] = field(default_factory=list)

    with pytest.raises(ConfigError, match=r"put @dataclass.* between @register and Plain"):
        optimizers.register(Plain)
    # As a dataclass it is taken, also with an option that nobody checks.
    plain = dataclass(kw_only=True, eq=False, repr=False)(Plain)
    assert repr(plain(scale=4, table=np.arange(3))) == "Plain(scale=4, table=array([0, 1, 2]))"


@pytest.mark.parametrize("name", ["weight", "gradient", "state"])
def test_a_rule_that_assigns_another_array_raises(name):
    class Rebinding(Optimizer):
        def rule(self, step, block):
            block.weight -= step.rate * block.gradient  # in place
            setattr(block, name, block.weight - 1)

    optimizer, weight = Rebinding(learning_rate=0.5), np.ones(3)
    with pytest.raises(ConfigError, match=rf"assigns another object to block\.{name}.* write in place"):
        optimizer.update(optimizer.step("a", 1), np.ones(3), weight, {})
    assert (weight == 0.5).all()


def test_the_contract_finds_a_rule_that_does_nothing():
    class Idle(Optimizer):
        def rule(self, step, block):
            pass

    contract = UpdaterContract()
    contract.updater = Idle
    with pytest.raises(AssertionError):
        contract.test_an_update_changes_the_value()
