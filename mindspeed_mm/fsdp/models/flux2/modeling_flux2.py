"""FLUX.2 dev and klein (text to image) as diffusers has them: latents patchified before they are normalised, several
layers of a language model for captions, positions of four axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import ChannelScale, LatentSizes, Numbers
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import ModelMixin

PATCH = 2
_STEPS = 50
"""Of the pipelines, by default: the released shift depends on them, too."""


def _numbers(vae: ModelMixin) -> tuple[Numbers, Numbers]:
    """Running mean and standard deviation of each position in a patch."""
    return vae.bn.running_mean, (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()


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
    encoders = ("vae", "text_encoder", "tokenizer")
    widths = {"in_channels": "vae"}
    sizes = LatentSizes(128, patch=1, packs=True, folded=PATCH)
    scale = ChannelScale(_numbers)
    takes_tokens = True
    time_scale = 1
    guidance_by_default = True
    # The call of their model cards.
    uses: ClassVar[tuple[ReleaseUse, ...]] = (
        ReleaseUse("FLUX.2 klein", {"index.is_distilled": True}, steps=4, guidance=1.0),
    )

    @classmethod
    def of_release(cls, index: JsonMapping) -> type[DiffusionAdapter]:
        """dev has a pipeline of its own."""
        if index.get("_class_name") == "Flux2Pipeline":
            return Flux2DevAdapter
        return cls

    def requirements(self) -> list[Requirement]:
        """Also three layers of the text encoder."""
        width, _ = self.width_of("text_encoder")
        three = Requirement("joint_attention_dim", width and 3 * width, "text_encoder: hidden_size × 3")
        return [*super().requirements(), three]

    def input_channels(self, channels: int) -> tuple[int, str]:
        """The channels of all positions in a patch."""
        return PATCH**2 * channels, f" × {PATCH**2}"

    def resolution_shift(self, tokens: int) -> float:
        """exp(μ), μ as the pipelines fit it to tokens and steps, for 50 steps: between two straight lines, one for 10
        steps and one for 200; the latter alone above 4300 tokens."""
        at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return math.exp(at_200)
        slope = (at_200 - at_10) / 190.0
        return math.exp(slope * _STEPS + at_200 - 200.0 * slope)

    def normalised(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Of each position in a patch: (B, C, H, W) → (B, 4C, H/2, W/2)."""
        return super().normalised(vae, torch.nn.functional.pixel_unshuffle(latents, PATCH))

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """(B, 4C, H/2, W/2) → (B, C, H, W)."""
        return torch.nn.functional.pixel_shuffle(super().vae_latents(vae, latents), PATCH)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Positions are (time, row, column, place in the caption)."""
        return super().inputs(noisy, sigma, batch, guidance) | {
            "txt_ids": _positions(1, 1, batch["prompt_embeds"].shape[1], noisy.device),
            "img_ids": _positions(noisy.shape[-2], noisy.shape[-1], 1, noisy.device),
        }

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


def _positions(rows: int, columns: int, places: int, device: torch.device) -> torch.Tensor:
    """(N, 4): time 0, row, column and place of each token."""
    axes = [torch.arange(length, device=device) for length in (1, rows, columns, places)]
    return torch.cartesian_prod(*axes)
