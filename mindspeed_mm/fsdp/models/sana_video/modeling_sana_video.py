"""SANA-Video (text to video) as diffusers has it: SANA's blocks with time, over Wan's VAE or that of LTX-2."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, standardised, unstandardised
from mindspeed_mm.fsdp.models.diffusion.position_limits import ltx2_sides
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.sana.modeling_sana import PIPELINE_STEP, SanaAdapter
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin


@model_register.register("sana_video")
class SanaVideoAdapter(SanaAdapter):
    """SANA-Video 2B, which makes videos from text."""

    transformer_class = "SanaVideoTransformer3DModel"
    uses = (ReleaseUse(fps=16.0),)  # the example of the pipeline
    frames_argument = "frames"
    pipelines = {"t2v": "SanaVideoPipeline"}
    lora_targets = SanaAdapter.older_lora_targets  # diffusers has no script for it
    never_split = ("*.attn?.*",)  # queries and keys are normed over all heads

    @cached_property
    def geometry(self) -> MediaGeometry:
        """The VAE's ratios and the transformer's patches. Wan's VAE names them otherwise than LTX-2's."""
        vae, (t, h, w) = self.component_config("vae"), self.transformer_config.get("patch_size", (1, 2, 2))
        ratio = int(vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio") or 8)
        in_time = int(vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio") or 4)
        least, _ = ltx2_sides(vae, ratio) if vae.get("_class_name") == "AutoencoderKLLTX2Video" else (0, None)
        positions = int(self.transformer_config.get("rope_max_seq_len", 1024))
        return MediaGeometry(
            spatial_ratio=ratio,
            temporal_ratio=in_time,
            patch=(t, h, w),
            latent_channels=int(self.transformer_config.get("in_channels", 16)),
            is_video=True,
            spatial_step=math.lcm(PIPELINE_STEP, ratio * h, ratio * w),
            heights=(least, positions * ratio * h),
            widths=(least, positions * ratio * w),
            most_frames=(positions * t - 1) * in_time + 1,
        )

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        vae = self.component_config("vae")
        return [
            Requirement("in_channels", vae.get("z_dim", vae.get("latent_channels")), "vae: z_dim"),
            Requirement("caption_channels", self.component_config("text_encoder").get("hidden_size"), "text_encoder"),
        ]

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − mean) / std by channel: of the configuration (Wan's VAE), or of buffers (LTX-2's)."""
        vae = pipeline.vae
        return standardised(posterior_mode(vae, pixels), *_scales(vae))

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """The way back, of either VAE."""
        return unstandardised(latents, *_scales(vae))

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Return SANA's inputs with a timestep of 1000 σ, without `timestep_scale`."""
        return super().inputs(noisy, sigma, batch, guidance) | {"timestep": 1000 * sigma}

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """Return the size by the general rule of `DiffusionAdapter`, which asks the pipeline, instead of SANA's."""
        return DiffusionAdapter.default_size(self, pipeline)


def _scales(vae: ModelMixin) -> tuple[Any, Any]:
    """Mean and standard deviation of each channel: settings of Wan's VAE, buffers of LTX-2's."""
    mean, std = (getattr(vae.config, name, None) or getattr(vae, name) for name in ("latents_mean", "latents_std"))
    return mean, std
