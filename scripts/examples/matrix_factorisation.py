# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy"]
#
# [tool.uv.sources]
# mpikv = { path = "../..", editable = true }
# ///
"""Factorise a matrix of ratings, of which few are known, on any number of ranks.

    $ mpikv run -n 4 scripts/examples/matrix_factorisation.py
    epoch 1  error of unknown ratings 1.6026
    epoch 2  error of unknown ratings 0.6581
    epoch 3  error of unknown ratings 0.2359
    epoch 4  error of unknown ratings 0.1438
    epoch 5  error of unknown ratings 0.1237
    epoch 6  error of unknown ratings 0.1190
    epoch 7  error of unknown ratings 0.1188
    epoch 8  error of unknown ratings 0.1184

Each rank takes its part of every batch of ratings. It pulls the rows of those users and items alone, and pushes
gradients of these rows. The owners of the rows update them by AdaGrad.
"""

import numpy as np

import mpikv

USERS, ITEMS, RANK, RATINGS, BATCH = 400, 300, 4, 24_000, 1_000


def make_ratings(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return users, items and ratings: of a matrix of low rank, with noise of 0.1."""
    left, right = random.standard_normal((USERS, RANK)), random.standard_normal((ITEMS, RANK))
    users, items = random.integers(USERS, size=RATINGS), random.integers(ITEMS, size=RATINGS)
    return users, items, (left[users] * right[items]).sum(axis=1) + 0.1 * random.standard_normal(RATINGS)


def main(kv: mpikv.KVStore) -> None:
    """Train both factors. Collective: every rank calls it."""
    random = np.random.default_rng(0)  # the same on every rank
    users, items, ratings = make_ratings(random)
    test, train = np.split(random.permutation(RATINGS), [RATINGS // 10])
    shapes = {"users": (USERS, RANK), "items": (ITEMS, RANK)}
    for name, shape in shapes.items():
        kv.init(name, mpikv.RowSparse(np.arange(shape[0]), 0.3 * random.standard_normal(shape), shape))
    kv.set_optimizer("adagrad", learning_rate=0.6)
    for epoch in range(1, 9):
        order = random.permutation(train)
        for start in range(0, len(order), BATCH):
            mine = order[start : start + BATCH][kv.rank :: kv.size]  # this rank's part of the batch
            numbers = {"users": users[mine], "items": items[mine]}
            pulled = kv.row_sparse_pull(list(numbers), row_ids=list(numbers.values()))
            pairs = zip(pulled, numbers.values(), strict=True)
            left, right = (rows.values[np.searchsorted(rows.indices, each)] for rows, each in pairs)
            error = ((left * right).sum(axis=1) - ratings[mine])[:, None]
            gradients = {"users": error * right, "items": error * left}
            kv.push({name: mpikv.RowSparse(numbers[name], gradients[name], shapes[name]) for name in shapes})
        left, right = kv.pull("users"), kv.pull("items")
        error = (left[users[test]] * right[items[test]]).sum(axis=1) - ratings[test]
        if kv.is_root:
            print(f"epoch {epoch}  error of unknown ratings {np.sqrt((error**2).mean()):.4f}")


if __name__ == "__main__":
    with mpikv.create() as store:
        main(store)
