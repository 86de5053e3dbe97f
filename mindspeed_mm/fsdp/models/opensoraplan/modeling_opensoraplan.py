"""Open-Sora Plan 1.3 (text to video, and from a first frame) and 1.5 (text to video). Transformers, VAE and pipelines,
which diffusers lacks, stand beside this module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_component
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import ChannelScale, Config, LatentSizes, Numbers, model_range
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.noise_paths import DiscretePath, FlowPath, NoisePath
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, POOLED, UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, SamplePlan
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

_HERE = "mindspeed_mm.fsdp.models.opensoraplan"
_INPAINT, _JOINT = "OpenSoraInpaintPipeline", "OpenSoraJointPipeline"
_IN_TIME = "Spatial2xTime2x3DDownsample"


def _ratios(vae: Config) -> tuple[int, int]:
    """Of WF-VAE: 8, and 4 or 8 frames of a latent frame. The first wavelet and the second block halve both; whether the
    first block does, the configuration says."""
    if vae.get("l1_dowmsample_block") == _IN_TIME:
        return 8, 8
    return 8, 4


def latent_numbers(vae: ModelMixin) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel: `shift`, and 1 / `scale`."""
    return vae.config.shift, [1 / scale for scale in vae.config.scale]


def given_frames(latents_BCTHW: torch.Tensor, frames: int) -> torch.Tensor:
    """The mask of a video whose first frame is given, (B, `frames`, T, H, W): 0 for what is given, 1 for what is made.

    Args:
        latents_BCTHW: Of the video.
        frames: Of a latent frame; the first latent frame stands for as many copies of one.
    """
    B, _, *size = latents_BCTHW.shape
    mask = latents_BCTHW.new_ones(B, frames, *size)
    mask[:, :, 0] = 0
    return mask


def masked_video(first_frame: torch.Tensor, frames: int) -> torch.Tensor:
    """A video of which the first frame is there, and black behind it: (B, 3, `frames`, H, W).

    Args:
        first_frame: (B, 3, 1, H, W) in −1..1.
        frames: Of the video.
    """
    # A view of one frame: the video of black frames takes no memory before `cat`.
    black = torch.full_like(first_frame, -1.0).expand(-1, -1, frames - 1, -1, -1)
    return torch.cat([first_frame, black], dim=2)


@model_register.register("opensoraplan")
class OpenSoraPlanAdapter(DiffusionAdapter):
    """Open-Sora Plan 1.3, text to video: v is learned in a thousand steps."""

    transformer_class = "OpenSoraT2V_v1_3"
    own_classes: ClassVar[Mapping[str, str]] = {
        "OpenSoraT2V_v1_3": f"{_HERE}.transformer_1_3",
        "OpenSoraInpaint_v1_3": f"{_HERE}.transformer_1_3",
        "OpenSoraT2V_v1_5": f"{_HERE}.transformer_1_5",
        "WFVAEModel": f"{_HERE}.wf_vae",
        "OpenSoraPipeline": f"{_HERE}.pipeline",
        _INPAINT: f"{_HERE}.pipeline",
        _JOINT: f"{_HERE}.pipeline",
    }
    pipelines: ClassVar[Mapping[str, str]] = {"t2v": "OpenSoraPipeline"}
    # scripts/text_condition/gpu/sample_t2v_v1_3.sh of PKU-YuanGroup/Open-Sora-Plan
    uses = (ReleaseUse(fps=18.0),)
    draws = frozenset({"t2v", "i2v"})  # the ancestral sampler
    one_by_one = frozenset({"i2v"})
    blocks = ("transformer_blocks.{*}",)
    sample_plan: ClassVar[SamplePlan | None] = SamplePlan(
        blocks={"transformer_blocks.{*}": {"hidden_states": (IMAGE, 1), "image_rotary_emb": (IMAGE, 0)}},
        attention={"*.attn1": (IMAGE,)},
    )
    cut_points: ClassVar[CutPoints | None] = CutPoints(
        layers={"transformer_blocks": ("hidden_states",)},
        behind=("norm_out", "proj_out"),
        behind_parameters=("scale_shift_table",),
        carried=("adaln_single", "caption_projection"),
    )
    lora_targets = layers_of("*.attn1", "*.attn2")
    streams = {
        "adaln_single*": "samples",
        "caption_projection*": "caption",
        "*.attn2.to_k": "caption",
        "*.attn2.to_v": "caption",
    }
    memory_streams: ClassVar[tuple[str, ...]] = ("caption", "samples")
    encoders: ClassVar[tuple[str, ...]] = ("vae", "text_encoder", "tokenizer")
    sizes = LatentSizes(8, ("vae.latent_dim", "transformer.in_channels"), _ratios, is_video=True)
    vae_class = "WFVAEModel"
    widths = {"in_channels": "vae", "out_channels": "vae", "caption_channels": "text_encoder"}
    captions = CaptionRows((EMBEDS, MASK), MASKED, UNGUIDED)
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK}
    scale = ChannelScale(latent_numbers)
    time_scale = 1

    @classmethod
    def of_release(cls, index: Mapping[str, object]) -> type[DiffusionAdapter]:
        """The weights that take frames, and those of 1.5, are other classes."""
        others = {_INPAINT: OpenSoraPlanInpaintAdapter, _JOINT: OpenSoraPlanJointAdapter}
        return others.get(str(index.get("_class_name")), cls)

    @cached_property
    def noise_path(self) -> NoisePath:
        """v-prediction over the betas of the folder's scheduler, the last step all noise. (The sampler's own table
        leaves a trace of signal there, which it has to divide by.)"""
        from diffusers import DDPMScheduler  # an extra, and seconds to import

        scheduler = DDPMScheduler.from_config(load_component(self, "scheduler").config)
        return DiscretePath(scheduler.alphas_cumprod, scheduler.config.prediction_type)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """The number of the step; i2v: the masked video and the mask stand behind the noisy channels."""
        hidden = noisy
        if "condition_latents" in batch:
            # Channels in the order of the released weights: noisy latents, masked video, mask.
            condition = batch["condition_latents"].to(noisy.dtype)
            hidden = torch.cat([noisy, condition, given_frames(noisy, self.geometry.temporal_ratio)], dim=1)
        return super().inputs(hidden, sigma.long(), batch, guidance)


class OpenSoraPlanInpaintAdapter(OpenSoraPlanAdapter):
    """Open-Sora Plan 1.3, image to video."""

    transformer_class = "OpenSoraInpaint_v1_3"
    pipelines: ClassVar[Mapping[str, str]] = {"i2v": _INPAINT}
    roles = {"i2v": (FIRST_FRAME,)}

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`condition_latents` (B, C, T, H, W): the first frame with black behind it."""
        video = masked_video(model_range(media["first_frame"]), media["target"].shape[2])
        return {"condition_latents": self.latents_of(pipeline.vae, video)}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        return {"condition_latents": latent_shape}


class OpenSoraPlanJointAdapter(OpenSoraPlanAdapter):
    """Open-Sora Plan 1.5: flow matching over stages of joint attention."""

    transformer_class = "OpenSoraT2V_v1_5"
    pipelines: ClassVar[Mapping[str, str]] = {"t2v": _JOINT}
    uses = (ReleaseUse("Open-Sora Plan 1.5", fps=24.0),)  # examples/opensoraplan1.5/inference_model.json, MindSpeed-MM
    draws = frozenset()
    blocks = ("transformer_blocks.{*}.{*}",)
    sample_plan = None
    whole_because = "a caption attends within every set of the video's tokens"
    cut_points = None
    uncut_because = "its first stages are connected with its last"
    lora_targets = layers_of("*.attn1", with_captions=True)
    streams = {
        "time_text_embed*": "samples",
        "*norm*.linear": "samples",
        "caption_projection": "caption",
        "*.add_*": "caption",
        "*.to_add_out": "caption",
        "*.ff_enc*": "caption",
        "skip_norm_linear_enc*": "caption",
    }
    memory_streams = ("samples",)
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    sizes = LatentSizes(32, ("vae.latent_dim", "transformer.in_channels"), _ratios, is_video=True)
    captions = CaptionRows((EMBEDS, MASK, POOLED), MASKED, UNGUIDED)
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK, "pooled_projections": POOLED}
    time_scale = 1000

    @cached_property
    def noise_path(self) -> NoisePath:
        """Flow matching, unlike the older release."""
        return FlowPath()

    def shift_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Tokens of a frame: its authors shift by the size of the picture, whatever the length."""
        return super().shift_tokens((latent_shape[0], 1, *latent_shape[2:]))

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Latents, 1000 σ and the captions, as of most families."""
        return DiffusionAdapter.inputs(self, noisy, sigma, batch, guidance)
