"""SANA (text to image) as diffusers has it: a deep autoencoder of 32 × 32, linear attention, Gemma 2 for captions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.attention_layers import layers_of
from mindspeed_mm.fsdp.models.diffusion.init_tables import init_scale_shift_table
from mindspeed_mm.fsdp.models.diffusion.latent_scales import scaled
from mindspeed_mm.fsdp.models.diffusion.pixels import model_range
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PIPELINE_STEP = 32
"""The pipelines refuse other heights and widths than its multiples."""


@model_register.register("sana")
class SanaAdapter(DiffusionAdapter):
    """SANA and SANA 1.5, which draw pictures from text."""

    transformer_class = "SanaTransformer2DModel"
    pipelines = {"t2i": "SanaPipeline"}
    blocks = ("transformer_blocks.{*}",)
    whole_because = "its feed-forward layers are convolutions over neighbouring tokens, which other ranks would hold"
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states",)},
        behind=("norm_out", "proj_out"),
        behind_parameters=("scale_shift_table",),
        carried=("time_embed", "caption_norm"),
    )
    lora_targets: ClassVar[tuple[str, ...]] = ("*.to_q", "*.to_k", "*.to_v")
    older_lora_targets = layers_of("*.attn1", "*.attn2")
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer")
    most_text_tokens = 300

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As the pipeline reads it off the VAE's blocks, and its own rule for sides."""
        ratio = 2 ** (len(self.component_config("vae").get("encoder_block_out_channels", (0,) * 6)) - 1)
        patch = int(self.transformer_config.get("patch_size", 1))
        channels = int(self.transformer_config.get("in_channels", 32))
        step = math.lcm(PIPELINE_STEP, ratio * patch)
        return MediaGeometry(ratio, 1, (1, patch, patch), channels, is_video=False, spatial_step=step)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        return [
            Requirement("in_channels", self.component_config("vae").get("latent_channels"), "vae: latent_channels"),
            Requirement("caption_channels", self.component_config("text_encoder").get("hidden_size"), "text_encoder"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): a caption's own tokens, read by Gemma 2 behind the instruction that the pipeline puts
        before prompts. The empty caption has none, as the pipeline's negative prompt."""
        return [{"prompt_embeds": self._caption_rows(pipeline, caption)} for caption in captions]

    def _caption_rows(self, pipeline: DiffusionPipeline, caption: str) -> torch.Tensor:
        instruction = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
        embeds, mask, _, _ = pipeline.encode_prompt(
            [caption],
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_tokens,
            complex_human_instruction=instruction if caption else None,
        )
        return own_rows(embeds, mask)[0]

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Pad captions to one length: `prompt_embeds` (B, L, D) and `prompt_mask` (B, L)."""
        return pad_rows(features)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """z · scaling_factor; this autoencoder draws nothing."""
        vae = pipeline.vae
        return scaled(vae, vae.encode(model_range(pixels[:, :, 0]).to(vae.device, vae.dtype)).latent)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1000 σ · `timestep_scale`."""
        inputs = {
            "hidden_states": noisy,
            "timestep": 1000 * sigma * self.transformer_config.get("timestep_scale", 1.0),
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_attention_mask": batch["prompt_mask"],
        }
        if self.transformer_config.get("guidance_embeds"):
            scale = self.transformer_config.get("guidance_embeds_scale", 0.1)
            inputs["guidance"] = torch.full_like(sigma, guidance) * scale
        return inputs

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The first channels: some release has as many again, which were for variances."""
        return output[0][:, : latent_shape[1]]

    def init_weights(self, module: nn.Module) -> None:
        """Draw `scale_shift_table` from N(0, 1/width); a module without one is left alone."""
        init_scale_shift_table(module)

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """The one that the release was trained on, of which the pipeline knows 1024 pixels alone."""
        side = int(self.transformer_config.get("sample_size", 32)) * self.geometry.spatial_ratio
        return side, side

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Classifier-free guidance, in the size that is asked for."""
        return self.guided(sampling, prompts, latents) | {"use_resolution_binning": False}
