"""CLIP models in open_clip's layout (`open_clip_pytorch_model.bin`, HPSv2's `.pt`), read as transformers' CLIPModel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import ModelFolderError

if TYPE_CHECKING:
    from transformers import CLIPModel

_HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
"""Width of a vision tower → width of its heads, of ViT-H-14, ViT-g-14 and ViT-bigG-14; 64 of the others."""
_HEAD_WIDTH = 64
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
_IN_BLOCK = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "attn.out_proj": "self_attn.out_proj",
             "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}  # fmt: skip
_OUTSIDE = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
_TRANSPOSED = ("text_projection", "visual.proj")
"""open_clip multiplies by them from the right."""
_NO_WEIGHTS = ("attn_mask", "position_ids")

Weights = Mapping[str, torch.Tensor]


def read_open_clip(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file in open_clip's layout, whole or under `state_dict`; nothing in the file is run.

    Raises:
        CheckpointError: The file is missing or broken.
        ModelFolderError: It holds something else.
    """
    content: object = load_weights(path)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    found: dict[str, torch.Tensor] = {}
    if isinstance(content, Mapping):
        for name, tensor in content.items():
            if isinstance(tensor, torch.Tensor) and not str(name).endswith(_NO_WEIGHTS):
                # Saved from inside torch's DistributedDataParallel.
                found[str(name).removeprefix("module.")] = tensor
    if "visual.proj" not in found or "text_projection" not in found:
        raise ModelFolderError(
            "holds no CLIP model in open_clip's layout: visual.proj or text_projection is missing",
            where=str(path),
            key="posttrain.rewards",
        )
    return found


def clip_from_open_clip(weights: Weights, end_id: int) -> CLIPModel:
    """A `CLIPModel` with these weights, in eval mode; its sizes follow from their shapes.

    Args:
        weights: From `read_open_clip`.
        end_id: The token that ends a text, behind which text features are read.

    Raises:
        ModelFolderError: A tensor is unknown, missing, or of another shape.
    """
    from transformers import CLIPConfig, CLIPModel  # seconds

    vision_width, _, patch, _ = weights["visual.conv1.weight"].shape
    text_width, projection = weights["text_projection"].shape
    # Places are those of the patches and one of the class token.
    side = round((weights["visual.positional_embedding"].shape[0] - 1) ** 0.5)
    common = {"hidden_act": "gelu", "projection_dim": projection}
    text = _tower(weights, "", text_width) | common
    vision = _tower(weights, "visual.", vision_width) | common
    vocabulary, longest = weights["token_embedding.weight"].shape[0], weights["positional_embedding"].shape[0]
    text |= {"vocab_size": vocabulary, "max_position_embeddings": longest, "eos_token_id": end_id}
    vision |= {"patch_size": patch, "image_size": side * patch}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection))
    try:
        model.load_state_dict(transformers_names(weights), strict=True, assign=True)
    except (RuntimeError, KeyError) as error:
        raise ModelFolderError(
            f"is no CLIP model that transformers has: {str(error).splitlines()[-1].strip()}", key="posttrain.rewards"
        ) from error
    return model.float().eval()


def transformers_names(weights: Weights) -> dict[str, torch.Tensor]:
    """The same tensors as transformers' CLIPModel names them; the joint projection of attention is cut in three.

    Raises:
        KeyError: A name is unknown.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        block = _BLOCK.fullmatch(name)
        if block is None:
            if name in _TRANSPOSED:
                tensor = tensor.t().contiguous()
            found[_OUTSIDE[name]] = tensor
            continue
        tower = "vision_model" if block[1] else "text_model"
        start = f"{tower}.encoder.layers.{block[2]}"
        if block[3].startswith("attn.in_proj_"):
            kind = block[3].removeprefix("attn.in_proj_")
            for which, part in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{start}.self_attn.{which}_proj.{kind}"] = part.contiguous()
            continue
        inside, _, kind = block[3].rpartition(".")
        found[f"{start}.{_IN_BLOCK[inside]}.{kind}"] = tensor
    return found


def _tower(weights: Weights, prefix: str, width: int) -> dict[str, int]:
    layers, head = 0, _HEAD_WIDTH
    for name in weights:
        block = _BLOCK.fullmatch(name)
        if block is not None and (block[1] or "") == prefix:
            layers = max(layers, int(block[2]) + 1)
    if prefix:
        head = _HEAD_WIDTHS.get(width, _HEAD_WIDTH)
    return {
        "hidden_size": width,
        "intermediate_size": weights[f"{prefix}transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // head),
    }
