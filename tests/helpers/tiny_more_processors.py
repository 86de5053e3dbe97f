"""Processors of more model families, made as in `tiny_processors`: real classes with tiny sizes, and a plain template
that puts a family's placeholders where its own template has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.tiny_processors import MERGE_SIZE, PATCH_SIZE, Family, byte_tokenizer

import transformers  # isort: skip  (after the guard of the line above)

_TURNS = """\
{%- for message in messages -%}
{{- '<|turn|>' + message.role + '\\n' -}}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ 'IMAGE' }}{% elif part.type == 'video' %}{{ 'VIDEO' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif -%}
"""
_NAMED = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "turn_token": "<|turn|>"}
_SQUARE = {"height": 32, "width": 32}


def _template(image: str, video: str = "") -> str:
    return _TURNS.replace("IMAGE", image).replace("VIDEO", video)


def _square(name: str, image_token: str, **sizes: Any) -> Callable[[], Any]:
    """DeepSeek-VL and Janus: every picture becomes a padded square of as many tokens."""

    def build() -> Any:
        special = _NAMED | {"image_token": image_token, "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
        return getattr(transformers, f"{name}Processor")(
            getattr(transformers, f"{name}ImageProcessor")(size=dict(_SQUARE), min_size=PATCH_SIZE, **sizes),
            byte_tokenizer(special, _template(image_token)),
            chat_template=_template(image_token),
            num_image_tokens=16,
        )

    return build


def _gemma4() -> Any:
    special = _NAMED | {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    special |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    template = _template("<|image|>", "<|video|>")
    pooled = {"patch_size": PATCH_SIZE, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessor(**pooled),
        tokenizer=byte_tokenizer(special, template),
        video_processor=transformers.Gemma4VideoProcessor(**pooled, num_frames=8),
        chat_template=template,
    )


def _step3p7() -> Any:
    marks = ("patch_start", "patch_end", "patch_newline", "im_start", "im_end")
    special = _NAMED | {"image_token": "<im_patch>"} | {f"mark_{mark}": f"<{mark}>" for mark in marks}
    images = transformers.Step3p7ImageProcessor(
        size=dict(_SQUARE), patch_size=16, max_image_size=128, vision_patch_size=4, downsampler_stride=4
    )
    template = _template("<im_patch>")
    return transformers.Step3p7Processor(images, byte_tokenizer(special, template), chat_template=template)


def _minimax_m3_vl() -> Any:
    kind = transformers.MiniMaxM3VLProcessor
    special = _NAMED | {
        "image_token": kind.IMAGE_TOKEN,
        "video_token": kind.VIDEO_TOKEN,
        "vision_start_token": kind.VISION_START_TOKEN,
        "vision_end_token": kind.VISION_END_TOKEN,
    }
    patches = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    limits = {"min_pixels": 16 * 16, "max_pixels": 64 * 64}
    template = _template(kind.IMAGE_TOKEN, kind.VIDEO_TOKEN)
    return kind(
        transformers.MiniMaxM3VLImageProcessor(size={"shortest_edge": 256, "longest_edge": 4096}, **patches),
        byte_tokenizer(special, template),
        transformers.MiniMaxM3VLVideoProcessor(**patches, **limits),
        chat_template=template,
    )


def _deepseek_ocr2() -> Any:
    """A page, whole or as a tile, becomes the 144 tokens that the encoder has queries for, however small it is."""
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "turn_token": "<|turn|>", "image_token": "<image>"}
    images = transformers.DeepseekOcr2ImageProcessor(size={"height": 48, "width": 48}, tile_size=48, max_patches=2)
    template = _template("<image>")
    return transformers.DeepseekOcr2Processor(
        images, byte_tokenizer(special, template), chat_template=template, patch_size=1, downsample_ratio=4
    )


CODES = 32
"""In the code book of `chameleon_processor`."""


def code_tokens() -> list[str]:
    """Chameleon's names for the codes of its code book: their digits as letters."""
    return ["IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z" for code in range(CODES)]


def chameleon_processor() -> Any:
    """A picture becomes a square of 16 codes. The template ends every turn with the separator, as Lumina-mGPT does;
    the processor by itself adds one more to every text, unless it is told that the text is to be completed."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "sep_token": "<reserved08706>"}
    special |= {"image_token": "<image>", "boi_token": "<racm3:break>", "eoi_token": "<eoss>"}
    template = (
        "{%- for message in messages -%}{%- if message.content is string %}{{ message.content }}{% else -%}"
        "{%- for part in message.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}"
        "{%- endif -%}{{- '<reserved08706>' -}}{%- endfor -%}"
    )
    images = transformers.ChameleonImageProcessor(
        size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}, rescale_factor=1 / 127.5
    )
    tokenizer = byte_tokenizer(special | {name: name for name in code_tokens()}, template)
    processor = transformers.ChameleonProcessor(images, tokenizer, image_seq_length=16)
    processor.chat_template = template
    return processor


MORE: dict[str, Family] = {
    "deepseek_vl": Family(_square("DeepseekVL", "<image_placeholder>"), ("image",)),
    "deepseek_vl_hybrid": Family(
        _square("DeepseekVLHybrid", "<image_placeholder>", high_res_size={"height": 48, "width": 48}), ("image",)
    ),
    "janus": Family(_square("Janus", "<image_placeholder>"), ("image",)),
    "gemma4": Family(_gemma4, ("image", "video")),
    "step3p7": Family(_step3p7, ("image",)),
    "minimax_m3_vl": Family(_minimax_m3_vl, ("image", "video")),
    "deepseek_ocr2": Family(_deepseek_ocr2, ("image",)),
}
