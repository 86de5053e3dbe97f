"""Lumina-Image 2 (text to image) as diffusers has it: time runs from noise to data, captions behind a system prompt."""

from __future__ import annotations

import math
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
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import BOTH, IMAGE, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PIPELINE_STEP = 16
"""The pipeline refuses other heights and widths than its multiples."""


@model_register.register("lumina2")
class Lumina2Adapter(DiffusionAdapter):
    """Lumina-Image 2.0, which draws pictures from text."""

    transformer_class = "Lumina2Transformer2DModel"
    pipelines = {"t2i": "Lumina2Pipeline"}
    blocks = ("context_refiner.{*}", "noise_refiner.{*}", "layers.{*}")
    sample_plan = SamplePlan(
        blocks={
            "noise_refiner.{*}": {"hidden_states": (IMAGE, 1), "image_rotary_emb": (IMAGE, 1)},
            "layers.{*}": {"hidden_states": (BOTH, 1), "image_rotary_emb": (BOTH, 1)},
        },
        attention={"noise_refiner.{*}.attn": (IMAGE,), "layers.{*}.attn": (BOTH,)},
        rejoined={"noise_refiner": (IMAGE, 1)},
        gathered=(("norm_out", (BOTH, 1)),),
    )
    cut_points = CutPoints(layers={"layers": ("hidden_states",)}, behind=("norm_out",), carried=("time_caption_embed",))
    lora_targets = layers_of("*.attn")
    older_lora_targets = layers_of("layers.{*}.attn")
    streams = {
        "time_caption_embed.timestep*": "samples",
        "time_caption_embed*": "caption",
        "*.norm1.linear": "samples",
        "norm_out.linear_1": "samples",
        "context_refiner.*": "caption",
        "layers.*": "latents+caption",
        "norm_out*": "latents+caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer")
    most_text_tokens = 256

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As the VAE's blocks say, and the pipeline's own rule for sides."""
        ratio = 2 ** (len(self.component_config("vae").get("block_out_channels", (0,) * 4)) - 1)
        patch = int(self.transformer_config.get("patch_size", 2))
        channels = int(self.transformer_config.get("in_channels", 16))
        _, rows, columns = self.transformer_config.get("axes_lens", (300, 512, 512))
        return MediaGeometry(
            ratio,
            1,
            (1, patch, patch),
            channels,
            is_video=False,
            spatial_step=math.lcm(_PIPELINE_STEP, ratio * patch),
            heights=up_to(rows, patch * ratio),
            widths=up_to(columns, patch * ratio),
        )

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        return [
            Requirement("in_channels", self.component_config("vae").get("latent_channels"), "vae: latent_channels"),
            Requirement("cap_feat_dim", self.component_config("text_encoder").get("hidden_size"), "text_encoder"),
        ]

    def released_shift(self, tokens: int) -> float:
        """Where the scheduler shifts dynamically, the pipeline hands it the latents' channels for tokens."""
        return super().released_shift(self.geometry.latent_channels)

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the last layer but one of Gemma 2, behind the pipeline's system prompt. The empty
        caption has none, as the pipeline's negative prompt."""
        device, found = pipeline._execution_device, []
        for caption in captions:
            if caption:
                embeds, mask, _, _ = pipeline.encode_prompt(
                    caption, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
                )
            else:
                embeds, mask = pipeline._get_gemma_prompt_embeds(
                    prompt=[caption], device=device, max_sequence_length=self.text_tokens
                )
            found.append({"prompt_embeds": own_rows(embeds, mask)[0]})
        return found

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Pad captions to one length: `prompt_embeds` (B, L, D) and `prompt_mask` (B, L)."""
        return pad_rows(features)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − shift_factor) · scaling_factor."""
        return scaled(pipeline.vae, posterior_mode(pipeline.vae, pixels[:, :, 0]))

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1 − σ."""
        return {
            "hidden_states": noisy,
            "timestep": 1 - sigma,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_attention_mask": batch["prompt_mask"].bool(),
        }

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The model says x − ε."""
        return -output[0]

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents)
