"""Rules as recorded operations: what is refused, and random ones, whose bits are numpy's in loops and in C++."""

import ctypes
import math
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.rules import bits, numbers

from mpikv.compute.cuda import loading
from mpikv.compute.cuda.loading import print_rule
from mpikv.errors import Unsupported
from mpikv.optimizers import SGD, Optimizer
from mpikv.optimizers.recording import call_of, rule_of

MANY = int(os.environ.get("RANDOM_RULES", "100"))
"""``RANDOM_RULES=1000`` makes 1,000, and compiles a tenth of them with numba."""


def made(rule, **more):
    return type("Made", (Optimizer,), {"rule": rule, "spares": 2, "states": ("a", "b"), **more})


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda o, s, b: np.exp(b.weight, out=b.weight), "it uses exp;"),
        (lambda o, s, b: np.linalg.norm(b.weight), "it uses norm;"),
        (lambda o, s, b: np.add.reduce(b.weight), "it uses add.reduce;"),
        (lambda o, s, b: np.add(b.weight, 1, dtype=np.float64), "it uses add with dtype=;"),
        (lambda o, s, b: np.multiply(s.rate, s.wd, out=b.weight), "it uses multiply;"),
        (lambda o, s, b: np.clip(b.weight, b.gradient, 1, out=b.weight), "it clips by arrays"),
        (lambda o, s, b: b.weight.any(), "AttributeError: '_Array' object has no attribute 'any'"),
        (lambda o, s, b: 1 if b.weight else 2, "it asks about elements of weight"),
        (lambda o, s, b: b.weight.__setitem__(0, 1.0), "it takes a part of weight"),
        (lambda o, s, b: b.weight[0] > 0, "it takes a part of weight"),
        (lambda o, s, b: np.where(b.weight, 1, 2), "it uses where;"),
        (lambda o, s, b: vars(o).update(calls=1), "it reads __dict__, of type dict"),
        (lambda o, s, b: np.add(b.weight, np.float64(1)), "it computes with an operand of type float64"),
        (lambda o, s, b: np.add(b.weight, b.spare[1]), "it reads spare1 before it writes it"),
        (lambda o, s, b: np.add(b.weight, 1, out=np.zeros(3)), "it writes to an array that is not of"),
        (lambda o, s, b: setattr(o, "_calls", 1), "it sets _calls"),
        (lambda o, s, b: o.lr_mult, "it reads lr_mult, of type mappingproxy"),
        (lambda o, s, b: math.sqrt(s.rate), "TypeError: must be real number, not _Number"),
        (lambda o, s, b: b.weight.__imul__(random.random()), "it does something else when it runs ag"),
        (lambda o, s, b: [s.rate > each for each in range(9) if s.rate > each], "more than 4 quest"),
    ],
)
def test_what_cannot_be_recorded_is_named(rule, why):
    with pytest.raises(Unsupported, match=r"^the rule of Made cannot be compiled: ") as refused:
        rule_of(made(rule)())
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("adapt", "why"),
    [
        (lambda o, s, weight, gradient: [each for each in range(9) if weight > each], "more than 4 quest"),
        (lambda o, s, weight, gradient: s.rate if 2**weight > 3 else weight, r"adapt uses \*\*, whose bits differ"),
    ],
)
def test_a_rate_that_cannot_be_recorded_is_named(adapt, why):
    with pytest.raises(Unsupported, match=f"^the rule of Made cannot be compiled: .*{why}"):
        rule_of(made(None, adapt=adapt)(), ("adapt",))


def test_numbers_of_a_rate_are_no_text_of_python():
    optimizer = made(None, adapt=lambda o, s, weight, gradient: s.rate * (weight - math.inf) / -math.nan)()
    rule, call = call_of(optimizer, optimizer.step("a", 1), ("adapt",))
    assert rule.code == "weight = ((((n[0]) * (((weight) - (n[1]))))) / (n[2]));"
    np.testing.assert_array_equal(call[2:], [math.inf, math.nan])


def test_options_select_a_record_and_steps_do_not():
    sgd = SGD(momentum=0.5, wd=0.25)
    rule, call = call_of(sgd, sgd.step("a", 1))
    assert call_of(sgd, SGD().step("a", 1)) == (rule, (0, *call[1:2], 0.0, *call[3:]))  # no weight decay
    sgd.rescale_grad = 0.5
    assert call_of(sgd, sgd.step("a", 1))[0] is rule
    for change in ({"nesterov": True}, {"clip_gradient": 1.0}, {"momentum": 0.0}):
        other = SGD(**{"momentum": 0.5, **change})
        assert rule_of(other) is not rule
        assert rule_of(other) is rule_of(SGD(**{"momentum": 0.5, **change}))


def test_numbers_of_another_way_are_not_computed():
    def rule(self, step, block):
        if step.rate:
            block.weight -= block.gradient * (1.0 / step.rate)

    optimizer = made(rule)(learning_rate=0.0)
    assert call_of(optimizer, optimizer.step("a", 1))[1][0] == 0
    optimizer.learning_rate = 0.5
    assert call_of(optimizer, optimizer.step("a", 1))[1][-1] == 2.0


# --- Random rules

BINARY = (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum)
UNARY = (np.negative, np.square, np.sqrt, np.absolute, np.sign)
ARRAYS, NUMBERS = st.integers(0, 5), st.integers(6, 11)
STATEMENTS = st.one_of(
    st.tuples(st.sampled_from(UNARY), st.tuples(ARRAYS), ARRAYS),
    st.tuples(st.sampled_from(BINARY), st.tuples(ARRAYS, ARRAYS | NUMBERS), ARRAYS),
    st.tuples(st.sampled_from(BINARY), st.tuples(NUMBERS, ARRAYS), ARRAYS),
    st.tuples(st.just(np.clip), st.tuples(ARRAYS, NUMBERS, NUMBERS), ARRAYS),
)
PROGRAMS = st.lists(st.tuples(STATEMENTS, st.sampled_from(["", "wd", "rate"])), min_size=1, max_size=12)


def optimizer_of(program):
    def rule(self, step, block):
        arrays = block.weight, block.gradient, *block.state, *block.spare
        values = step.rate, -step.wd, self.clip_gradient, 1e-40, step.rate / self.clip_gradient, -0.0
        for spare in block.spare:
            spare[:] = block.gradient[...]
        for (operation, inputs, out), question in program:
            if not question or getattr(step, question) > 0:
                operation(*((*arrays, *values)[each] for each in inputs), out=arrays[out])

    return made(rule, coupled=False)(learning_rate=0.3, wd=0.0, clip_gradient=2.5)


def arrays_of(dtype):
    drawn = np.random.default_rng(5)
    return [numbers(drawn, 67, np.dtype(dtype), 0.3) for _ in range(4)]


def in_numpy(optimizer, dtype):
    total, weight, first, second = arrays_of(dtype)
    with np.errstate(all="ignore"):
        optimizer.bind(total, weight, {"a": first, "b": second})(optimizer.step("key", 1))
    return [bits(array) for array in (weight, first, second)]


RUN = """
template <template <class> class Rule, class T> static void run(T* gradient, T* weight, T* a, T* b, const double* row) {
    T n[11];
    for (int k = 0; k < 11; k++) n[k] = (T)row[1 + k];
    for (int i = 0; i < 67; i++) {
        T state[2] = {a[i], b[i]};
        Rule<T>::update(weight[i], gradient[i], state, (int)row[0], n);
        a[i] = state[0], b[i] = state[1];
    }
}
#define ENTRY(T, name, rule) extern "C" void name(T* g, T* w, T* a, T* b, double* row) { run<rule>(g, w, a, b, row); }
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed: it compiles rules for the host")
@pytest.mark.deadline(1000)
@settings(max_examples=max(1, MANY // 50), phases=[Phase.generate])
@given(programs=st.lists(PROGRAMS, min_size=50, max_size=50))
def test_random_rules_in_cpp(programs, tmp_path_factory):
    source, library = (tmp_path_factory.mktemp("rules") / f"rules.{end}" for end in ("cpp", "so"))
    header = Path(loading.__file__).with_name("numbers.h").read_text()
    text, optimizers = [header, RUN], list(map(optimizer_of, programs))
    for number, rule in enumerate(map(rule_of, optimizers)):
        text.append(f"namespace r{number} {{ {print_rule(rule)} }}\n")
        text.append(f"ENTRY(float, float32_{number}, r{number}::{rule.name})\n")
        text.append(f"ENTRY(double, float64_{number}, r{number}::{rule.name})\n")
    source.write_text("".join(text))
    flags = "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"
    subprocess.run(["g++", *flags, "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    for number, optimizer in enumerate(optimizers):
        _, call = call_of(optimizer, optimizer.step("key", 1))
        row = np.array([*call, *[0.0] * (12 - len(call))])
        for dtype in ("float32", "float64"):
            arrays = arrays_of(dtype)
            loaded[f"{dtype}_{number}"](*(ctypes.c_void_p(array.ctypes.data) for array in (*arrays, row)))
            assert list(map(bits, arrays[1:])) == in_numpy(optimizer, dtype), programs[number]


@pytest.mark.deadline(1000)
@settings(max_examples=max(3, MANY // 10), phases=[Phase.generate])
@given(program=PROGRAMS, dtype=st.sampled_from(["float32", "float64"]))
def test_random_rules_in_loops(program, dtype):
    compiled = pytest.importorskip("mpikv.compute.numba.rules", reason="numba is not installed")
    optimizer, (total, weight, first, second) = optimizer_of(program), arrays_of(dtype)
    compiled.bind(optimizer, total, weight, {"a": first, "b": second})(optimizer.step("key", 1))
    assert list(map(bits, (weight, first, second))) == in_numpy(optimizer, dtype), program
