"""Sums, means and the root's values of trees, in and outside of compiled functions."""

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, PeerFailed, RankMismatch, Unsupported, ValueMismatch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'mpikv[jax]'")
jnp = jax.numpy
mpikv_jax = pytest.importorskip("mpikv.jax")

pytestmark = pytest.mark.ranks(1, 2, 3)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def kv(request, comm):
    with mpikv.create(getattr(request, "param", "allreduce"), comm=comm, timeout=10) as kv:
        yield kv


each_kind = pytest.mark.parametrize("kv", ["allreduce", "dist_sync"], indirect=True)


@pytest.fixture(params=[False, True], ids=["plain", "jit"])
def run(request):
    """Return what runs a function, compiled or not."""
    return jax.jit if request.param else lambda function: function


def leaves_are(tree: Any, expected: Any) -> None:
    """Check structures, dtypes, shapes and values."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(np.asarray(leaf, np.complex128), np.asarray(wanted, np.complex128))


def sample(number: float) -> Any:
    value = float(number)
    return {
        "layers": [Pair(jnp.full((2, 3), value), None), Pair(jnp.full(5, value, jnp.bfloat16), ())],
        "count": jnp.full((), value, jnp.int32),
        "others": (jnp.full((0, 4), value), jnp.full(3, value, jnp.complex64)),
        "half": jnp.full(2, value, jnp.float16),
    }


@each_kind
def test_a_sum_keeps_structure_and_dtypes(kv, run):
    mine = sample(kv.rank + 1)
    before = jax.tree.map(np.array, mine)
    total = run(lambda tree: mpikv_jax.pushpull(kv, tree))(mine)
    leaves_are(total, sample(kv.size * (kv.size + 1) / 2))
    leaves_are(mine, before)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(total))


def test_a_mean_of_float64(kv, run, x64):
    rows = [np.random.default_rng(rank).standard_normal(1000) for rank in range(kv.size)]
    mean = run(lambda row: mpikv_jax.pushpull(kv, row, average=True))(jnp.asarray(rows[kv.rank]))
    assert mean.dtype == np.float64
    np.testing.assert_allclose(mean, np.mean(rows, axis=0), rtol=1e-12, atol=1e-15)


@each_kind
@pytest.mark.ranks(1, 3)
def test_the_roots_tree(kv, run):
    mine = [jnp.full(3, kv.rank + 1.0), {"b": jnp.full((), kv.rank == 0)}]
    for _ in range(2):
        leaves_are(run(lambda tree: mpikv_jax.broadcast(kv, tree))(mine), [jnp.ones(3), {"b": jnp.array(True)}])
    assert not kv.keys()


@pytest.mark.ranks(2)
def test_arrays_of_numpy_and_numbers(kv):
    total = mpikv_jax.pushpull(kv, [np.ones(2), np.float64(2), 3, 0.5])
    leaves_are(
        total, [np.full(2, kv.size, float), np.float64(2 * kv.size), jnp.array(3 * kv.size), jnp.array(0.5 * kv.size)]
    )
    assert [type(leaf) for leaf in total[:2]] == [np.ndarray, np.float64]
    assert all(isinstance(leaf, jax.Array) for leaf in total[2:])


@each_kind
@pytest.mark.ranks(1, 3)
def test_trees_by_turns(kv, run):
    """Trees of other structures and shapes, and none at all, follow each other in one store."""
    trees = [jnp.ones(3), {"w": jnp.ones((2, 2))}, (), jnp.ones(5), jnp.ones(5, jnp.int8), [jnp.ones(3), jnp.ones(1)]]
    for tree in trees * 2:
        expected = jax.tree.map(lambda leaf: leaf * kv.size, tree)
        leaves_are(run(lambda tree: mpikv_jax.pushpull(kv, tree))(tree), expected)


@pytest.mark.ranks(2)
def test_calls_in_a_compiled_function_keep_their_order(kv):
    """A loop, calls whose result nobody uses, a constant, and a call outside while it runs."""

    def step(total, row):
        mpikv_jax.pushpull(kv, {"unused": row})
        total = mpikv_jax.pushpull(kv, total + row, average=True)
        return total, mpikv_jax.broadcast(kv, row)

    def program(rows):
        constant = mpikv_jax.pushpull(kv, 3)
        return constant, jax.lax.scan(step, jnp.zeros(rows.shape[1]), rows)

    compiled = jax.jit(program)
    for turn in range(2):
        constant, (total, root) = compiled(jnp.full((10, 10_000), kv.rank + turn, jnp.float32))
        outside = mpikv_jax.pushpull(kv, jnp.ones(2))
        assert (outside == kv.size).all()
        assert constant == 3 * kv.size
        np.testing.assert_allclose(total, 10 * ((kv.size - 1) / 2 + turn))
        assert (root == turn).all()


@pytest.mark.ranks(2)
def test_large_arrays(kv):
    """Callbacks read arrays in whatever thread they run."""
    compiled = jax.jit(lambda rows: jax.tree.map(jnp.sin, mpikv_jax.pushpull(kv, [2 * row for row in rows])))
    for _ in range(3):
        rows = compiled([jnp.ones(size) for size in (1, 1000, 500_000, 7)])
        for row in rows:
            np.testing.assert_allclose(row, np.sin(np.full(row.shape, 2 * kv.size, np.float32)), rtol=1e-6)


@pytest.mark.ranks(2, 3)
def test_a_tree_of_one_rank_differs(kv):
    shape, last = 3 + (kv.rank == 1), kv.rank == kv.size - 1
    trees = [
        ({"w": jnp.ones(shape)}, False),
        ({"w": jnp.ones(3, jnp.int32 if last else jnp.float32)}, False),
        ([jnp.ones(2)] * (1 + last), False),
        (() if last else jnp.ones(2), False),
        (jnp.ones(2), last),
    ]
    for tree, average in trees:
        call = partial(mpikv_jax.pushpull, kv, average=average)
        with pytest.raises(RankMismatch, match="ranks disagree"):
            call(tree)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RankMismatch"):
            jax.block_until_ready(jax.jit(call)(tree))
        assert (mpikv_jax.pushpull(kv, jnp.ones(2)) == kv.size).all()


@each_kind
@pytest.mark.ranks(2, 3)
def test_a_structure_of_one_rank_differs(kv, run):
    """Also where the leaves are equal, and when each tree has been exchanged before."""
    last, x = kv.rank == kv.size - 1, jnp.ones(2)
    total = run(lambda tree: mpikv_jax.pushpull(kv, tree))
    for mine, other, pattern in [
        ({"a": [x, x]}, {"a": (x, x)}, r"\['a'\] is a list of 2 against \['a'\] is a tuple of 2"),
        ({"a": [x, None]}, {"a": [x, ()]}, r"\['a'\]\[1\] is None against \['a'\]\[1\] is a tuple of 0"),
        ((x, {"b": x}), (x, OrderedDict(b=x)), r"\(1\) is a dict of 1 against \(1\) is an OrderedDict of 1"),
        (Pair(x, x), Pair(x, jnp.ones(3)), r"\.second is float32\[2\] against \.second is float32\[3\]"),
        ({"w": x}, {"v": x}, r"\['w'\] is float32\[2\] against \['v'\] is float32\[2\]"),
    ]:
        with pytest.raises((RankMismatch, jax.errors.JaxRuntimeError), match=pattern):
            jax.block_until_ready(total(other if last else mine))
    for tree in {"a": [x, x]}, {"a": (x, x)}:
        assert (jax.block_until_ready(total(tree))["a"][0] == kv.size).all()
    with pytest.raises((RankMismatch, jax.errors.JaxRuntimeError), match=r"0\['a'\]\[0\].*0\['a'\]\(0\)"):
        jax.block_until_ready(total({"a": (x, x) if last else [x, x]}))


@each_kind
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("function", [mpikv_jax.pushpull, mpikv_jax.broadcast])
def test_named_calls_of_equal_trees_in_another_order(kv, run, function):
    last, x = kv.rank == kv.size - 1, jnp.ones(2)
    calls = {name: run(lambda tree, name=name: function(kv, tree, name=name)) for name in ("right", "all")}
    for _ in range(2):
        with pytest.raises((RankMismatch, jax.errors.JaxRuntimeError), match=r"/right/.*/all/"):
            jax.block_until_ready(calls["all" if last else "right"](x))
        for call in calls.values():
            assert (jax.block_until_ready(call(x)) == (1 if function is mpikv_jax.broadcast else kv.size)).all()


@pytest.mark.ranks(2)
def test_a_name_is_a_text(kv):
    with pytest.raises(TypeError if kv.rank else PeerFailed, match="name=3 is an int, not a string"):
        mpikv_jax.pushpull(kv, 1.0, name=3 if kv.rank else "loss")


@pytest.mark.ranks(2, 3)
def test_a_leaf_of_one_rank_cannot_be_summed(kv, run):
    last = kv.rank == kv.size - 1
    total = run(lambda tree: mpikv_jax.pushpull(kv, tree, average=True))
    with pytest.raises(
        ValueMismatch if last else RuntimeError, match="'jax/mean/0' is int32" if last else "PeerFailed|rank"
    ):
        jax.block_until_ready(total(jnp.ones(2, jnp.int32 if last else jnp.float32)))
    with pytest.raises(TypeError if last else PeerFailed, match="'text'"):
        mpikv_jax.pushpull(kv, "text" if last else 1.0)
    with pytest.raises(TypeError if last else PeerFailed, match=r"jax\.random\.key_data"):
        mpikv_jax.pushpull(kv, jax.random.key(0) if last else 1.0)
    assert (total(jnp.ones(2)) == 1).all()


@pytest.mark.ranks(1, 2)
def test_stores_that_make_no_sums(comm):
    with mpikv.create(comm=comm) as kv:
        kv.set_optimizer("sgd")
        with pytest.raises(ConfigError, match="the store 'local' has an updater"):
            mpikv_jax.pushpull(kv, jnp.ones(2))
        assert (mpikv_jax.broadcast(kv, jnp.full(2, kv.rank + 1.0)) == 1).all()
    with mpikv.create("dist_async", comm=comm) as kv, pytest.raises(ConfigError, match="'dist_async'"):
        mpikv_jax.pushpull(kv, jnp.ones(2))
    with pytest.raises(TypeError, match="kv is a dict, not a store"):
        mpikv_jax.pushpull({}, jnp.ones(2))


@pytest.mark.ranks(2)
def test_values_of_a_store_and_sums_beside_them(comm):
    with mpikv.create(comm=comm) as kv:
        kv.init("w", np.zeros(2))
        assert (mpikv_jax.pushpull(kv, {"w": jnp.ones(3)})["w"] == kv.size).all()
        assert kv.keys() == ("w", "jax/sum/0['w']")


@pytest.mark.ranks(2)
def test_versions_that_cannot_compile_a_call(kv, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 0))
    assert (mpikv_jax.pushpull(kv, jnp.ones(2)) == kv.size).all()
    with pytest.raises(Unsupported, match=r"take JAX 0\.7\.2 or newer"):
        jax.jit(lambda x: mpikv_jax.pushpull(kv, x))(jnp.ones(2))


@pytest.mark.ranks(2)
def test_several_devices_would_each_make_a_call(kv):
    """It is seen where the function is traced, for which the devices need not be there."""

    def total(devices):
        spec = jax.sharding.PartitionSpec("d")
        mesh = jax.sharding.AbstractMesh((devices,), ("d",))
        mapped = jax.shard_map(lambda x: mpikv_jax.pushpull(kv, x), mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.eval_shape(mapped, jax.ShapeDtypeStruct((4,), jnp.float32))

    with pytest.raises(Unsupported, match="from each of 2 devices, in no order"):
        total(2)
    assert total(1).shape == (4,)
    assert (mpikv_jax.pushpull(kv, jnp.ones(2)) == kv.size).all()


@pytest.mark.ranks(2)
def test_an_exchange_has_no_derivative(kv):
    def total(x):
        return mpikv_jax.pushpull(kv, x).sum()

    x = jnp.ones(2)
    for derive in (
        lambda: jax.grad(total)(x),
        lambda: jax.jit(jax.grad(total))(x),
        lambda: jax.grad(jax.jit(total))(x),
        lambda: jax.jvp(total, (x,), (x,)),
    ):
        with pytest.raises(ValueError, match=r"no derivative; compute gradients first .*value_and_grad"):
            derive()
        with pytest.raises(ValueError if kv.rank else PeerFailed, match="has no derivative"):
            (derive if kv.rank else partial(mpikv_jax.pushpull, kv))(*[x][kv.rank :])
    constant = jax.jit(jax.grad(lambda x: x.sum() * total(jax.lax.stop_gradient(x))))(x)
    assert (constant == 2 * kv.size).all()
    with pytest.raises(ValueError, match="Cannot `vmap`"):
        jax.vmap(total)(jnp.ones((2, 2)))
