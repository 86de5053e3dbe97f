"""The denoising transformer of Ming-Lite-Omni 1.5, under its released names: Stable Diffusion 3's (arXiv:2403.03206),
with blocks in front that go over the noise, or over a picture that is edited, alone.

Facts: `diffusion/sd3_transformer.py` and `sd3_loss.py` of inclusionAI/Ming at d97e2f3. Shapes: B samples, C channels,
h and w positions of latents; N tokens of a picture; Q rows of a condition, D features of one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import PatchEmbed
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_sd3 import SD3SingleTransformerBlock
from torch import nn

REFINERS = 2
"""Blocks that go over the noise alone, and over the picture that is edited; the published code has no other number."""


class ConditionMLP(nn.Module):
    """From a condition to what Stable Diffusion 3 takes for captions. Its weights lie in the released folder `mlp`.

    Args:
        width: D.
        inner: Features between its layers.
        out: Features of a caption's rows.
    """

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.fc1, self.layer_norm1 = nn.Linear(width, inner), nn.LayerNorm(inner)
        self.fc2, self.layer_norm2 = nn.Linear(inner, out), nn.LayerNorm(out)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(B, Q, D) → (B, Q, out)."""
        hidden = F.relu(self.layer_norm1(self.fc1(rows)))
        return self.layer_norm2(self.fc2(hidden))  # type: ignore[no-any-return]


class MingImageTransformer(SD3Transformer2DModel):  # type: ignore[misc]
    """Stable Diffusion 3's transformer, its refiners, and the MLP in front.

    Args:
        sample_size: Positions along a side that the table of places is scaled for.
        patch_size: Positions along a side of a token.
        in_channels: C.
        num_layers: Joint blocks.
        num_refiner_layers: `REFINERS`.
        attention_head_dim: Features of a head.
        num_attention_heads: Heads.
        joint_attention_dim: Features of a row behind the MLP.
        caption_projection_dim: Features of a row in the blocks.
        pooled_projection_dim: Features of the condition as a whole: means of equally many neighbouring features.
        out_channels: Of the prediction.
        pos_embed_max_size: Tokens along a side of the largest picture.
        dual_attention_layers: Blocks in which a picture also attends to itself alone.
        qk_norm: Norm of queries and keys.
        vae_ref_channel_cat: False: the published code has no other way for a picture that is edited.
        condition_dim: D.
        condition_inner_dim: Features between the layers of the MLP.

    Raises:
        ValueError: A setting is none that the published code has a forward for.
    """

    _no_split_modules = ["JointTransformerBlock", "SD3SingleTransformerBlock"]

    @register_to_config
    def __init__(
        self,
        sample_size: int = 128,
        patch_size: int = 2,
        in_channels: int = 16,
        num_layers: int = 18,
        num_refiner_layers: int = REFINERS,
        attention_head_dim: int = 64,
        num_attention_heads: int = 18,
        joint_attention_dim: int = 4096,
        caption_projection_dim: int = 1152,
        pooled_projection_dim: int = 2048,
        out_channels: int = 16,
        pos_embed_max_size: int = 96,
        dual_attention_layers: tuple[int, ...] = (),
        qk_norm: str | None = None,
        vae_ref_channel_cat: bool = False,
        condition_dim: int = 2048,
        condition_inner_dim: int = 2048,
    ) -> None:
        if vae_ref_channel_cat or num_refiner_layers != REFINERS:
            raise ValueError(
                f"vae_ref_channel_cat: {vae_ref_channel_cat}, num_refiner_layers: {num_refiner_layers}; known are "
                f"False and {REFINERS}"
            )
        if joint_attention_dim % pooled_projection_dim:
            raise ValueError(
                f"joint_attention_dim {joint_attention_dim} is no multiple of pooled_projection_dim "
                f"{pooled_projection_dim}"
            )
        super().__init__(
            sample_size=sample_size,
            patch_size=patch_size,
            in_channels=in_channels,
            num_layers=num_layers,
            attention_head_dim=attention_head_dim,
            num_attention_heads=num_attention_heads,
            joint_attention_dim=joint_attention_dim,
            caption_projection_dim=caption_projection_dim,
            pooled_projection_dim=pooled_projection_dim,
            out_channels=out_channels,
            pos_embed_max_size=pos_embed_max_size,
            dual_attention_layers=dual_attention_layers,
            qk_norm=qk_norm,
        )
        sizes = {"height": sample_size, "width": sample_size, "patch_size": patch_size, "in_channels": in_channels}
        self.ref_pos_embed = PatchEmbed(**sizes, embed_dim=self.inner_dim, pos_embed_max_size=pos_embed_max_size)
        heads = {"num_attention_heads": num_attention_heads, "attention_head_dim": attention_head_dim}
        for name in ("noise_refiner", "ref_image_refiner"):
            blocks = [SD3SingleTransformerBlock(self.inner_dim, **heads) for _ in range(num_refiner_layers)]
            self.add_module(name, nn.ModuleList(blocks))
        self.mlp = ConditionMLP(condition_dim, condition_inner_dim, joint_attention_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        ref_hidden_states: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """(B, C, h, w): noise minus latents, as predicted.

        Args:
            hidden_states: (B, C, h, w) latents with noise.
            encoder_hidden_states: (B, Q, D) conditions.
            timestep: (B,) noise levels in 0 … 1000.
            ref_hidden_states: (B, C, h, w) latents of the pictures that are edited; None: none is.
            return_dict: False: a tuple.
        """
        config, (height, width) = self.config, hidden_states.shape[-2:]
        context = self.mlp(encoder_hidden_states)
        pooled = context.mean(dim=1).unflatten(1, (config.pooled_projection_dim, -1)).mean(dim=2)
        times = self.time_text_embed(timestep, pooled)
        context = self.context_embedder(context)
        tokens = self.pos_embed(hidden_states).contiguous()
        for block in self.noise_refiner:
            tokens = block(tokens, times)
        own = tokens.shape[1]
        if ref_hidden_states is not None:
            seen = self.ref_pos_embed(ref_hidden_states).contiguous()
            for block in self.ref_image_refiner:
                seen = block(seen, times)
            tokens = torch.cat([tokens, seen], dim=1)
        for block in self.transformer_blocks:
            context, tokens = block(hidden_states=tokens, encoder_hidden_states=context, temb=times)
        made = self.proj_out(self.norm_out(tokens, times))[:, :own]
        side = config.patch_size
        squares = made.view(len(made), height // side, width // side, side, side, self.out_channels)
        sample = squares.permute(0, 5, 1, 3, 2, 4).reshape(len(made), self.out_channels, height, width)
        if return_dict:
            return Transformer2DModelOutput(sample=sample)
        return (sample,)
