# /// script
# requires-python = ">=3.10"
# dependencies = ["mpikv", "numpy", "scikit-learn"]
#
# [tool.uv.sources]
# mpikv = { path = "..", editable = true }
# ///
"""Train a small network on scikit-learn's handwritten digits, on any number of ranks.

    python scripts/train_digits.py                        one rank, no MPI library needed
    mpikv run -n 4 scripts/train_digits.py                four ranks, the same accuracy
    mpikv run -n 4 scripts/train_digits.py --trainer      through mpikv.Trainer, the same weights
    mpikv run -n 4 scripts/train_digits.py --verify       the weights beside those of one process, every placement
    mpikv run -n 4 scripts/train_digits.py --kvstore dist_async --staleness 4       no rank waits for a batch's sum
    mpikv run -n 4 scripts/train_digits.py --dtype float32 --compression 2bit       gradients of two bits
    mpikv run -n 4 scripts/train_digits.py --device gpu   on a GPU for each rank, which sum by NCCL

What to copy is `train`: every rank takes its part of every batch, divides its gradients by the size of the whole batch,
and gives them to `pushpull`, which sums them, lets the owner of each weight update it, and brings the new weights back.
So the sum is the gradient of the whole batch on any number of ranks, and the network learns the same.

The default is float64 because rounding depends on the order of a sum, hence on the number of ranks, and training
multiplies it: in float32 the weights may part in the third digit, and a doubtful image may change sides.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpikv

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]

OPTIMIZERS: dict[str, dict[str, float]] = {
    "adam": {"learning_rate": 4e-3},
    "sgd": {"learning_rate": 0.2, "momentum": 0.9},
}
# A threshold is of the size of one rank's gradients; so is what a push can change of one element.
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "2bit": {"threshold": 5e-3},
    "1bit": {"threshold": 0.0},
    "fp16": {},
    "bf16": {},
    "topk": {"ratio": 0.05},
    "lowrank": {"rank": 2},
}
# By what gradients are multiplied before they are compressed, and divided again by the optimizer: one bit is 1 or -1.
# That is much noise at once, which SGD averages and Adam takes for the size of the gradient: --optimizer sgd.
SCALES = {"1bit": 64.0}
PLACEMENTS = ("root", "sharded", "replicated")
MOST_DIFFERENCE = 1e-12


class Digits(NamedTuple):
    """Images as rows of 64 numbers in [0, 1], and the digits that they show."""

    images: Array
    labels: Array
    test_images: Array
    test_labels: Array


class Settings(NamedTuple):
    """What the result of a training depends on."""

    optimizer: str
    dtype: str
    epochs: int
    batch: int
    seed: int
    scale: float = 1.0


def load(dtype: str, seed: int) -> Digits:
    """Return the 1,797 digits, a random fifth of them for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        sys.exit(f"train_digits.py needs scikit-learn ({error}):  pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(dtype)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = np.split(order, [len(order) // 5])
    return Digits(images[train], labels[train], images[test], labels[test])


def initial(dtype: str, seed: int) -> Arrays:
    """Return the weights of a new network of 64, 128 and 10 units (He et al. 2015)."""
    random = np.random.default_rng(seed)
    return {
        "hidden/weight": (random.standard_normal((64, 128)) * np.sqrt(2 / 64)).astype(dtype),
        "hidden/bias": np.zeros(128, dtype),
        "output/weight": (random.standard_normal((128, 10)) * np.sqrt(2 / 128)).astype(dtype),
        "output/bias": np.zeros(10, dtype),
    }


def forward(params: Arrays, images: Array) -> tuple[Array, Array]:
    """Return the activity of the hidden units, and the logarithm of each digit's probability."""
    hidden = np.maximum(images @ params["hidden/weight"] + params["hidden/bias"], 0)
    scores = hidden @ params["output/weight"] + params["output/bias"]
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def gradients(params: Arrays, images: Array, labels: Array, batch_size: float) -> Arrays:
    """Return these images' part of the gradient of a batch's mean loss; that of no images is zero."""
    hidden, scores = forward(params, images)
    error = np.exp(scores)
    error[np.arange(len(labels), like=labels), labels] -= 1
    error /= batch_size
    back = (error @ params["output/weight"].T) * (hidden > 0)
    return {
        "hidden/weight": images.T @ back,
        "hidden/bias": back.sum(axis=0),
        "output/weight": hidden.T @ error,
        "output/bias": error.sum(axis=0),
    }


def measure(params: Arrays, images: Array, labels: Array) -> tuple[float, float]:
    """Return the mean loss and the share of right answers."""
    _, scores = forward(params, images)
    loss = -scores[np.arange(len(labels)), labels].mean()
    return float(loss), float((scores.argmax(axis=1) == labels).mean())


def epochs(count: int, settings: Settings) -> Iterator[tuple[float, list[Array]]]:
    """Yield each epoch's learning rate, which falls to zero, and its batches, as indices of images.

    Both are the same on every rank, because the seed is.
    """
    random = np.random.default_rng(settings.seed)
    for epoch in range(settings.epochs):
        rate = OPTIMIZERS[settings.optimizer]["learning_rate"] * (1 - epoch / settings.epochs)
        order = random.permutation(count)
        yield rate, [order[start : start + settings.batch] for start in range(0, count, settings.batch)]


def train(
    kv: mpikv.KVStore,
    digits: Digits,
    settings: Settings,
    report: Callable[[Arrays], None],
    onto: Callable[[Array], Array] = np.asarray,
) -> Arrays:
    """Train on all ranks; return the weights, which are the same on each. ``onto`` brings arrays to their device."""
    params = {name: onto(value) for name, value in initial(settings.dtype, settings.seed).items()}
    kv.broadcast(params)  # every rank starts from the root's weights
    kv.set_optimizer(settings.optimizer, **OPTIMIZERS[settings.optimizer], rescale_grad=1 / settings.scale)
    for rate, batches in epochs(len(digits.labels), settings):
        kv.set_learning_rate(rate)
        for batch in batches:
            part = batch[kv.rank :: kv.size]
            images, labels = onto(digits.images[part]), onto(digits.labels[part])
            grads = gradients(params, images, labels, len(batch) / settings.scale)
            kv.pushpull(grads, out=params)
        if kv.is_root:
            report(params)
    return params


def train_on_gpu(kv: mpikv.KVStore, digits: Digits, settings: Settings, report: Callable[[Arrays], None]) -> Arrays:
    """Train as `train` does, with arrays of CuPy on the store's GPU, which numpy's functions take as well."""
    import cupy

    def report_on_host(params: dict[str, Any]) -> None:
        report({name: value.get() for name, value in params.items()})

    return train(kv, digits, settings, report_on_host, cupy.asarray)


def train_with_trainer(
    kv: mpikv.KVStore, digits: Digits, settings: Settings, report: Callable[[Arrays], None]
) -> Arrays:
    """Train as `train` does, through a Trainer; return the weights, which are the same on each rank."""
    params = initial(settings.dtype, settings.seed)
    trainer = mpikv.Trainer(params, settings.optimizer, OPTIMIZERS[settings.optimizer], kv)
    trainer.start()  # every rank starts from the root's weights
    for rate, batches in epochs(len(digits.labels), settings):
        trainer.set_learning_rate(rate)
        for batch in batches:
            part = batch[kv.rank :: kv.size]
            trainer.set_grads(gradients(params, digits.images[part], digits.labels[part], len(batch)))
            trainer.step(1)  # the gradients have been divided by the batch size
        if kv.is_root:
            report(params)
    return params


def train_alone(digits: Digits, settings: Settings) -> Arrays:
    """Train in this process with numpy alone, by the papers' formulas: what the ranks are compared with."""
    params = initial(settings.dtype, settings.seed)
    first, second = ({name: np.zeros_like(value) for name, value in params.items()} for _ in range(2))
    count = 0
    for rate, batches in epochs(len(digits.labels), settings):
        for batch in batches:
            count += 1
            grads = gradients(params, digits.images[batch], digits.labels[batch], len(batch))
            for name, grad in grads.items():
                if settings.optimizer == "sgd":
                    first[name] = 0.9 * first[name] - rate * grad
                    params[name] += first[name]
                else:
                    first[name] = 0.9 * first[name] + 0.1 * grad
                    second[name] = 0.999 * second[name] + 0.001 * grad**2
                    mean, variance = first[name] / (1 - 0.9**count), second[name] / (1 - 0.999**count)
                    params[name] -= rate * mean / (np.sqrt(variance) + 1e-8)
    return params


def verified(digits: Digits, settings: Settings, placement: str | None, is_root: bool) -> bool:
    """Train with every optimizer and placement, or those given; return whether all weights are those of one process.

    In float32 they are not (see above), and the differences are only shown.
    """
    optimizers = [settings.optimizer] if placement else sorted(OPTIMIZERS)
    if is_root:
        print(f"\noptimizer  placement   max weight difference from one process, {settings.dtype}", flush=True)
    worst = 0.0
    for optimizer in optimizers:
        settings = settings._replace(optimizer=optimizer)
        reference = train_alone(digits, settings) if is_root else {}
        for name in [placement] if placement else PLACEMENTS:
            difference = compare(digits, settings, name, reference)
            worst = max(worst, difference)
            if is_root:
                print(f"{optimizer:9}  {name:10}  {difference:.1e}", flush=True)
    equal = worst <= MOST_DIFFERENCE or settings.dtype != "float64"
    if is_root:
        print(f"largest {worst:.1e}{'' if equal else f', above {MOST_DIFFERENCE:.0e}: NOT equal'}\n", flush=True)
    return equal


def compare(digits: Digits, settings: Settings, placement: str, reference: Arrays) -> float:
    """Train on all ranks; return, on every rank, how far the root's weights are from its reference."""
    with mpikv.create(placement=placement) as kv:
        params = train(kv, digits, settings, lambda params: None)
        difference = np.zeros(1)
        if kv.is_root:
            difference[0] = max(np.abs(params[name] - reference[name]).max() for name in params)
        return float(kv.broadcast("difference", difference)[0])


class Reporter:
    """Shows the progress of a training, now and then in a line."""

    def __init__(self, digits: Digits, epochs: int) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self._digits, self._epochs = digits, epochs

    def __call__(self, params: Arrays) -> None:
        """Measure and show one epoch."""
        self.losses.append(measure(params, self._digits.images, self._digits.labels)[0])
        self.accuracies.append(measure(params, self._digits.test_images, self._digits.test_labels)[1])
        epoch = len(self.losses)
        if epoch % max(1, self._epochs // 5) == 0 or epoch == self._epochs:
            text = f"loss {self.losses[-1]:.4f}  test accuracy {self.accuracies[-1]:.4f}"
            print(f"epoch {epoch:2}  {text}", flush=True)


def positive(text: str) -> int:
    """Return the number above 0 that the text is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def count(text: str) -> int:
    """Return the number from 0 that the text is."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits, on any number of ranks.")
    add = parser.add_argument
    add("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="default: adam; sgd has momentum 0.9")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays are; gpu needs CuPy; default: cpu")
    add("--kvstore", help="default: dist_sync, or nccl on GPUs; dist_async updates when a gradient arrives")
    add("--staleness", type=count, help="of dist_async: how many batches a rank may be ahead; default: any number")
    add("--placement", choices=PLACEMENTS, help="where weights and optimizer state live; default: the store decides")
    add("--dtype", choices=("float32", "float64"), default="float64", help="default: float64")
    add("--compression", choices=tuple(COMPRESSIONS), help="how gradients are sent; needs --dtype float32")
    add("--epochs", type=positive, default=20, help="default: 20")
    add("--batch", type=positive, default=64, help="images per update, over all ranks; default: 64")
    add("--seed", type=int, default=0, help="default: 0")
    add("--trainer", action="store_true", help="train through mpikv.Trainer instead of pushpull")
    add(
        "--verify",
        action="store_true",
        help="train again with every optimizer and placement, or those given, and compare the weights with one process",
    )
    options = parser.parse_args()
    if options.compression and (options.dtype != "float32" or options.verify):
        parser.error("--compression needs --dtype float32, and no --verify: its weights are others")
    if options.kvstore == "dist_async" and (options.verify or options.trainer):
        parser.error("dist_async gives other weights at each run, in no step with a Trainer: no --verify, no --trainer")
    options.kvstore = options.kvstore or ("nccl" if options.device == "gpu" else "dist_sync")
    if options.device == "gpu" and (options.verify or options.trainer or options.compression):
        parser.error("--device gpu has no --verify, --trainer and --compression")
    return options


def main() -> int:
    """Train, and report on the root."""
    options = arguments()
    scale = SCALES.get(options.compression, 1.0)
    settings = Settings(options.optimizer, options.dtype, options.epochs, options.batch, options.seed, scale)
    packed = options.compression and {"type": options.compression, **COMPRESSIONS[options.compression]}
    digits = load(options.dtype, options.seed)
    report = Reporter(digits, options.epochs)
    choices = {"placement": options.placement, "compression": packed, "staleness": options.staleness}
    try:
        store = mpikv.create(options.kvstore, **choices)
    except mpikv.TransportUnavailable as error:
        sys.exit(f"train_digits.py: {error}")
    run = train_on_gpu if options.device == "gpu" else train_with_trainer if options.trainer else train
    with store as kv:
        started = time.perf_counter()
        run(kv, digits, settings, report)
        seconds = time.perf_counter() - started
        setting = f"ranks {kv.size}, placement {kv.placement}, transport {kv.transport}, {seconds:.1f} s"
        is_root = kv.is_root
    different = options.verify and not verified(digits, settings, options.placement, is_root)
    if is_root:
        print(f"test accuracy {report.accuracies[-1]:.4f} ({setting})", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
