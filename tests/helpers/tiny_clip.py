"""A tiny CLIP model, as transformers saves it and as open_clip does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_generators import clip_tokenizer

SIDE = 32


def make_tiny_clip(folder: Path) -> Path:
    """Write a CLIP model with its processor; returns the folder."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    tokenizer = clip_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 1,
             "hidden_act": "gelu", "projection_dim": 16}  # fmt: skip
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    text = {**sizes, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 40, "pad_token_id": 0}
    vision = {**sizes, "image_size": SIDE, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    shown = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
    CLIPProcessor(image_processor=shown, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def write_open_clip(model: Any, path: Path) -> None:
    """Write a `CLIPModel` under open_clip's names, as HPSv2's file has them."""
    own = model.state_dict()
    found = {
        "logit_scale": own["logit_scale"],
        "text_projection": own["text_projection.weight"].T.contiguous(),
        "visual.proj": own["visual_projection.weight"].T.contiguous(),
        "token_embedding.weight": own["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": own["text_model.embeddings.position_embedding.weight"],
        "visual.class_embedding": own["vision_model.embeddings.class_embedding"],
        "visual.positional_embedding": own["vision_model.embeddings.position_embedding.weight"],
        "visual.conv1.weight": own["vision_model.embeddings.patch_embedding.weight"],
        "attn_mask": torch.zeros(2, 2),
    }
    for theirs, ours in {"ln_final": "text_model.final_layer_norm", "visual.ln_pre": "vision_model.pre_layrnorm",
                         "visual.ln_post": "vision_model.post_layernorm"}.items():  # fmt: skip
        found |= {f"{theirs}.{kind}": own[f"{ours}.{kind}"] for kind in ("weight", "bias")}
    for tower, start in (("text_model", ""), ("vision_model", "visual.")):
        for layer in range(2):
            theirs, ours = f"{start}transformer.resblocks.{layer}", f"{tower}.encoder.layers.{layer}"
            for kind in ("weight", "bias"):
                parts = [own[f"{ours}.self_attn.{which}_proj.{kind}"] for which in "qkv"]
                found[f"{theirs}.attn.in_proj_{kind}"] = torch.cat(parts)
                for one, other in {"attn.out_proj": "self_attn.out_proj", "ln_1": "layer_norm1", "ln_2": "layer_norm2",
                                   "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}.items():  # fmt: skip
                    found[f"{theirs}.{one}.{kind}"] = own[f"{ours}.{other}.{kind}"]
    torch.save({"state_dict": found}, path)
