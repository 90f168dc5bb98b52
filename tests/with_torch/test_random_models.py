"""Small models of random parts, optimizers and settings: their weights on all ranks are those of one process
with the whole batch.
"""

import os
import random
from typing import Any

import pytest

import mpikv

from .training import ROWS, assert_close, attach, nn, optim, torch

pytestmark = pytest.mark.ranks(1, 2, 3)

MODELS = int(os.environ.get("RANDOM_MODELS", "20"))
STEPS, LENGTH, WORDS = 10, 5, 7
AT_ONCE = 5  # models of a test

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.5, "dampening": 0.2, "maximize": False}),
    ("Adam", {"eps": 0.01}),
    ("Adam", {"eps": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    ("AdamW", {"eps": 0.01}),
    ("RMSprop", {"eps": 0.01, "momentum": 0.5}),
    ("RMSprop", {"eps": 0.01, "centered": True}),
    ("Adagrad", {"eps": 0.01, "lr_decay": 0.1}),
    ("NAdam", {"eps": 0.01}),
    ("RAdam", {"eps": 0.01}),
    ("Adamax", {"eps": 0.01}),
    ("Adadelta", {"eps": 0.01}),
    ("ASGD", {}),
]
"""``eps``, as that of norms, is far above the rounding errors of gradients near zero, which it would not enlarge."""


class Model(nn.Module):
    """Words, some layers, and numbers for each; with parts that are shared, frozen or not used."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        torch.manual_seed(draw.randrange(1000))
        width = draw.choice([3, 4, 6])
        self.table = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList()
        for _ in range(draw.randint(1, 4)):
            layer, width = self.random_layer(draw, width)
            self.layers.append(layer)
        tied = width == self.table.embedding_dim and draw.random() < 0.5
        self.head = nn.Linear(width, WORDS, bias=draw.random() < 0.5)
        if tied:
            self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        if draw.random() < 0.5:
            self.unused = nn.Linear(3, draw.choice([1, 4]))
        self.double()
        for parameter in self.layers.parameters():
            parameter.requires_grad = draw.random() < 0.8

    @staticmethod
    def random_layer(draw: random.Random, width: int) -> tuple[Any, int]:
        wider = draw.choice([3, 4, 6])
        kind = draw.choice(["linear", "convolution", "norm", "repeated"])
        if kind == "linear":
            return nn.Sequential(nn.Linear(width, wider), nn.Tanh()), wider
        if kind == "convolution":
            return Convolution(width, wider), wider
        if kind == "norm":
            return nn.LayerNorm(width, eps=0.1), width
        shared = nn.Linear(width, width)
        return nn.Sequential(shared, nn.GELU(), shared), width

    def forward(self, words: Any) -> Any:
        hidden = self.table(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.scale * self.head(hidden)


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(inputs, outputs, 3, padding=1)

    def forward(self, hidden: Any) -> Any:
        return torch.tanh(self.convolve(hidden.transpose(1, 2))).transpose(1, 2)


def groups(draw: random.Random, model: Any) -> list[dict[str, Any]]:
    """Divide the parameters into groups with rates of their own."""
    parameters = list(model.parameters())
    draw.shuffle(parameters)
    count = min(draw.randint(1, 3), len(parameters))
    return [{"params": parameters[index::count], "lr": draw.choice([0.01, 0.02, 0.05])} for index in range(count)]


def schedule_of(kind: str, optimizer: Any) -> Any:
    options = {"StepLR": {"step_size": 3}, "ExponentialLR": {"gamma": 0.9}, "CosineAnnealingLR": {"T_max": 12}}
    cycles = not {"betas", "momentum"}.isdisjoint(optimizer.defaults)
    options["OneCycleLR"] = {"max_lr": 0.05, "total_steps": 12, "cycle_momentum": cycles}
    return getattr(optim.lr_scheduler, kind)(optimizer, **options[kind]) if kind in options else None


def run(seed: int, kv: Any = None, update: str = "local") -> Any:
    """Return the model of a seed after its steps; the settings of ranks are drawn last, as one process has none."""
    draw = random.Random(seed)
    model = Model(draw)
    name, options = OPTIMIZERS[seed % len(OPTIMIZERS)]
    optimizer = getattr(optim, name)(groups(draw, model), **options)
    kind = draw.choice(["StepLR", "ExponentialLR", "CosineAnnealingLR", "OneCycleLR", "none"])
    schedule = schedule_of(kind, optimizer) if draw.random() < 0.5 else None  # else it is made after attach
    passes, clips, to_none = draw.choice([1, 1, 2]), draw.random() < 0.3, draw.random() < 0.5
    attached = None
    if kv is not None:
        size = draw.choice([1, 50, 200, 1000, 1 << 20])
        attached = attach(model, optimizer, kv=kv, update=update, bucket_bytes=size)
    schedule = schedule or schedule_of(kind, optimizer)
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        for _ in range(passes):
            words, targets = torch.randint(WORDS, (ROWS, LENGTH)), torch.randn(ROWS, LENGTH, WORDS, dtype=torch.float64)
            if kv is not None:
                words, targets = words[kv.rank :: kv.size], targets[kv.rank :: kv.size]
            (model(words) - targets).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    if attached is not None:
        attached.detach()
    return model


@pytest.mark.deadline(120)
@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("first", range(0, MODELS, AT_ONCE))
def test_models_are_those_of_one_process(comm, first):
    with mpikv.create(comm=comm, timeout=10) as kv:
        for seed in range(first, first + AT_ONCE):
            alone = run(seed)
            for update in ("local", "store"):
                assert_close(run(seed, kv, update), alone)
