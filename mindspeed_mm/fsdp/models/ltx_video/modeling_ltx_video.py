"""LTX-Video (text to video, image to video) as diffusers has it: tokens of a VAE of 8 × 32 × 32, positions in seconds
and pixels; the picture that a video goes on from stands among the tokens without noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.attention_layers import layers_of
from mindspeed_mm.fsdp.models.diffusion.init_tables import init_scale_shift_table
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, standardised, unstandardised
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

_PIPELINE_STEP = 32
"""The pipeline refuses other heights and widths than its multiples."""


@model_register.register("ltx_video")
class LTXVideoAdapter(DiffusionAdapter):
    """LTX-Video 0.9 2B and 13B. Image to video is given the first frame, in training the clip's own, since the VAE is
    causal."""

    transformer_class = "LTXVideoTransformer3DModel"
    pipelines = {"t2v": "LTXPipeline", "i2v": "LTXImageToVideoPipeline"}
    more_tasks = {"LTXPipeline": ("i2v",), "LTXImageToVideoPipeline": ("t2v",)}
    roles = {"i2v": (replace(FIRST_FRAME, is_trained=False),)}
    draws = one_by_one = frozenset({"i2v"})
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        inputs={"hidden_states": (IMAGE, 1), "timestep": (IMAGE, 1)},
        blocks={"transformer_blocks.{*}": {"hidden_states": (IMAGE, 1), "image_rotary_emb": (IMAGE, 1)}},
        attention={"*.attn1": (IMAGE,)},
    )
    never_split = ("*.attn1.*",)  # positions are turned before heads are told apart
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states",)},
        behind=("norm_out", "proj_out"),
        behind_parameters=("scale_shift_table",),
        carried=("time_embed", "caption_projection"),
    )
    lora_targets = layers_of("*.attn1", "*.attn2")
    streams = {
        "time_embed*": "samples",
        "caption_projection*": "caption",
        "transformer_blocks.{*}.attn2.to_q": "latents",
        "transformer_blocks.{*}.attn2.to_?": "caption",
    }
    memory_streams = ("caption", "samples")
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer")
    most_text_tokens = 128
    reads_fps = True
    # The rate is the pipelines' default, also for clips that say nothing of theirs; the calls are those of
    # docs/source/en/api/pipelines/ltx_video.md of diffusers.
    uses = (
        ReleaseUse(fps=25.0),
        ReleaseUse(
            "LTX-Video 0.9.1 and later",
            {"vae.timestep_conditioning": True},
            call={"decode_timestep": 0.05, "decode_noise_scale": 0.025},
        ),
        ReleaseUse(
            "LTX-Video 0.9.7 13B",
            {"vae.timestep_conditioning": True, "transformer.num_layers": 48},
            steps=30,
            guidance=5.0,
            call={"decode_timestep": 0.05, "decode_noise_scale": 0.025, "guidance_rescale": 0.7},
        ),
    )

    @cached_property
    def geometry(self) -> MediaGeometry:
        """The VAE's ratios: its own patch, doubled by each block that scales."""
        vae, transformer = self.component_config("vae"), self.transformer_config
        doubled = 2 ** sum(vae.get("spatio_temporal_scaling", (True, True, True, False)))
        patch = int(transformer.get("patch_size", 1))
        ratio = int(vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * doubled)
        return MediaGeometry(
            spatial_ratio=ratio,
            temporal_ratio=int(vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * doubled),
            patch=(int(transformer.get("patch_size_t", 1)), patch, patch),
            latent_channels=int(vae.get("latent_channels", 128)),
            is_video=True,
            spatial_step=math.lcm(_PIPELINE_STEP, ratio * patch),
        )

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        channels, (t, h, w) = self.component_config("vae").get("latent_channels"), self.geometry.patch
        return [
            Requirement("in_channels", channels and channels * t * h * w, "vae: latent_channels"),
            Requirement("caption_channels", self.component_config("text_encoder").get("d_model"), "text_encoder"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): a caption's own tokens by T5, which has seen the padding."""
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return [{"prompt_embeds": rows} for rows in own_rows(embeds, mask)]

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Pad captions to one length: `prompt_embeds` (B, L, D) and `prompt_mask` (B, L)."""
        return pad_rows(features)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − mean) / (std / scaling_factor) by channel, from the VAE's buffers."""
        vae = pipeline.vae
        return standardised(posterior_mode(vae, pixels), vae.latents_mean, vae.latents_std / vae.config.scaling_factor)

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """The way back; the decoder of later releases is told how much noise is left, and adds some."""
        if vae.config.timestep_conditioning:
            raise ConfigError(
                "the decoder of this VAE denoises, too, and rewards would look at what it adds",
                where=str(self.folder / "vae"),
                key="posttrain.method",
                way_out="Post-train a release whose VAE has timestep_conditioning false.",
            )
        return unstandardised(latents, vae.latents_mean, vae.latents_std / vae.config.scaling_factor)

    def given_latents(self, batch: Batch) -> torch.Tensor | None:
        """i2v: the first latent frame, (1, 1, T, 1, 1)."""
        if self.task != "i2v":
            return None
        latents = batch["latents"]
        return (torch.arange(latents.shape[2], device=latents.device) == 0).view(1, 1, -1, 1, 1)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Tokens; time is 1000 σ, of i2v for each token, (B, N), 0 where the frame is given; the size in tokens, and
        what a token covers: seconds by the clip's own rate, and pixels."""
        geometry = self.geometry
        frames, height, width = (side // p for side, p in zip(noisy.shape[-3:], geometry.patch, strict=True))
        time = 1000 * sigma
        if self.task == "i2v":
            time = time.view(-1, 1, 1).repeat(1, frames, height * width)
            time[:, 0] = 0
            time = time.flatten(1)
        rates = [rate or self.usage.fps for rate in batch.get("fps", [0.0] * len(noisy))]
        seconds = geometry.temporal_ratio / torch.tensor(rates, device=noisy.device).view(-1, 1, 1, 1, 1)
        return {
            "hidden_states": self._pack(noisy),
            "timestep": time,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_attention_mask": batch["prompt_mask"],
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (seconds, geometry.spatial_ratio, geometry.spatial_ratio),
        }

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """(B, tokens, D) → (B, C, T, H, W)."""
        B, C, T, H, W = latent_shape
        t, h, w = self.geometry.patch
        patches = output[0].reshape(B, T // t, H // h, W // w, C, t, h, w)
        return patches.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(latent_shape)

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) → (B, tokens, D), channels outermost in a token."""
        B, C, T, H, W = latents.shape
        t, h, w = self.geometry.patch
        patches = latents.reshape(B, C, T // t, t, H // h, h, W // w, w)
        return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def init_weights(self, module: nn.Module) -> None:
        """Draw `scale_shift_table` from N(0, 1/width); a module without one is left alone."""
        init_scale_shift_table(module)

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents) | {
            "latents": self._pack(latents),
            "frame_rate": sampling.fps,
        }

    def pipeline_media(self, media: Mapping[str, Any], sampling: SamplingArguments) -> dict[str, Any]:
        """The pipeline encodes the picture only where it draws the noise itself."""
        given = super().pipeline_media(media, sampling)
        if self.task == "i2v":
            given["latents"] = None
        return given
