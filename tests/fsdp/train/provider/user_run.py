"""A training run of somebody else's: a plain model, a plain loader, and loss functions of every form, beside what
Megatron-Core's formula gives for it, written with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.trainer import ProviderOptions, ProviderTrainer

MICRO_BATCHES = 2
ROWS = 2
"""Of a micro-batch."""
FORMS = ("loss", "loss and dict", "loss, tokens and dict", "per token")


class PlainModel(nn.Module):
    """Somebody's model, which knows nothing of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.out = nn.Linear(6, 1)

    def forward(self, x_BLH: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BLH = x_BLH + torch.tanh(block(x_BLH))
        return self.out(x_BLH).squeeze(-1)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(count, L, H) inputs, (count, L) targets and a mask of unequally many labels; the row 3 has none."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, 6, generator=draw, dtype=torch.float64)
    y = torch.randn(count, 5, generator=draw, dtype=torch.float64)
    labels = torch.tensor([1, 5, 2, 0, 4, 3, 1, 5])[torch.arange(count) % 8]
    return x, y, (torch.arange(5) < labels[:, None]).double()


def data_provider(count: int, *, sharded: bool = True, loader: type[DataLoader[Any]] = DataLoader) -> Any:
    """A loader of one's own, split over data ranks by torch's sampler."""
    state = get_parallel_state()
    data = TensorDataset(*rows(count))
    sampler = DistributedSampler(data, state.data_size, state.data_rank, shuffle=False) if sharded else None
    return loader(data, batch_size=ROWS, sampler=sampler), None, None


def loss_func(form: str, y: torch.Tensor, mask: torch.Tensor, output: torch.Tensor) -> Any:
    total, tokens = ((output - y) ** 2 * mask).sum(), mask.sum()
    mean = total / tokens.clamp(min=1)
    report = {"squares": (total.detach(), tokens), "mean": mean.detach()}
    given = {"loss": mean, "loss and dict": (mean, report)}
    return given.get(form, (total, tokens, report))


def forward_step(form: str, data_iterator: Any, model: nn.Module) -> Any:
    x, y, mask = next(data_iterator)
    return model(x), partial(loss_func, form, y, mask)


def seeded_model(*_args: Any, **_kwargs: Any) -> nn.Module:
    torch.manual_seed(5)
    return PlainModel().double()


def configuration(**sections: Any) -> dict[str, Any]:
    """What flags would be translated to."""
    training = {
        "micro_batch_size": ROWS, "gradient_accumulation_steps": MICRO_BATCHES, "train_iters": 1, "lr": 1e-3,
        "clip_grad": 0.0, "log_interval": 1, "seed": 7,
    }  # fmt: skip
    parallel = {"fsdp_plan": {"param_dtype": "fp64", "apply_modules": ["blocks.{*}"]}}
    config: dict[str, Any] = {"model": {}, "data": {"dataset_param": {}}, "parallel": parallel, "training": training}
    for name, content in sections.items():
        for key, value in content.items():
            old = config.setdefault(name, {}).get(key)
            config[name][key] = {**old, **value} if isinstance(old, dict) else value
    return config


def train(form: str, sections: dict[str, Any], *, provider: Callable[[], Any]) -> dict[str, Any]:
    """One optimizer step; the loss, and full gradients by name."""
    recorder = StepRecorder()
    callbacks = Callbacks(seeded_model, provider, partial(forward_step, form))
    scaling = ProviderOptions(per_token=form == "per token")
    ProviderTrainer(configuration(**sections), callbacks, scaling, hooks=[recorder]).train()
    step = recorder.steps[0]
    return {"loss": step["loss"], **step["gradients"]}


def by_formula(form: str, data_ranks: int) -> dict[str, Any]:
    """Megatron-Core's: each of N micro-batches divided by N, gradients averaged over D ranks; per token, sums are
    divided by the tokens of all of them."""
    model = seeded_model()
    x, y, mask = rows(MICRO_BATCHES * ROWS * data_ranks)
    total, tokens = torch.zeros((), dtype=torch.float64), 0.0
    for rank in range(data_ranks):
        for number in range(MICRO_BATCHES):
            own = [rank + data_ranks * (number * ROWS + row) for row in range(ROWS)]
            squares = ((model(x[own]) - y[own]) ** 2 * mask[own]).sum()
            if form == "per token":
                total, tokens = total + squares, tokens + float(mask[own].sum())
            else:
                total = total + squares / mask[own].sum().clamp(min=1) / MICRO_BATCHES / data_ranks
    loss = total / tokens if form == "per token" else total
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
