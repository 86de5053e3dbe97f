"""LTX-Video (text to video, image to video) as diffusers has it: tokens of a VAE of 8 × 32 × 32, positions in seconds
and pixels; the picture that a video goes on from stands among the tokens without noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import BY_BUFFERS, LatentSizes
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import ModelMixin


def _ratios(vae: JsonMapping) -> tuple[int, int]:
    """The VAE's own patch, doubled by each block that scales, where it does not state them."""
    doubled = 2 ** sum(vae.get("spatio_temporal_scaling", (True, True, True, False)))
    return (
        int(vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * doubled),
        int(vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * doubled),
    )


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
    encoders = ("vae", "text_encoder", "tokenizer")
    most_text_tokens = 128
    sizes = LatentSizes(128, ("vae.latent_channels",), _ratios, patch=1, is_video=True, step=32)
    widths = {"in_channels": "vae", "caption_channels": "text_encoder"}
    captions = CaptionRows((EMBEDS, MASK), MASKED, UNGUIDED)
    scale = BY_BUFFERS
    takes_tokens = pipeline_takes_tokens = True
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK}
    starts_with_frame = frozenset({"i2v"})
    reads_fps = True
    rate_argument = "frame_rate"
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

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Later releases have a decoder that denoises, too: they are rejected."""
        if vae.config.timestep_conditioning:
            raise ConfigError(
                "the decoder of this VAE denoises, too, and rewards would look at what it adds",
                where=str(self.folder / "vae"),
                key="posttrain.method",
                way_out="Post-train a release whose VAE has timestep_conditioning false.",
            )
        return super().vae_latents(vae, latents)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Also the size in tokens, and what a token covers: seconds, by the clip's own rate, and pixels. i2v: a time
        for each token, (B, N), 0 where the frame is given."""
        inputs, geometry = super().inputs(noisy, sigma, batch, guidance), self.geometry
        frames, height, width = geometry.grid(tuple(noisy.shape))
        if self.task == "i2v":
            inputs["timestep"] = self.token_times(inputs["timestep"], tuple(noisy.shape))
        rates = [rate or self.usage.fps for rate in batch.get("fps", [0.0] * len(noisy))]
        seconds = geometry.temporal_ratio / torch.tensor(rates, device=noisy.device).view(-1, 1, 1, 1, 1)
        return inputs | {
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (seconds, geometry.spatial_ratio, geometry.spatial_ratio),
        }

    def pipeline_media(self, media: Mapping[str, object], sampling: SamplingArguments) -> dict[str, Any]:
        """The pipeline encodes the picture only where it draws the noise itself."""
        given = super().pipeline_media(media, sampling)
        if self.task == "i2v":
            given["latents"] = None
        return given
