"""The processor of DeepSeek-OCR: a page becomes a whole view and tiles. It reads the released processor_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import ProcessorMixin, UnlimitedOcrImageProcessor, UnlimitedOcrProcessor

from mindspeed_mm.fsdp.models.deepseek_vl2.processing_deepseek_vl2 import CHAT_TEMPLATE

TILE, FEWEST_TILES, MOST_TILES = 640, 2, 9
"""Side of a tile, in pixels; how many there are of a page that is larger than one."""


class DeepseekOCRProcessor(UnlimitedOcrProcessor):
    """Unlimited-OCR's, with the limits of DeepSeek-OCR.

    Args:
        tokenizer: Of the text model.
        candidate_resolutions: The first one is the size of the whole view, in pixels.
        patch_size: Side of a patch of SAM, in pixels.
        downsample_ratio: Patches along the side of what becomes one token.
        image_mean: Of each channel, of colours from 0 to 1.
        image_std: Of each channel.
        tile_size: Side of a tile, in pixels.
        chat_template: Jinja text.
        kwargs: Further settings of the released file, which mean nothing here.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        candidate_resolutions: Sequence[Sequence[int]] = ((1024, 1024),),
        patch_size: int = 16,
        downsample_ratio: int = 4,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        tile_size: int = TILE,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        width, height = candidate_resolutions[0]
        ProcessorMixin.__init__(self, tokenizer, chat_template=chat_template or CHAT_TEMPLATE)
        self.image_processor = UnlimitedOcrImageProcessor(
            size={"height": height, "width": width},
            tile_size=tile_size,
            min_patches=FEWEST_TILES,
            max_patches=MOST_TILES,
            image_mean=list(image_mean),
            image_std=list(image_std),
        )
        self.patch_size, self.downsample_ratio = patch_size, downsample_ratio
        self.image_token = "<image>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
