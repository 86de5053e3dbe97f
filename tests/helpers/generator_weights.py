"""Weights of generators for tests of names: every key of a model of diffusers, with its true rows and two columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

import diffusers  # noqa: E402  (the guard comes first)

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan": ("WanTransformer3DModel", {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}),
    "Wan I2V": (
        "WanTransformer3DModel",
        {
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 36,
            "image_dim": 8,
            "added_kv_proj_dim": 16,
        },
    ),
    "VACE": (
        "WanVACETransformer3DModel",
        {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 8, "vace_layers": [0, 2]},
    ),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", {"num_layers": 1, "num_single_layers": 2}),
    "HunyuanVideo 1.5": (
        "HunyuanVideo15Transformer3DModel",
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8},
    ),
    "CogVideoX": ("CogVideoXTransformer3DModel", {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}),
    "LTX-Video": ("LTXVideoTransformer3DModel", {"num_layers": 2}),
    "LTX-2": ("LTX2VideoTransformer3DModel", {"num_layers": 2}),
    "FLUX.1": ("FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 2, "guidance_embeds": True}),
    "FLUX.2": ("Flux2Transformer2DModel", {"num_layers": 1, "num_single_layers": 2}),
}
"""Class and sizes. FLUX.1 and HunyuanVideo keep their width: diffusers' functions are written for 3072 alone."""


def outline(case: str) -> torch.nn.Module:
    """A transformer without memory."""
    class_name, sizes = TRANSFORMERS[case]
    with torch.device("meta"):
        return getattr(diffusers, class_name)(**sizes)


def narrow_weights(case: str) -> dict[str, torch.Tensor]:
    """A transformer's keys with random numbers: all rows, two columns."""
    torch.manual_seed(0)
    shapes = {key: tensor.shape for key, tensor in outline(case).state_dict().items()}
    return {
        key: torch.randint(-(2**15), 2**15, (*shape[:1], *(min(length, 2) for length in shape[1:])), dtype=torch.int16)
        for key, shape in shapes.items()
    }


class _Memory:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def get_tensor(self, key: str) -> torch.Tensor:
        return self.tensors[key]


def lazy(tensors: Mapping[str, torch.Tensor]) -> dict[str, LazyTensor]:
    """As a reader gives them."""
    memory = _Memory(tensors)
    return {key: Stored(key, tensor.shape, tensor.dtype, lambda: memory) for key, tensor in tensors.items()}


def read(tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """All of them."""
    return {key: tensor.read() for key, tensor in tensors.items()}


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """Assert that two sets of weights are equal bit for bit."""
    assert sorted(first) == sorted(second)
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different, different


SMALL: dict[str, dict[str, Any]] = {
    "Wan": {"num_layers": 4, "ffn_dim": 24, "text_dim": 8},
    "Wan I2V": {"ffn_dim": 24, "text_dim": 8},
    "VACE": {"ffn_dim": 24, "text_dim": 8},
    "HunyuanVideo": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "text_embed_dim": 8,
        "pooled_projection_dim": 8,
    },
    "HunyuanVideo 1.5": {"text_embed_dim": 8, "text_embed_2_dim": 8, "image_embed_dim": 8},
    "CogVideoX": {
        "num_layers": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 8,
        "use_rotary_positional_embeddings": True,
    },
    "LTX-Video": {"attention_head_dim": 2, "cross_attention_dim": 64, "caption_channels": 8},
    "LTX-2": {
        "attention_head_dim": 2,
        "cross_attention_dim": 64,
        "audio_attention_head_dim": 2,
        "audio_cross_attention_dim": 64,
        "caption_channels": 8,
        "rope_type": "split",
    },
    "FLUX.1": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
    },
    "FLUX.2": {"num_attention_heads": 2, "attention_head_dim": 8, "joint_attention_dim": 8},
}
"""Sizes that make a whole model of a few hundred kilobytes."""


def small_model(case: str) -> Any:
    """A transformer with random weights, seeded."""
    class_name, sizes = TRANSFORMERS[case]
    torch.manual_seed(0)
    return getattr(diffusers, class_name)(**{**sizes, **SMALL[case]})


def reload(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """What diffusers reads from a folder; it must miss nothing."""
    class_name, _ = TRANSFORMERS[case]
    model, info = getattr(diffusers, class_name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return dict(model.state_dict())
