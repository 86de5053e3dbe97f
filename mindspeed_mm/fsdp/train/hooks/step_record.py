"""What optimizer steps produced, whole, so that two ways of computing them can be compared: `mm verify` and the tests
hand a `StepRecorder` to the trainer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.models.structure.share import first_names
from mindspeed_mm.fsdp.optimizer.gradient_offload import gradient_of
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine

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
    gradients: dict[str, torch.Tensor | None] = {}
    for name, parameter in parameters.items():
        gradient = gradient_of(parameter)
        gradients[name] = None if gradient is None else full(gradient)
    return {"loss": full(loss), "grad_norm": full(grad_norm), "gradients": gradients, "weights": {}}


def record_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of all parameters. Collective on a sharded model."""
    copies = first_names(model)
    return {copies.get(name, name): full(p) for name, p in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a tensor, gathered when it is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.clone()


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
