"""What BAGEL sees with, SigLIP for pictures of any size; and the tables of places and of noise levels.

Where a sequence is spread over ranks, so are the patches of its pictures. Shapes: S patches of seen pictures, of which
a rank holds s, V features of the tower, H of the language model.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from typing_extensions import override

from mindspeed_mm.fsdp.models.bagel.configuration_bagel import BagelConfig
from mindspeed_mm.fsdp.models.bagel.mixture import Samples, attend
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare

_FREQUENCIES = 256


class BagelVisionLayer(SiglipEncoderLayer):
    """SigLIP's layer on the patches of many pictures, each of which sees its own."""

    @override
    def forward(self, hidden: torch.Tensor, pictures: Samples | ContextShare) -> torch.Tensor:  # type: ignore[override]
        attention: Any = self.self_attn
        normed = self.layer_norm1(hidden)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (each(normed).unflatten(2, (-1, attention.head_dim)) for each in projections)
        if isinstance(pictures, ContextShare):
            attended = pictures.attend(query, key, value, causal=False, scale=None).flatten(2)
        else:
            attended = attend(query, key, value, pictures)
        hidden = hidden + attention.out_proj(attended)
        return hidden + self.mlp(self.layer_norm2(hidden))


class BagelVisionEmbeddings(nn.Module):
    """Patches and their places.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        vit = config.vit_config
        self.patch_embedding = nn.Linear(vit.num_channels * vit.patch_size**2, vit.hidden_size)
        self.position_embedding = nn.Embedding((vit.image_size // vit.patch_size) ** 2, vit.hidden_size)

    def forward(self, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(S, channels · p²) numbers of patches → (1, S, V), with their places added."""
        patches = patches.to(self.patch_embedding.weight.dtype)
        return (self.patch_embedding(patches) + self.position_embedding(places))[None]


class BagelVision(nn.Module):
    """SigLIP for pictures of any size: `vit_model.vision_model` of the release.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        vit = config.vit_config
        self.embeddings = BagelVisionEmbeddings(config)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(BagelVisionLayer(vit) for _ in range(config.vit_layers))})
        self.post_layernorm = nn.LayerNorm(vit.hidden_size, eps=vit.layer_norm_eps)

    def forward(
        self, patches: torch.Tensor, places: torch.Tensor, lengths: list[int], share: ContextShare | None = None
    ) -> torch.Tensor:
        """(s, channels · p²) → (1, s, V).

        Args:
            patches: Of all pictures; of a spread sequence the own ones.
            places: (s,) of each patch, in the table of places.
            lengths: Patches of each picture.
            share: Of the patches, where they are spread over ranks.
        """
        hidden = self.embeddings(patches, places)
        pictures: Samples | ContextShare = share or Samples(
            list(pairwise(accumulate(lengths, initial=0))), [None] * len(lengths)
        )
        for layer in self.encoder["layers"]:
            hidden = layer(hidden, pictures)
        return self.post_layernorm(hidden)


class PlaceTable(nn.Module):
    """A fixed table of places, sines and cosines of column and row (arXiv:2212.09748); stored with the weights.

    Args:
        per_side: PlaceTable along a side.
        width: H.
    """

    def __init__(self, per_side: int, width: int) -> None:
        super().__init__()
        self._per_side = per_side
        self.pos_embed = nn.Parameter(torch.empty(per_side**2, width), requires_grad=False)

    def table(self) -> torch.Tensor:
        """What the table holds: of each place the sines, then the cosines of its column; then of its row."""
        half = self.pos_embed.shape[1] // 2
        speeds = 10000.0 ** -(torch.arange(half // 2, dtype=torch.float64) / (half / 2))
        angles = torch.arange(self._per_side, dtype=torch.float64)[:, None] * speeds
        side = torch.cat([angles.sin(), angles.cos()], dim=1)
        count = self._per_side
        return torch.cat([side.repeat(count, 1), side.repeat_interleave(count, dim=0)], dim=1)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """(n,) places, numbered row by row → (n, H)."""
        return self.pos_embed[places]


class TimeEmbedder(nn.Module):
    """Noise levels from 0 to 1 as vectors.

    Args:
        width: H.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """(n,) noise levels → (n, H), as DiT makes them of timesteps."""
        half = _FREQUENCIES // 2
        speeds = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=times.device) / half)
        angles = times[:, None] * speeds.to(times.dtype)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))  # type: ignore[no-any-return,union-attr]


class Connector(nn.Module):
    """From the tower to the language model.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        width = config.llm_config.hidden_size
        self.fc1, self.fc2 = nn.Linear(config.vit_config.hidden_size, width), nn.Linear(width, width)
        self._activation = ACT2FN[config.connector_act]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(…, V) features of patches → (…, H) in the language model."""
        return self.fc2(self._activation(self.fc1(features)))
