"""What MXNet's KVStore and Trainer do, row by row, and which of it this package does or refuses.

A row that is done, or refused, is shown by tests: those with the marker ``feature("name")``, or those of
``mpikv.testing.StoreContract`` that the row names.
"""

from __future__ import annotations

from typing import NamedTuple


class Feature(NamedTuple):
    """One row."""

    name: str
    does: str
    contract: tuple[str, ...] = ()
    """Tests of the store's contract that show it."""
    refused: bool = False
    """Whether it raises instead, as ``does`` says."""


def _row(name: str, does: str, *contract: str) -> Feature:
    return Feature(name, does, contract)


def _refused(name: str, does: str, *contract: str) -> Feature:
    return Feature(name, does, contract, refused=True)


FEATURES: dict[str, tuple[Feature, ...]] = {
    "Names of stores": (
        _row(
            "names-host", "`local`, `local_update_cpu`, `local_allreduce_cpu`, `dist`, `dist_sync` sum over all ranks"
        ),
        _row("names-device", "`device` and `local_allreduce_device` sum on the host where there is no GPU"),
        _row("names-any-case", "case does not matter; `kv.type` is the name in lower case"),
        _refused("names-unknown", "an unknown name raises and shows near ones, instead of being a local store"),
        _refused("names-not-a-string", "a name that is no string raises `TypeError`"),
        _refused(
            "names-gpu", "`nccl`, `dist_device_sync` and `dist_sync_device` raise `TransportUnavailable` without a GPU"
        ),
        _row("names-storeless", "`horovod`, `byteps` and `allreduce` sum and broadcast without stored values"),
        _row("names-storeless-rebroadcast", "a storeless store broadcasts a name as often as it is asked to"),
        _row("names-teststore", "`teststore` sums in one process and has no optimizer"),
        _row(
            "plug-in-register",
            "`KVStoreBase.register` makes a class known by its name in lower case; a second one warns",
        ),
        _row("plug-in-entry-point", "a store of an installed package is found by its entry point"),
        _row("plug-in-surface", "a method that a class leaves out raises and says so"),
        _row("several-stores", "any number of stores at once, also of some ranks, each with messages of its own"),
        _row("rank-and-size", "`rank` and `num_workers` are the communicator's, for every name", "test_facts"),
    ),
    "Keys and values": (
        _row(
            "keys-int-and-str", "a key is an int, numpy's too, or a str", "test_one_key", "test_numpy_integers_are_ints"
        ),
        _refused("keys-other-types", "any other key raises `TypeError`, truth values too"),
        _refused(
            "keys-mixed", "int and str keys in one store raise `TypeError`; `3` is not `'3'`", "test_keys_of_one_type"
        ),
        _row("keys-failed-call", "a failed call does not decide between int and str keys"),
        _row(
            "values-list-per-key",
            "a list of arrays for one key is summed; a pull fills each",
            "test_several_arrays_of_one_rank_are_summed_first",
        ),
        _row("values-list-of-keys", "a list of keys goes with a list of arrays", "test_a_list_of_keys"),
        _row("values-nested", "an inner list belongs to its key", "test_a_list_of_keys_with_a_list_of_arrays_each"),
        _row(
            "values-repeated-keys",
            "a key that is named again means a list, in push and pull",
            "test_repeated_keys_mean_a_list_of_arrays",
        ),
        _refused("values-unequal-lists", "lists of unequal lengths raise on all ranks", "test_what_does_not_fit"),
        _row("values-dict", "a dict of arrays, nested too", "test_a_dict"),
        _row("values-same-array", "one array several times, as value or as out"),
        _row(
            "values-call-order",
            "an updater runs in the order of the keys of the call",
            "test_an_updater_runs_once_per_key_and_push",
        ),
        _refused("values-other-array", "arrays without host memory, and read-only ones, raise `TypeError`"),
    ),
    "init, push, pull, pushpull, broadcast": (
        _row(
            "init-root",
            "the root's values are stored, and copied",
            "test_init_stores_the_values_of_the_root",
            "test_init_copies",
        ),
        _refused(
            "init-twice",
            "a known key raises `KeyAlreadyInitialized`; `overwrite=True` starts it anew",
            "test_init_twice",
        ),
        _row("init-again", "`set` overwrites, `delete` forgets, `keys()` and `in` tell", "test_set", "test_delete"),
        _refused("init-other-shapes", "ranks with other shapes or dtypes raise `RankMismatch`"),
        _row(
            "push-no-updater-assigns",
            "without updater a push replaces the value by the sum over lists and ranks",
            "test_push_replaces_the_value_by_the_sum",
        ),
        _row("push-sum-not-mean", "a sum is never divided by the number of ranks"),
        _row(
            "push-does-not-alias",
            "a pushed array is neither kept nor changed, lists included",
            "test_a_pushed_array_is_neither_changed_nor_kept",
        ),
        _row(
            "push-updater",
            "with an updater, it runs once per key when the sum is complete",
            "test_an_updater_runs_once_per_key_and_push",
        ),
        _refused(
            "push-unknown-key",
            "an unknown key raises on every rank before data move; no int key is made silently",
            "test_an_unknown_key",
        ),
        _refused("push-wrong-shape", "another shape raises, with as many elements too", "test_what_does_not_fit"),
        _row(
            "push-casts",
            "a dtype of the same kind is cast, both ways; another kind raises",
            "test_a_dtype_of_the_same_kind_is_cast",
        ),
        _row("push-half-in-float32", "half precision is summed in float32", "test_half_precision_is_summed_in_single"),
        _row("push-order", "operations on a key run in the order of the calls, on every rank"),
        _row(
            "pull-out",
            "`out` is filled; without one, new arrays are returned",
            "test_one_key",
            "test_a_pulled_array_is_a_copy",
        ),
        _row("pull-ignore-sparse", "`ignore_sparse` is accepted"),
        _row(
            "pushpull",
            "`pushpull` is both; without `out` it fills the values",
            "test_pushpull",
            "test_pushpull_into_the_values",
        ),
        _row("pushpull-shapes-of-lists", "`value` and `out` may be lists of other lengths", "test_pushpull"),
        _row("pushpull-compressed", "`pushpull` works with compression"),
        _row("broadcast-again", "`broadcast` gives the root's value to all; again overwrites", "test_broadcast"),
        _row(
            "priority",
            "`priority` is an int, or a list with one per key, and orders pending calls",
            "test_priority_changes_nothing",
        ),
        _refused("priority-differs", "ranks with other priorities raise `RankMismatch`"),
        _row("placements", "values live at the root, divided, or on all ranks, as is asked or as the updater needs"),
        _row("sums-reproducible", "a sum has the same bits every time; with `deterministic`, wherever it is made"),
        _row("sums-by-dtype", "booleans add up by or, integers wrap around", "test_sums_by_dtype"),
        _row("layouts", "arrays of any layout are pushed and filled", "test_any_layout"),
        _row("empty-values", "values of one and of no elements", "test_values_of_one_and_of_no_elements"),
    ),
    "Updaters and optimizers": (
        _row(
            "updater-set",
            "`_set_updater`, `set_updater` and `@kv.updater` set `f(key, received, stored)`",
            "test_an_updater_may_return_the_value",
        ),
        _row("updater-no-change-before-push", "setting one changes nothing until the next push; a pull never calls it"),
        _row("updater-returns", "its return value, if any, becomes the value", "test_an_updater_may_return_the_value"),
        _row("updater-key", "it is given exactly the key of `init`, never bytes or another number"),
        _row("updater-none", "None returns to replacing", "test_no_updater_again"),
        _refused("updater-raises", "its error is raised on every rank, and nothing has changed"),
        _row(
            "optimizer-set",
            "`set_optimizer` takes an object or a name; state starts anew",
            "test_an_optimizer",
            "test_an_optimizer_starts_anew",
        ),
        _row(
            "optimizer-settings-reach-owners",
            "settings that are changed later count from the next push, on every placement",
            "test_settings_of_an_optimizer_count_from_the_next_push",
        ),
        _refused("optimizer-settings-differ", "settings that differ between ranks raise `RankMismatch`"),
        _row(
            "optimizer-base-options",
            "`rescale_grad`, `clip_gradient`, `wd` and `begin_num_update`, under MXNet's names",
        ),
        _row(
            "optimizer-factors-per-key", "`lr_mult` and `wd_mult` by key", "test_each_key_has_its_own_count_and_factor"
        ),
        _row("optimizer-counts", "one count per key and push, also for lists"),
        _refused("optimizer-rate-and-schedule", "a rate that is set later, beside a schedule, raises"),
        _row("optimizer-rate-beside-schedule", "a rate and a schedule: the schedule begins with the rate, in a copy"),
        _row("optimizer-names", "options under MXNet's names, with its defaults"),
        _row("optimizer-average", "`average=True`: the mean over ranks, on any number of them"),
        _row("checkpoint-other-mean", "a `rescale_grad` of 1 / size that is loaded on another size is warned of"),
        _row("checkpoint-state", "`kv.save(path, state=...)`: what the program needs besides returns from `kv.load`"),
        _row("optimizer-sgd-order", "SGD has MXNet's order of operations"),
        _row("optimizer-test", "`test` has MXNet 2's rule"),
        _refused("optimizer-unknown", "unknown names and options raise and list the known"),
        _row("optimizer-custom", "a registered optimizer of your own; no pickle anywhere"),
        _row("optimizer-schedules", "schedules of the learning rate, by the number of updates"),
        _row("optimizer-states-saved", "`save_optimizer_states` and `load_optimizer_states` on any number of ranks"),
        _row("optimizer-states-other-size", "a checkpoint loads on other numbers of ranks"),
        _row(
            "optimizer-whole-values",
            "LARS and LAMB see whole values, however they are divided",
            "test_an_optimizer_of_whole_values",
        ),
        _row(
            "optimizer-masters",
            "float32 masters of half precision at the owner",
            "test_an_optimizer_keeps_a_master_of_half_precision",
        ),
        _row("half-sums", "float16 and bfloat16 are summed in float32, and rounded once"),
    ),
    "Sparse values": (
        _row("sparse-push", "a push of rows, merged by their indices"),
        _row("sparse-assign", "without updater, rows that nobody pushed become zero"),
        _row("sparse-pull", "`row_sparse_pull` of chosen rows, unique and sorted"),
        _row("sparse-pull-lists", "one list of rows for several outs"),
        _row("sparse-optimizers", "optimizers that touch the pushed rows only: element-wise ones, lazily"),
        _row("sparse-ignore", "`ignore_sparse` leaves row-sparse outs as they are, False fills them"),
        _refused("sparse-trainer", "a Trainer takes whole gradients and weights; a sparse one raises `TypeError`"),
    ),
    "Gradient compression": (
        _row("compression-2bit-bits", "`2bit`: MXNet's codes, bit for bit, and its residual"),
        _row("compression-1bit-bits", "`1bit`: the same"),
        _row("compression-set", "`set_gradient_compression` takes MXNet's dict; None ends compression"),
        _refused("compression-bad-options", "unknown types and options, and thresholds that are none, raise"),
        _row("compression-residual-per-array", "each array of a list has a residual of its own"),
        _row("compression-everywhere", "every transport and placement, buffers and `pushpull` included"),
        _row("compression-init-pull-exact", "`init`, `set`, `broadcast` and `pull` never are"),
        _row("compression-half", "float16 and bfloat16 are compressed in float32"),
        _refused("compression-other-dtypes", "other dtypes raise `Unsupported`"),
        _refused("compression-not-finite", "inf and nan raise, instead of staying in the residual for good"),
        _row("compression-threshold-exact", "the threshold is compared between ranks, not rounded"),
        _row("compression-residuals-in-checkpoints", "checkpoints keep residuals, not with `residuals=False`"),
    ),
    "Facts, control and faults": (
        _row(
            "capabilities",
            "`is_capable` of `optimizer`, `sparse`, `compression`, `async`, `gpu`; unknown ones raise, where the store "
            "keeps values",
        ),
        _row("barrier", "`barrier` and `_barrier`, with a deadline", "test_barrier"),
        _row("dead-nodes", "`num_dead_node` counts the ranks of the host that have ended"),
        _row("commands", "`_send_command_to_servers` reaches a controller at the root, as JSON, no pickle"),
        _row("commands-unknown", "a command without controller does nothing"),
        _row(
            "close", "`close`, `with` and the end of the program end a store, and wait for no dead peer", "test_close"
        ),
        _row("late-rank-named", "a rank that does not come is named, with its last call"),
        _row("recovery", "a killed job goes on from a checkpoint, and leaves it whole"),
        _row("restarts", "killed ranks go on from the newest commit of `kv.steps`, with the bits of an unbroken run"),
        _row("restarts-async", "the same in `dist_async`: no push of a committed step is lost, or made twice"),
        _row("steps-end-at-sigterm", "at SIGTERM a loop with a path saves, and ends with status 75"),
        _row("steps-of-torch", "`Attached.steps` and `mpikv.torch.steps` keep models, optimizers and generators"),
        _row("steps-of-trainers", "`Trainer.steps` keeps weights, optimizer state and loss scale"),
        _row("steps-on-disk", "`kv.steps(path=...)` goes on from a checkpoint, on any number of ranks"),
        _row(
            "restarts-faults", "`scripts/restart_faults`: a full disk, too little memory and others, under `--restarts`"
        ),
        _row("restarts-messages", "`mpikv run --restarts` names the dead rank and the step from which it goes on"),
        _row(
            "restarts-hosts", "`mpikv run --restarts` on several hosts, with `--keep` on a file system that they share"
        ),
        _row(
            "restarts-spares",
            "`mpikv run --spares torch`: ranks that have imported torch wait to take dead ones' places",
        ),
        _row("save-without-waiting", "`save(wait=False)` writes a copy while training goes on, and loses no error"),
        _row("dead-rank-ends-job", "a rank that dies ends the job"),
        _row("unequal-batches", "`join` lets ranks have unequal numbers of batches"),
        _row("no-roles", "no servers and no roles: nothing runs at import, one rank needs no launcher"),
        _row("launcher", "`mpikv run -n 4 script.py`, or any launcher of MPI"),
        _row("profiler-trace", "when each collective call of each rank began and ended, for Chrome's viewer"),
        _row("profiler-off", "nothing is measured without the variable"),
        _row("legacy-names", "MXNet's names of methods do what the new ones do"),
    ),
    "Environment variables": (
        _row("variables-update-on-kvstore", "`MXNET_UPDATE_ON_KVSTORE` decides where a Trainer does not"),
        _row(
            "variables-ignored",
            "those of threads, trees, bounds, aggregation, P2P and ps-lite are ignored without a warning",
        ),
        _row("variables-own", "`MPIKV_*` are the defaults of arguments; unknown ones warn"),
    ),
    "Trainer": (
        _row("trainer-sorted-names", "keys are the names, in sorted order"),
        _row("trainer-shared-parameters", "a parameter of several names is updated once, by the sum"),
        _refused("trainer-bad-arguments", "bad arguments raise when it is made, options beside an object too"),
        _row("trainer-store-lazily", "the store is made at the first use"),
        _row("trainer-where", "`update_on_kvstore` None follows the variable, if the store can"),
        _refused("trainer-not-capable", "True with a store that has no optimizer raises"),
        _row(
            "trainer-setup-order", "compression, then optimizer, then one broadcast: all start from the root's weights"
        ),
        _row("trainer-step", "a step is `rescale_grad / batch_size` times the sum over ranks"),
        _row("trainer-batch-size-changes", "`batch_size` may change, wherever the weights are updated"),
        _row("trainer-frozen", "`grad_req='null'` is neither summed nor updated"),
        _row("trainer-frozen-integers", "frozen integers are given to all ranks, and left alone"),
        _row("trainer-accumulation", "`grad_req='add'` adds up gradients until `zero_grad`"),
        _row("trainer-halves", "`allreduce_grads`, `clip_global_norm`, `update`"),
        _refused("trainer-halves-on-store", "the halves raise while the store updates, and name the right argument"),
        _refused("trainer-stale", "a parameter without a new gradient raises `StaleGradient`, a `UserWarning`"),
        _row("trainer-stale-ignored", "`ignore_stale_grad` leaves it out; reset in both modes"),
        _row(
            "trainer-learning-rate", "`learning_rate`, `set_learning_rate`, `optimizer`; factors are read at each step"
        ),
        _row("trainer-both-ways-equal", "both ways of updating have the bits of push and pull"),
        _row("trainer-states", "`save_states` and `load_states`: training goes on as if it had never stopped"),
        _row("trainer-states-any-size", "saved on 4 ranks, loaded on 1, 2, 3 or 4, in either way of updating"),
        _row(
            "trainer-states-one-form", "both ways of updating write the same file, once each parameter has been updated"
        ),
        _row("trainer-states-masters", "masters of half precision are state"),
        _refused("trainer-sums-are-no-checkpoint", "`kv.save` of a store that only sums for a Trainer raises"),
        _row("trainer-set-data", "weights that are set by hand reach every rank and the store"),
        _row("trainer-overflow-vote", "a gradient that overflowed on one rank skips the update on all"),
        _row(
            "trainer-several-on-one-store",
            "a store for each Trainer, or one that only sums for names of their own; one for two raises",
        ),
    ),
    "Asynchronous": (
        _row("async-names", "`dist_async`, `dist_async_device` and `dist_device_async` apply pushes on the host"),
        _row(
            "async-push",
            "a push is applied by its owner when it arrives, never two of one key at once, and none is lost",
        ),
        _refused("async-updater-required", "a push without an updater raises"),
        _row("async-pull", "a pull is a whole value, never half an update"),
        _row("async-staleness", "`staleness` bounds how far a rank may be ahead"),
        _refused("async-trainer", "a Trainer on it raises"),
    ),
    "P3": (
        _row("p3-name", "`p3` is `dist_sync` with messages of as many elements as a slice has"),
        _row("p3-variable", "`DMLC_PS_VAN_TYPE=p3` and `MXNET_KVSTORE_SLICE_THRESHOLD` are honoured"),
        _row("p3-order", "an urgent call comes before those that have not begun"),
        _row("p3-values", "values are those of `dist_sync` with messages of that size, whatever the order"),
        _row("p3-trainer", "a Trainer on it gives the same weights"),
    ),
    "Tutorials": (
        _row("tutorial-python", "the tutorials' numbers, with and without updater"),
        _row("tutorial-numpy", "those of the numpy interface"),
        _row("tutorial-clojure", "those of the one with repeated keys"),
        _row("tutorial-ranks", "those of one array per rank in place of a list"),
    ),
}
