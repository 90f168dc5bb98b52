"""The vectors of words in scripts/ are learnt, and little of them travels."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import train_words

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.mark.deadline(120)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_words_are_learnt(comm: Any, transport: str) -> None:
    corpus = train_words.read(60)
    options = Namespace(dim=16, batch=512, window=2, negative=3, epochs=1, rate=0.2, seed=0)
    with mpikv.create(comm=comm, transport="local" if comm is None else transport) as kv:
        loss = train_words.train(kv, corpus, options)
        vectors = kv.pull("words")
        sent, pushes, whole = kv.statistics()["rows"]["bytes_sent"], kv.version("words"), train_words.whole(kv, vectors)
        others = kv.size - 1
        # Gradients go to the owners; vectors come from them, unless all ranks share them.
        ways = 1 if kv.transport in ("local", "shm") else 2
    assert len(corpus.words) > 300
    assert pushes > 50
    # That of vectors that know nothing is (1 + 3) ln 2.
    assert loss < 0.9 * 4 * np.log(2)
    assert whole == 2 * ways * pushes * vectors.nbytes * others // (others + 1)
    assert 0 < sent < whole or sent == whole == others == 0
    assert len(train_words.neighbours(vectors, corpus.words, "array")) == 6


def test_pairs_are_near_each_other_and_in_one_sentence() -> None:
    text = np.array([0, 1, 2, -1, 3, 4, -1])
    corpus = train_words.Corpus(list("abcde"), np.full(5, 1e-9), text)
    centers, contexts = train_words.pairs(corpus._replace(counts=np.ones(5)), 2, NotRandom())
    assert sorted(zip(centers.tolist(), contexts.tolist(), strict=True)) == sorted(
        [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (3, 4), (4, 3)]
    )


class NotRandom:
    """Keeps every word, in order."""

    def random(self, size: int) -> Any:
        return np.zeros(size)

    def permutation(self, size: int) -> Any:
        return np.arange(size)
