"""Qwen-Image (text to image) as diffusers has it: packed latents of a video VAE, captions by Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, standardised
from mindspeed_mm.fsdp.models.diffusion.packing import PATCH, pack, unpack
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("qwen_image")
class QwenImageAdapter(DiffusionAdapter):
    """Qwen-Image."""

    transformer_class = "QwenImageTransformer2DModel"
    pipelines = {"t2i": "QwenImagePipeline"}
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        blocks={
            "transformer_blocks.{*}": {
                "hidden_states": (IMAGE, 1),
                "encoder_hidden_states": (TEXT, 1),
                "encoder_hidden_states_mask": (TEXT, 1),
                "image_rotary_emb": ((IMAGE, 0), (TEXT, 0)),
            }
        },
        attention={"*.attn": (TEXT, IMAGE)},
    )
    lora_targets = (
        *(f"*.attn.to_{name}" for name in ("q", "k", "v", "out.0")),
        *(f"*.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    )
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer")

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As the pipeline reads it off the VAE: one factor of two for each entry of `temperal_downsample`."""
        ratio = 2 ** len(self.component_config("vae").get("temperal_downsample", (0,) * 3))
        channels = int(self.transformer_config.get("in_channels", 64)) // PATCH**2
        return MediaGeometry(ratio, 1, (1, PATCH, PATCH), channels, is_video=False)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        channels, text = self.component_config("vae").get("z_dim"), self.component_config("text_encoder")
        width = (text.get("text_config") or text).get("hidden_size")
        return [
            Requirement("in_channels", channels and PATCH**2 * channels, "vae: z_dim × 4"),
            Requirement("joint_attention_dim", width, "text_encoder"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the last layer of Qwen2.5-VL, without the template before the caption."""
        embeds, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_tokens)
        rows = list(embeds) if mask is None else own_rows(embeds, mask)
        return [{"prompt_embeds": each.clone()} for each in rows]

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """With a mask."""
        return pad_rows(features)

    @torch.no_grad()
    def encode_media(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(z − mean) / std by channel; a picture is a clip of one frame."""
        vae = pipeline.vae
        latents = posterior_mode(vae, pixels)[:, :, 0]
        return standardised(latents, vae.config.latents_mean, vae.config.latents_std)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Packed latents; time is σ itself."""
        height, width = noisy.shape[-2] // PATCH, noisy.shape[-1] // PATCH
        inputs = {
            "hidden_states": pack(noisy),
            "timestep": sigma,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_hidden_states_mask": batch["prompt_mask"],
            "img_shapes": [[(1, height, width)]] * len(noisy),
        }
        if self.transformer_config.get("guidance_embeds"):
            inputs["guidance"] = torch.full_like(sigma, guidance)
        return inputs

    def prediction(self, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """Unpacked."""
        return unpack(output[0], latent_shape)

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Classifier-free guidance, which the pipeline calls true_cfg_scale."""
        arguments = self.guided(sampling, prompts, latents) | {"latents": pack(latents)}
        scale = arguments.pop("guidance_scale")
        if self.transformer_config.get("guidance_embeds"):
            self.refuse_negative_prompt(sampling, "this transformer takes guidance as an input")
            del arguments["negative_prompt"]
            return arguments | {"guidance_scale": scale}
        return arguments | {"true_cfg_scale": scale}
