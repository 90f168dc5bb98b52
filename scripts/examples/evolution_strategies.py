# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy"]
#
# [tool.uv.sources]
# mpikv = { path = "../..", editable = true }
# ///
"""Learn to balance a pole on a cart by evolution strategies (https://arxiv.org/abs/1703.03864), on any number of ranks.

    $ mpikv run -n 4 scripts/examples/evolution_strategies.py
    generation 1  mean  40.70  best 200.00 steps
    generation 2  mean  74.43  best 200.00 steps
    generation 3  mean 122.28  best 200.00 steps
    generation 4  mean 142.76  best 200.00 steps
    generation 5  mean 154.76  best 200.00 steps
    generation 6  mean 157.93  best 200.00 steps
    generation 7  mean 183.08  best 200.00 steps
    the policy balances for 200.00 of 200 steps

Each rank tries a part of the population. All ranks draw the same noise, so they exchange rewards alone: one number for
each try, and no weights.
"""

import numpy as np

import mpikv

POPULATION, SPREAD, RATE, LONGEST = 64, 0.5, 0.3, 200


def balance(policies: np.ndarray) -> np.ndarray:
    """Return how many steps of 20 ms each policy keeps the pole up, from the mean of eight starts."""
    states = np.random.default_rng(1).uniform(-0.2, 0.2, (1, 8, 4)).repeat(len(policies), axis=0)
    steps, up = np.zeros(states.shape[:2]), np.ones(states.shape[:2], bool)
    for _ in range(LONGEST):
        speed, angle, turn = np.moveaxis(states[..., 1:], 2, 0)
        force = np.where((states * policies[:, None]).sum(axis=2) > 0, 10.0, -10.0)
        pushed = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
        turning = (9.8 * np.sin(angle) - np.cos(angle) * pushed) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        moving = pushed - 0.05 * turning * np.cos(angle) / 1.1
        states = states + 0.02 * np.stack([speed, moving, turn, turning], axis=2)
        up &= (np.abs(states[..., 0]) < 2.4) & (np.abs(states[..., 2]) < 0.21)
        steps += up
    return steps.mean(axis=1)


def main(kv: mpikv.KVStore) -> None:
    """Train the policy. Collective: every rank calls it."""
    random = np.random.default_rng(0)  # the same on every rank
    policy, mine = np.zeros(4), slice(kv.rank, None, kv.size)
    kv.init("rewards", np.zeros(POPULATION))
    for generation in range(1, 8):
        half = random.standard_normal((POPULATION // 2, 4))
        noise = np.concatenate([half, -half])
        rewards = np.zeros(POPULATION)
        rewards[mine] = balance(policy + SPREAD * noise[mine])
        kv.pushpull("rewards", rewards)  # zeros of other ranks leave a reward as it is
        if kv.is_root:
            print(f"generation {generation}  mean {rewards.mean():6.2f}  best {rewards.max():6.2f} steps")
        ranking = rewards.argsort(kind="stable").argsort() / (POPULATION - 1) - 0.5
        policy += RATE / (POPULATION * SPREAD) * ranking @ noise * 4
    if kv.is_root:
        print(f"the policy balances for {balance(policy[None])[0]:.2f} of {LONGEST} steps")


if __name__ == "__main__":
    with mpikv.create() as store:
        main(store)
