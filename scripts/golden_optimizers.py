"""Write tests/support/golden/optimizers.npz: what torch.optim makes of fixed gradients.

Needs torch; the tests need only the file.
"""

import sys
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parents[1] / "tests/support/golden/optimizers.npz"
STEPS, SIZE = 25, 31
KEPT = [0, 1, 4, 11, 24]
CLIP = 0.75

CASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum_wd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_nesterov_wd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad_wd": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.01}),
    "rmsprop_wd": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-8, "weight_decay": 0.01}),
    "adadelta_wd": (torch.optim.Adadelta, {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam_wd_epsilon": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "eps": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
    "nadam_wd": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01, "momentum_decay": 0.004}),
    "adamax_wd": (torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
}


def main() -> None:
    """Write the file named on the command line, or the one the tests read."""
    # NAdam keeps a product of numbers in the default dtype, whatever that of the weight is.
    torch.set_default_dtype(torch.float64)
    random = np.random.default_rng(20)
    weight = random.standard_normal(SIZE)
    gradients = random.standard_normal((STEPS, SIZE))
    gradients[:, 0] = 0.0
    golden = {"weight": weight, "gradients": gradients, "clip": np.array(CLIP), "kept": np.array(KEPT)}
    for (name, (kind, options)), dtype, clip in (
        (case, dtype, clip) for case in CASES.items() for dtype in ("float32", "float64") for clip in (False, True)
    ):
        parameter = torch.tensor(weight.astype(dtype), requires_grad=True)
        optimizer = kind([parameter], foreach=False, **options)
        path = []
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient.astype(dtype))
            if clip:
                parameter.grad.clamp_(-CLIP, CLIP)
            optimizer.step()
            path.append(parameter.detach().numpy().copy())
        golden[f"{name}/{dtype}/{'clip' if clip else 'plain'}"] = np.array(path)[KEPT]
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    target.parent.mkdir(exist_ok=True)
    np.savez_compressed(target, **golden)
    print(f"{target}: {len(golden)} arrays from torch {torch.__version__}")


if __name__ == "__main__":
    main()
