"""MXNet's names, its environment variables, and rows of its contract that no other test is about."""

import numpy as np
import pytest
from support.commands import python

import mpikv
from mpikv import ConfigError

pytestmark = pytest.mark.ranks(1, 2, 3)

# Each with a value that would matter, or be refused, if it were read.
IGNORED = {
    "MXNET_KVSTORE_BIGARRAY_BOUND": "1",
    "MXNET_KVSTORE_REDUCTION_NTHREADS": "many",
    "MXNET_KVSTORE_SERIAL_PUSH": "1",
    "MXNET_KVSTORE_USETREE": "1",
    "MXNET_KVSTORE_LOGTREE": "1",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": "1",
    "MXNET_KVSTORE_TREE_BACKTRACK": "1",
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY": "-1",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "1",
    "MXNET_KVSTORE_SLICE_THRESHOLD": "of p3 only",
    "MXNET_UPDATE_AGGREGATION_SIZE": "0",
    "MXNET_OPTIMIZER_AGGREGATION_SIZE": "1000",
    "MXNET_ENABLE_GPU_P2P": "0",
    "DMLC_ROLE": "server",
    "DMLC_NUM_WORKER": "7",
    "DMLC_NUM_SERVER": "7",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
    "DMLC_PS_VAN_TYPE": "ibverbs",
    "DMLC_INTERFACE": "none",
    "PS_VERBOSE": "2",
    "PS_RESEND": "1",
    "PS_RESEND_TIMEOUT": "1",
    "PS_DROP_MSG": "50",
    "PS_HEARTBEAT_INTERVAL": "1",
    "PS_HEARTBEAT_TIMEOUT": "1",
}

NAMES = [
    *("local", "local_update_cpu", "local_allreduce_cpu", "dist", "dist_sync", "device", "local_allreduce_device"),
    *("horovod", "byteps", "allreduce"),
]


def facts_and_sums(comm):
    """Return what a store says of itself, and what some calls give."""
    with mpikv.create("dist_sync", comm=comm) as kv:
        kv.init(["a", "b"], [np.zeros(70_000), np.zeros(3, np.float32)])
        values = [np.arange(70_000) * (kv.rank + 1.0), np.full(3, 0.1, np.float32)]
        sums = [total.tobytes() for total in kv.pushpull(["a", "b"], values)]
        return sums, kv.type, kv.rank, kv.size, kv.transport, kv.placement, type(kv)


@pytest.mark.feature("variables-ignored")
def test_variables_that_are_ignored(comm, monkeypatch):
    """Warnings are errors in tests, so that none is given either."""
    before = facts_and_sums(comm)
    for name, value in IGNORED.items():
        monkeypatch.setenv(name, value)
    assert facts_and_sums(comm) == before


@pytest.mark.processes
@pytest.mark.ranks(1)
@pytest.mark.feature("no-roles", "variables-ignored")
def test_a_server_of_mxnet_is_an_ordinary_process():
    """There, the import of a process with this role serves, and exits."""
    code = "import mpikv; kv = mpikv.create('dist_sync'); print(kv.rank, kv.size)"
    done = python("-W", "error", "-c", code, timeout=15, **IGNORED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")


@pytest.mark.feature("legacy-names")
def test_names_of_mxnet(comm):
    with mpikv.create("dist_sync", comm=comm) as kv:
        heard = []
        kv.init(3, np.zeros(2))
        kv._set_updater(lambda key, received, stored: stored + received)
        for _ in range(2):
            kv.push(3, np.ones(2))
        np.testing.assert_array_equal(kv.pull(3), np.full(2, 2.0 * kv.size))
        kv._barrier()
        kv.set_controller(1, heard.append)
        kv._send_command_to_servers(1, "body")
        assert heard == (["body"] if kv.is_root else [])
        assert kv.num_workers == kv.size
        assert kv.is_capable("optimizer")
        assert kv.is_capable(mpikv.KVStore.OPTIMIZER)


@pytest.mark.feature("updater-set")
@pytest.mark.parametrize("name", ["local", "device", "dist_sync"])
@pytest.mark.parametrize("setter", ["set_updater", "_set_updater", "updater"])
def test_every_way_to_set_an_updater(comm, name, setter):
    with mpikv.create(name, comm=comm) as kv:
        kv.init("w", np.ones(2))

        def update(key, received, stored):
            stored -= 0.5 * received

        assert getattr(kv, setter)(update) is (update if setter == "updater" else None)
        kv.push("w", np.ones(2))
        np.testing.assert_array_equal(kv.pull("w"), np.full(2, 1 - 0.5 * kv.size))


@pytest.mark.feature("updater-key")
@pytest.mark.parametrize("keys", [[3, 2**40, -1], ["3", "w", "layer/é"]])
def test_an_updater_is_given_the_keys_of_init(kv, keys):
    seen = []
    kv.init(keys, [np.zeros(1)] * 3)
    kv.set_updater(lambda key, received, stored: seen.append(key))
    kv.push(keys, [np.ones(1)] * 3)
    assert seen == (keys if kv.is_root else [])
    assert {type(key) for key in seen} <= {type(keys[0])}


@pytest.mark.feature("updater-no-change-before-push")
def test_an_updater_waits_for_the_next_push(kv):
    calls = []
    kv.init("w", np.zeros(2))
    kv.push("w", np.full(2, 3.0))
    kv.set_updater(lambda key, received, stored: calls.append(key))
    for _ in range(2):
        np.testing.assert_array_equal(kv.pull("w"), np.full(2, 3.0 * kv.size))
    kv.set("w", np.ones(2))
    assert calls == []


@pytest.mark.feature("optimizer-counts")
def test_lists_and_ranks_count_once(kv):
    """A schedule that counts in devices, as MXNet's did, would have run through its steps too soon."""
    kv.init(["w", "b"], [np.zeros(1), np.zeros(1)])
    kv.set_optimizer("test", lr_scheduler=lambda count: float(count))
    for step in range(1, 4):
        before = kv.pull(["w", "b"])
        kv.push(["w"] if step == 2 else ["w", "b"], [[np.ones(1)] * 4] * (1 if step == 2 else 2))
        after = kv.pull(["w", "b"])
        assert before[0] - after[0] == step * 4 * kv.size
        assert before[1] - after[1] == {1: 1, 2: 0, 3: 2}[step] * 4 * kv.size


@pytest.mark.feature("rank-and-size")
@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_the_ranks_of_the_communicator(comm, name):
    with mpikv.create(name, comm=comm) as kv:
        assert (kv.rank, kv.num_workers) == ((0, 1) if comm is None else (comm.rank, comm.size))


@pytest.mark.feature("capabilities")
def test_capabilities(kv):
    found = {name: kv.is_capable(name) for name in ("optimizer", "compression", "sparse", "async", "gpu")}
    assert all(type(able) is bool for able in found.values())
    assert found["optimizer"]
    assert found["compression"]
    assert kv.is_capable("OPTIMIZER")
    with pytest.raises(ConfigError, match=r"unknown capability 'optimiser' .*did you mean 'optimizer'"):
        kv.is_capable("optimiser")


@pytest.mark.feature("pull-ignore-sparse")
@pytest.mark.parametrize("ignore", [True, False])
def test_dense_values_are_pulled_in_any_case(kv, ignore):
    kv.init("w", np.ones(2))
    out = np.zeros(2)
    assert kv.pull("w", out=out, ignore_sparse=ignore) is out
    np.testing.assert_array_equal(out, np.ones(2))
