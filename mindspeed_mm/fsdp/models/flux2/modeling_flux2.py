"""FLUX.2 dev and klein (text to image) as diffusers has them: latents patchified before they are normalised, several
layers of a language model for captions, positions of four axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.attention_layers import layers_of
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, standardised, unstandardised
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

PATCH = 2
_STEPS = 50
"""Of the pipelines, by default: the released shift depends on them, too."""


@model_register.register("flux2")
class Flux2Adapter(DiffusionAdapter):
    """FLUX.2 klein 4B and 9B; dev by `Flux2DevAdapter`."""

    transformer_class = "Flux2Transformer2DModel"
    pipelines: ClassVar[Mapping[str, str]] = {"t2i": "Flux2KleinPipeline"}
    blocks = ("transformer_blocks.{*}", "single_transformer_blocks.{*}")
    sample_plan = SamplePlan(
        inputs={
            "hidden_states": (IMAGE, -2),
            "img_ids": (IMAGE, -2),
            "encoder_hidden_states": (TEXT, -2),
            "txt_ids": (TEXT, -2),
        },
        attention={"*transformer_blocks.{*}.attn": (TEXT, IMAGE)},
    )
    cut_points = CutPoints(
        layers={
            "transformer_blocks": ("encoder_hidden_states", "hidden_states"),
            "single_transformer_blocks": ("hidden_states",),
        },
        behind=("norm_out", "proj_out"),
        carried=(
            "time_guidance_embed",
            "double_stream_modulation_img",
            "double_stream_modulation_txt",
            "single_stream_modulation",
        ),
    )
    lora_targets = (
        *layers_of("*.attn"),
        "*.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.{*}.attn.to_out",
    )
    older_lora_targets = (
        *layers_of("*.attn", with_captions=True),
        "*.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.{*}.attn.to_out",
    )
    streams = {
        "time_guidance_embed*": "samples",
        "*_modulation*": "samples",
        "norm_out.linear": "samples",
        "context_embedder": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
        "single_transformer_blocks.*": "latents+caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer")
    # The call of their model cards.
    uses: ClassVar[tuple[ReleaseUse, ...]] = (
        ReleaseUse("FLUX.2 klein", {"index.is_distilled": True}, steps=4, guidance=1.0),
    )

    @classmethod
    def of_release(cls, index: Mapping[str, Any]) -> type[DiffusionAdapter]:
        """dev has a pipeline of its own."""
        return Flux2DevAdapter if index.get("_class_name") == "Flux2Pipeline" else cls

    @cached_property
    def geometry(self) -> MediaGeometry:
        """Latents are counted after the patches of 2 × 2: a position is a token."""
        ratio = 2 ** (len(self.component_config("vae").get("block_out_channels", (0,) * 4)) - 1)
        channels = int(self.transformer_config.get("in_channels", 128))
        return MediaGeometry(PATCH * ratio, 1, (1, 1, 1), channels, is_video=False)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE; three layers of the text encoder."""
        channels, text = self.component_config("vae").get("latent_channels"), self.component_config("text_encoder")
        width = (text.get("text_config") or text).get("hidden_size")
        return [
            Requirement("in_channels", channels and PATCH**2 * channels, "vae: latent_channels × 4"),
            Requirement("joint_attention_dim", width and 3 * width, "text_encoder: hidden_size × 3"),
        ]

    def resolution_shift(self, tokens: int) -> float:
        """exp(μ), μ as the pipelines fit it to tokens and steps, for 50 steps: between two straight lines, one for 10
        steps and one for 200; the latter alone above 4300 tokens."""
        at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return math.exp(at_200)
        slope = (at_200 - at_10) / 190.0
        return math.exp(slope * _STEPS + at_200 - 200.0 * slope)

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D) of three layers side by side, padding included, since the model attends to it."""
        embeds, _ = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_tokens)
        return [{"prompt_embeds": each} for each in embeds]

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − running mean) / √(running variance + ε) of each position in a patch: (B, 4C, H/2, W/2)."""
        vae, latents = pipeline.vae, posterior_mode(pipeline.vae, pixels[:, :, 0])
        patches = torch.nn.functional.pixel_unshuffle(latents, PATCH)
        return standardised(patches, vae.bn.running_mean, _std(vae))

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Invert `encode_media`: undo the normalisation and unfold patches, (B, 4C, H/2, W/2) → (B, C, H, W)."""
        return torch.nn.functional.pixel_shuffle(unstandardised(latents, vae.bn.running_mean, _std(vae)), PATCH)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Tokens; time is σ itself; positions are (time, row, column, place in the caption)."""
        text = batch["prompt_embeds"]
        inputs = {
            "hidden_states": noisy.flatten(2).transpose(1, 2),
            "timestep": sigma,
            "encoder_hidden_states": text,
            "txt_ids": _positions(1, 1, text.shape[1], noisy.device),
            "img_ids": _positions(noisy.shape[-2], noisy.shape[-1], 1, noisy.device),
        }
        if self.transformer_config.get("guidance_embeds", True):
            inputs["guidance"] = torch.full_like(sigma, guidance)
        return inputs

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """(B, tokens, 4C) → (B, 4C, H/2, W/2)."""
        return output[0].transpose(1, 2).reshape(latent_shape)

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """dev takes guidance as an input; klein is guided away from the empty prompt, unless it is distilled."""
        self.refuse_negative_prompt(sampling, "these pipelines take no negative prompt")
        if self.index.get("is_distilled") and (sampling.guidance_scale or 0) > self.guidance_off:
            raise ConfigError(
                f"{sampling.guidance_scale:g} has no effect: this release is distilled and draws without guidance",
                key="sampling.guidance_scale",
                way_out="Leave it out.",
            )
        arguments = self.guided(sampling, prompts, latents)
        arguments.pop("negative_prompt", None)
        return arguments


class Flux2DevAdapter(Flux2Adapter):
    """FLUX.2 dev: captions by Mistral Small behind a system message, guidance as an input."""

    pipelines: ClassVar[Mapping[str, str]] = {"t2i": "Flux2Pipeline"}


def _std(vae: ModelMixin) -> torch.Tensor:
    """(C,) of the normalisation's buffers."""
    std: torch.Tensor = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    return std


def _positions(rows: int, columns: int, places: int, device: torch.device) -> torch.Tensor:
    """(N, 4): time 0, row, column and place of each token."""
    axes = [torch.arange(length, device=device) for length in (1, rows, columns, places)]
    return torch.cartesian_prod(*axes)
