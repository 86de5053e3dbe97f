"""Stable Diffusion 3 as a plugin from outside would bring it; to import it registers it, for the whole process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.latents import model_range
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register
from tests.helpers.tiny_sd3 import T5_TOKENS


@model_register.register("outside_sd3")
class OutsideSD3(DiffusionAdapter):
    """Two CLIP encoders; where the third is absent, its tokens are zeros."""

    transformer_class = "SD3Transformer2DModel"
    pipelines = {"t2i": "StableDiffusion3Pipeline"}
    blocks = ("transformer_blocks.{*}",)
    lora_targets = ("*.attn.to_q", "*.attn.to_v")
    tokenizer = "tokenizer_3"
    most_text_tokens = T5_TOKENS

    @property
    def geometry(self) -> MediaGeometry:
        """Of the VAE's blocks, patches of 2 × 2."""
        ratio = 2 ** (len(self.component_config("vae")["block_out_channels"]) - 1)
        return MediaGeometry(ratio, 1, (1, 2, 2), self.transformer_config["in_channels"], is_video=False)

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[TextFeatures]:
        """Tokens of all encoders behind one another, and both pooled ones."""
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(captions), None, None, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return [{"prompt_embeds": each, "pooled_prompt_embeds": p} for each, p in zip(embeds, pooled, strict=True)]

    @torch.no_grad()
    def encode_media(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(z − shift) × scale."""
        config = pipeline.vae.config
        latents = pipeline.vae.encode(model_range(pixels[:, :, 0])).latent_dist.mode()
        return (latents - config.shift_factor) * config.scaling_factor

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1000 σ."""
        text = {"encoder_hidden_states": batch["prompt_embeds"], "pooled_projections": batch["pooled_prompt_embeds"]}
        return {"hidden_states": noisy, "timestep": 1000 * sigma, **text}

    def prediction(self, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """As it is."""
        return output[0]

    def init_weights(self, module: torch.nn.Module) -> None:
        """Nothing of its own."""

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Classifier-free guidance."""
        height, width = (side * self.geometry.spatial_ratio for side in latents.shape[-2:])
        return {
            "height": height,
            "width": width,
            "num_inference_steps": sampling.num_inference_steps,
            "guidance_scale": sampling.guidance_scale,
            "negative_prompt": [sampling.negative_prompt] * len(prompts),
            "latents": latents,
            "max_sequence_length": self.text_tokens,
        }
