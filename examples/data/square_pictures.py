"""Branch B: a chat template, a media plugin and a collator of one's own, for rows that the built-in data set reads.

Named in the YAML as `training.plugin: [examples/data/square_pictures.py]`: see `square_pictures_config.yaml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image, ImageOps

from mindspeed_mm.fsdp.data.data_utils.data_collator import GenericCollator, register_collator
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import register_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin
from mindspeed_mm.fsdp.data.data_utils.template import register_template

# A template is Jinja, run in a sandbox. It gets `messages` and `add_generation_prompt`; the mask follows from what it
# writes for each turn, so it needs no marks of its own.
register_template(
    "question_answer",
    """\
{%- for message in messages -%}
{%- set text -%}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endset -%}
{%- if message.role == 'assistant' -%}{{ 'Answer:\\n' + text + '<|im_end|>\\n' }}
{%- else -%}{{ 'Question: ' + text + '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Answer:\\n' }}{%- endif -%}
""",
)


@register_mm_plugin("Qwen3VLProcessor")
class SquarePictures(QwenVLPlugin):
    """Every picture is padded with white to a square before the model's own patches are cut.

    The name is that of the processor's class. What is said here of pictures, the plugin says twice: `encode_image` of
    the pixels, `measure` of the header, so that lengths are known before a file is decoded.
    """

    is_deterministic = True  # it draws no random numbers: `preprocess_on_fly: false` may keep what it encodes

    def encode_image(self, image: Image.Image) -> Any:
        """Pad, then as ever."""
        side = max(image.size)
        return super().encode_image(ImageOps.pad(image, (side, side), color="white"))

    def measure(self, kind: Any, header: Any) -> Any:
        """The size that `encode_image` gives."""
        if isinstance(header, ImageHeader):
            side = max(header.height, header.width)
            header = replace(header, height=side, width=side)
        return super().measure(kind, header)


@register_collator("counted", keys=["images_per_row"])
class CountedCollator(GenericCollator):
    """The generic batch with one more key, for a model whose `forward` takes it.

    Keys that nobody documents are an error, so a collator declares its own.
    """

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collate and count."""
        batch = super().__call__(samples)
        counts = [sum(item.kind == "image" for item in sample["media"]) for sample in samples]
        return batch | {"images_per_row": torch.tensor(counts)}
