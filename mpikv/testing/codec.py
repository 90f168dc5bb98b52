"""The contract of codecs, as tests.

Subclass :class:`ElementwiseCodecContract` or :class:`TensorCodecContract` in a test module and give the two factories::

    class TestTwoBit(ElementwiseCodecContract):
        def codec(self):
            return codecs.TwoBit(0.5)

        def other(self):
            return codecs.TwoBit(0.25)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codecs import LARGEST, ErrorFeedback
from ..protocols import Array, Codec, ElementwiseCodec, Gather, Rounds, Sum, TensorCodec

__all__ = ["CodecContract", "ElementwiseCodecContract", "TensorCodecContract", "together"]

SIZES = (1, 2, 15, 16, 17, 31, 33, 64, 100, 1000, (1 << 14) - 1, (1 << 14) + 1, 40_000)
SHAPES = ((1,), (5,), (3, 4), (20, 30), (4, 3, 5), (64, 64), ())
GUARD = 16
"""Bytes and elements beside the memory given to a codec; it must not change them."""


class CodecContract:
    """Promises of both kinds of codecs, alone and inside of :func:`mpikv.codecs.ErrorFeedback`."""

    scale = 1.0
    """The size of the tested gradients."""

    def codec(self) -> Codec:
        """Return a new codec, always of the same settings."""
        raise AssertionError("a subclass of CodecContract defines codec()")

    def other(self) -> Codec:
        """Return a codec with other payloads or sums than :meth:`codec`."""
        raise AssertionError("a subclass of CodecContract defines other()")

    def gradient(self, size: int, *seed: int) -> Array:
        """Return numbers for compression."""
        random = np.random.default_rng([size, *seed])
        return (self.scale * random.standard_normal(size)).astype(np.float32)

    def test_settings_tell_codecs_apart(self) -> None:
        assert self.codec().settings() == self.codec().settings() != self.other().settings()
        assert isinstance(self.codec().feedback, bool)

    def test_feedback_loses_nothing(self) -> None:
        """Decoded sum and residual add up to the given numbers, but for rounding."""
        codec = self.codec()
        codec = codec if codec.feedback else ErrorFeedback(codec)
        for shape in SHAPES if not codec.elementwise else [(size,) for size in SIZES]:
            size = int(np.prod(shape))
            left, state = np.zeros(size, np.float32), {} if codec.elementwise else codec.state(shape)
            given, arrived = np.zeros((2, size))
            for step in range(10):
                gradient = self.gradient(size, step)
                given += gradient
                arrived += total_of(codec, gradient, shape, state, left)
            np.testing.assert_allclose(arrived + left, given, rtol=0, atol=1e-4 * self.scale)

    def test_the_largest_numbers_stay_finite(self) -> None:
        codec = self.codec()
        codec = codec if codec.feedback else ErrorFeedback(codec)
        for shape in ((40, 30), (7,)):
            size = int(np.prod(shape))
            left, state = np.zeros(size, np.float32), {} if codec.elementwise else codec.state(shape)
            for step in range(20):
                gradient = np.sign(self.gradient(size, step)) * np.float32(LARGEST)
                assert np.isfinite(total_of(codec, gradient, shape, state, left)).all()
            assert np.isfinite(left).all()


class ElementwiseCodecContract(CodecContract):
    """The promises of :class:`mpikv.protocols.ElementwiseCodec`."""

    def codec(self) -> ElementwiseCodec:
        """Return a new codec, always of the same settings."""
        raise AssertionError("a subclass of ElementwiseCodecContract defines codec()")

    def test_the_size_of_a_payload_is_known(self) -> None:
        codec = self.codec()
        sizes = [codec.nbytes(count) for count in SIZES]
        assert all(type(size) is int and size > 0 for size in sizes)
        assert sizes == sorted(sizes)

    def test_a_payload_is_all_written_and_nothing_else(self) -> None:
        codec = self.codec()
        for size in SIZES:
            gradient = self.gradient(size)
            gradient.flags.writeable = False
            payloads = []
            for fill in (0, 255):
                memory = np.full(codec.nbytes(size) + 2 * GUARD, fill, np.uint8)
                payload = memory[GUARD:-GUARD]
                codec.encode(gradient, payload, residual(codec, size))
                assert (memory[:GUARD] == fill).all()
                assert (memory[-GUARD:] == fill).all()
                payloads.append(payload.tobytes())
            assert payloads[0] == payloads[1]

    def test_what_was_sent_is_added(self) -> None:
        codec = self.codec()
        for size in SIZES:
            payload = encoded(codec, self.gradient(size))
            payload.flags.writeable = False
            memory = np.ones(size + 2 * GUARD, np.float32)
            total = memory[GUARD:-GUARD]
            start = self.gradient(size, 1)
            total[:] = start
            codec.decode_add(payload, total)
            np.testing.assert_array_equal(total, start + decoded(codec, payload, size))
            assert (memory[:GUARD] == 1).all()
            assert (memory[-GUARD:] == 1).all()

    def test_equal_gradients_have_equal_payloads(self) -> None:
        for size in SIZES:
            first, second = (encoded(self.codec(), self.gradient(size)) for _ in range(2))
            assert first.tobytes() == second.tobytes()


class TensorCodecContract(CodecContract):
    """The promises of :class:`mpikv.protocols.TensorCodec`."""

    def codec(self) -> TensorCodec:
        """Return a new codec, always of the same settings."""
        raise AssertionError("a subclass of TensorCodecContract defines codec()")

    def test_ranks_exchange_alike(self) -> None:
        for ranks in (1, 2, 3):
            for shape in SHAPES:
                self._compare_ranks(self.codec(), ranks, shape)

    def _compare_ranks(self, codec: TensorCodec, ranks: int, shape: tuple[int, ...]) -> None:
        size = int(np.prod(shape))
        states = [codec.state(shape) for _ in range(ranks)]
        for step in range(3):
            gradients = [self.gradient(size, step, rank) for rank in range(ranks)]
            rounds = [
                codec.exchange(gradient, shape, state, residual(codec, size))
                for gradient, state in zip(gradients, states, strict=True)
            ]
            results = together(rounds)
            totals = [total for total, _ in results]
            assert len({total.tobytes() for total in totals}) == 1
            own = np.sum([own for _, own in results], axis=0, dtype=np.float64)
            np.testing.assert_allclose(totals[0], own, rtol=0, atol=1e-4 * self.scale)
            texts = [{name: array.tobytes() for name, array in state.items()} for state in states]
            assert all(text == texts[0] for text in texts)


def together(rounds: Sequence[Rounds]) -> list[tuple[Array, Array]]:
    """Run the exchanges of all ranks, check that they ask for the same, and return their results."""
    answers: list[Any] = [None] * len(rounds)
    results: list[tuple[Array, Array]] = []
    while not results:
        asked = []
        for each, answer in zip(rounds, answers, strict=True):
            try:
                asked.append(each.send(answer))
            except StopIteration as done:
                results.append(done.value)
        assert not (asked and results), "one rank asks for more than another"
        if asked:
            answers = _answered(asked)
    return results


def _answered(asked: Sequence[Sum | Gather]) -> list[Any]:
    assert len({(type(each), each[0].dtype, each[0].shape) for each in asked}) == 1
    arrays = [each[0].copy() for each in asked]
    assert arrays[0].ndim == 1
    assert arrays[0].dtype == (np.float32 if isinstance(asked[0], Sum) else np.uint8)
    if isinstance(asked[0], Gather):
        return [arrays] * len(asked)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return [total.copy() for _ in asked]


def total_of(codec: Codec, gradient: Array, shape: tuple[int, ...], state: dict[str, Array], left: Array) -> Array:
    """Return the decoded gradient of the only rank."""
    if codec.elementwise:
        return decoded(codec, encoded(codec, gradient, left), gradient.size)
    ((total, _),) = together([codec.exchange(gradient, shape, state, left)])
    return total


def encoded(codec: ElementwiseCodec, gradient: Array, left: Array | None = None) -> Array:
    """Return the payload of a gradient."""
    payload = np.empty(codec.nbytes(gradient.size), np.uint8)
    codec.encode(gradient, payload, residual(codec, gradient.size) if left is None else left)
    return payload


def decoded(codec: ElementwiseCodec, payload: Array, size: int) -> Array:
    """Return the decoded content of a payload."""
    total = np.zeros(size, np.float32)
    codec.decode_add(payload, total)
    return total


def residual(codec: Codec, size: int) -> Array | None:
    """Return an empty residual; None if the codec keeps none."""
    return np.zeros(size, np.float32) if codec.feedback else None
