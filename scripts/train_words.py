# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy"]
#
# [tool.uv.sources]
# mpikv = { path = "..", editable = true }
# ///
"""Learn vectors of words from the documentation of Python and numpy, on any number of ranks.

    python scripts/train_words.py                       one rank, no MPI library needed
    mpikv run -n 2 scripts/train_words.py               two ranks
    mpikv run -n 2 scripts/train_words.py --words loop array --dim 100

Skip-gram with negative sampling (Mikolov et al., Distributed Representations of Words and Phrases, NeurIPS 2013,
https://arxiv.org/abs/1310.4546): of two words that stand near each other the vectors are moved together, of a word and
some others they are moved apart. A batch touches few of the words, so what to copy is `train`: every rank pulls the
rows of the words that its part of the batch has, and pushes the gradients of these rows. No rank has the whole table of
vectors, nor its gradient, until the end.

The text is what the docstrings of this Python's standard library and of numpy say, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpikv

Array: TypeAlias = "np.ndarray[Any, Any]"

WORDS = ("list", "integer", "file", "thread", "array", "import")
# A word that is rarer than this has seen too little to be anything's neighbour.
RAREST = 5
# The share of a word above which some of its places are left out, as in the paper.
FREQUENT = 1e-3


class Corpus(NamedTuple):
    """A text as numbers of words; sentences are parted by -1."""

    words: list[str]
    counts: Array
    text: Array


def docstrings(files: Sequence[Path]) -> Iterator[str]:
    """Yield what stands in the docstrings of some files."""
    for path in files:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # files that are there to test parsers
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def sources(most: int) -> list[Path]:
    """Return so many source files of numpy and the standard library, in an order that is the same everywhere."""
    found = sorted(Path(np.__file__).parent.rglob("*.py"))
    # Packages that are installed beside the standard library are none of it.
    found += [path for path in sorted(Path(ast.__file__).parent.rglob("*.py")) if "site-packages" not in path.parts]
    return [path for path in found if not {"test", "tests", "idlelib", "lib2to3"} & set(path.parts)][:most]


def read(most: int) -> Corpus:
    """Return the text of so many files."""
    sentences = [
        re.findall(r"[a-z]{2,}", sentence.lower())
        for text in docstrings(sources(most))
        for sentence in re.split(r"[.:;]\s|\n\s*\n", text)
    ]
    tally = Counter(word for sentence in sentences for word in sentence)
    words = [word for word, count in tally.most_common() if count >= RAREST]
    numbers = {word: number for number, word in enumerate(words)}
    text = [number for sentence in sentences for number in (*map(numbers.get, sentence), -1) if number is not None]
    return Corpus(words, np.array([tally[word] for word in words], np.float64), np.array(text, np.int64))


def pairs(corpus: Corpus, window: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return all pairs of words that stand near each other, in random order, without some of the frequent ones."""
    share = corpus.counts / corpus.counts.sum()
    kept = rng.random(corpus.text.size) < np.sqrt(FREQUENT / share)[corpus.text]
    text = corpus.text[kept | (corpus.text < 0)]
    centers, contexts = [], []
    for distance in range(1, window + 1):
        left, right = text[:-distance], text[distance:]
        # None that stands in another sentence: the ends of sentences are in the text.
        crossed = np.cumsum(text < 0)
        near = (left >= 0) & (right >= 0) & (crossed[:-distance] == crossed[distance:])
        centers += [left[near], right[near]]
        contexts += [right[near], left[near]]
    order = rng.permutation(sum(each.size for each in centers))
    return np.concatenate(centers)[order], np.concatenate(contexts)[order]


def gradients(vectors: Array, others: Array, labels: Array) -> tuple[float, Array, Array]:
    """Return the loss of pairs, and its gradients: ``vectors`` is (pairs, dim), ``others`` (pairs, words, dim)."""
    scores = np.einsum("pd,pkd->pk", vectors, others)
    chance = 1 / (1 + np.exp(-scores))
    loss = float(-np.log(np.abs(1 - labels - chance) + 1e-9).sum())
    error = chance - labels
    return loss, np.einsum("pk,pkd->pd", error, others), error[:, :, None] * vectors[:, None, :]


def train(kv: mpikv.KVStore, corpus: Corpus, options: argparse.Namespace) -> float:
    """Train on all ranks; return the mean loss of a pair in the last tenth of the batches."""
    shape, size = (len(corpus.words), options.dim), options.batch
    random = np.random.default_rng(options.seed)
    start = ((random.random(shape) - 0.5) / options.dim).astype(np.float32)
    kv.init("words", mpikv.RowSparse(np.arange(shape[0]), start, shape))
    kv.init("contexts", mpikv.RowSparse([], np.zeros((0, options.dim), np.float32), shape))
    kv.set_optimizer("adagrad", learning_rate=options.rate, epsilon=1e-8)
    rarer = np.cumsum(corpus.counts**0.75)
    losses: list[float] = []
    # What ranks draw differs; what all of them go through is the same.
    mine = np.random.default_rng([options.seed, kv.rank])
    for _ in range(options.epochs):
        centers, contexts = pairs(corpus, options.window, random)
        for begin in range(0, centers.size - size + 1, size):
            part = slice(begin + size * kv.rank // kv.size, begin + size * (kv.rank + 1) // kv.size)
            center, context = centers[part], contexts[part]
            negative = np.searchsorted(rarer, mine.random((center.size, options.negative)) * rarer[-1])
            others = np.concatenate((context[:, None], negative), axis=1)
            words, seen = kv.row_sparse_pull(["words", "contexts"], row_ids=[center, others])
            at, at_other = np.searchsorted(words.indices, center), np.searchsorted(seen.indices, others)
            labels = np.zeros(others.shape, np.float32)
            labels[:, 0] = 1
            loss, by_word, by_other = gradients(words.values[at], seen.values[at_other], labels)
            kv.push(
                ["words", "contexts"],
                [
                    mpikv.RowSparse(center, by_word, shape),
                    mpikv.RowSparse(others.ravel(), by_other.reshape(-1, options.dim), shape),
                ],
            )
            losses.append(loss / max(center.size, 1))
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def neighbours(vectors: Array, words: Sequence[str], word: str, count: int = 6) -> list[str]:
    """Return the words whose vectors point most nearly where that of ``word`` does."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(length, 1e-9)
    closeness = unit @ unit[words.index(word)]
    nearest = np.argsort(-closeness)
    return [words[number] for number in nearest if words[number] != word][:count]


def whole(kv: mpikv.KVStore, vectors: Array) -> int:
    """Return how many bytes a rank would have sent in whole arrays of the gradients and vectors of both tables."""
    # What others own of its gradient, and what it owns to the others; but where ranks share values none are sent.
    ways = 1 if kv.transport == "shm" else 2
    return 2 * ways * int(kv.version("words")) * vectors.nbytes * (kv.size - 1) // kv.size


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Learn vectors of words, on any number of ranks.")
    add = parser.add_argument
    add("--words", nargs="+", default=WORDS, help="words whose neighbours are printed")
    add("--dim", type=int, default=64, help="length of a vector; default: 64")
    add("--batch", type=int, default=2048, help="pairs per push, over all ranks; default: 2048")
    add("--window", type=int, default=3, help="largest distance of two words; default: 3")
    add("--negative", type=int, default=4, help="words drawn for each pair; default: 4")
    add("--epochs", type=int, default=1, help="default: 1")
    add("--rate", type=float, default=0.2, help="learning rate; default: 0.2")
    add("--files", type=int, default=600, help="most source files to read; default: 600")
    add("--seed", type=int, default=0, help="default: 0")
    return parser.parse_args()


def main() -> None:
    """Train, and report on the root."""
    options = arguments()
    corpus = read(options.files)
    with mpikv.create() as kv:
        started = time.perf_counter()
        loss = train(kv, corpus, options)
        seconds = time.perf_counter() - started
        pushes = kv.version("words")
        sent = kv.statistics()["rows"]["bytes_sent"]
        vectors = kv.pull("words")
        if kv.is_root:
            print(
                f"{len(corpus.words)} words, {corpus.text.size} places, {pushes} pushes on {kv.size} ranks in "
                f"{seconds:.1f} s; loss {loss:.3f}"
            )
            for word in options.words:
                known = word in corpus.words
                print(f"{word:>10}: {' '.join(neighbours(vectors, corpus.words, word)) if known else 'too rare'}")
            print(f"bytes sent by a rank: {sent} in rows; {whole(kv, vectors)} if they were whole arrays")


if __name__ == "__main__":
    main()
