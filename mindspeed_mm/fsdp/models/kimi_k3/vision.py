"""What Kimi-K3 sees with: MoonViT as Kimi-K2.5 has it, with RMS norms and without biases, and the projector behind
it."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from mindspeed_mm.fsdp.models.kimi_k3.configuration_kimi_k3 import KimiK3Config, KimiK3VisionConfig

_EPS = torch.finfo(torch.float32).eps
"""Of the tower's norms, which state none: torch's own."""


class KimiK3VisionModel(Kimi_K25VisionModel):  # type: ignore[misc]
    """Kimi-K2.5's tower with RMS norms, without biases, with heads that are wider together than its features.

    Args:
        config: Its settings.
    """

    config: KimiK3VisionConfig
    config_class = KimiK3VisionConfig

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, config.qkv_hidden_size
        convolution = self.patch_embed.proj
        self.patch_embed.proj = nn.Conv2d(3, width, convolution.kernel_size, convolution.stride, bias=False)
        self.patch_embed.pos_emb.interpolation_mode = "bilinear"
        self.final_layernorm = nn.RMSNorm(width, eps=_EPS)
        for layer in self.layers:
            layer.norm1, layer.norm2 = (nn.RMSNorm(width, eps=_EPS) for _ in range(2))
            layer.mlp.fc1 = nn.Linear(width, config.intermediate_size, bias=False)
            layer.mlp.fc2 = nn.Linear(config.intermediate_size, width, bias=False)
            attention = layer.attn
            attention.head_dim = config.head_dim
            attention.scaling = config.head_dim**-0.5
            attention.proj = nn.Linear(heads, width, bias=False)
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, name, nn.Linear(width, heads, bias=False))
        self.post_init()


class KimiK3Projector(nn.Module):
    """Squares of patches to tokens of the text model.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        vision, out = config.vision_config, config.text_config.hidden_size
        wide = vision.hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
        self.proj = nn.Sequential(nn.Linear(wide, wide, bias=False), nn.GELU(), nn.Linear(wide, out, bias=False))
        self.post_norm = nn.RMSNorm(out, eps=config.projection_layer_norm_eps)

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """(tokens, patches of a square, features) → (tokens, H)."""
        output: torch.Tensor = self.post_norm(self.proj(squares.flatten(1)))
        return output
