"""Every argument of MXNet 2's optimizers and schedulers: its default there, and what it is here.

The tables were written from MXNet's documentation, not from the code here, which is held against them.
"""

import pytest

from mpikv import ConfigError, optimizers, schedules

LEFT_OUT = object()
"""In place of a default: the argument is refused, and the message says what to write instead."""

BASE = {
    "rescale_grad": 1.0,
    "wd": 0.0,
    "clip_gradient": None,
    "lr_scheduler": None,
    "begin_num_update": 0,
    "multi_precision": False,
    "param_dict": LEFT_OUT,
    "param_idx2name": LEFT_OUT,
    "aggregate_num": LEFT_OUT,
    "use_fused_step": LEFT_OUT,
    "sym": LEFT_OUT,
}
ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
ADAM_OF_LAYERS = {**ADAM, "epsilon": 1e-6}
BOUNDS = {"lower_bound": None, "upper_bound": None, "bias_correction": True}

OPTIMIZERS = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.0, "lazy_update": LEFT_OUT},
    "Signum": {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.0},
    "AdaGrad": {"learning_rate": 0.01, "epsilon": 1e-6},
    "RMSProp": {
        "learning_rate": 0.001,
        "rho": 0.9,
        "momentum": 0.9,
        "epsilon": 1e-8,
        "centered": False,
        "clip_weights": None,
        "gamma1": LEFT_OUT,
        "gamma2": LEFT_OUT,
    },
    "AdaDelta": {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6},
    "Adam": {**ADAM, "lazy_update": LEFT_OUT},
    "AdamW": {**ADAM_OF_LAYERS, "correct_bias": True},
    "Nadam": {**ADAM, "schedule_decay": 0.004},
    "Adamax": {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999},
    "Ftrl": {"learning_rate": 0.1, "lamda1": 0.01, "beta": 1.0, "lazy_update": LEFT_OUT},
    "LARS": {"learning_rate": 0.1, "momentum": 0.0, "eta": 0.001, "epsilon": 1e-8, "lazy_update": LEFT_OUT},
    "LAMB": {**ADAM_OF_LAYERS, **BOUNDS},
    "Test": {"learning_rate": 0.01},
}

OTHERS = {
    "NAG": "write 'sgd' with nesterov=True, momentum=0.9",
    "LBSGD": "write 'lars'",
    "ccSGD": "write 'sgd'",
    "SGLD": "mpikv lacks this optimizer of MXNet",
    "DCASGD": "mpikv lacks this optimizer of MXNet",
    "FTML": "mpikv lacks this optimizer of MXNet",
    "LANS": "mpikv lacks this optimizer of MXNet",
    "AdaBelief": "mpikv lacks this optimizer of MXNet",
    "GroupAdaGrad": "mpikv lacks this optimizer of MXNet",
}

WARMUP = {"base_lr": 0.01, "warmup_steps": 0, "warmup_begin_lr": 0, "warmup_mode": "linear"}
SCHEDULERS = {
    "LRScheduler": (schedules.Schedule, (), {}),
    "FactorScheduler": (schedules.Factor, (5,), {"factor": 1, "stop_factor_lr": 1e-8}),
    "MultiFactorScheduler": (schedules.MultiFactor, ([5, 7],), {"factor": 1}),
    "PolyScheduler": (schedules.Polynomial, (5,), {"pwr": 2, "final_lr": 0}),
    "CosineScheduler": (schedules.Cosine, (5,), {"final_lr": 0}),
}


@pytest.mark.feature("optimizer-names")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_of_optimizers(name):
    default = optimizers.create(name)
    for argument, value in {**BASE, **OPTIMIZERS[name]}.items():
        if value is LEFT_OUT:
            with pytest.raises(
                ConfigError, match=f"unknown option of {type(default).__name__} '{argument}' .*; (leave|did)"
            ):
                optimizers.create(name, **{argument: False})
        else:
            assert getattr(default, argument) == value
            given = optimizers.create(name, **{argument: value})
            assert given.settings() == default.settings()


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_are_not_here(name):
    with pytest.raises(ConfigError, match=f"unknown optimizer '{name}' .*; {OTHERS[name]}"):
        optimizers.create(name)


@pytest.mark.feature("optimizer-names")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_arguments_of_schedulers(name):
    kind, positional, own = SCHEDULERS[name]
    default = kind(*positional)
    for argument, value in {**WARMUP, **own}.items():
        assert getattr(default, argument) == value
        assert kind(*positional, **{argument: value}) == default
