"""Tiny models that see a picture in tiles of different number: Idefics3 (SmolVLM is its kind) and LLaVA-OneVision, each
with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from tests.helpers import family_templates as templates
from tests.helpers.packed_families import TEXT, TOWER
from tests.helpers.tiny_processors import byte_tokenizer

ensure_torchvision()

import transformers  # noqa: E402  (the guard comes first)

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}


def idefics3_processor() -> Any:
    tags = {f"tag_{row}_{column}": f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)}
    special = _SPECIAL | {"around": "<fake_token_around_image>", "whole": "<global-img>", "said": "<end_of_utterance>"}
    images = transformers.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    tokenizer = byte_tokenizer(special | tags, templates.LLAVA)
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=templates.LLAVA)


def idefics3(processor: Any) -> Any:
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(processor.tokenizer)},
        vision_config=TOWER | {"image_size": 32, "patch_size": 8},
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def llava_onevision_processor() -> Any:
    images = transformers.LlavaOnevisionImageProcessor(
        size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]]
    )
    return transformers.LlavaOnevisionProcessor(
        images,
        byte_tokenizer(_SPECIAL | {"video_token": "<video>"}, templates.LLAVA_ONEVISION),
        transformers.LlavaOnevisionVideoProcessor(size={"height": 16, "width": 16}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=templates.LLAVA_ONEVISION,
    )


def llava_onevision(processor: Any) -> Any:
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT, "vocab_size": len(processor.tokenizer)},
        vision_config={"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-1,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


TILED = {"idefics3": (idefics3_processor, idefics3), "llava_onevision": (llava_onevision_processor, llava_onevision)}
"""Name → makes the processor; makes the model for it."""


def save_tiled(name: str, folder: Path) -> Any:
    """Write model and processor into a folder; the model."""
    build_processor, build_model = TILED[name]
    processor = build_processor()
    torch.manual_seed(0)
    model = build_model(processor)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
