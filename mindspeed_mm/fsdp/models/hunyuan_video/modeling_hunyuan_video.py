"""HunyuanVideo (text to video) as diffusers has it: captions by Llama behind a template and by CLIP, guidance as an
input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, scaled
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

_PIPELINE_STEP = 16
"""The pipeline refuses other heights and widths than its multiples."""


@model_register.register("hunyuan_video")
class HunyuanVideoAdapter(DiffusionAdapter):
    """HunyuanVideo."""

    transformer_class = "HunyuanVideoTransformer3DModel"
    pipelines = {"t2v": "HunyuanVideoPipeline"}
    blocks = (
        "context_embedder.token_refiner.refiner_blocks.{*}",
        "transformer_blocks.{*}",
        "single_transformer_blocks.{*}",
    )
    sample_plan = SamplePlan(
        blocks={
            "*transformer_blocks.{*}": {"hidden_states": (IMAGE, 1), "encoder_hidden_states": (TEXT, 1)},
            "transformer_blocks.{*}": {"freqs_cis": (IMAGE, 0)},
            "single_transformer_blocks.{*}": {"image_rotary_emb": (IMAGE, 0)},
        },
        attention={"*transformer_blocks.{*}.attn": (IMAGE, TEXT)},
    )
    lora_targets = (
        *(f"transformer_blocks.{{*}}.attn.to_{name}" for name in ("q", "k", "v", "out.0")),
        *(f"transformer_blocks.{{*}}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"single_transformer_blocks.{{*}}.attn.to_{name}" for name in ("q", "k", "v")),
    )
    streams = {
        "*time_text_embed*": "samples",
        "*norm*linear": "samples",
        "context_embedder*": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
        "single_transformer_blocks.*": "latents+caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    most_text_tokens = 256

    @property
    def text_tokens(self) -> int:
        """Of the caption: the template's come on top, and the tokenizer's length is for both."""
        return self.most_text_tokens

    @cached_property
    def geometry(self) -> MediaGeometry:
        """The VAE's ratios, the transformer's patches, and the pipeline's own rule for sides."""
        vae, transformer = self.component_config("vae"), self.transformer_config
        patch = int(transformer.get("patch_size", 2))
        return MediaGeometry(
            spatial_ratio=int(vae.get("spatial_compression_ratio", 8)),
            temporal_ratio=int(vae.get("temporal_compression_ratio", 4)),
            patch=(int(transformer.get("patch_size_t", 1)), patch, patch),
            latent_channels=int(transformer.get("in_channels", 16)),
            is_video=True,
            spatial_step=_PIPELINE_STEP,
        )

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, widths of the text encoders."""
        encoders = ("text_encoder", "text_encoder_2")
        text, pooled = (self.component_config(name).get("hidden_size") for name in encoders)
        return [
            Requirement("in_channels", self.component_config("vae").get("latent_channels"), "vae: latent_channels"),
            Requirement("text_embed_dim", text, "text_encoder"),
            Requirement("pooled_projection_dim", pooled, "text_encoder_2"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the third last layer of Llama, without the template before the caption;
        `pooled_prompt_embeds` (D,) by CLIP."""
        embeds, pooled, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_tokens)
        return [
            {"prompt_embeds": rows, "pooled_prompt_embeds": pooled_each}
            for rows, pooled_each in zip(own_rows(embeds, mask), pooled, strict=True)
        ]

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """With a mask."""
        return pad_rows(features) | {
            "pooled_prompt_embeds": torch.stack([each["pooled_prompt_embeds"] for each in features])
        }

    @torch.no_grad()
    def encode_media(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        """z · scaling_factor."""
        return scaled(pipeline.vae, posterior_mode(pipeline.vae, pixels))

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1000 σ, and guidance, where it is taken, a thousand times the scale."""
        inputs = {
            "hidden_states": noisy,
            "timestep": 1000 * sigma,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_attention_mask": batch["prompt_mask"],
            "pooled_projections": batch["pooled_prompt_embeds"],
        }
        if self.transformer_config.get("guidance_embeds", True):
            inputs["guidance"] = torch.full_like(sigma, 1000 * guidance)
        return inputs

    def prediction(self, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """As it is."""
        return output[0]

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """A transformer that takes guidance as an input gets it; any other is guided away from the negative prompt."""
        arguments = self.guided(sampling, prompts, latents)
        if self.transformer_config.get("guidance_embeds", True):
            self.refuse_negative_prompt(sampling, "this transformer takes guidance as an input")
            del arguments["negative_prompt"]
            return arguments
        return arguments | {"true_cfg_scale": arguments.pop("guidance_scale")}
