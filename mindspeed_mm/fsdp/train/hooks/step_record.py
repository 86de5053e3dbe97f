"""What optimizer steps produced, whole, so that two ways of computing them can be compared: `mm verify` and the tests
hand a `StepRecorder` to the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.models.structure.stages import first_names
from mindspeed_mm.fsdp.optimizer.offload import gradient_of
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
    waiting: dict[tuple[dist.ProcessGroup, torch.dtype], list[_Cut]] = {}
    for name, tensor in tensors.items():
        axis = _only_cut_axis(tensor) if isinstance(tensor, DTensor) else None
        if axis is None:
            found[name] = full(tensor)
            continue
        assert isinstance(tensor, DTensor)
        group = tensor.device_mesh.get_group(axis)
        together = waiting.setdefault((group, tensor.dtype), [])
        together.append(_Cut(name, tensor, tensor.placements[axis].dim, group.size()))
        if sum(cut.tensor.numel() for cut in together) >= GATHERED_AT_ONCE:
            found |= _gathered(waiting.pop((group, tensor.dtype)), group)
    for (group, _), together in waiting.items():
        found |= _gathered(together, group)
    return {name: found[name] for name in tensors}


def _only_cut_axis(tensor: DTensor) -> int | None:
    """The axis of the mesh over whose ranks a tensor is cut, in order; None where it is whole, or cut in other ways."""
    placed = [
        (axis, placement)
        for axis, placement in enumerate(tensor.placements)
        if tensor.device_mesh.size(axis) > 1 and not isinstance(placement, Replicate)
    ]
    if len(placed) == 1 and type(placed[0][1]) is Shard:
        return placed[0][0]
    return None


class _Cut(NamedTuple):
    """A tensor in pieces of the same length along one dimension, of which the last ones are shorter or empty."""

    name: str
    tensor: DTensor
    dimension: int
    ranks: int

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the piece that a rank holds."""
        whole = self.tensor.shape[self.dimension]
        each = -(-whole // self.ranks)
        length = min(max(whole - rank * each, 0), each)
        return (*self.tensor.shape[: self.dimension], length, *self.tensor.shape[self.dimension + 1 :])


def _gathered(cuts: Sequence[_Cut], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Whole tensors of one dtype, cut over the ranks of one group."""
    with torch.no_grad():
        own = torch.cat([cut.tensor.to_local().reshape(-1) for cut in cuts])
    sizes = [[math.prod(cut.shape_on(rank)) for cut in cuts] for rank in range(group.size())]
    longest = max(map(sum, sizes))
    parts = list(own.new_empty(group.size(), longest))
    dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))), group=group)
    pieces = [part[: sum(of_rank)].split(of_rank) for part, of_rank in zip(parts, sizes, strict=True)]
    return {
        cut.name: torch.cat([piece.view(cut.shape_on(rank)) for rank, piece in enumerate(of_cut)], dim=cut.dimension)
        for cut, of_cut in zip(cuts, zip(*pieces, strict=True), strict=True)
    }


def of_all_stages(own: dict[str, Any]) -> JsonObject:
    """Entries by parameter name, with those of the other pipeline stages. Collective where there are any."""
    state = get_parallel_state()
    if state.axis_size("pp") == 1:
        return own
    parts = [own] * state.axis_size("pp")
    dist.all_gather_object(parts, own, group=state.axis_group("pp"))
    whole: JsonObject = {}
    for part in parts:
        whole |= part
    return whole
