"""FLUX.1 (text to image, editing, filling) as diffusers has it: packed latents, two text encoders, time in 0..1."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import (
    ConditionShapes,
    DiffusionAdapter,
    Requirement,
    TextFeatures,
    TransformerOutput,
)
from mindspeed_mm.fsdp.models.diffusion.attention_layers import layers_of
from mindspeed_mm.fsdp.models.diffusion.latent_scales import scaled
from mindspeed_mm.fsdp.models.diffusion.media_roles import MASK_OF_PICTURE, PICTURE_AROUND_MASK, SOURCE_PICTURE
from mindspeed_mm.fsdp.models.diffusion.packing import PATCH, pack, unpack
from mindspeed_mm.fsdp.models.diffusion.pixels import model_range
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

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

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As `FluxPipeline` reads it off the VAE's blocks."""
        ratio = 2 ** (len(self.component_config("vae").get("block_out_channels", (0,) * 4)) - 1)
        return MediaGeometry(
            spatial_ratio=ratio,
            temporal_ratio=1,
            patch=(1, PATCH, PATCH),
            latent_channels=self._packed_channels // PATCH**2,
            is_video=False,
        )

    @property
    def _packed_channels(self) -> int:
        """Of the noise: those that are given beside it stand in `in_channels` alone."""
        config = self.transformer_config
        return int(config.get("out_channels") or config.get("in_channels", 64))

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, widths of both text encoders."""
        packed = PATCH**2 * self.component_config("vae").get("latent_channels", 16)
        of_mask = (PATCH * self.geometry.spatial_ratio) ** 2
        taken = 2 * packed + of_mask if self.task == "fill" else packed
        return [
            Requirement(
                "in_channels",
                taken,
                "vae: latent_channels × 4" if taken == packed else "vae: latent_channels and its mask",
            ),
            Requirement(
                "joint_attention_dim", self.component_config("text_encoder_2").get("d_model"), "text_encoder_2"
            ),
            Requirement(
                "pooled_projection_dim", self.component_config("text_encoder").get("hidden_size"), "text_encoder"
            ),
        ]

    # --- encoding ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D) by T5, padding included, since the model attends to it; `pooled_prompt_embeds` (D,) by
        CLIP."""
        embeds, pooled, _ = pipeline.encode_prompt(
            prompt=list(captions), prompt_2=None, max_sequence_length=self.text_tokens
        )
        return [
            {"prompt_embeds": each, "pooled_prompt_embeds": pooled_each}
            for each, pooled_each in zip(embeds, pooled, strict=True)
        ]

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − shift_factor) · scaling_factor."""
        return _latents(pipeline.vae, model_range(pixels[:, :, 0]))

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`source_latents` (B, C, H, W): of the picture that is edited, or of what is around the mask; `mask_latents`
        (B, ratio², H, W): one where the picture is to be filled, the pixels of a position as channels."""
        if self.task == "t2i":
            return {}
        source = model_range(media["source"][:, :, 0])
        if self.task == "edit":
            return {"source_latents": _latents(pipeline.vae, source)}
        mask = (media["mask"][:, :, 0].float().mean(dim=1, keepdim=True) >= _HALF).to(source)
        ratio = self.geometry.spatial_ratio
        folded = torch.nn.functional.pixel_unshuffle(mask, ratio).to(pipeline.vae.dtype)
        return {"source_latents": _latents(pipeline.vae, source * (1 - mask)), "mask_latents": folded}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        shapes = {"source_latents": latent_shape} if self.task != "t2i" else {}
        if self.task == "fill":
            shapes["mask_latents"] = (self.geometry.spatial_ratio**2, *latent_shape[1:])
        return shapes

    # --- training ---------------------------------------------------------------------------------------------------

    def given_tokens(self, batch: Batch) -> int:
        """Of a picture that is edited; what is around a mask stands in the channels of the noise."""
        return 0 if "mask_latents" in batch else super().given_tokens(batch)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Packed latents; time is σ itself; positions are (0, row, column), those of text are zero."""
        text = batch["prompt_embeds"]
        inputs = {
            "hidden_states": pack(noisy),
            "timestep": sigma,
            "encoder_hidden_states": text,
            "pooled_projections": batch["pooled_prompt_embeds"],
            "txt_ids": torch.zeros(text.shape[1], 3, device=noisy.device),
            "img_ids": position_ids(noisy.shape[-2], noisy.shape[-1], noisy.device),
        }
        if "mask_latents" in batch:
            given = (pack(batch[name].to(noisy.dtype)) for name in ("source_latents", "mask_latents"))
            inputs["hidden_states"] = torch.cat([inputs["hidden_states"], *given], dim=-1)
        elif "source_latents" in batch:
            source = batch["source_latents"].to(noisy.dtype)
            ids = position_ids(source.shape[-2], source.shape[-1], noisy.device)
            ids[:, 0] = 1  # another picture at the same places
            inputs["hidden_states"] = torch.cat([inputs["hidden_states"], pack(source)], dim=1)
            inputs["img_ids"] = torch.cat([inputs["img_ids"], ids])
        if self.transformer_config.get("guidance_embeds"):
            inputs["guidance"] = torch.full_like(sigma, guidance)
        return inputs

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """Unpacked; what stands behind the noise is the picture that is edited."""
        tokens = (latent_shape[-2] // PATCH) * (latent_shape[-1] // PATCH)
        return unpack(output[0][:, :tokens], latent_shape)

    # --- sampling ---------------------------------------------------------------------------------------------------

    @property
    def takes_guidance(self) -> bool:
        """Fill's pipeline has no other guidance."""
        return self.task == "fill" or super().takes_guidance

    def pipeline_media(self, media: Mapping[str, Any], sampling: SamplingArguments) -> dict[str, Any]:
        """Kontext's pipeline would choose sizes of its own."""
        given = super().pipeline_media(media, sampling)
        if self.task == "edit":
            assert sampling.height and sampling.width
            given |= {"max_area": sampling.height * sampling.width, "_auto_resize": False}
        return given

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents) | {"latents": pack(latents)}


def _latents(vae: ModelMixin, images: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in −1..1 → (z − shift_factor) · scaling_factor."""
    return scaled(vae, vae.encode(images.to(vae.device, vae.dtype)).latent_dist.mode())


def position_ids(height: int, width: int, device: torch.device) -> torch.Tensor:
    """(N, 3): 0, row and column of each token of latents of this size."""
    rows = torch.arange(height // PATCH, device=device, dtype=torch.float32)
    columns = torch.arange(width // PATCH, device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.cat([torch.zeros(len(grid), 1, device=device), grid], dim=1)
