"""Our engine around a model, without data and without a run folder: what `Trainer` builds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.distributed.job.launch import initialize_distributed, shutdown_distributed
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import set_gradient_sync
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective
from mindspeed_mm.fsdp.loss.objectives import Objective, build_objective
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble
from mindspeed_mm.fsdp.train.build_engine import build_lr_schedule, why_steps_wait
from mindspeed_mm.fsdp.train.step.forward_backward import PlainForwardBackward
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.utils.device import get_device_type, set_local_device
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype


class NoLoader:
    """Stands where data would come from: the benchmarks hand their batches to the engine themselves."""

    position = DataPosition(0, 0)
    bad_samples: dict[str, str] = {}
    untold_bad_samples = 0

    def __iter__(self) -> Iterator[list[Batch]]:
        """No steps."""
        return iter(())


def build_engine(arguments: Arguments, total_steps: int) -> TrainEngine:
    """A group of one, and the engine on it."""
    return engine_on(enter(arguments), arguments, total_steps)


def enter(arguments: Arguments) -> torch.device:
    """Make the group; `leave` undoes it."""
    _, local_rank, world_size = initialize_distributed(timeout_s=120.0)
    device = set_local_device(local_rank)
    init_parallel_state(resolve_parallel_sizes(arguments.parallel, world_size), get_device_type())
    return device


def engine_on(device: torch.device, arguments: Arguments, total_steps: int) -> TrainEngine:
    """The model assembled on the device, objective, optimizer, schedule."""
    assembled = assemble(arguments, device)
    objective = objective_of(assembled, arguments)
    optimizer = build_optimizer(assembled.model, arguments.training, note=print)
    return TrainEngine(
        model=assembled.model,
        objective=objective,
        forward_backward=PlainForwardBackward(assembled.model, objective, set_gradient_sync),
        optimizer=optimizer,
        schedule=build_lr_schedule(arguments.training, total_steps),
        training=arguments.training,
        device=device,
        loader=NoLoader(),
        towers=assembled.applied.towers,
        late=device.type != "cpu"
        and not why_steps_wait(arguments.parallel, arguments.training, arguments.posttrain, optimizer, None, device),
    )


def objective_of(assembled: Assembled, arguments: Arguments) -> Objective:
    """What the model is trained for; a generator on features."""
    adapter = facts_of(assembled.model).adapter
    if adapter is None:
        return build_objective(None, assembled.model, assembled.applied.head)
    dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype) or torch.float32
    diffusion, seed = arguments.training.diffusion, arguments.training.seed
    return DenoisingObjective(adapter, diffusion, seed=seed, compute_dtype=dtype)


def leave() -> None:
    """Undo the group."""
    destroy_parallel_state()
    shutdown_distributed()
