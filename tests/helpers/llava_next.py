"""A tiny LLaVA-Next: pictures in tiles, which its text model reads with a mark at the end of each line."""

from __future__ import annotations

import torch

from tests.helpers.packed_families import IMAGE, TEXT, TOWER, Family, Item, of


def tiled_image(draw: torch.Generator) -> Item:
    """A picture of one tile beside its whole."""
    pixels = torch.randn(1, 2, 3, 16, 16, generator=draw).double()
    tokens = 16 + 4 * 5  # the whole, and a tile of 4 × 4 with line ends
    return [IMAGE] * tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]])}


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
    )
}
