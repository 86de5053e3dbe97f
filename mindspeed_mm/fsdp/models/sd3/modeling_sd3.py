"""Stable Diffusion 3 and 3.5 (text to image) as diffusers has them: three text encoders, of which T5 may be absent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.attention_layers import layers_of
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, scaled
from mindspeed_mm.fsdp.models.diffusion.position_limits import up_to
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@model_register.register("sd3")
class StableDiffusion3Adapter(DiffusionAdapter):
    """Stable Diffusion 3 medium, 3.5 medium and 3.5 large."""

    transformer_class = "SD3Transformer2DModel"
    pipelines = {"t2i": "StableDiffusion3Pipeline"}
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        blocks={
            "transformer_blocks.{*}": {
                "hidden_states": (IMAGE, 1),
                "encoder_hidden_states": (TEXT, 1),
            }
        },
        attention={"*.attn": (IMAGE, TEXT), "*.attn2": (IMAGE,)},
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("encoder_hidden_states", "hidden_states")},
        behind=("norm_out", "proj_out"),
        carried=("time_text_embed",),
    )
    lora_targets = layers_of("*.attn", with_captions=True)
    streams = {
        "time_text_embed*": "samples",
        "*.norm*linear": "samples",
        "norm_out.linear": "samples",
        "context_embedder": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer_3"
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    most_text_tokens = 256
    # The calls of their model cards; the pipeline's default is that of Stable Diffusion 3.
    uses = (
        ReleaseUse(
            "Stable Diffusion 3.5 medium",
            {"transformer.qk_norm": "rms_norm", "transformer.num_layers": 24},
            steps=40,
            guidance=4.5,
        ),
        ReleaseUse(
            "Stable Diffusion 3.5 large",
            {"transformer.qk_norm": "rms_norm", "transformer.num_layers": 38},
            steps=28,
            guidance=3.5,
        ),
    )

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As the pipeline reads it off the VAE's blocks; the transformer has a table of positions."""
        ratio = 2 ** (len(self.component_config("vae").get("block_out_channels", (0,) * 4)) - 1)
        patch = int(self.transformer_config.get("patch_size", 2))
        channels = int(self.transformer_config.get("in_channels", 16))
        sides = up_to(int(self.transformer_config.get("pos_embed_max_size", 96)), patch * ratio)
        return MediaGeometry(ratio, 1, (1, patch, patch), channels, is_video=False, heights=sides, widths=sides)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, widths of the text encoders."""
        t5 = joint = None
        if self.has_component("text_encoder_3"):
            t5 = self.component_config("text_encoder_3").get("d_model")
        first = self.component_config("text_encoder").get("projection_dim")
        second = self.component_config("text_encoder_2").get("projection_dim")
        if first and second:
            joint = first + second
        return [
            Requirement("in_channels", self.component_config("vae").get("latent_channels"), "vae: latent_channels"),
            Requirement("joint_attention_dim", t5, "text_encoder_3"),
            Requirement("pooled_projection_dim", joint, "text_encoder_2"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): both CLIP encoders side by side, then T5, padding included, since the model attends
        to it; `pooled_prompt_embeds` (D,) by both CLIP encoders."""
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(captions), None, None, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return [
            {"prompt_embeds": each, "pooled_prompt_embeds": pooled_each}
            for each, pooled_each in zip(embeds, pooled, strict=True)
        ]

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − shift_factor) · scaling_factor."""
        return scaled(pipeline.vae, posterior_mode(pipeline.vae, pixels[:, :, 0]))

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Return the transformer's inputs; the timestep is 1000 σ."""
        return {
            "hidden_states": noisy,
            "timestep": 1000 * sigma,
            "encoder_hidden_states": batch["prompt_embeds"],
            "pooled_projections": batch["pooled_prompt_embeds"],
        }

    @override
    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        return output[0]

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents)
