"""FLUX.1 (text to image, editing, filling) as diffusers has it: packed latents, two text encoders, time in 0..1."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import PATCH, LatentSizes, model_range, pack
from mindspeed_mm.fsdp.models.diffusion.media_roles import MASK_OF_PICTURE, PICTURE_AROUND_MASK, SOURCE_PICTURE
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, POOLED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_HALF = 127.5
"""Pixels of a mask that are brighter are filled."""


@model_register.register("flux")
class FluxAdapter(DiffusionAdapter):
    """FLUX.1 dev, schnell, Kontext dev and Fill dev."""

    transformer_class = "FluxTransformer2DModel"
    pipelines = {"t2i": "FluxPipeline", "edit": "FluxKontextPipeline", "fill": "FluxFillPipeline"}
    roles = {"edit": (SOURCE_PICTURE,), "fill": (PICTURE_AROUND_MASK, MASK_OF_PICTURE)}
    draws = one_by_one = frozenset({"fill"})
    latents_in_sequence = ("source_latents",)
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
        layers=dict.fromkeys(
            ("transformer_blocks", "single_transformer_blocks"), ("encoder_hidden_states", "hidden_states")
        ),
        behind=("norm_out", "proj_out"),
        carried=("time_text_embed",),
    )
    lora_targets = (
        *layers_of("*.attn", with_captions=True),
        *("*.ff.net.0.proj", "*.ff.net.2", "*.ff_context.net.0.proj", "*.ff_context.net.2"),
    )
    more_lora_targets = {"edit": ("*.proj_mlp",)}
    older_lora_targets = layers_of("*.attn", with_captions=True)
    streams = {
        "time_text_embed*": "samples",
        "*.norm*linear": "samples",
        "norm_out.linear": "samples",
        "context_embedder": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
        "single_transformer_blocks.*": "latents+caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer_2"
    true_guidance = "true_cfg_scale"
    # The calls of their model cards; also docs/source/en/api/pipelines/flux.md of diffusers.
    uses = (
        ReleaseUse(
            "FLUX.1 schnell",
            {
                "transformer.guidance_embeds": False,
                "transformer.num_layers": 19,
                "scheduler.shift": 1.0,
                "scheduler.use_dynamic_shifting": False,
            },
            steps=4,
            text_tokens=256,
        ),
        ReleaseUse("FLUX.1 Kontext dev", {"index._class_name": "FluxKontextPipeline"}, guidance=2.5),
    )
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    sizes = LatentSizes(64, ("transformer.out_channels", "transformer.in_channels"), packs=True)
    widths = {"in_channels": "vae", "joint_attention_dim": "text_encoder_2", "pooled_projection_dim": "text_encoder"}
    captions = CaptionRows((EMBEDS, POOLED))
    takes_tokens = pipeline_takes_tokens = True
    time_scale = 1
    text_inputs = {"encoder_hidden_states": EMBEDS, "pooled_projections": POOLED}

    def input_channels(self, channels: int) -> tuple[int, str]:
        """Fill: noise, what is around the mask, and the mask's own pixels."""
        packed, words = super().input_channels(channels)
        if self.task != "fill":
            return packed, words
        return 2 * packed + (PATCH * self.geometry.spatial_ratio) ** 2, " and its mask"

    # --- encoding ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`source_latents` (B, C, H, W): of the picture that is edited, or of what is around the mask; `mask_latents`
        (B, ratio², H, W): one where the picture is to be filled, the pixels of a position as channels."""
        if self.task == "t2i":
            return {}
        if self.task == "edit":
            return {"source_latents": self.latents_of(pipeline.vae, media["source"][:, :, 0])}
        source = model_range(media["source"][:, :, 0])
        mask = (media["mask"][:, :, 0].float().mean(dim=1, keepdim=True) >= _HALF).to(source)
        ratio = self.geometry.spatial_ratio
        folded = torch.nn.functional.pixel_unshuffle(mask, ratio).to(pipeline.vae.dtype)
        return {"source_latents": self.latents_of(pipeline.vae, source * (1 - mask)), "mask_latents": folded}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        shapes = {"source_latents": latent_shape} if self.task != "t2i" else {}
        if self.task == "fill":
            shapes["mask_latents"] = (self.geometry.spatial_ratio**2, *latent_shape[1:])
        return shapes

    # --- training ---------------------------------------------------------------------------------------------------

    def given_tokens(self, batch: Batch) -> int:
        """Of a picture that is edited; what is around a mask stands in the channels of the noise."""
        if "mask_latents" in batch:
            return 0
        return super().given_tokens(batch)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Positions are (0, row, column), those of text are zero."""
        inputs = super().inputs(noisy, sigma, batch, guidance)
        inputs["txt_ids"] = torch.zeros(batch[EMBEDS].shape[1], 3, device=noisy.device)
        inputs["img_ids"] = position_ids(noisy.shape[-2], noisy.shape[-1], noisy.device)
        if "mask_latents" in batch:
            given = (pack(batch[name].to(noisy.dtype)) for name in ("source_latents", "mask_latents"))
            inputs["hidden_states"] = torch.cat([inputs["hidden_states"], *given], dim=-1)
        elif "source_latents" in batch:
            source = batch["source_latents"].to(noisy.dtype)
            ids = position_ids(source.shape[-2], source.shape[-1], noisy.device)
            ids[:, 0] = 1  # another picture at the same places
            inputs["hidden_states"] = torch.cat([inputs["hidden_states"], pack(source)], dim=1)
            inputs["img_ids"] = torch.cat([inputs["img_ids"], ids])
        return inputs

    # --- sampling ---------------------------------------------------------------------------------------------------

    @property
    def takes_guidance(self) -> bool:
        """Fill's pipeline has no other guidance."""
        return self.task == "fill" or super().takes_guidance

    def pipeline_media(self, media: Mapping[str, object], sampling: SamplingArguments) -> dict[str, Any]:
        """Kontext's pipeline would choose sizes of its own."""
        given = super().pipeline_media(media, sampling)
        if self.task == "edit":
            assert sampling.height and sampling.width
            given |= {"max_area": sampling.height * sampling.width, "_auto_resize": False}
        return given


def position_ids(height: int, width: int, device: torch.device) -> torch.Tensor:
    """(N, 3): 0, row and column of each token of latents of this size."""
    rows = torch.arange(height // PATCH, device=device, dtype=torch.float32)
    columns = torch.arange(width // PATCH, device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.cat([torch.zeros(len(grid), 1, device=device), grid], dim=1)
