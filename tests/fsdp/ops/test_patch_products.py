"""Patches that come one by one are embedded by a matrix product, which gives what the library's convolution gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm import ensure_torchvision
from mindspeed_mm.fsdp.features.speed.apply_speed import apply_speed
from mindspeed_mm.fsdp.features.speed.choice import Machine, SpeedFacts
from mindspeed_mm.fsdp.ops.forward_stack import describe_forwards
from mindspeed_mm.fsdp.ops.patch_products import multiply_patches
from mindspeed_mm.fsdp.params.argument import FeatureArguments, ModelArguments, TrainingArguments
from tests.helpers.tiny_models import make_tiny_qwen3_vl

ensure_torchvision()
PATCH, PATCHES, CHANNELS, WIDTH = 6, 9, 3, 10


class Convolutions(TorchDispatchMode):
    """Counts them, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "conv" in str(func)
        return func(*args, **(kwargs or {}))


def of_qwen3_vl() -> nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchEmbed

    return Qwen3VLVisionPatchEmbed(Qwen3VLVisionConfig(patch_size=PATCH, temporal_patch_size=2, hidden_size=WIDTH))


def of_qwen2_vl() -> nn.Module:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchEmbed

    return PatchEmbed(PATCH, 2, CHANNELS, WIDTH)


def of_pictures() -> nn.Module:
    """Two dimensions, as in towers of Kimi-VL."""
    return nn.Sequential(
        nn.Unflatten(1, (CHANNELS, PATCH, 2 * PATCH)),
        nn.Conv2d(CHANNELS, WIDTH, (PATCH, 2 * PATCH), (PATCH, 2 * PATCH)),
    )


def outcome(embedding: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
    """Features and gradients in fp64, and how many operations were convolutions."""
    generator = torch.Generator().manual_seed(3)
    patches = torch.randn(PATCHES, CHANNELS * 2 * PATCH * PATCH, dtype=torch.float64, generator=generator)
    patches.requires_grad_()
    with Convolutions() as convolutions:
        features = embedding(patches)
        features.sin().sum().backward()
    found = {"features": features.detach(), "patches": patches.grad}
    return found | {name: p.grad for name, p in embedding.named_parameters()}, convolutions.count


@pytest.mark.parametrize("build", [of_qwen3_vl, of_qwen2_vl, of_pictures])
def test_features_and_gradients_are_those_of_the_convolution(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    plain = build().double()
    embedding = copy.deepcopy(plain)
    assert multiply_patches(embedding) == 1
    assert embedding.state_dict().keys() == plain.state_dict().keys()
    (expected, before), (found, after) = outcome(plain), outcome(embedding)
    assert before and not after
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        torch.testing.assert_close(found[name], tensor, rtol=1e-13, atol=1e-14, msg=name)


def test_larger_inputs_go_through_the_convolution() -> None:
    convolution = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)
    pictures = torch.randn(2, CHANNELS, 3 * PATCH, 2 * PATCH + 1)
    expected = convolution(pictures)
    assert multiply_patches(convolution) == 1
    with Convolutions() as convolutions:
        assert torch.equal(convolution(pictures), expected)
        assert convolutions.count
        assert torch.equal(convolution(pictures[0]), expected[0])  # without a batch


class OwnConvolution(nn.Conv2d):
    """May compute anything."""


def test_other_convolutions_stay() -> None:
    others = nn.ModuleList(
        [
            nn.Conv2d(4, 4, 2, 2, padding=1),
            nn.Conv2d(4, 4, 2, 2, dilation=2),
            nn.Conv2d(4, 4, 2, 2, groups=2),
            nn.Conv2d(4, 4, 2, 1),
            nn.Conv2d(4, 4, 1, 1),
            nn.Conv1d(4, 4, 2, 2),
            nn.ConvTranspose2d(4, 4, 2, 2),
            OwnConvolution(4, 4, 2, 2),
        ]
    )
    assert multiply_patches(others) == 0
    assert describe_forwards(others) == ""


def test_every_model_that_is_trained_has_it(tmp_path: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(make_tiny_qwen3_vl(tmp_path / "model"))
    apply_speed(model, ModelArguments(), FeatureArguments(), TrainingArguments(), SpeedFacts(Machine("cpu")))
    assert "1 Conv3d (kernel)" in describe_forwards(model)
