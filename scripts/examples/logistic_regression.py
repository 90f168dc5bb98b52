# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy"]
#
# [tool.uv.sources]
# mpikv = { path = "../..", editable = true }
# ///
"""Fit a logistic regression by Newton's method (iteratively reweighted least squares), on any number of ranks.

    $ mpikv run -n 4 scripts/examples/logistic_regression.py
    step 1  loss 13862.944  gradient 5674.122
    step 2  loss  7761.774  gradient 1589.799
    step 3  loss  6447.668  gradient  537.641
    step 4  loss  6103.916  gradient  138.222
    step 5  loss  6065.182  gradient   16.787
    step 6  loss  6064.482  gradient    0.331
    step 7  loss  6064.482  gradient    0.000
    weights [ 1.0143 -2.0428  0.5315  0.0068  3.0094]

Each rank has a part of the rows. A step sums a gradient and a Hessian over ranks. Their size depends on the number of
columns alone. Every rank then solves the same small system, so all have the same weights.
"""

import numpy as np

import mpikv

TRUE = np.array([1.0, -2.0, 0.5, 0.0, 3.0])


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return 20,000 rows of five columns, and a label of 0 or 1 for each."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((20_000, len(TRUE)))
    return rows, (random.random(len(rows)) < 1 / (1 + np.exp(-rows @ TRUE))).astype(float)


def main(kv: mpikv.KVStore) -> None:
    """Fit the weights. Collective: every rank calls it."""
    rows, labels = (array[kv.rank :: kv.size] for array in make_rows())  # this rank's share
    weights = np.zeros(len(TRUE))
    sums = {"loss": np.zeros(1), "gradient": np.zeros_like(weights), "hessian": np.zeros((len(TRUE), len(TRUE)))}
    kv.init(sums)
    for step in range(1, 8):
        scores = rows @ weights
        chances = 1 / (1 + np.exp(-scores))
        parts = {
            "loss": np.array([np.logaddexp(0, scores).sum() - labels @ scores]),
            "gradient": rows.T @ (labels - chances),
            "hessian": (rows.T * (chances * (1 - chances))) @ rows,
        }
        kv.pushpull(parts, out=sums)  # the sum over ranks
        weights += np.linalg.solve(sums["hessian"], sums["gradient"])
        if kv.is_root:
            print(f"step {step}  loss {sums['loss'][0]:9.3f}  gradient {np.abs(sums['gradient']).max():8.3f}")
    if kv.is_root:
        print("weights", weights.round(4))


if __name__ == "__main__":
    with mpikv.create() as store:
        main(store)
