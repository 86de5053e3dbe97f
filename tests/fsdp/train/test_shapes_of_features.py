"""Features that stand in for encoders in checks and forecasts have the keys and widths of the family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.train.memory.forecast import features_of


def adapter(**config: Any) -> Any:
    return SimpleNamespace(
        geometry=SimpleNamespace(latent_shape=lambda size: (4, 2, 2)),
        transformer_config=config,
        text_tokens=3,
        seen_tokens=lambda shape, given: 0,
        media_roles=(),
        text_shapes=dict,
        condition_shapes=lambda shape, given: {},
        sound=None,
    )


@pytest.mark.parametrize(
    ("config", "width", "pooled"),
    [
        ({"joint_attention_dim": 5, "pooled_projection_dim": 7}, 5, 7),  # FLUX.1, SD3
        ({"text_embed_dim": 5, "pooled_projection_dim": 7}, 5, 7),  # HunyuanVideo
        ({"text_embed_dim": 5}, 5, None),  # CogVideoX
        ({"cap_feat_dim": 5}, 5, None),  # Lumina 2, Z-Image
        ({"text_dim": 5}, 5, None),  # Wan
    ],
)
def test_text_features_have_the_width_of_the_transformer(
    config: dict[str, Any], width: int, pooled: int | None
) -> None:
    made = features_of({"pixels": torch.zeros(2, 3, 1, 16, 16), "captions": ["a", "b"]}, adapter(**config))
    assert made["prompt_embeds"].shape == (2, 3, width)
    assert (made["pooled_prompt_embeds"].shape if "pooled_prompt_embeds" in made else None) == (
        None if pooled is None else (2, pooled)
    )
