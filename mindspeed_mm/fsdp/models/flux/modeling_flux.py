"""FLUX.1 (text to image) as diffusers has it: packed latents, two text encoders, time in 0..1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, scaled
from mindspeed_mm.fsdp.models.diffusion.packing import PATCH, pack, unpack
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("flux")
class FluxAdapter(DiffusionAdapter):
    """FLUX.1 dev and schnell."""

    transformer_class = "FluxTransformer2DModel"
    pipelines = {"t2i": "FluxPipeline"}
    blocks = ("transformer_blocks.{*}", "single_transformer_blocks.{*}")
    sample_plan = SamplePlan(
        image_inputs={"hidden_states": -2, "img_ids": -2},
        text_inputs={"encoder_hidden_states": -2, "txt_ids": -2},
    )
    lora_targets = (
        *(f"*.attn.to_{name}" for name in ("q", "k", "v", "out.0")),
        *(f"*.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    )
    streams = {
        "time_text_embed*": "samples",
        "*.norm*linear": "samples",
        "norm_out.linear": "samples",
        "context_embedder": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
        "single_transformer_blocks.*": "latents+caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer_2"
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As `FluxPipeline` reads it off the VAE's blocks."""
        ratio = 2 ** (len(self.component_config("vae").get("block_out_channels", (0,) * 4)) - 1)
        return MediaGeometry(
            spatial_ratio=ratio,
            temporal_ratio=1,
            patch=(1, PATCH, PATCH),
            latent_channels=self._packed_channels // PATCH**2,
            is_video=False,
        )

    @property
    def _packed_channels(self) -> int:
        return int(self.transformer_config.get("in_channels", 64))

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, widths of both text encoders."""
        packed = PATCH**2 * self.component_config("vae").get("latent_channels", 16)
        return [
            Requirement("in_channels", packed, "vae: latent_channels × 4"),
            Requirement(
                "joint_attention_dim", self.component_config("text_encoder_2").get("d_model"), "text_encoder_2"
            ),
            Requirement(
                "pooled_projection_dim", self.component_config("text_encoder").get("hidden_size"), "text_encoder"
            ),
        ]

    # --- encoding ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D) by T5, padding included, since the model attends to it; `pooled_prompt_embeds` (D,) by
        CLIP."""
        embeds, pooled, _ = pipeline.encode_prompt(
            prompt=list(captions), prompt_2=None, max_sequence_length=self.text_tokens
        )
        return [
            {"prompt_embeds": each, "pooled_prompt_embeds": pooled_each}
            for each, pooled_each in zip(embeds, pooled, strict=True)
        ]

    @torch.no_grad()
    def encode_media(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(z − shift_factor) · scaling_factor."""
        return scaled(pipeline.vae, posterior_mode(pipeline.vae, pixels[:, :, 0]))

    # --- training ---------------------------------------------------------------------------------------------------

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Packed latents; time is σ itself; positions are (0, row, column), those of text are zero."""
        text = batch["prompt_embeds"]
        inputs = {
            "hidden_states": pack(noisy),
            "timestep": sigma,
            "encoder_hidden_states": text,
            "pooled_projections": batch["pooled_prompt_embeds"],
            "txt_ids": torch.zeros(text.shape[1], 3, device=noisy.device),
            "img_ids": position_ids(noisy.shape[-2], noisy.shape[-1], noisy.device),
        }
        if self.transformer_config.get("guidance_embeds"):
            inputs["guidance"] = torch.full_like(sigma, guidance)
        return inputs

    def prediction(self, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """Unpacked."""
        return unpack(output[0], latent_shape)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """A transformer that takes guidance as an input gets it; any other is guided away from the negative prompt.

        Raises:
            ConfigError: There is a negative prompt, which would have no effect.
        """
        arguments = self.guided(sampling, prompts, latents) | {"latents": pack(latents)}
        if self.transformer_config.get("guidance_embeds"):
            self.refuse_negative_prompt(sampling, "this transformer takes guidance as an input")
            del arguments["negative_prompt"]
            return arguments
        return arguments | {"true_cfg_scale": arguments.pop("guidance_scale")}


def position_ids(height: int, width: int, device: torch.device) -> torch.Tensor:
    """(N, 3): 0, row and column of each token of latents of this size."""
    rows = torch.arange(height // PATCH, device=device, dtype=torch.float32)
    columns = torch.arange(width // PATCH, device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.cat([torch.zeros(len(grid), 1, device=device), grid], dim=1)
