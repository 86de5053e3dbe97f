"""A PaliGemma small enough for a test: its processor, and a folder with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.helpers.tiny_processors import byte_tokenizer

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIDE, _PATCH = 32, 8


def paligemma_processor() -> transformers.PaliGemmaProcessor:
    """The real class on pictures of 32 × 32 pixels; it adds its tokens of places and segments itself."""
    images = transformers.SiglipImageProcessor(size={"height": _SIDE, "width": _SIDE})
    images.image_seq_length = (_SIDE // _PATCH) ** 2
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return transformers.PaliGemmaProcessor(images, byte_tokenizer(special, None))


def make_tiny_paligemma(folder: Path) -> Path:
    """Write a model's folder."""
    processor = paligemma_processor()
    ids = {f"{name}_token_id": getattr(processor.tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    rows = len(processor.tokenizer)
    config = transformers.PaliGemmaConfig(
        vision_config=_SIZES
        | {"model_type": "siglip_vision_model", "image_size": _SIDE, "patch_size": _PATCH, "vision_use_head": False},
        text_config=_SIZES
        | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8, "vocab_size": rows, **ids},
        image_token_index=processor.image_token_id,
        vocab_size=rows,
        projection_dim=32,
        hidden_size=32,
        **ids,
    )
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)  # large enough for what is attended to to show in the loss
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
