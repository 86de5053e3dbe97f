"""Tiny models that see pictures in tiles, which their text models read with a mark at the end of each line."""

from __future__ import annotations

import torch

from tests.helpers.packed_families import IMAGE, TEXT, TOWER, Family, Item, of


def tiled_image(draw: torch.Generator) -> Item:
    """A picture of one tile beside its whole."""
    pixels = torch.randn(1, 2, 3, 16, 16, generator=draw).double()
    tokens = 16 + 4 * 5  # the whole, and a tile of 4 × 4 with line ends
    return [IMAGE] * tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]])}


def pooled_image(draw: torch.Generator) -> Item:
    """The same, of which the text model reads a quarter."""
    _, tensors = tiled_image(draw)
    return [IMAGE] * (4 + 2 * 3), tensors


LLAVA_NEXT = {
    "llava_next": Family(
        of(
            "LlavaNextConfig",
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "clip_vision_model", **TOWER},
            image_token_index=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]],
            vision_feature_layer=-1,
        ),
        "LlavaNextForConditionalGeneration",
        {"image": tiled_image, "image2": tiled_image},
    ),
    "granite4_vision": Family(
        of(
            "Granite4VisionConfig",
            text_config=TEXT | {
                "num_hidden_layers": 5, "logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
            },
            vision_config={
                "model_type": "siglip_vision_model", **TOWER, "hidden_size": 64, "num_hidden_layers": 3,
                "vision_use_head": False,
            },
            qformer_config={
                "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 32,
                "cross_attention_frequency": 1, "use_qformer_text_input": False, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            image_token_index=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]],
            vision_feature_select_strategy="full",
            downsample_rate="2/4",
            deepstack_layer_map=[[-3, 0]],
            spatial_vision_layer=-2,
            spatial_target_layers=[1, 2, 3, 4],
            projector_dropout=0.0,
        ),
        "Granite4VisionForConditionalGeneration",
        {"image": pooled_image, "image2": pooled_image},
    ),
}  # fmt: skip
"""Granite 4 Vision's text model reads single layers of its tower, here not the last one, which so has no gradient."""
