"""Optimizers and what they do not go with are found in the configuration alone."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.rules.training import optimizer_problems
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS, SCHEDULES, TrainingArguments
from mindspeed_mm.fsdp.train.build_engine import build_lr_schedule


def keys(**sections: dict[str, Any]) -> list[str]:
    run = Arguments.model_validate(sections)
    return [problem.key for problem in optimizer_problems(run.parallel, run.training, run.features)]


OFFLOADED = {"enable_gradient_offload": True}
ON_HOST = {"fsdp_plan": {"cpu_offload": True}}


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"training": {"optimizer": "adamw_swap"}, "parallel": ON_HOST}, "training.optimizer"),
        ({"features": OFFLOADED, "parallel": ON_HOST}, "features.enable_gradient_offload"),
        ({"features": OFFLOADED, "parallel": {"pipeline_parallel_size": 2}}, "features.enable_gradient_offload"),
        ({"training": {"optimizer": "muon", "optimizer_state_dtype": "int8"}}, "training.optimizer_state_dtype"),
        ({"training": {"optimizer": "lion", "optimizer_state_dtype": "int8"}}, "training.optimizer_state_dtype"),
        ({"training": {"optimizer": "muon", "lora": {"enable": True}}}, "training.optimizer"),
    ],
)
def test_refused(sections: dict[str, Any], found: str) -> None:
    assert keys(**sections) == [found]


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"optimizer": "adamw_swap", "optimizer_state_dtype": "bf16"}, "features": OFFLOADED},
        {"training": {"optimizer": "muon"}, "features": OFFLOADED},
        {"training": {"optimizer": "lion", "lora": {"enable": True}}, "parallel": ON_HOST},
        {"training": {"optimizer_state_dtype": "int8"}, "parallel": ON_HOST},
        {"training": {"optimizer": "muon", "lora": {"enable": True, "modules_to_save": ["visual"]}}},
        {"training": {"optimizer": "muon"}, "parallel": {"pipeline_parallel_size": 2}},
    ],
)
def test_taken(sections: dict[str, Any]) -> None:
    assert keys(**sections) == []


def test_every_optimizer_that_can_be_named_has_its_facts() -> None:
    assert set(get_args(TrainingArguments.model_fields["optimizer"].annotation)) == set(OPTIMIZERS)


# --- settings of another optimizer, or of another schedule ------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-3, "muon_momentum": 0.5, "ns_steps": 3,
    "matched_adamw_rms": 0.0, "lion_beta1": 0.99, "lion_beta2": 0.5,
}  # fmt: skip
SHAPE: dict[str, Any] = {"lr_min": 1e-6, "lr_decay_ratio": 0.5, "lr_wsd_style": "cosine"}


class SmallBlocks(nn.Module):
    """Blocks whose matrices are muon's."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 4)])


def updated(optimizer: str, **settings: Any) -> torch.Tensor:
    """The weights after two updates."""
    torch.manual_seed(0)
    model = SmallBlocks().double()
    given = {"lr": 0.1, "optimizer": optimizer, "adam_fused": False, **settings}
    update = build_optimizer(model, TrainingArguments.model_validate(given), note=lambda _: None)
    for factor in (1.0, -0.3):
        for parameter in model.parameters():
            parameter.grad = factor * torch.linspace(-1, 2, parameter.numel()).double().view_as(parameter)
        update.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def rates(style: str, **settings: Any) -> list[float]:
    given = {"lr_decay_style": style, "lr_decay_ratio": 0.25, **settings}
    schedule = build_lr_schedule(TrainingArguments.model_validate(given), 20)
    return [schedule.at(step) for step in range(20)]


def refused(**training: Any) -> list[tuple[str, str]]:
    return [(each.key, each.what) for each in check_cross_section(Arguments.model_validate({"training": training}))]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CHANGED)
def test_what_an_optimizer_does_not_read_is_refused(optimizer: str, name: str) -> None:
    """As its updates show."""
    acts = not torch.equal(updated(optimizer), updated(optimizer, **{name: CHANGED[name]}))
    found = refused(optimizer=optimizer, **{name: CHANGED[name]})
    what = f"{CHANGED[name]} has no effect with training.optimizer: {optimizer}"
    assert found == ([] if acts else [(f"training.{name}", what)])


@pytest.mark.parametrize("style", SCHEDULES)
@pytest.mark.parametrize("name", SHAPE)
def test_what_a_schedule_does_not_read_is_refused(style: str, name: str) -> None:
    """As its rates show."""
    acts = rates(style) != rates(style, **{name: SHAPE[name]})
    found = refused(**{"lr_decay_style": style, "lr_decay_ratio": 0.25 if acts else 1.0, name: SHAPE[name]})
    assert [key for key, _ in found] == ([] if acts else [f"training.{name}"])


def test_defaults_of_what_is_not_read_may_be_written_out() -> None:
    assert refused(optimizer="adamw", lion_beta1=0.9, muon_momentum=0.95, lr_decay_style="constant", lr_min=0.0) == []
