"""Whatever is done wrong, on every rank or on the last one alone, each rank raises a named error in time, and training
goes on afterwards.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, KeyNotInitialized, NotFinite, PeerFailed, RankMismatch, Stalled, Unsupported

from .training import (
    assert_close,
    assert_equal_over_ranks,
    attach,
    attached_pair,
    check_attaches,
    check_trains,
    functional,
    is_last,
    last_fails,
    loss_of,
    network,
    nn,
    optim,
    sgd,
    torch,
    train,
)

pytestmark = pytest.mark.ranks(1, 2, 3)
SEVERAL = pytest.mark.ranks(2, 3)


def fails(kv: Any, kind: type[Exception], pattern: str, call: Callable[[], Any]) -> None:
    """Check that the call, which every rank makes, raises on each."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert re.search(pattern, str(caught.value)), str(caught.value)


def differ(kv: Any, call: Callable[[], Any], others: Callable[[], Any]) -> str:
    """Check that every rank raises RankMismatch where the last one makes another call; return its text."""
    with pytest.raises(RankMismatch) as caught:
        (call if is_last(kv) else others)()
    return str(caught.value)


def end_all_the_same(kv: Any) -> None:
    """Have the end of the store compare nothing, where ranks are left as they are."""
    kv.before_close.clear()


# --- What attach refuses


def test_a_model_is_attached_once(kv, update):
    model, optimizer, _ = attached_pair(kv, update=update)
    fails(kv, ConfigError, r"'0.weight' is attached already; call detach\(\)", lambda: attach(model, kv=kv))
    check_trains(kv, model, optimizer)
    fails(kv, ConfigError, "attached already", lambda: attach(model, kv=kv))


@SEVERAL
def test_a_model_is_attached_twice_on_one_rank(kv):
    model, optimizer, _ = attached_pair(kv)
    other = network(1)
    last_fails(kv, ConfigError, "is attached already", lambda: attach(model, kv=kv), lambda: attach(other, kv=kv))
    check_trains(kv, model, optimizer)
    check_attaches(kv)


def test_what_is_no_store(kv):
    for value in ("dist_sync", mpikv.create("horovod")):
        with pytest.raises(TypeError, match=r"kv is an? .*; pass mpikv.create\(\), without another name"):
            attach(nn.Linear(1, 1), kv=value)


def test_a_part_of_an_attached_model(kv):
    model = network()
    attached = attach(model, kv=kv)
    fails(kv, ConfigError, "'weight' is attached already", lambda: attach(model[0], kv=kv))
    attached.detach()
    attach(model[0], kv=kv).detach()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"update": "stor"}, ConfigError, r"unknown update 'stor' \(known: local, store\); did you mean 'store'"),
        ({"buffers": "all"}, ConfigError, r"unknown buffers 'all' \(known: each, root\)"),
        ({"bucket_bytes": 0}, ConfigError, "bucket_bytes"),
        ({"bucket_bytes": 1.5}, (ConfigError, TypeError), "bucket_bytes"),
        ({"compression": "fp8"}, ConfigError, "fp8"),
        ({"compression": {"type": "2bit", "treshold": 1}}, ConfigError, "treshold"),
    ],
    ids=["update", "buffers", "bucket_bytes", "float", "compression", "its-option"],
)
def test_a_bad_option(kv, options, kind, text):
    model = network()
    with pytest.raises(kind, match=text):
        attach(model, kv=kv, **options)
    if kv.size > 1:
        with pytest.raises(kind if is_last(kv) else (PeerFailed, RankMismatch)):
            attach(model, kv=kv, **(options if is_last(kv) else {}))
    check_attaches(kv)


def chain(*layers: Any) -> Any:
    return nn.Sequential(*layers).double()


def frozen() -> Any:
    model = network()
    model[0].weight.requires_grad = False
    return model


OTHER_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: chain(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), r"\[6, 4\]"),
    "name": (lambda: chain(nn.Linear(4, 5), nn.Linear(5, 3)), "1.weight"),
    "frozen": (frozen, "0.weight.* fixed"),
    "dtype": (lambda: network(0, torch.float32), "float32"),
    "missing": (lambda: chain(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), "2.bias.*only in"),
    "buffer": (lambda: chain(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)), "1.running"),
}
LAYERS = [0, 2]
OTHER_OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "kind": (lambda model: optim.AdamW(model.parameters()), "(?s)SGD.*AdamW"),
    "lr": (lambda model: sgd(model, lr=0.01), r"SGD, group 0: lr 0.1 against SGD, group 0: lr 0.01\b"),
    "decay": (lambda model: sgd(model, weight_decay=0.5), "weight_decay 0 against .*weight_decay 0.5"),
    "order": (
        lambda model: optim.SGD(reversed([*model.parameters()]), 0.1, 0.9),
        "SGD, group 0: 0.weight against SGD, group 0: 2.bias",
    ),
    "groups": (
        lambda model: optim.SGD([{"params": model[layer].parameters()} for layer in LAYERS], 0.1, 0.9),
        "SGD, group 0: 2.weight against SGD, group 1: lr 0.1",
    ),
}

OTHER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "update": ("store", "local"),
    "buffers": ("each", "root"),
    "bucket_bytes": (64, 65),
    "compression": ("fp16", None),
}


def check_differs(kv: Any, odd: Any, usual: Any, text: str, make: Any = sgd, **options: tuple[Any, Any]) -> None:
    """Check that ranks cannot attach where the last one has another model, optimizer or option."""
    model = odd() if is_last(kv) else usual()
    chosen = {name: values[not is_last(kv)] for name, values in options.items()}
    with pytest.raises(RankMismatch) as caught:
        attach(model, (make if is_last(kv) else sgd)(model), kv=kv, **chosen)
    assert re.search(text, str(caught.value)), str(caught.value)
    check_attaches(kv)


@SEVERAL
@pytest.mark.parametrize("other", OTHER_MODELS)
def test_ranks_have_other_models(kv, update, other):
    check_differs(kv, OTHER_MODELS[other][0], network, OTHER_MODELS[other][1], update=(update, update))


@SEVERAL
@pytest.mark.parametrize("other", OTHER_OPTIMIZERS)
def test_ranks_have_other_optimizers(kv, update, other):
    make, text = OTHER_OPTIMIZERS[other]
    check_differs(kv, network, network, text, make, update=(update, update))


@SEVERAL
@pytest.mark.parametrize(("option", "values"), OTHER_OPTIONS.items())
def test_ranks_have_other_options(kv, option, values):
    single = partial(network, 0, torch.float32)
    check_differs(kv, single, single, option, **{option: values})


@SEVERAL
def test_ranks_with_other_models_are_told_what_differs(kv):
    """And not all of a large model."""
    model = nn.Sequential(*(nn.Linear(3, 4 if place == 7 and is_last(kv) else 3) for place in range(50)))
    with pytest.raises(
        RankMismatch, match=r"7.weight float32\[3, 3\] trained against 7.weight float32\[4, 3\] trained"
    ) as caught:
        attach(model, kv=kv)
    assert "8.weight" not in str(caught.value)


def test_a_lazy_model(kv):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    fails(kv, ConfigError, "'0.weight' has no shape yet.*one forward pass before attach", lambda: attach(model, kv=kv))
    model(torch.ones(2, 4))
    attach(model, kv=kv).detach()


class Own(optim.SGD):
    pass


def stepped(make: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(1))
    return model, optimizer


def overlapped(kind: str) -> Any:
    """Return a model with a tensor whose elements share memory."""
    model, tensor = nn.Linear(3, 2, bias=False), torch.zeros(3).expand(2, 3)
    if kind == "weight":
        model.weight = nn.Parameter(tensor)
    else:
        model.register_buffer("mask", tensor)
    return model


def attach_on_store(make: Callable[[Any], Any], kv: Any) -> Any:
    model = network()
    return attach(model, make(model), kv=kv, update="store")


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "SGD has made a step": (ConfigError, "has made a step", lambda kv: attach(*stepped(sgd), kv=kv)),
    "Adam has made a step": (
        ConfigError,
        "has made a step",
        lambda kv: attach(*stepped(lambda model: optim.Adam(model.parameters())), kv=kv, update="store"),
    ),
    "optimizer of another model": (
        ConfigError,
        r"a parameter of shape \(8, 2\) that is not the model's",
        lambda kv: attach(network(), sgd(nn.Linear(2, 8)), kv=kv),
    ),
    "parameter in two optimizers": (
        ConfigError,
        "is in two optimizers",
        lambda kv: attach_on_store(lambda model: [sgd(model), sgd(model)], kv),
    ),
    "LBFGS on parts": (
        Unsupported,
        r"LBFGS.*update='local'",
        lambda kv: attach_on_store(lambda model: optim.LBFGS(model.parameters()), kv),
    ),
    "own class on parts": (Unsupported, "Own", lambda kv: attach_on_store(lambda model: Own(model.parameters()), kv)),
    "weight of one memory": (Unsupported, r"strides \(0, 1\)", lambda kv: attach(overlapped("weight"), kv=kv)),
    "another device": (
        Unsupported,
        "is on meta.*mpikv.torch needs tensors of the host",
        lambda kv: attach(nn.Linear(3, 2, device="meta"), kv=kv),
    ),
    **{
        f"optimizer {wrong!r}": (
            TypeError,
            "not a torch.optim.Optimizer",
            lambda kv, wrong=wrong: attach(network(), wrong, kv=kv),
        )
        for wrong in (0.1, "sgd", {"lr": 0.1})
    },
    **{
        f"model {wrong!r}": (TypeError, "torch.nn.Module", lambda kv, wrong=wrong: attach(wrong, kv=kv))
        for wrong in (None, 3, "model", [1.0])
    },
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_attach_refuses(kv, wrong):
    """On every rank, and on the last one alone."""
    kind, pattern, call = REFUSED[wrong]
    fails(kv, kind, pattern, lambda: call(kv))
    if kv.size > 1:
        model = network()
        last_fails(kv, kind, pattern, lambda: call(kv), lambda: attach(model, sgd(model), kv=kv))
    check_attaches(kv)


def test_what_is_refused_with_parts_alone_works_without_them(kv):
    model = network()
    attach(model, [sgd(model), sgd(model)], kv=kv).detach()
    masked, text = overlapped("buffer"), "the buffer 'mask' has strides .*clone.*buffers='each'"
    fails(kv, Unsupported, text, lambda: attach(masked, kv=kv))
    attach(masked, kv=kv, buffers="each").detach()
    check_attaches(kv)


class Wrapper(optim.Optimizer):
    """As Accelerate's: it has an optimizer, and has not called what makes it one itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_wrapped_optimizer(kv, update):
    model = network()
    wrapped = Wrapper(Wrapper(sgd(model)))
    attach(model, wrapped, kv=kv, update=update)
    train(model, wrapped, range(2), kv)
    check_trains(kv, model, wrapped.optimizer.optimizer)
    fails(kv, TypeError, "a Wrapper, .* if it wraps one, pass that", lambda: attach(network(), Wrapper(None), kv=kv))


def test_a_store_that_updates_or_compresses(kv):
    updating, compressing = ("set_optimizer", "sgd"), ("set_gradient_compression", "fp16")
    for name, verb, *options in (("dist_sync", *updating), ("dist_sync", *compressing), ("dist_async", "barrier")):
        with mpikv.create(name, comm=kv.comm, timeout=5) as other:
            getattr(other, verb)(*options)
            fails(kv, ConfigError, "has an updater or compresses", lambda other=other: attach(network(), kv=other))
    check_attaches(kv)


# --- What backward refuses


class Lookup(nn.Module):
    """An embedding whose gradient is sparse when that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, sparse: bool) -> Any:
        return self.head(functional.embedding(torch.tensor([1, 3]), self.table.weight, sparse=sparse)).sum()


@pytest.mark.parametrize("passes", [0, 1], ids=["first-pass", "second-pass"])
@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_sparse_gradient(kv, update, passes, bucket_bytes):
    model, optimizer, _ = attached_pair(kv, model=Lookup(), update=update, bucket_bytes=bucket_bytes)
    for _ in range(passes):
        model(sparse=False).backward()
        optimizer.step()
    optimizer.zero_grad()
    fails(kv, Unsupported, "the gradient of 'table.weight' is sparse", model(sparse=True).backward)
    optimizer.zero_grad()
    if kv.size > 1:
        last_fails(kv, Unsupported, "is sparse", model(sparse=is_last(kv)).backward)
    optimizer.zero_grad()
    model(sparse=False).backward()
    assert_close(model.table.weight.grad[1], model.head.weight[0].detach(), 1e-6)
    optimizer.step()


@pytest.mark.parametrize("passes", [0, 1], ids=["first-pass", "second-pass"])
@pytest.mark.parametrize("zero", [True, False], ids=["none", "kept"])
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=SEVERAL)], ids=["all", "last"])
def test_a_model_that_changed_its_dtype(kv, update, passes, zero, alone):
    model, optimizer, _ = attached_pair(kv, update=update, steps=passes)
    if zero:
        optimizer.zero_grad()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if is_last(kv) or not alone:
        model.float()
    pattern = r"'[02].(bias|weight)' is torch.float32\[.* on cpu and was torch.float64"
    backward = loss_of(model, 0, kv).backward
    if alone:
        last_fails(kv, Unsupported, pattern, backward)
    else:
        fails(kv, Unsupported, pattern, backward)
    optimizer.zero_grad()
    model.double().load_state_dict(saved)
    check_trains(kv, model, optimizer)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("passes", [0, 1], ids=["first-pass", "second-pass"])
def test_reentrant_checkpointing(kv, passes):
    from torch.utils.checkpoint import checkpoint_sequential

    model, optimizer, _ = attached_pair(kv, bucket_bytes=1, steps=passes)
    inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)

    def backward(use_reentrant: bool) -> None:
        checkpoint_sequential(model, 2, inputs, use_reentrant=use_reentrant).sum().backward()

    fails(kv, Unsupported, "use_reentrant=False", lambda: backward(True))
    optimizer.zero_grad()
    backward(use_reentrant=False)
    optimizer.step()
    check_trains(kv, model, optimizer)


def test_a_gradient_with_a_graph(kv):
    model, optimizer, _ = attached_pair(kv)
    with pytest.warns(UserWarning, match="create_graph"):
        fails(kv, Unsupported, "create_graph=True", lambda: loss_of(model, 0, kv).backward(create_graph=True))
    check_trains(kv, model, optimizer)


def clamped(parameter: Any) -> None:
    parameter.grad = parameter.grad.clamp(-1, 1)


def clamped_in_place(parameter: Any) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def taken(parameter: Any) -> None:
    parameter.grad = None


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("passes", [0, 1], ids=["first-pass", "second-pass"])
@pytest.mark.parametrize("hook", [clamped, clamped_in_place, taken])
def test_a_hook_that_changes_a_gradient_after_it_was_taken(kv, update, passes, hook):
    model, optimizer, _ = attached_pair(kv, update=update, bucket_bytes=1, steps=passes)
    handle = model[0].weight.register_post_accumulate_grad_hook(hook)
    optimizer.zero_grad()
    fails(kv, Unsupported, "a hook that was registered after attach", lambda: loss_of(model, 0, kv).backward())
    handle.remove()
    check_trains(kv, model, optimizer)


def test_a_closure_whose_gradients_stay_on_their_rank(kv, update):
    model, optimizer, attached = attached_pair(kv, update=update)

    def closure() -> Any:
        with attached.no_sync():
            loss_of(model, 0, kv).backward()

    fails(kv, ConfigError, r"no_sync\(\)", lambda: optimizer.step(closure))
    check_trains(kv, model, optimizer)


def test_a_closure_with_a_layer_that_was_not_added(kv, update):
    model, optimizer, _ = attached_pair(kv, update=update)
    model.append(nn.Linear(3, 3, dtype=torch.float64))
    optimizer.add_param_group({"params": model[-1].parameters()})
    fails(kv, ConfigError, r"attached\.add", lambda: optimizer.step(lambda: loss_of(model, 0, kv).backward()))


def test_shards_of_weights_in_another_order(kv):
    model, optimizer, _ = attached_pair(kv, model=chain(nn.Conv2d(4, 6, 3), nn.Flatten()), update="store")

    def step() -> None:
        model(torch.ones(1, 4, 3, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()

    step()
    model.to(memory_format=torch.channels_last)
    fails(kv, Unsupported, "memory_format", step)


def test_compression_of_doubles(kv, update):
    model = network()
    fails(kv, Unsupported, "'0.weight' is torch.float64", lambda: attach(model, kv=kv, compression="bf16"))
    attached = attach(model.float(), kv=kv, compression="bf16")
    late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    fails(kv, Unsupported, "'late' is torch.float64", lambda: attached.add("late", late))


def test_a_scaler_whose_gradients_overflow_in_a_codec(kv, update):
    singles = network(dtype=torch.float32)
    model, optimizer, _ = attached_pair(kv, steps=2, model=singles, update=update, compression="bf16")
    optimizer.zero_grad()
    with pytest.raises((NotFinite, PeerFailed), match="infinite"):
        (loss_of(model, 2, kv) * (float("inf") if is_last(kv) else 1.0)).backward()
    train(model, optimizer, range(2), kv)
    assert_equal_over_ranks(kv, *model.parameters())


def grown(model: Any) -> None:
    model[1].seen = torch.ones(5)


def removed(model: Any) -> None:
    model[1].seen = None


def with_a_buffer() -> Any:
    model = network()
    model[1].register_buffer("seen", torch.ones(2), persistent=False)
    return model


@pytest.mark.parametrize("change", [grown, removed])
@pytest.mark.parametrize("passes", [0, 2], ids=["first-pass", "later-pass"])
def test_a_buffer_that_changed_its_length(kv, update, change, passes):
    model, optimizer, _ = attached_pair(kv, steps=passes, model=with_a_buffer(), update=update)
    before = model[1].seen
    change(model)
    optimizer.zero_grad()
    pattern = r"the buffer '1.seen' has [05] elements, and had 2 .*buffers='each'"
    fails(kv, Unsupported, pattern, lambda: loss_of(model, 0, kv).backward())
    if not is_last(kv):
        model[1].seen = before
    if kv.size > 1:
        optimizer.zero_grad()
        last_fails(kv, Unsupported, "the buffer '1.seen'", lambda: loss_of(model, 0, kv).backward())
    model[1].seen = before
    check_trains(kv, model, optimizer, with_a_buffer)


# --- Ranks that are not in step


@SEVERAL
@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("passes", [0, 2], ids=["first-pass", "later-pass"])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize(("text", "order"), [("optimizer.step", 1), ("barrier", 1), ("torch1/", 1), ("torch1/", -1)])
def test_a_rank_that_makes_another_call_than_backward(kv, update, passes, bucket_bytes, text, order, caplog):
    model, optimizer, _ = attached_pair(kv, update=update, bucket_bytes=bucket_bytes, steps=passes)
    second, its_optimizer, _ = attached_pair(kv)
    calls = {"barrier": kv.barrier, "optimizer.step": optimizer.step, "torch1/": loss_of(second, 0, kv).backward}
    assert text in differ(kv, calls[text], lambda: loss_of(model, 0, kv).backward())
    assert "has failed" not in caplog.text  # backward waits for its calls
    for each in [(model, optimizer), (second, its_optimizer)][::order]:
        check_trains(kv, *each)


@SEVERAL
@pytest.mark.usefixtures("overlapping")
def test_a_call_without_waiting_that_fails_as_backward_begins(kv):
    model, optimizer, _ = attached_pair(kv, steps=1)
    if is_last(kv):
        time.sleep(0.2)  # the others' backward begins before the call has failed
    work = kv.pushpull("missing", np.ones(1), wait=False)
    fails(kv, KeyNotInitialized, "missing", work.wait if is_last(kv) else loss_of(model, 0, kv).backward)
    train(model, optimizer, range(2), kv)
    check_trains(kv, model, optimizer)


@SEVERAL
def test_ranks_that_met_in_join_by_steps_of_two_models(kv):
    model, optimizer, attached = attached_pair(kv)
    second, its_optimizer, _ = attached_pair(kv)
    loss_of(second, 0, kv).backward()
    with attached.join():
        last_fails(kv, ValueError, "planted", lambda: kv.raise_on_all_ranks(ValueError("planted")), kv.barrier)
        (optimizer if is_last(kv) else its_optimizer).step()
    check_trains(kv, model, optimizer)
    end_all_the_same(kv)


@pytest.mark.usefixtures("overlapping")
def test_a_pass_whose_keys_were_deleted(kv):
    model, optimizer, attached = attached_pair(kv, bucket_bytes=1, steps=1)
    kv.delete([f"torch0/{name}" for name, _ in model.named_parameters()])
    fails(kv, KeyNotInitialized, "torch0/", lambda: loss_of(model, 1, kv).backward())
    fails(kv, ConfigError, "the last backward has failed", optimizer.step)
    attached.detach()
    check_attaches(kv)


@SEVERAL
def test_a_rank_that_leaves_out_a_step(kv):
    model, optimizer, _ = attached_pair(kv, update="store", steps=2)
    loss_of(model, 2, kv).backward()
    differ(kv, lambda: loss_of(model, 3, kv).backward(), optimizer.step)
    check_trains(kv, model, optimizer)


@SEVERAL
def test_a_rank_that_has_a_batch_less(comm):
    with pytest.raises((RankMismatch, PeerFailed)), mpikv.create(comm=comm, timeout=3) as kv:
        attached_pair(kv, steps=2 if is_last(kv) else 3)


def test_a_step_whose_gradients_stayed_on_one_rank(kv, update):
    model, optimizer, attached = attached_pair(kv, update=update, steps=2)
    if is_last(kv):
        with attached.no_sync():
            loss_of(model, 2, kv).backward()
    last_fails(kv, ConfigError, "no_sync", optimizer.step, lambda: loss_of(model, 2, kv).backward())
    check_trains(kv, model, optimizer)


class Unable(torch.autograd.Function):
    """The identity, whose backward raises when it is told to."""

    @staticmethod
    def forward(context: Any, value: Any, does: bool) -> Any:
        context.does = does
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        if context.does:
            raise ArithmeticError("planted")
        return gradient, None


def break_backward(model: Any, raises: bool) -> None:
    hidden = model[1](model[0](torch.ones(2, 4, dtype=torch.float64)))
    model[2](Unable.apply(hidden, raises)).sum().backward()


@SEVERAL
@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_an_exception_in_backward_of_one_rank_that_goes_on(kv, update, passes, bucket_bytes):
    model, optimizer, _ = attached_pair(kv, update=update, bucket_bytes=bucket_bytes, steps=passes)
    optimizer.zero_grad()
    pattern = f"^planted$|rank {kv.size - 1} raised .*: a backward of this rank has ended with an exception"
    last_fails(kv, ArithmeticError, pattern, lambda: break_backward(model, is_last(kv)))
    train(model, optimizer, range(20, 22), kv)
    assert_equal_over_ranks(kv, *model.parameters())
    check_trains(kv, model, optimizer)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.usefixtures("overlapping")
def test_a_step_after_a_backward_that_failed_on_every_rank(kv, update, bucket_bytes):
    model, optimizer, _ = attached_pair(kv, update=update, bucket_bytes=bucket_bytes, steps=2)
    optimizer.zero_grad()
    fails(kv, ArithmeticError, "planted", lambda: break_backward(model, True))
    fails(kv, ConfigError, "the last backward has failed", optimizer.step)
    check_trains(kv, model, optimizer)


@pytest.mark.usefixtures("overlapping")
def test_zeros_in_gradients_whose_sums_are_on_their_way(kv, update):
    model, optimizer, _ = attached_pair(kv, update=update, bucket_bytes=1, steps=2)
    optimizer.zero_grad()
    fails(kv, ArithmeticError, "planted", lambda: break_backward(model, True))
    optimizer.zero_grad(set_to_none=False)
    fails(kv, Unsupported, "sums of the last backward, which did not end", lambda: loss_of(model, 0, kv).backward())
    check_trains(kv, model, optimizer)


@SEVERAL
def test_an_exception_in_backward_of_one_rank_that_ends(comm):
    kind = ArithmeticError if comm.rank == comm.size - 1 else Stalled
    with pytest.raises(kind), mpikv.create(comm=comm, timeout=3) as kv:
        break_backward(attached_pair(kv, steps=2)[0], is_last(kv))


@SEVERAL
def test_an_exception_in_backward_that_is_handled_by_detach(kv, update):
    model, _, attached = attached_pair(kv, update=update, steps=2)
    try:
        break_backward(model, is_last(kv))
    except (ArithmeticError, PeerFailed) as error:
        told = str(error)
        attached.detach()
    of_others = r"rank \d raised .* ended with an exception; it handles ArithmeticError: planted"
    assert re.search("^planted$" if is_last(kv) else of_others, told), told


# --- What add and join refuse


def test_add_refuses_what_is_there(kv):
    model, optimizer, attached = attached_pair(kv)
    second, one = network(1), nn.Parameter(torch.ones(1))
    for each in (attached, attach(second, kv=kv)):
        fails(kv, ConfigError, "'0.weight' is attached already", partial(each.add, "0.weight", one))
    fails(kv, ConfigError, "'new' is attached already", lambda: attached.add("new", model[0].weight))
    if kv.size > 1:
        with pytest.raises(RankMismatch):
            attached.add("new", nn.Parameter(torch.ones(2 + is_last(kv))))
    check_trains(kv, model, optimizer)


def test_a_parameter_that_the_optimizer_alone_was_given(kv):
    _model, optimizer, _ = attached_pair(kv, update="store", steps=1)
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(2)
    fails(kv, ConfigError, r"shape \(2,\), which the model.*attached.add\(name, parameter\)", optimizer.step)


def test_join_needs_weights_that_every_rank_updates(kv):
    model, optimizer, attached = attached_pair(kv, update="store")
    fails(kv, Unsupported, "join needs update='local'", attached.join().__enter__)
    check_trains(kv, model, optimizer)


# --- Steps that ranks would make each by itself


def test_gradients_that_were_never_exchanged(kv, update):
    model, optimizer, _ = attached_pair(kv, update=update)
    own = torch.autograd.grad(loss_of(model, 0, kv), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        parameter.grad = gradient
    fails(kv, ConfigError, "was not exchanged; compute it by backward", optimizer.step)
    check_trains(kv, model, optimizer)


def test_a_layer_that_the_optimizer_alone_was_given(kv):
    model, optimizer, _ = attached_pair(kv, partial(sgd, momentum=0), steps=2)
    model[0] = nn.Linear(4, 5).double()
    optimizer.add_param_group({"params": model[0].parameters()})
    loss_of(model, 2, kv).backward()
    fails(kv, ConfigError, "the gradient of '0.weight' was not exchanged; .* or call attached.add", optimizer.step)


def test_a_frozen_parameter_is_not_added(kv):
    attached = attach(network(), kv=kv)
    fails(kv, ConfigError, "'late' is frozen", lambda: attached.add("late", nn.Parameter(torch.ones(2), False)))


def test_an_optimizer_in_backward(kv, update):
    model, optimizer, _ = attached_pair(kv, update=update, steps=2)
    handle = next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    fails(kv, Unsupported, "in a hook of a backward", lambda: loss_of(model, 2, kv).backward())
    handle.remove()
    check_trains(kv, model, optimizer)


def test_a_hook_that_takes_the_gradient_away(kv):
    model = network()
    next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    attach(model, kv=kv)
    fails(kv, Unsupported, "another hook removed the gradient of '0.weight'", lambda: loss_of(model, 0, kv).backward())


@SEVERAL
def test_a_rank_that_leaves_out_a_step_on_all_weights(kv):
    model, optimizer, _ = attached_pair(kv, steps=2)
    loss_of(model, 2, kv).backward()
    if not is_last(kv):
        optimizer.step()
    optimizer.zero_grad()
    text = differ(kv, loss_of(model, 3, kv).backward, loss_of(model, 3, kv).backward)
    assert re.search("left out a backward or a step.*pass 4, 3 steps", text)
    end_all_the_same(kv)


@SEVERAL
@pytest.mark.parametrize("form", [float, np.float32, np.float64, torch.tensor])
def test_ranks_with_other_learning_rates(kv, update, form):
    model, optimizer, _ = attached_pair(kv, update=update, steps=2)
    optimizer.param_groups[0]["lr"] = form(0.2 if is_last(kv) else 0.1)
    loss_of(model, 2, kv).backward()
    optimizer.step()
    optimizer.zero_grad()
    text = differ(kv, loss_of(model, 3, kv).backward, loss_of(model, 3, kv).backward)
    assert re.search(r"other learning rates.*lr 0\.1\d* against SGD, group 0: lr 0\.2", text)
    end_all_the_same(kv)


def test_a_store_of_its_own_ends_where_attach_fails(comm):
    """Else ranks would wait for each other at the end of the program."""
    with pytest.raises((TypeError, PeerFailed)):
        attach("no model" if comm is None or comm.rank == 0 else network())
    attached = attach(network())
    attached.detach()
    attached.detach()
