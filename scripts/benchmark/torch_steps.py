"""Training steps of PyTorch models: the cost of exchanging gradients, beside DDP over gloo.

The timing includes DDP's strength in a real step: it hides the exchange behind the backward pass.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mpikv.cli.bench.cases import Comparison, Factory, Group, unless
from mpikv.cli.bench.keysets import KeySet
from mpikv.protocols import Array

from .options import Options
from .torch_peer import close_group, gloo_problem, open_group

_ROUNDS, _QUICK_ROUNDS = 21, 2

# Per rank: images; sentences, and words per sentence.
_IMAGES, _SENTENCES, _WORDS = 8, 4, 64


def training_steps(comm: Any, options: Options, name: str) -> Group:
    """Return the group with that name."""
    torch_is_missing = find_spec("torch") is None
    title, build = _MODELS[name]
    shapes = () if torch_is_missing else tuple(tuple(one.shape) for one in build(options.quick)[0].parameters())
    keys = KeySet(title, shapes)
    cases, comparisons = _step_cases(comm, options, title, build)
    return Group(
        name,
        f"{title} ({keys.nbytes / 1e6:.3g} MB), a training step",
        keys,
        None,
        options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        {case: unless(lambda: gloo_problem(comm), factory) for case, factory in cases.items()},
        comparisons,
        # Per rank: weights, gradients and momentum of each case, and intermediate values.
        needed_bytes=keys.nbytes * comm.size * 5 * len(cases),
    )


Model = Callable[[bool], "tuple[Any, tuple[Any, ...]]"]
"""Makes a model and a batch for it; True makes small ones."""


def _step_cases(comm: Any, options: Options, title: str, build: Model) -> tuple[dict[str, Factory], list[Comparison]]:
    def case(attach: Callable[[Any, Any], Any]) -> Factory:
        return lambda: partial(_TrainingStep, build, options.quick, attach)

    cases = {
        "alone": case(lambda model, optimizer: None),
        "attach": case(_attach("local")),
        "attach, store": case(_attach("store")),
        "DDP, silent": case(partial(_DDP, comm, "gloo", silent=True)),
        "DDP, mpikv": case(partial(_DDP, comm, "mpikv")),
        "torch DDP": case(partial(_DDP, comm, "gloo")),
    }
    bound = 0.5 if comm.size == 2 and not options.quick else None
    goal = f"{title}: added to a step by attach / by PyTorch DDP, gloo"
    backend = f"{title}: added to a step by DDP over mpikv / over gloo"
    communication = f"{title}: added by communication alone, over mpikv / over gloo"
    return cases, [
        Comparison(goal, "attach", "torch DDP", bound, beyond="alone"),
        Comparison(backend, "DDP, mpikv", "torch DDP", beyond="alone"),
        Comparison(communication, "DDP, mpikv", "torch DDP", bound, beyond="DDP, silent"),
    ]


def _attach(update: str) -> Callable[[Any, Any], Any]:
    return lambda model, optimizer: import_module("mpikv.torch").attach(model, optimizer, update=update)


class _DDP:
    """A model in PyTorch's DistributedDataParallel over a library. ``silent``: ranks send nothing, and what stays is
    DDP's own work, as the copies of gradients to its buckets and back.
    """

    def __init__(self, comm: Any, library: str, model: Any, optimizer: Any, silent: bool = False) -> None:
        self._group = open_group(comm, library)
        wrap = import_module("torch.nn.parallel").DistributedDataParallel
        self.model = wrap(model, process_group=self._group, broadcast_buffers=not silent)
        if silent:
            hooks = import_module("torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks")
            self.model.register_comm_hook(None, hooks.noop_hook)

    def detach(self) -> None:
        close_group(self._group)


class _TrainingStep:
    """Forward, backward and the step of SGD with momentum."""

    exact = None

    def __init__(self, build: Model, quick: bool, attach: Callable[[Any, Any], Any]) -> None:
        """Collective. Each rank uses one thread."""
        torch = import_module("torch")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model, self._batch = build(quick)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, momentum=0.9)
        self._attached = attach(self._model, self._optimizer)
        self._forward: Any = getattr(self._attached, "model", self._model)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._forward(*self._batch).square().mean().backward()
        self._optimizer.step()

    def results(self) -> list[Array]:
        return []

    def close(self) -> None:
        if self._attached is not None:
            self._attached.detach()


def _resnet18(quick: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return ResNet-18 for images of 32 x 32, and a batch."""
    torch = import_module("torch")
    nn = torch.nn
    narrow = 8 if quick else 1

    def block(inner: int, width: int, stride: int) -> Any:
        first = nn.Conv2d(inner, width, 3, stride, 1, bias=False)
        second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        body = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.BatchNorm2d(width))
        if stride == 1 and inner == width:
            return _residual(body, nn.Identity())
        return _residual(body, nn.Sequential(nn.Conv2d(inner, width, 1, stride, bias=False), nn.BatchNorm2d(width)))

    widths = [64 // narrow, 128 // narrow, 256 // narrow, 512 // narrow]
    layers = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for inner, width in zip([widths[0], *widths], widths, strict=False):
        layers += [block(inner, width, 1 if width == widths[0] else 2), block(width, width, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return model, (torch.randn(_IMAGES, 3, 32, 32),)


def _residual(body: Any, shortcut: Any) -> Any:
    torch = import_module("torch")

    class Residual(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shortcut = body, shortcut

        def forward(self, values: Any) -> Any:
            return torch.relu(self.body(values) + self.shortcut(values))

    return Residual()


def _bert(quick: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return six layers like BERT's, of half its width and with its whole vocabulary, and a batch."""
    torch = import_module("torch")
    nn = torch.nn
    width, words = (48, 500) if quick else (384, 30522)
    layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(words, width), encoder, nn.Linear(width, 2))
    return model, (torch.randint(0, words, (_SENTENCES, _WORDS)),)


_MODELS: dict[str, tuple[str, Model]] = {
    "resnet18": ("ResNet-18", _resnet18),
    "bert-small": ("BERT of half width, 6 layers", _bert),
}
