"""Ten programs as their users write them: ``torchrun --nproc-per-node 2 ten_programs.py BACKEND FILE [NAME]``.

Each trains in float64 and returns its losses. Rank 0 writes them to the file, by program.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKEND = sys.argv[1]
STEPS = 4


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32), nn.Linear(32, 10))


def batches() -> Iterator[tuple[Any, Any]]:
    """Yield this rank's inputs and classes."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        yield torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)


def mean_over_ranks(loss: Any) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def fit(model: Any, optimizer: Any, backward: Callable[[Any], Any] = torch.Tensor.backward) -> list[float]:
    losses = []
    for inputs, classes in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        backward(loss)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return str(folder[0])


def ddp() -> list[float]:
    model = DistributedDataParallel(make_model())
    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def accumulation() -> list[float]:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for inputs, classes in batches():
        with model.no_sync():
            nn.functional.cross_entropy(model(inputs[:8]), classes[:8]).backward()
        loss = nn.functional.cross_entropy(model(inputs[8:]), classes[8:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def amp() -> list[float]:
    model = DistributedDataParallel(make_model().float())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for inputs, classes in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs.float()), classes)
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def fsdp2() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return fit(model, torch.optim.Adam(model.parameters(), lr=0.01))


def zero() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model())
    return fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def dtensor() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    rows = distribute_tensor(torch.arange(72.0).view(9, 8), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    return [*losses, float(rows.full_tensor().square().sum())]


def checkpoint() -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def make() -> tuple[Any, Any]:
        model = make_model()
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = make()
    folder = shared_folder()
    losses = fit(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/first")
    saving.result()
    model, optimizer = make()
    fit(model, optimizer)
    fit(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/first")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return [*losses, *fit(model, optimizer)]


def compiled() -> list[float]:
    import torch.distributed._functional_collectives as collectives

    @torch.compile(backend="aot_eager", fullgraph=True)
    def functional(tensor: Any) -> Any:
        return collectives.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    @torch.compile(backend="aot_eager", fullgraph=True)
    def plain(tensor: Any) -> Any:
        tensor = tensor * 2
        dist.all_reduce(tensor)
        return tensor + 1

    model = DistributedDataParallel(make_model())
    losses = fit(torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, *functional(torch.ones(3)).tolist(), *plain(torch.ones(3)).tolist()]


def accelerate() -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = fit(model, optimizer, accelerator.backward)
    gathered = accelerator.gather(torch.tensor([float(accelerator.process_index)]))
    return [*losses, *gathered.tolist()]


def lightning() -> list[float]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            losses.append(mean_over_ranks(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    generator = torch.Generator().manual_seed(0)
    dataset = torch.utils.data.TensorDataset(
        torch.randn(96, 64, generator=generator), torch.randint(10, (96,), generator=generator)
    )
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend=BACKEND),
        max_epochs=1,
        default_root_dir=shared_folder(),
        **quiet,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(dataset, batch_size=8))
    assert dist.get_backend() == BACKEND
    return losses


PROGRAMS = (ddp, accumulation, amp, fsdp2, zero, dtensor, checkpoint, compiled, accelerate, lightning)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(BACKEND)
    wanted = sys.argv[3:] or [program.__name__ for program in PROGRAMS]
    losses = {program.__name__: program() for program in PROGRAMS if program.__name__ in wanted}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
