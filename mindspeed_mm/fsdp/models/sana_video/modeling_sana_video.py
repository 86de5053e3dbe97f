"""SANA-Video (text to video) as diffusers has it: SANA's blocks with time, over Wan's VAE or that of LTX-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import ChannelScale, LatentSizes, Numbers, by_settings, of_settings
from mindspeed_mm.fsdp.models.sana.modeling_sana import SanaAdapter
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin


def _numbers(vae: ModelMixin) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel: settings of Wan's VAE, buffers of LTX-2's, as they are."""
    if vae.config.get("latents_mean"):
        return of_settings(vae)
    return (vae.latents_mean, vae.latents_std)


@model_register.register("sana_video")
class SanaVideoAdapter(SanaAdapter):
    """SANA-Video 2B, which makes videos from text."""

    transformer_class = "SanaVideoTransformer3DModel"
    uses = (ReleaseUse(fps=16.0, call={"use_resolution_binning": False}),)  # the rate of the pipeline's example
    frames_argument = "frames"
    pipelines = {"t2v": "SanaVideoPipeline"}
    lora_targets = SanaAdapter.older_lora_targets  # diffusers has no script for it
    sizes = LatentSizes(16, ratios=by_settings(8, 4), is_video=True, step=32, positions=("rope_max_seq_len", 1024))
    scale = ChannelScale(_numbers)
    never_split = ("*.attn?.*",)  # queries and keys are normed over all heads

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """Return the size by the general rule of `DiffusionAdapter`, which asks the pipeline, instead of SANA's."""
        return DiffusionAdapter.default_size(self, pipeline)
