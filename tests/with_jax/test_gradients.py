"""Gradients that are means over ranks are those of one process with all examples."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from support import commands

import mpikv
from mpikv import PeerFailed, RankMismatch, TransportUnavailable

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'mpikv[jax]'")
jnp = jax.numpy
mpikv_jax = pytest.importorskip("mpikv.jax")

ROOT = Path(__file__).parents[2]
EXAMPLES = 12
RUNS = pytest.mark.parametrize("compiled", [False, True], ids=["plain", "jit"])


@pytest.fixture
def kv(comm, x64):
    with mpikv.create("allreduce", comm=comm, timeout=10) as kv:
        yield kv


def new_params():
    random = np.random.default_rng(1)
    return {"hidden": {"w": random.standard_normal((4, 8)), "b": np.zeros(8)}, "out": random.standard_normal(8)}


def batch(step):
    random = np.random.default_rng(step)
    return random.standard_normal((EXAMPLES, 4)), random.standard_normal(EXAMPLES)


def loss(params, images, targets):
    hidden = jnp.tanh(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.mean((hidden @ params["out"] - targets) ** 2)


def mine(kv, arrays):
    return [array[kv.rank :: kv.size] for array in arrays]


def check_close(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == np.float64
        np.testing.assert_allclose(leaf, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(1, 2, 3)
@RUNS
def test_a_value_and_its_gradient(kv, compiled):
    averaged = mpikv_jax.value_and_grad(loss, kv)
    averaged = jax.jit(averaged) if compiled else averaged
    alone = jax.jit(jax.value_and_grad(loss))
    for step in range(3):
        check_close(averaged(new_params(), *mine(kv, batch(step))), alone(new_params(), *batch(step)))


@pytest.mark.ranks(1, 2)
@RUNS
def test_arguments_and_what_stays_on_a_rank(kv, compiled):
    def both(a, b, scale=1.0):
        return (a * b * scale).sum(), {"rank": a[0]}

    averaged = mpikv_jax.value_and_grad(both, kv, argnums=(0, 1), has_aux=True)
    assert averaged.__name__ == "both"
    a, b = jnp.full(2, kv.rank + 1.0), jnp.full(2, 3.0)
    (value, aux), (to_a, to_b) = (jax.jit(averaged) if compiled else averaged)(a, b, scale=2.0)
    mean = (kv.size + 1) / 2
    assert (value, aux["rank"]) == (12 * mean, kv.rank + 1)
    np.testing.assert_array_equal(to_a, [6, 6])
    np.testing.assert_array_equal(to_b, [2 * mean, 2 * mean])


@pytest.mark.ranks(2)
@RUNS
def test_two_functions_of_the_same_parameters_in_another_order(kv, compiled):
    def value(x):
        return x.sum()

    def square(x):
        return (x**2).sum()

    averaged = [mpikv_jax.value_and_grad(f, kv) for f in (value, square)]
    averaged = [jax.jit(f) for f in averaged] if compiled else averaged
    for _ in range(2):
        with pytest.raises((RankMismatch, jax.errors.JaxRuntimeError), match=r"mean/.*value/.*mean/.*square/"):
            jax.block_until_ready(averaged[kv.rank](jnp.ones(2)))
        assert [float(f(jnp.full(2, 3.0))[0]) for f in averaged] == [6, 18]


@pytest.mark.ranks(1, 2, 3)
@RUNS
def test_a_training_with_optax(kv, compiled):
    optax = pytest.importorskip("optax", reason="optax is not installed: pip install 'mpikv[jax]'")
    rule = optax.adam(0.01)
    ours, alone = optax.chain(mpikv_jax.all_reduce(kv), rule), optax.chain(optax.identity(), rule)

    gradient = jax.jit(jax.grad(loss))

    def step(optimizer, params, state, *examples):
        updates, state = optimizer.update(gradient(params, *examples), state, params)
        return optax.apply_updates(params, updates), state

    if compiled:
        step = jax.jit(step, static_argnums=0)
    params = mpikv_jax.broadcast(kv, jax.tree.map(lambda leaf: leaf + kv.rank, new_params()))
    expected, state, whole = new_params(), ours.init(params), alone.init(params)
    for number in range(3):
        params, state = step(ours, params, state, *mine(kv, batch(number)))
        expected, whole = step(alone, expected, whole, *batch(number))
    check_close(params, expected)


@pytest.mark.ranks(2, 3)
@RUNS
def test_a_function_raises_on_one_rank(kv, compiled):
    averaged = mpikv_jax.value_and_grad(lambda x: x.sum() if kv.rank else 1 / 0, kv)
    failure = ZeroDivisionError if kv.rank == 0 else jax.errors.JaxRuntimeError if compiled else PeerFailed
    with pytest.raises(failure, match="division by zero"):
        jax.block_until_ready((jax.jit(averaged) if compiled else averaged)(jnp.ones(2)))
    assert (mpikv_jax.pushpull(kv, jnp.ones(2)) == kv.size).all()


def test_without_optax(hide):
    hide("optax")
    with pytest.raises(TransportUnavailable, match=r"pip install 'mpikv\[jax\]'"):
        mpikv_jax.all_reduce(mpikv.create("allreduce"))


def test_without_jax():
    code = "import sys; sys.modules['jax'] = None; import mpikv.jax"
    ran = commands.python("-c", code)
    assert "mpikv.errors.TransportUnavailable: mpikv.jax needs JAX" in ran.stderr
    assert "pip install 'mpikv[jax]'" in ran.stderr


@pytest.mark.processes
@pytest.mark.deadline(120)
def test_the_example_goes_on_from_its_checkpoint(tmp_path, x64, capsys):
    for library in ("sklearn", "optax"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    script, checkpoint = str(ROOT / "scripts/train_jax.py"), ["--checkpoint", str(tmp_path / "digits.npz")]
    first = commands.mpikv("run", "-n", 2, script, "--epochs", "1", *checkpoint)
    assert first.returncode == 0, first.stderr
    runpy.run_path(script)["main"](["--epochs", "2", *checkpoint])  # goes on, on one rank
    losses = re.findall(r"epoch  (\d)  loss ([\d.]+)", first.stdout + capsys.readouterr().out)
    assert [epoch for epoch, _ in losses] == ["1", "2"]
    assert float(losses[1][1]) < float(losses[0][1])


@pytest.mark.processes
@pytest.mark.deadline(120)
def test_an_error_in_a_compiled_function_ends_the_program(tmp_path):
    (tmp_path / "train.py").write_text(
        "import mpikv, mpikv.jax, jax, jax.numpy as jnp\n"
        "kv = mpikv.create('allreduce', timeout=20)\n"
        "jax.jit(lambda x: mpikv.jax.pushpull(kv, x[: 3 + kv.rank]))(jnp.ones(9))\n"
    )
    ran = commands.mpikv("run", "-n", 2, "train.py", cwd=tmp_path)
    assert ran.returncode != 0
    assert re.search(r"RankMismatch: pushpull: ranks disagree .*float32\[3\].*float32\[4\]", ran.stderr)


@pytest.mark.processes
@pytest.mark.deadline(120)
@pytest.mark.parametrize("more", [0, 1], ids=["the same", "one more on a rank"])
def test_a_program_may_end_before_its_compiled_functions(tmp_path, more):
    """JAX runs them in another thread where their arrays are still being computed."""
    (tmp_path / "train.py").write_text(
        "import mpikv, mpikv.jax, jax, jax.numpy as jnp\n"
        "kv = mpikv.create('allreduce', timeout=20)\n"
        "slow = jax.jit(lambda x: (x @ x @ x @ x)[0])\n"
        "total = jax.jit(lambda x: mpikv.jax.pushpull(kv, x))\n"
        "ones = jax.block_until_ready(jnp.ones((1500, 1500)))\n"
        f"for _ in range(1 + {more} * kv.rank):\n"
        "    total(slow(ones))\n"
    )
    ran = commands.mpikv("run", "-n", 2, "train.py", cwd=tmp_path)
    assert (ran.returncode != 0) == more, ran.stderr
    assert ("RankMismatch" in ran.stderr) == more
