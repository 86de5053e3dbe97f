"""Which weights decay and which learn faster, against the paper's formula and groups made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.optimizer.groups import parameter_groups, set_lr
from mindspeed_mm.fsdp.params.training_args import TrainingArguments


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4, dtype=torch.float64)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.visual = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.float64)


def settings(**changes: Any) -> TrainingArguments:
    return TrainingArguments.model_validate({"lr": 0.1, "weight_decay": 0.5, **changes})


def by_name(model: nn.Module, **changes: Any) -> dict[str, tuple[float, float]]:
    """Parameter → (weight decay, lr scale)."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, settings(**changes))
    return {names[id(p)]: (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}


def test_norms_and_biases_do_not_decay() -> None:
    decay = {name: value for name, (value, _) in by_name(Model()).items()}
    assert decay == {
        "embed.weight": 0.5, "norm.weight": 0.0, "norm.bias": 0.0, "visual.weight": 0.5, "visual.bias": 0.0,
        "head.weight": 0.5,
    }  # fmt: skip


def test_biases_of_stacked_experts_do_not_decay() -> None:
    model = nn.Module()
    model.experts = nn.Module()
    for name, shape in (("gate_up_proj", (2, 4, 6)), ("gate_up_proj_bias", (2, 6)), ("bias_table", (2, 6))):
        model.experts.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    decay = {name: value for name, (value, _) in by_name(model).items()}
    assert decay == {
        "experts.gate_up_proj": 0.5, "experts.gate_up_proj_bias": 0.0, "experts.bias_table": 0.5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "undecayed"),
    [
        ({"no_decay_modules": ["Embedding"]}, {"embed.weight"}),
        ({"no_decay_modules": ["vis*"]}, {"visual.weight"}),
        ({"no_decay_params": ["head.weight"]}, {"head.weight"}),
    ],
)
def test_what_is_named_does_not_decay_either(changes: dict[str, Any], undecayed: set[str]) -> None:
    always = {"norm.weight", "norm.bias", "visual.bias"}
    assert {name for name, (decay, _) in by_name(Model(), **changes).items() if not decay} == always | undecayed


def test_first_matching_rule_scales_the_rate_and_frozen_weights_are_left_out() -> None:
    model = Model()
    model.embed.requires_grad_(False)
    plan = [{"match": r"^visual\.weight", "scale": 0.1}, {"match": "visual", "scale": 0.5}]
    scales = {name: scale for name, (_, scale) in by_name(model, lr_scaling_plan=plan).items()}
    expected = {"norm.weight": 1.0, "norm.bias": 1.0, "visual.weight": 0.1, "visual.bias": 0.5, "head.weight": 1.0}
    assert scales == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_decay_modules": ["nothing"]}, "training.no_decay_modules"),
        ({"no_decay_params": ["nothing"]}, "training.no_decay_params"),
        ({"lr_scaling_plan": [{"match": "nothing", "scale": 2}]}, r"lr_scaling_plan\[0\]"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parameter_groups(Model(), settings(**changes))


def test_everything_frozen_is_an_error() -> None:
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        parameter_groups(Model().requires_grad_(False), settings())


@pytest.mark.parametrize("fused", [True, False])
def test_two_updates_follow_the_formula(fused: bool) -> None:
    """Loshchilov & Hutter 2019, algorithm 2, with the rate of each step scaled for one weight."""
    model = Model()
    changes = {"adam_fused": fused, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-3}
    optimizer = build_optimizer(
        model, settings(lr_scaling_plan=[{"match": "head", "scale": 0.25}], **changes), note=print
    )
    weight, first, second = model.head.weight.detach().clone(), 0.0, 0.0
    for step, lr in enumerate((0.1, 0.02), start=1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3 * step)
        set_lr(optimizer, lr)
        optimizer.step()
        grad, rate = 0.3 * step, 0.25 * lr
        first, second = 0.8 * first + 0.2 * grad, 0.9 * second + 0.1 * grad**2
        corrected = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)) ** 0.5 + 1e-3)
        weight = weight - rate * corrected - rate * 0.5 * weight
        assert (model.head.weight - weight).abs().max() < 1e-12


def test_rates_and_decays_are_those_of_groups_made_by_hand() -> None:
    ours, theirs = Model(), Model()
    plan = [{"match": "embed", "scale": 0.5}, {"match": "head", "scale": 2.0}]
    mine = build_optimizer(
        ours, settings(lr_scaling_plan=plan, no_decay_modules=["vis*"], no_decay_params=["head.weight"]), note=print
    )
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.embed.weight], "lr": 0.05, "weight_decay": 0.5},
            {"params": [theirs.head.weight], "lr": 0.2, "weight_decay": 0.0},
            {"params": [*theirs.norm.parameters(), *theirs.visual.parameters()], "lr": 0.1, "weight_decay": 0.0},
        ],
        fused=True,
    )
    for step in range(3):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.full_like(one, step + 0.5)
            other.grad = one.grad.clone()
        set_lr(mine, 0.1)
        mine.step()
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))
