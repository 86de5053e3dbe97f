"""A tiny folder of DeepSeek-OCR, written as the released one is, by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_deepseek_vl2 import HIDDEN, SPECIAL, text_settings, text_shapes, value_of
from tests.helpers.tiny_processors import byte_tokenizer

SAM, CLIP, MIDDLE, NECK = 24, 20, 16, 256
"""Features of SAM, of CLIP, between the two, and of SAM's neck, which no setting names."""
PAGE, TILE, PATCH, WINDOW = 128, 16, 16, 14


def make_tiny_deepseek_ocr(folder: Path, layers: int = 3) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer(SPECIAL, None)
    tokenizer.save_pretrained(folder)
    text = text_settings("tiny", layers, tokenizer)
    sam = {"width": SAM, "layers": 2, "heads": 2, "global_attn_indexes": [1], "downsample_channels": [MIDDLE, CLIP]}
    clip = {"width": CLIP, "layers": 2, "heads": 2, "image_size": 28, "patch_size": 14}
    config = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "language_config": text,
        "projector_config": {"projector_type": "linear", "input_dim": 2 * CLIP, "n_embed": HIDDEN},
        "vision_config": {
            "model_name": "deeplip_b_l",
            "model_type": "vision",
            "image_size": PAGE,
            "width": {"sam_vit_b": sam, "clip-l-14-224": clip},
        },
        "torch_dtype": "float32",
        **{key: text[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")},
    }
    processor = {
        "processor_class": "DeepseekVLV2Processor", "candidate_resolutions": [[PAGE, PAGE]], "tile_size": TILE,
        "patch_size": PATCH, "downsample_ratio": 4, "image_token": "<image>", "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "normalize": True, "sft_format": "deepseek", "pad_token": "<｜▁pad▁｜>",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tensors = {name: value_of(name, shape) for name, shape in released_shapes(text).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def released_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every name of the release with its shape, written out by hand."""
    places = PAGE // PATCH
    shapes: dict[str, tuple[int, ...]] = {
        "model.image_newline": (HIDDEN,),
        "model.view_seperator": (HIDDEN,),
        "model.sam_model.pos_embed": (1, places, places, SAM),
        "model.sam_model.patch_embed.proj.weight": (SAM, 3, PATCH, PATCH),
        "model.sam_model.patch_embed.proj.bias": (SAM,),
        "model.sam_model.neck.0.weight": (NECK, SAM, 1, 1),
        "model.sam_model.neck.2.weight": (NECK, NECK, 3, 3),
        "model.sam_model.net_2.weight": (MIDDLE, NECK, 3, 3),
        "model.sam_model.net_3.weight": (CLIP, MIDDLE, 3, 3),
        "model.vision_model.embeddings.class_embedding": (CLIP,),
        "model.vision_model.embeddings.patch_embedding.weight": (CLIP, 3, 14, 14),
        "model.vision_model.embeddings.position_embedding.weight": (5, CLIP),
    }

    def linear(name: str, out: int, inner: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inner), (out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width,), (width,)

    norm("model.sam_model.neck.1", NECK)
    norm("model.sam_model.neck.3", NECK)
    norm("model.vision_model.pre_layrnorm", CLIP)
    linear("model.projector.layers", HIDDEN, 2 * CLIP)
    for number in range(2):
        block, layer = f"model.sam_model.blocks.{number}", f"model.vision_model.transformer.layers.{number}"
        for side in "hw":
            shapes[f"{block}.attn.rel_pos_{side}"] = (2 * (WINDOW, places)[number] - 1, SAM // 2)
        linear(f"{block}.attn.qkv", 3 * SAM, SAM)
        linear(f"{block}.attn.proj", SAM, SAM)
        linear(f"{block}.mlp.lin1", 4 * SAM, SAM)
        linear(f"{block}.mlp.lin2", SAM, 4 * SAM)
        linear(f"{layer}.self_attn.qkv_proj", 3 * CLIP, CLIP)
        linear(f"{layer}.self_attn.out_proj", CLIP, CLIP)
        linear(f"{layer}.mlp.fc1", 4 * CLIP, CLIP)
        linear(f"{layer}.mlp.fc2", CLIP, 4 * CLIP)
        for place in ("1", "2"):
            norm(f"{block}.norm{place}", SAM)
            norm(f"{layer}.layer_norm{place}", CLIP)
    return shapes | text_shapes(text, "")
