"""Half precision on every transport: sums in float32 that are rounded once, masters, and torch's bfloat16."""

import numpy as np
import pytest

import mpikv

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

F32 = np.float32
# Short arrays are converted by the libraries, long ones by blocks; the longest is several messages.
SIZES = (1, 5000, 70_001, 700_000)


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request):
    return np.dtype(np.float16) if request.param == "float16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def contributions(size, ranks, dtype):
    """Return numbers of which a float32 sum is exact, in any order, and mostly no half."""
    random = np.random.default_rng(size)
    return (random.integers(-128, 129, (ranks, size)) * 2.0 ** random.integers(-6, 4, (ranks, size))).astype(dtype)


def rounded_once(given):
    return given.astype(np.float64).sum(axis=0).astype(F32).astype(given.dtype)


@pytest.mark.feature("half-sums")
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_sums_are_rounded_once(comm, ranks, transport, dtype, placement, kernels):
    if kernels == "numba":
        pytest.importorskip("numba")
    with mpikv.create(transport=transport, placement=placement, kernels=kernels, bucket_bytes=1 << 19) as kv:
        given = {size: contributions(size, ranks, dtype) for size in SIZES}
        kv.init({str(size): np.zeros(size, dtype) for size in SIZES})
        kv.push({str(size): each[kv.rank] for size, each in given.items()})
        outs = {str(size): np.zeros(size, dtype) for size in SIZES}
        kv.pushpull({str(size): each[kv.rank] for size, each in given.items()}, out=outs)
        for size, each in given.items():
            expected = rounded_once(each)
            if ranks > 1 and size > 1:
                assert not np.array_equal(expected.astype(F32), each.astype(F32).sum(axis=0))
            for pulled in (outs[str(size)], kv.pull(str(size))):
                assert (pulled.view(np.uint16) == expected.view(np.uint16)).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_no_number_stays_none(comm, ranks, transport, dtype, deterministic):
    if deterministic and transport == "hierarchical":
        pytest.skip("sums in a fixed order are mpi's there")
    with mpikv.create(transport=transport, deterministic=deterministic) as kv:
        mine = np.ones(100_000, dtype)
        mine[3], mine[50_000], mine[99_999] = np.inf, np.nan, np.finfo(F32).max if dtype.name != "float16" else 65504
        kv.init("w", np.zeros_like(mine))
        pulled = kv.pushpull("w", mine, np.zeros_like(mine)).astype(F32)
        assert pulled[3] == np.inf
        assert np.isnan(pulled[50_000])
        assert np.isinf(pulled[99_999]) == (ranks > 1 or dtype.name != "float16")
        others = np.delete(pulled, [3, 50_000, 99_999])
        assert (others == ranks).all()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_master_is_what_float32_would_be(comm, ranks, transport, dtype, name):
    """The gradients' sums are exact, so that a store of float32 makes the same masters."""
    size, options = 20_000, {"learning_rate": 2.0**-9, "momentum": 0.5} if name == "sgd" else {"learning_rate": 1e-3}
    start = np.random.default_rng(1).standard_normal(size).astype(dtype)
    given = [contributions(size, ranks, dtype)[:, ::-1] * dtype.type(2.0**-4) for _ in range(3)]
    with mpikv.create(transport=transport) as half, mpikv.create(transport=transport) as single:
        half.init("w", start)
        single.init("w", start.astype(F32))
        half.set_optimizer(name, multi_precision=True, **options)
        single.set_optimizer(name, **options)
        for each in given:
            half.push("w", each[half.rank])
            single.push("w", each[half.rank].astype(F32))
            expected = single.pull("w").astype(dtype)
            assert (half.pull("w").view(np.uint16) == expected.view(np.uint16)).all()
        assert not np.array_equal(expected, start)


def test_an_order_of_additions_and_nccls_own_cannot_both_be_had(comm):
    with pytest.raises(mpikv.Unsupported, match="deterministic=True adds in a fixed order, and native_halves=True in"):
        mpikv.create(comm=comm, deterministic=True, native_halves=True)
    with mpikv.create(comm=comm, native_halves=True) as kv:  # the host takes no note of it
        kv.init("w", np.zeros(3, np.float16))
        kv.push("w", np.ones(3, np.float16))
        assert (kv.pull("w") == kv.size).all()
