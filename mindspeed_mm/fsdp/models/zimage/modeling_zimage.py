"""Z-Image (text to image) as diffusers has it: samples and captions as lists, time from noise to data, captions by
Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.attention_layers import layers_of
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, scaled
from mindspeed_mm.fsdp.models.diffusion.position_limits import up_to
from mindspeed_mm.fsdp.models.diffusion.text_rows import pad_rows
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import BOTH, IMAGE, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@model_register.register("z_image")
class ZImageAdapter(DiffusionAdapter):
    """Z-Image and Z-Image Turbo, which draw pictures from text."""

    transformer_class = "ZImageTransformer2DModel"
    pipelines = {"t2i": "ZImagePipeline"}
    blocks = ("noise_refiner.{*}", "context_refiner.{*}", "layers.{*}")
    sample_plan = SamplePlan(
        blocks={
            "noise_refiner.{*}": {"x": (IMAGE, 1), "freqs_cis": (IMAGE, 1)},
            "layers.{*}": {"x": (BOTH, 1), "freqs_cis": (BOTH, 1)},
        },
        attention={"noise_refiner.{*}.attention": (IMAGE,), "layers.{*}.attention": (BOTH,)},
        rejoined={"noise_refiner": (IMAGE, 1)},
        gathered=(("all_final_layer.2-1", (BOTH, 1)),),
    )
    cut_points = CutPoints(layers={"layers": ("x",)}, behind=("all_final_layer.2-1",), carried=("t_embedder",))
    lora_targets = layers_of("*.attention")
    older_lora_targets = layers_of("layers.{*}.attention")
    streams = {
        "t_embedder*": "samples",
        "*adaLN_modulation*": "samples",
        "cap_embedder*": "caption",
        "context_refiner.*": "caption",
        "layers.*": "latents+caption",
        "all_final_layer*": "latents+caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer")
    guidance_off = 0.0
    # README of Tongyi-MAI/Z-Image; its folders differ in the scheduler's shift, 6 of Z-Image and 3 of Turbo.
    uses = (
        ReleaseUse(size=(1024, 1024)),
        ReleaseUse("Z-Image Turbo", {"scheduler.shift": 3.0, "transformer.n_layers": 30}, steps=9, guidance=0.0),
    )

    @cached_property
    def geometry(self) -> MediaGeometry:
        """The VAE's blocks, patches of 2 × 2, positions of `axes_lens`."""
        ratio = 2 ** (len(self.component_config("vae").get("block_out_channels", (0,) * 4)) - 1)
        channels = int(self.transformer_config.get("in_channels", 16))
        _, rows, columns = self.transformer_config.get("axes_lens", (1024, 512, 512))
        heights, widths = up_to(rows, 2 * ratio), up_to(columns, 2 * ratio)
        return MediaGeometry(ratio, 1, (1, 2, 2), channels, is_video=False, heights=heights, widths=widths)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        return [
            Requirement("in_channels", self.component_config("vae").get("latent_channels"), "vae: latent_channels"),
            Requirement("cap_feat_dim", self.component_config("text_encoder").get("hidden_size"), "text_encoder"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the last layer but one of Qwen3, over the caption in its chat template."""
        rows, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return [{"prompt_embeds": each.clone()} for each in rows]

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Pad captions to one length: `prompt_embeds` (B, L, D) and `prompt_mask` (B, L)."""
        return pad_rows(features)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − shift_factor) · scaling_factor."""
        return scaled(pipeline.vae, posterior_mode(pipeline.vae, pixels[:, :, 0]))

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """(C, 1, H, W) and (L, D) of each sample; time is 1 − σ."""
        lengths = batch["prompt_mask"].sum(dim=1).tolist()
        return {
            "x": list(noisy.unsqueeze(2)),
            "t": 1 - sigma,
            "cap_feats": [rows[:length] for rows, length in zip(batch["prompt_embeds"], lengths, strict=True)],
        }

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The model says x − ε."""
        return -torch.stack(output[0]).squeeze(2)

    def init_weights(self, module: nn.Module) -> None:
        """What stands for padding is zero, as in diffusers' constructor."""
        for name in ("x_pad_token", "cap_pad_token", "siglip_pad_token"):
            token = module._parameters.get(name)
            if token is not None:
                token.zero_()

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Classifier-free guidance. This pipeline counts its scale from 0, where others count from 1."""
        return self.guided(sampling, prompts, latents)
