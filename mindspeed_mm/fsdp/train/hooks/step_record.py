"""What optimizer steps produced, whole, so that two ways of computing them can be compared: `mm verify` and the tests
hand a `StepRecorder` to the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.models.structure.share import first_names
from mindspeed_mm.fsdp.optimizer.gradient_offload import gradient_of
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine

GATHERED_AT_ONCE = 1 << 24
"""Elements of whole tensors that travel together, at most one tensor more."""
StepRecord = dict[str, Any]
"""`loss` and `grad_norm`: 0-d tensors; `gradients` and `weights`: parameter name → full tensor, or None."""


class StepRecorder(Hook):
    """Records every step of a run, on each rank the whole model: shards are gathered, stages put together.

    Gradients are those of the step before they are clipped, weights those after it.
    """

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_gradients(self, engine: TrainEngine, norm: torch.Tensor) -> None:
        """Begin the record of a step."""
        step = record_step(engine.model, torch.zeros(()), norm)
        self.steps.append(step | {"gradients": of_all_stages(step["gradients"])})

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Add the loss and the updated weights to the record of the step."""
        loss = torch.tensor(result.loss, dtype=torch.float64)
        self.steps[-1] |= {"loss": loss, "weights": of_all_stages(record_weights(engine.model))}


def record_step(model: nn.Module, loss: torch.Tensor, grad_norm: torch.Tensor) -> StepRecord:
    """The record of a step whose backward pass is done; add the weights with `record_weights` after the update.

    Collective on a sharded model. `loss` is the loss of the whole global batch.
    """
    copies = first_names(model)  # of a weight on two stages the copy is what is looked at
    parameters = {copies.get(name, name): p for name, p in model.named_parameters()}
    held = {name: gradient_of(parameter) for name, parameter in parameters.items()}
    found = all_full({name: gradient for name, gradient in held.items() if gradient is not None})
    gradients = {name: found.get(name) for name in held}
    return {"loss": full(loss), "grad_norm": full(grad_norm), "gradients": gradients, "weights": {}}


def record_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of all parameters. Collective on a sharded model."""
    copies = first_names(model)
    return all_full({copies.get(name, name): p for name, p in model.named_parameters()})


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a tensor, gathered when it is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.clone()


def all_full(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `full` gives of each. Collective where there are shards, of which many travel at once: a model has hundreds
    of parameters, and the way of each by itself costs more than its bytes."""
    found: dict[str, torch.Tensor] = {}
    waiting: dict[tuple[dist.ProcessGroup, torch.dtype], dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        axis = _only_cut_axis(tensor)
        if axis is None:
            found[name] = full(tensor)
            continue
        assert isinstance(tensor, DTensor)
        shards = waiting.setdefault((tensor.device_mesh.get_group(axis), tensor.dtype), {})
        shards[name] = tensor
        if sum(each.numel() for each in shards.values()) >= GATHERED_AT_ONCE:
            found |= _gathered(shards, tensor.device_mesh.get_group(axis))
            shards.clear()
    for (group, _), shards in waiting.items():
        found |= _gathered(shards, group)
    return {name: found[name] for name in tensors}


def _only_cut_axis(tensor: torch.Tensor) -> int | None:
    """The axis of the mesh over whose ranks a tensor is cut, in order; None where it is whole, or cut in other ways."""
    if not isinstance(tensor, DTensor) or not all(type(each) in (Shard, Replicate) for each in tensor.placements):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    return axes[0] if len(axes) == 1 else None


def _gathered(tensors: Mapping[str, DTensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Whole tensors of one dtype, each cut along one dimension over the ranks of a group: in pieces of the same length,
    of which the last ones are shorter or empty."""
    if not tensors:
        return {}
    ranks = group.size()
    with torch.no_grad():
        own = torch.cat([tensor.to_local().reshape(-1) for tensor in tensors.values()])
    shapes = {name: _shapes_by_rank(tensor, ranks) for name, tensor in tensors.items()}
    lengths = [sum(math.prod(of_ranks[rank]) for of_ranks in shapes.values()) for rank in range(ranks)]
    parts = list(own.new_empty(ranks, max(lengths)))
    dist.all_gather(parts, torch.nn.functional.pad(own, (0, max(lengths) - len(own))), group=group)
    pieces = [
        part[:length].split([math.prod(of_ranks[rank]) for of_ranks in shapes.values()])
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True))
    ]
    return {
        name: torch.cat(
            [pieces[rank][number].view(shapes[name][rank]) for rank in range(ranks)], dim=_cut_dimension(tensor)
        )
        for number, (name, tensor) in enumerate(tensors.items())
    }


def _shapes_by_rank(tensor: DTensor, ranks: int) -> list[tuple[int, ...]]:
    dimension = _cut_dimension(tensor)
    whole, before, after = tensor.shape[dimension], tensor.shape[:dimension], tensor.shape[dimension + 1 :]
    each = -(-whole // ranks)
    return [(*before, min(max(whole - rank * each, 0), each), *after) for rank in range(ranks)]


def _cut_dimension(tensor: DTensor) -> int:
    (dimension,) = {placement.dim for placement in tensor.placements if isinstance(placement, Shard)}
    return dimension


def of_all_stages(own: dict[str, Any]) -> dict[str, Any]:
    """Entries by parameter name, with those of the other pipeline stages. Collective where there are any."""
    state = get_parallel_state()
    if state.axis_size("pp") == 1:
        return own
    parts = [own] * state.axis_size("pp")
    dist.all_gather_object(parts, own, group=state.axis_group("pp"))
    whole: dict[str, Any] = {}
    for part in parts:
        whole |= part
    return whole
