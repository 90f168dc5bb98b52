# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy"]
#
# [tool.uv.sources]
# mpikv = { path = "../..", editable = true }
# ///
"""Find the centers of clusters by k-means (Lloyd's algorithm), on any number of ranks.

    $ mpikv run -n 4 scripts/examples/k_means.py
    step 1  inertia  155717.27
    step 2  inertia   53342.28
    step 3  inertia   23859.83
    step 4  inertia   19582.10
    step 5  inertia   19578.21
    step 6  inertia   19578.21
    2497 points around  5.9428  0.9474
    2448 points around -5.0042  4.0359
    2552 points around  1.0052 -7.0089
    2503 points around -0.0206  0.0023

Each rank has a part of the points. A step sums the points and the number of points of each cluster over ranks; every
rank then moves the centers alike.
"""

import numpy as np

import mpikv

CENTERS = np.array([[0.0, 0.0], [6.0, 1.0], [-5.0, 4.0], [1.0, -7.0]])


def main(kv: mpikv.KVStore) -> None:
    """Find the centers. Collective: every rank calls it."""
    random = np.random.default_rng(1)
    points = CENTERS[random.integers(len(CENTERS), size=10_000)] + random.standard_normal((10_000, 2))
    centers = points[: len(CENTERS)].copy()  # on every rank, as the seed is the same
    mine = points[kv.rank :: kv.size]  # this rank's share
    sums = {"points": np.zeros_like(centers), "counts": np.zeros(len(centers)), "inertia": np.zeros(1)}
    kv.init(sums)
    for step in range(1, 7):
        distances = ((mine[:, None] - centers) ** 2).sum(axis=2)
        nearest = np.eye(len(centers))[distances.argmin(axis=1)]  # a row with a single 1 for each point
        parts = {
            "points": nearest.T @ mine,
            "counts": nearest.sum(axis=0),
            "inertia": distances.min(axis=1).sum(keepdims=True),
        }
        kv.pushpull(parts, out=sums)  # the sum over ranks
        centers = sums["points"] / np.maximum(sums["counts"], 1)[:, None]
        if kv.is_root:
            print(f"step {step}  inertia {sums['inertia'][0]:10.2f}")
    if kv.is_root:
        for center, count in zip(centers, sums["counts"], strict=True):
            print(f"{count:.0f} points around {center[0]:7.4f} {center[1]:7.4f}")


if __name__ == "__main__":
    with mpikv.create() as store:
        main(store)
