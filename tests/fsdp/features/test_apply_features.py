"""Which modules `features.recompute` is about, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory.recompute import RecomputedForward
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


BLOCKS = ("layers.0", "layers.1", "layers.2")


def applied(*blocks: str, recompute: bool = True, **plan: Any) -> list[str]:
    """Names of the modules that are recomputed."""
    features = FeatureArguments.model_validate({"recompute": recompute, "recompute_plan": plan})
    model = Model()
    assert FeaturesApplier(features, blocks)(model) is model
    model(torch.zeros(1, 4)).sum().backward()
    return [name for name, module in model.named_modules() if isinstance(module.forward, RecomputedForward)]


def test_off_changes_nothing() -> None:
    assert applied(*BLOCKS, recompute=False, apply_modules=["nothing"]) == []


def test_the_models_own_blocks_unless_patterns_name_others() -> None:
    assert applied(*BLOCKS) == list(BLOCKS)
    assert applied(*BLOCKS, apply_modules=["layers.{0,2}", "head"]) == ["layers.0", "layers.2", "head"]
    assert applied(apply_modules=["layers.{*}.0"]) == [f"{name}.0" for name in BLOCKS]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "Model declares no repeated blocks"),
        ({"apply_modules": ["layer.{*}"]}, r"'layer\.\{\*\}' matches no module.*'layers\.0'"),
        ({"apply_modules": ["layers"]}, r"'layers' is a ModuleList, which is never called itself.*'layers\.\{\*\}'"),
        ({"apply_modules": ["layers.{*}", "layers.1.0"]}, r"'layers\.1\.0' lies inside 'layers\.1'"),
    ],
    ids=str,
)
def test_refused_modules(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        applied(**plan)
    assert "features.recompute_plan.apply_modules" in str(caught.value)
