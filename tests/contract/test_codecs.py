"""Codecs: published bits, an implementation element by element to compare with, and the contract for each."""

import sys
import textwrap
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.published import BITS

import mpikv
from mpikv import codecs
from mpikv.compute.kernels import find_kernels
from mpikv.errors import ConfigError
from mpikv.testing import ElementwiseCodecContract, TensorCodecContract
from mpikv.testing.codec import together

pytestmark = pytest.mark.one_library

F32 = np.float32


# --- The rules of MXNet, one element at a time.


def two_bits(gradients, residuals, threshold):
    """Return the payload and what it decodes to; change the residuals."""
    t = F32(threshold)
    payload, values = bytearray(4 * -(-len(gradients) // 16)), []
    for place, gradient in enumerate(gradients):
        r = F32(residuals[place] + gradient)
        code, value = 0b00, F32(0)
        if r >= t:
            code, value, r = 0b11, t, F32(r - t)
        elif r <= -t:
            code, value, r = 0b10, -t, F32(r + t)
        payload[place // 4] |= code << 2 * (3 - place % 4)
        residuals[place] = r
        values.append(value)
    return bytes(payload), values


def one_bit(gradients, residuals, threshold):
    """Return the payload and what it decodes to; change the residuals."""
    payload, values = bytearray(4 * -(-len(gradients) // 32)), []
    for place, gradient in enumerate(gradients):
        r = F32(residuals[place] + gradient)
        if r > F32(threshold):
            payload[place // 8] |= 1 << (7 - place % 8)
            value, r = F32(1), F32(r - F32(1))
        else:
            value, r = F32(-1), F32(r + F32(1))
        residuals[place] = r
        values.append(value)
    return bytes(payload), values


RULES = [(codecs.TwoBit, two_bits), (codecs.OneBit, one_bit)]


def both(codec):
    """Return the codec with error feedback, in numpy and, if numba is there, compiled."""
    with_feedback = codecs.ErrorFeedback(codec)
    if find_spec("numba") is None:
        return [with_feedback]
    twin = find_kernels("numba").codec(with_feedback)
    assert type(twin) is not type(with_feedback) or isinstance(codec, codecs.Float16)  # some processors convert none
    return [with_feedback, twin]


def encode(codec, gradient, residual=None):
    payload = np.full(codec.nbytes(len(gradient)), 0xAA, np.uint8)
    codec.encode(np.asarray(gradient, F32), payload, residual)
    return payload


def decode(codec, payload, size):
    total = np.zeros(size, F32)
    codec.decode_add(payload, total)
    return total


# --- Vectors made by hand


@pytest.mark.parametrize(("codec", "gradient", "payload", "values", "left"), BITS)
@pytest.mark.feature("compression-2bit-bits", "compression-1bit-bits")
def test_published_bits(codec, gradient, payload, values, left):
    for each in both(codec):
        residual = np.zeros(len(gradient), F32)
        sent = encode(each, gradient, residual)
        assert sent.tobytes().hex() == payload
        np.testing.assert_array_equal(decode(each, sent, len(gradient)), np.array(values, F32))
        np.testing.assert_array_equal(residual, np.array(left, F32))


@pytest.mark.parametrize(
    ("kind", "values"),
    # 01 is never written
    [(codecs.TwoBit, {0b11: 0.5, 0b10: -0.5, 0b01: 0.0, 0b00: 0.0}), (codecs.OneBit, {1: 1.0, 0: -1.0})],
)
def test_every_byte_decodes(kind, values):
    payload, width = np.arange(256).astype(np.uint8), len(values) // 2
    shifts = range(8 - width, -1, -width)
    expected = [values[byte >> shift & len(values) - 1] for byte in range(256) for shift in shifts]
    for codec in both(kind(0.5)):
        assert decode(codec, payload, len(expected)).tolist() == expected


@pytest.mark.parametrize(("kind", "rule"), RULES)
@given(data=st.data())
@pytest.mark.feature("compression-2bit-bits", "compression-1bit-bits")
def test_bits_are_those_of_the_rule(kind, rule, data):
    threshold = data.draw(st.sampled_from([0.5, 0.3, 0.1, 1e-3, 2.0]))
    size = data.draw(st.integers(0, 70))
    numbers = st.one_of(
        st.floats(-3, 3, width=32),
        st.sampled_from([0.0, -0.0, threshold, -threshold, 2 * threshold, 2.0**100, -(2.0**100)]),
    )
    pushes = data.draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=1, max_size=4))
    for codec in both(kind(threshold)):
        residual, expected = np.zeros(size, F32), [F32(0)] * size
        for gradient in np.array(pushes, F32):
            payload = encode(codec, gradient, residual)
            bits, values = rule(gradient, expected, threshold)
            assert payload.tobytes() == bits
            assert decode(codec, payload, size).tobytes() == (np.zeros(size, F32) + np.array(values, F32)).tobytes()
            assert residual.tobytes() == np.array(expected, F32).tobytes()


# --- Half precision


def floats(most, **sizes):
    return st.lists(st.floats(width=32, allow_nan=False, min_value=-most, max_value=most), **sizes)


@pytest.mark.parametrize(("codec", "dtype"), [(codecs.Bfloat16(), "bfloat16"), (codecs.Float16(), "float16")])
@given(data=st.data())
def test_halves_round_as_numpy_does(codec, dtype, data):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float16
    most = 65504 if dtype is np.float16 else 2.0**100
    gradient = np.array(data.draw(floats(most, min_size=1, max_size=50)), F32)
    payload = encode(codec, gradient)
    assert payload.tobytes() == gradient.astype(dtype).tobytes()
    np.testing.assert_array_equal(decode(codec, payload, gradient.size), gradient.astype(dtype).astype(F32))


@pytest.mark.parametrize("codec", [codecs.Bfloat16(), codecs.Float16()])
@given(pushes=st.lists(floats(2.0**100, min_size=5, max_size=5), min_size=1, max_size=5))
def test_compiled_halves_have_the_bits_of_numpy(codec, pushes):
    codecs_, residuals = both(codec), np.zeros((2, 5), F32)
    for gradient in np.array(pushes, F32):
        sent = [encode(each, gradient, left) for each, left in zip(codecs_, residuals, strict=False)]
        assert len({payload.tobytes() for payload in sent}) == 1
        assert len({decode(each, sent[0], 5).tobytes() for each in codecs_}) == 1
        assert len({left.tobytes() for left in residuals[: len(codecs_)]}) == 1


def test_what_is_too_large_for_float16_comes_later():
    codec, residual, total = codecs.ErrorFeedback(codecs.Float16()), np.zeros(2, F32), np.zeros(2, F32)
    for gradient in ([100_000, -1e5], [0, 0]):
        codec.decode_add(encode(codec, gradient, residual), total)
    assert total.tolist() == [100_000, -100_000]
    assert not residual.any()


# --- The largest elements


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0]), min_size=1, max_size=40), st.integers(1, 45)
)
def test_the_largest_are_chosen(numbers, count):
    by_size = sorted(
        range(len(numbers)), key=lambda place: (-abs(numbers[place]), place)
    )  # stable: the first of equals
    assert codecs.topk.largest(np.array(numbers, F32), count).tolist() == sorted(by_size[:count])


@pytest.mark.parametrize(
    ("codec", "size", "count"),
    [
        (codecs.TopK(), 1, 1),
        (codecs.TopK(), 1000, 10),
        (codecs.TopK(), 1001, 11),
        (codecs.TopK(ratio=0.07), 100, 7),
        (codecs.TopK(ratio=1), 9, 9),
        (codecs.TopK(ratio=1e-9), 1000, 1),
        (codecs.TopK(ratio=1e-300), 3, 1),
        (codecs.TopK(), 0, 0),
    ],
)
def test_how_many_are_sent(codec, size, count):
    assert codec.chosen(size) == count
    rounds = codec.exchange(np.arange(size, dtype=F32), (size,), {})
    assert next(rounds).payload.size == 8 * count
    rounds.close()


# --- Low rank


def test_a_matrix_of_low_rank_arrives_whole():
    random = np.random.default_rng(0)
    left, right = random.standard_normal((2, 30, 3))
    gradient = (left @ right.T).astype(F32)
    codec = codecs.LowRank(rank=3)
    ((total, own),) = together([codec.exchange(gradient.reshape(-1), (30, 30), codec.state((30, 30)))])
    np.testing.assert_allclose(total.reshape(30, 30), gradient, atol=1e-4)
    np.testing.assert_array_equal(own, total)


def test_pushes_of_one_matrix_come_near_its_best_approximation():
    """The start is where the last push ended, so pushes are steps of the power method (Eckart, Young 1936)."""
    gradient = np.random.default_rng(1).standard_normal((40, 30)).astype(F32)
    gradient *= np.linspace(3, 0.1, 30, dtype=F32)
    u, s, v = np.linalg.svd(gradient)
    best = np.linalg.norm(gradient - (u[:, :4] * s[:4]) @ v[:4])
    codec = codecs.LowRank(rank=4)
    state, errors = codec.state((40, 30)), []
    for _ in range(40):
        ((total, _),) = together([codec.exchange(gradient.reshape(-1).copy(), (40, 30), state)])
        errors.append(float(np.linalg.norm(gradient - total.reshape(40, 30))))
    assert errors[-1] < 1.02 * best < errors[0]


def test_zeros_do_not_end_a_low_rank():
    codec, shape = codecs.LowRank(rank=2), (20, 20)
    state = codec.state(shape)
    together([codec.exchange(np.zeros(400, F32), shape, state)])
    gradient = np.outer(np.arange(20), np.arange(20)).astype(F32).reshape(-1)
    ((total, _),) = together([codec.exchange(gradient.copy(), shape, state)])
    np.testing.assert_allclose(total, gradient, atol=1e-3)


@pytest.mark.parametrize("shape", [(7,), (), (1, 9), (4, 4), (2, 3, 1)])
def test_what_would_not_shrink_is_sent_as_it_is(shape):
    codec = codecs.LowRank(rank=4)
    gradient = np.arange(np.prod(shape), dtype=F32)
    assert codec.state(shape) == {}
    assert next(codec.exchange(gradient, shape, {})).array is gradient


@pytest.mark.parametrize("name", ["2bit", "1bit", "fp16", "bf16"])
def test_packing_allocates_nothing_of_the_size_of_a_gradient(name):
    gradient, total = np.ones(1 << 20, F32), np.zeros(1 << 20, F32)
    for codec in (codecs.create(name), *both(codecs.TwoBit())[1:]):
        payload, residual = np.empty(codec.nbytes(gradient.size), np.uint8), np.zeros_like(gradient)
        peaks = []
        for _ in range(2):  # the first makes what is used again
            tracemalloc.start()
            try:
                codec.encode(gradient, payload, residual)
                codec.decode_add(payload, total)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        assert peaks[1] < gradient.nbytes // 8


@pytest.mark.parametrize("name", ["2bit", "1bit", "fp16", "bf16"])
def test_threads_may_share_a_codec(name):
    codec, size = codecs.create(name), 40_000
    gradients = np.random.default_rng(0).standard_normal((2, size)).astype(F32)
    expected = [encode(codecs.create(name), gradient, np.zeros(size, F32)).tobytes() for gradient in gradients]
    totals = [decode(codecs.create(name), np.frombuffer(sent, np.uint8), size).tobytes() for sent in expected]

    def work(gradient):
        sent = encode(codec, gradient, np.zeros(size, F32))
        return sent.tobytes(), decode(codec, sent, size).tobytes()

    barrier = threading.Barrier(2)

    def often(gradient):
        barrier.wait()
        return {work(gradient) for _ in range(200)}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(often, gradients))
    finally:
        sys.setswitchinterval(interval)
    assert results == [{pair} for pair in zip(expected, totals, strict=True)]


# --- Names and arguments


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ("2bit", "2bit(threshold=0.5) with error feedback"),
        ({"type": "2bit", "threshold": 2}, "2bit(threshold=2.0) with error feedback"),
        ({"type": "1bit", "threshold": -1}, "1bit(threshold=-1.0) with error feedback"),
        ({"type": "2bit", "error_feedback": False}, "2bit(threshold=0.5)"),
        ("fp16", "fp16() with error feedback"),
        ("bf16", "bf16() with error feedback"),
        ({"type": "topk", "ratio": 1}, "topk(ratio=1.0) with error feedback"),
        ({"type": "lowrank", "rank": 2}, "lowrank(rank=2, seed=0) with error feedback"),
        (codecs.TwoBit(), "2bit(threshold=0.5)"),
    ],
)
def test_what_is_meant(given, settings):
    assert codecs.create(given).settings() == settings


def test_none_is_no_codec():
    assert codecs.create(None) is None


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("2bits", ConfigError, r"unknown compression '2bits' \(known: 1bit, 2bit, .*did you mean '2bit'"),
        ({"type": 2}, ConfigError, "unknown compression 2"),
        ({}, ConfigError, "has no 'type'"),
        ({"threshold": 1}, ConfigError, "has no 'type'"),
        ({"type": "2bit", "treshold": 1}, ConfigError, "unknown option of compression '2bit' 'treshold'.*'threshold'"),
        ({"type": "fp16", "threshold": 1}, ConfigError, "unknown option of compression 'fp16' 'threshold'"),
        ({"type": "2bit", "threshold": 0}, ConfigError, r"threshold=0 is not a number in \(0, inf\) in float32"),
        ({"type": "2bit", "threshold": float("nan")}, ConfigError, "threshold=nan is not"),
        ({"type": "2bit", "threshold": 1e39}, ConfigError, "threshold=1e.39 is not"),
        ({"type": "2bit", "threshold": 10**400}, ConfigError, "threshold=.* is not a number in"),
        ({"type": "1bit", "threshold": -(10**5000)}, ConfigError, "threshold=.* is not a number in"),
        ({"type": "topk", "ratio": 10**400}, ConfigError, "ratio=1000*… is not a number in"),
        ({"type": "1bit", "threshold": float("inf")}, ConfigError, r"threshold=inf is not a number in \(-inf, inf\)"),
        ({"type": "bf16", "compress_pull": True}, ConfigError, "unknown option of compression 'bf16' 'compress_pull'"),
        ({"type": "2bit", "error_feedback": 1}, ConfigError, "error_feedback=1 is neither True nor False"),
        ({"type": "topk", "ratio": 0}, ConfigError, r"ratio=0 is not a number in \(0, 1\]"),
        ({"type": "topk", "ratio": 1.5}, ConfigError, "ratio=1.5"),
        ({"type": "lowrank", "rank": 0}, ConfigError, r"rank=0 is not a whole number in \[1, "),
        ({"type": "lowrank", "seed": -1}, ConfigError, r"seed=-1 is not a whole number in \[0, "),
        ({"type": "auto", "codec": "bf16"}, ConfigError, r"unknown compression 'auto' \(known: 1bit, "),
        (3, TypeError, "compression is a name"),
        (codecs.TwoBit, TypeError, "compression is a name"),
        (object(), TypeError, "compression is a name"),
    ],
)
@pytest.mark.feature("compression-bad-options")
def test_bad_arguments(given, error, text):
    with pytest.raises(error, match=text):
        codecs.create(given)


@pytest.mark.parametrize("given", ["2bit", None, codecs.TwoBit])
def test_feedback_is_given_to_codecs_only(given):
    with pytest.raises(TypeError, match=r"takes a codec .*, not .*; mpikv.codecs.create\(\) makes one of a name"):
        codecs.ErrorFeedback(given)


def test_feedback_is_given_once():
    with pytest.raises(ConfigError, match="has error feedback already"):
        codecs.ErrorFeedback(codecs.ErrorFeedback(codecs.TwoBit()))


# --- The contract, also of a codec that is not ours


@dataclass(frozen=True)
class Signs:
    """Sends signs, and the mean size of a range before them: its payload is more than its elements'."""

    scale: float = 1.0
    elementwise = True
    feedback = False

    def settings(self):
        return f"signs(scale={self.scale!r})"

    def nbytes(self, count):
        return 4 + -(-count // 8)

    def encode(self, gradient, payload, residual=None):
        payload[:4].view(F32)[0] = self.scale * np.mean(np.abs(gradient, dtype=np.float64))
        payload[4:] = np.packbits(gradient >= 0)

    def decode_add(self, payload, total):
        size = payload[:4].view(F32)[0]
        total += np.where(np.unpackbits(payload[4:], count=total.size), size, -size)


COMPILED = find_spec("numba") is not None


def compiled(name):
    return pytest.param(
        lambda: find_kernels("numba").codec(codecs.create(name)),
        lambda: codecs.create("1bit"),
        marks=pytest.mark.skipif(not COMPILED, reason="numba is not installed: pip install 'mpikv[numba]'"),
        id=f"{name}, compiled",
    )


class Drawn:
    @pytest.fixture(autouse=True)
    def settle(self, codec, other):
        self.codec, self.other = codec, other


@pytest.mark.parametrize(
    ("codec", "other"),
    [
        (lambda: codecs.TwoBit(0.5), lambda: codecs.TwoBit(0.25)),
        (lambda: codecs.create("2bit"), lambda: codecs.TwoBit(0.25)),
        compiled("2bit"),
        compiled("bf16"),
        compiled("fp16"),
        (lambda: codecs.OneBit(0.0), lambda: codecs.OneBit(0.25)),
        (codecs.Float16, codecs.Bfloat16),
        (codecs.Bfloat16, codecs.Float16),
        (lambda: Signs(1.0), lambda: Signs(0.5)),
    ],
)
class TestElementwise(Drawn, ElementwiseCodecContract):
    pass


@pytest.mark.parametrize(
    ("codec", "other"),
    [
        (lambda: codecs.TopK(ratio=0.1), lambda: codecs.TopK(ratio=0.2)),
        (lambda: codecs.LowRank(rank=2), lambda: codecs.LowRank(rank=3)),
        (lambda: codecs.create({"type": "lowrank", "rank": 2}), lambda: codecs.LowRank(rank=3)),
    ],
)
class TestTensor(Drawn, TensorCodecContract):
    pass


@pytest.fixture
def registry(monkeypatch):
    """Forget in the end what a test registers."""
    monkeypatch.setattr(codecs, "_KINDS", dict(codecs._KINDS))


@pytest.mark.usefixtures("registry")
def test_a_codec_can_be_registered():
    codecs.register("signs", Signs)
    assert codecs.create({"type": "signs", "scale": 0.5}).settings() == "signs(scale=0.5) with error feedback"
    with pytest.raises(ConfigError, match="a codec '2bit' exists already"):
        codecs.register("2bit", Signs)


@pytest.mark.usefixtures("registry")
def test_the_codec_of_the_documentation_is_one():
    """Cut from the docstring, it sends signs."""
    source = textwrap.dedent(codecs.__doc__.partition("::\n\n")[2])
    stores = []
    kv = SimpleNamespace(set_gradient_compression=lambda meant: stores.append(codecs.create(meant)))
    exec(source, {"dataclass": dataclass, "np": np, "mpikv": mpikv, "kv": kv, "__name__": __name__})
    first, second = stores
    assert first.settings() == second.settings() == "signs(scale=0.05) with error feedback"
    payload = encode(first, [3, -3, 3], np.zeros(3, F32))
    np.testing.assert_allclose(decode(first, payload, 3), [0.05, -0.05, 0.05])
