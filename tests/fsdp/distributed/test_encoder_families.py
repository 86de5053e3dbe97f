"""Towers of several families give the same features and gradients when two ranks share their media: uneven, one each,
and fewer than ranks."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.towers.media import share_media
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.encoder import resolve_encoder_sizes
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.helpers.distributed import run_ranks

SMALL = {"depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2,
         "temporal_patch_size": 2, "intermediate_size": 24, "out_hidden_size": 12}  # fmt: skip
FAMILIES = {
    "qwen2_vl": ("Qwen2VisionTransformerPretrainedModel", {"embed_dim": 16, "hidden_size": 12, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        {"hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "glm4v": ("Glm4vVisionModel", {"hidden_size": 16, "image_size": 32}),
    "qwen3_vl": (
        "Qwen3VLVisionModel",
        {"hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}
PLANS: dict[str, dict[str, Any]] = {
    "balance": {"encoder_plan": {"balance": True}},
    "whole tower": {"tensor_parallel_size": 2, "encoder_plan": {"tensor_parallel_size": 1}},
    "whole media": {"ring_attention_size": 2, "encoder_plan": {"ring_attention_size": 1}},
    "team": {"encoder_plan": {"balance": True, "ulysses_parallel_size": 2}},
}
MEDIA = {  # what rank 0 has, and what rank 1 has where ranks read different samples
    "uneven": ([(1, 8, 8), (2, 4, 8), (1, 4, 4)], [(1, 2, 2)]),
    "one each": ([(1, 4, 6)], [(1, 8, 4)]),
}


def media_for(family: str, media: str) -> list[list[tuple[int, int, int]]]:
    """GLM counts every frame as a medium."""
    return [[(1 if family == "glm4v" else t, h, w) for t, h, w in grids] for grids in MEDIA[media]]


def build(family: str) -> nn.Module:
    name, sizes = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    tower = getattr(module, name)
    config = tower.config_class(**{**SMALL, **sizes})
    config._attn_implementation = "sdpa"
    root = nn.Module()
    root.visual = tower(config).double()
    return root


def pixels_of(grids: list[tuple[int, int, int]], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)


def features_of(root: nn.Module, grids: list[tuple[int, int, int]], pixels: Tensor) -> Tensor:
    output = root.visual(pixels, grid_thw=torch.tensor(grids), return_dict=True)
    return torch.cat([output.pooler_output, *(output.get("deepstack_features") or ())], dim=-1)


def loss_of(features: Tensor, keep: Tensor | None = None) -> Tensor:
    weights = torch.arange(1.0, len(features) + 1, dtype=features.dtype)[:, None]
    return (features.square() * (weights if keep is None else weights * keep[:, None])).sum()


def gradients_of(root: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}


def compare(family: str, plan: dict[str, Any], media: list[Any]) -> tuple[float, float]:
    """Largest differences of features and of gradients summed over ranks."""
    rank = dist.get_rank()
    arguments = ParallelArguments.model_validate(plan)
    state = init_parallel_state(resolve_parallel_sizes(arguments, 2), "cpu")
    streams = range(state.data_size)
    alone, shared = build(family), build(family)
    expected = [features_of(alone, media[stream], pixels_of(media[stream], stream)) for stream in streams]
    torch.stack([loss_of(each) for each in expected]).sum().backward()
    sizes = resolve_encoder_sizes(arguments, state.data_size)
    assert sizes is not None
    share_media(shared, ["visual"], sizes, state)
    own = state.data_rank
    features = features_of(shared, media[own], pixels_of(media[own], own))
    # Context ranks read different rows; tensor ranks all the same.
    keep = (torch.arange(len(features)) % 2 == rank).double() if sizes.parts > 1 else None
    loss_of(features, keep).backward()
    difference = 0.0
    for name, gradient in gradients_of(alone).items():
        total = gradients_of(shared)[name]
        dist.all_reduce(total)
        difference = max(difference, float((total - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)))
    destroy_parallel_state()
    return float((features - expected[own]).abs().max()), difference


def compare_all(media: str) -> dict[str, tuple[float, float]]:
    return {
        f"{family}, {plan}": compare(family, PLANS[plan], media_for(family, media))
        for family in FAMILIES
        for plan in PLANS
    }


@cache
def measured(media: str) -> list[dict[str, tuple[float, float]]]:
    return run_ranks(2, compare_all, media)


@pytest.mark.parametrize("media", ["uneven", pytest.param("one each", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_gradients_are_those_of_one_process(family: str, plan: str, media: str) -> None:
    for on_rank in measured(media):
        features, gradients = on_rank[f"{family}, {plan}"]
        assert features < 1e-12 and gradients < 1e-9


def call_a_strange_tower() -> str:
    arguments = ParallelArguments.model_validate(PLANS["balance"])
    state = init_parallel_state(resolve_parallel_sizes(arguments, 2), "cpu")
    root, sizes = build("qwen3_vl"), resolve_encoder_sizes(arguments, 2)
    assert sizes is not None
    root.visual.register_forward_hook(lambda *call: type(call[2])(pooler_output=call[2].pooler_output[1:]))
    share_media(root, ["visual"], sizes, state)
    grids = MEDIA["one each"][dist.get_rank()]
    try:
        features_of(root, grids, pixels_of(grids, 0))
    except MMError as error:
        return str(error)
    finally:
        destroy_parallel_state()
    return ""


def test_a_tower_that_returns_something_else_is_named() -> None:
    assert all("returns something else than a feature" in said for said in run_ranks(2, call_a_strange_tower))
