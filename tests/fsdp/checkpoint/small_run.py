"""A sharded model with everything that is awkward to save, an AdamW, and steps that depend only on their number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.params.training_args import TrainingArguments

CONTEXT: dict[str, Any] = {
    "config": {"training": {"lr": 0.01}},
    "dataset": {"rows": 3},
    "global_batch": 4,
    "world_size": 1,
}


class SmallModel(nn.Module):
    """Tied embedding and head, odd sizes, a frozen bf16 part, buffers of both kinds, a part that gets no gradient."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.block = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.frozen = nn.Linear(width, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.idle = nn.Linear(3, 1)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.block(hidden) + self.frozen(hidden.bfloat16()).float()
        return self.head(hidden)


def build(seed: int = 0, width: int = 7, lr: float = 0.01) -> tuple[SmallModel, torch.optim.AdamW]:
    """Model and optimizer as the trainer would have them; sharded when there is a process group."""
    torch.manual_seed(seed)
    model = SmallModel(width)
    if dist.is_initialized():
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (model.block, model.idle):
            fully_shard(module, mesh=mesh)
        fully_shard([model.embed, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=lr, weight_decay=0.1)


def train_step(model: SmallModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every rank takes the same batch, a function of the step, with dropout-like noise from the generator."""
    tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(step))
    noise = torch.rand(()).item()
    loss = model(tokens).square().mean() * (1 + noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.steps_seen += 1


def arguments(**changes: Any) -> TrainingArguments:
    """The `training` section, with every checkpoint kept."""
    return TrainingArguments.model_validate({"save_total_limit": None, **changes})


def manager(
    save: Path | str, context: dict[str, Any] | None = None, note: Callable[[str], None] = print, **changes: Any
) -> CheckpointManager:
    """A manager as the trainer makes it."""
    context = CONTEXT if context is None else context
    return CheckpointManager(Path(save), arguments(**changes), context=context, note=note)


def saved_run(save: Path, *steps: int, **changes: Any) -> tuple[SmallModel, torch.optim.Optimizer]:
    """Train in this process without a process group and save after each of `steps`."""
    model, optimizer = build()
    checkpoints = manager(save, **changes)
    for step in range(1, max(steps) + 1):
        train_step(model, optimizer, step)
        if step in steps:
            checkpoints.save(step, model, optimizer, {"iteration": step, "rng": {"cpu": torch.get_rng_state()}})
    checkpoints.wait()
    return model, optimizer


def save_for_ever(save: str) -> None:
    """Go on from the newest checkpoint and save every step until somebody kills the process."""
    model, optimizer = build()
    checkpoints = manager(save, save_total_limit=3)
    found = checkpoints.find_latest()
    step = (found.iteration or 0) if found else 0
    while True:
        step += 1
        train_step(model, optimizer, step)
        checkpoints.save(step, model, optimizer, {"iteration": step})


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole weights, buffers and optimizer state by name; a collective when sharded."""
    names = {p: name for name, p in model.named_parameters()}
    tensors = dict(model.state_dict())
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]}/{key}": value for key, value in state.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in sorted(tensors.items())
    }


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same bit for bit."""
    return [n for n in sorted({*left, *right}) if n not in left or n not in right or not torch.equal(left[n], right[n])]
