"""Processors of models that draw with codes of their own: pictures in answers are prepared for their tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import ProcessorPlugin
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

_PROCESSORS = frozenset({"JanusProcessor"})
_PIXELS = "drawn_pixel_values"


class DrawingPlugin(ProcessorPlugin):
    """As every processor's, and pictures that are drawn. Arguments as of `ProcessorPlugin`."""

    def encode_drawn_image(self, image: Image.Image) -> MediaFeatures:
        """A picture in the model's turn: the square in its middle, from -1 to 1. Its tokens are as many as those of a
        picture that is seen."""
        size = self._processor.image_processor.size
        square = ImageOps.fit(image, (size["width"], size["height"]), Image.Resampling.BICUBIC)
        made = self._asked("image", square, f"an image of {image.width} × {image.height}")
        pixels = torch.from_numpy(np.array(square, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1
        return MediaFeatures(made.kind, made.token_ids, {_PIXELS: pixels[None]}, made.text)

    @override
    def collate(self, media: Sequence[MediaFeatures]) -> Batch:
        batch = super().collate(media)
        is_drawn = [_PIXELS in item.tensors for item in media]
        return batch | {"drawn_images": torch.tensor(is_drawn)} if any(is_drawn) else batch


def build_drawing_plugin(processor: Processor, preprocess: PreprocessParameters) -> DrawingPlugin | None:
    """The plugin of a processor whose model draws; None for others."""
    return DrawingPlugin(processor, preprocess) if type(processor).__name__ in _PROCESSORS else None
