"""Qwen-Image (text to image, editing) as diffusers has it: packed latents of a video VAE, captions by Qwen2.5-VL, which
looks at the picture that is edited."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

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
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, standardised, unstandardised
from mindspeed_mm.fsdp.models.diffusion.media_roles import FURTHER_SOURCES, SOURCE_PICTURE
from mindspeed_mm.fsdp.models.diffusion.packing import PATCH, pack, unpack
from mindspeed_mm.fsdp.models.diffusion.pixels import as_pil
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin
    from PIL import Image

_LATENT_AREA = 1024 * 1024
"""Pixels that the pipelines scale a picture to before its latents are taken, whatever size it has; in no setting."""
_SEEN_AREA = 384 * 384
"""Pixels that the text encoder of Edit-Plus sees of it."""
_SIDE_STEP = 32
_LATENTS_OF = "_latents"


@model_register.register("qwen_image")
class QwenImageAdapter(DiffusionAdapter):
    """Qwen-Image, which draws pictures from text; releases that edit have subclasses of their own."""

    transformer_class = "QwenImageTransformer2DModel"
    pipelines: ClassVar[Mapping[str, str]] = {"t2i": "QwenImagePipeline"}
    true_guidance = "true_cfg_scale"
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        blocks={
            "transformer_blocks.{*}": {
                "hidden_states": (IMAGE, 1),
                "encoder_hidden_states": (TEXT, 1),
                "encoder_hidden_states_mask": (TEXT, 1),
                "image_rotary_emb": ((IMAGE, 0), (TEXT, 0)),
            }
        },
        attention={"*.attn": (TEXT, IMAGE)},
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("encoder_hidden_states", "hidden_states")},
        behind=("norm_out", "proj_out"),
        carried=("time_text_embed",),
    )
    lora_targets = layers_of("*.attn")
    older_lora_targets = layers_of("*.attn", with_captions=True)
    streams = {
        "time_text_embed*": "samples",
        "transformer_blocks.{*}.*_mod.{*}": "samples",
        "norm_out.linear": "samples",
        "txt_in": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.txt_mlp*": "caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer"
    encoders: ClassVar[tuple[str, ...]] = ("vae", "text_encoder", "tokenizer")

    @classmethod
    def of_release(cls, index: Mapping[str, Any]) -> type[DiffusionAdapter]:
        """Models that edit look at a picture."""
        by_pipeline = {each.pipelines["edit"]: each for each in (QwenImageEditAdapter, QwenImageEditPlusAdapter)}
        return by_pipeline.get(str(index.get("_class_name")), cls)

    @cached_property
    def geometry(self) -> MediaGeometry:
        """As the pipeline reads it off the VAE: one factor of two for each entry of `temperal_downsample`."""
        ratio = 2 ** len(self.component_config("vae").get("temperal_downsample", (0,) * 3))
        channels = int(self.transformer_config.get("in_channels", 64)) // PATCH**2
        return MediaGeometry(ratio, 1, (1, PATCH, PATCH), channels, is_video=False)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, width of the text encoder."""
        channels, text = self.component_config("vae").get("z_dim"), self.component_config("text_encoder")
        width = (text.get("text_config") or text).get("hidden_size")
        return [
            Requirement("in_channels", channels and PATCH**2 * channels, "vae: z_dim × 4"),
            Requirement("joint_attention_dim", width, "text_encoder"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the last layer of Qwen2.5-VL, without the template before the caption."""
        embeds, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_tokens)
        rows = list(embeds) if mask is None else own_rows(embeds, mask)
        return [{"prompt_embeds": each.clone()} for each in rows]

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Pad captions to one length: `prompt_embeds` (B, L, D) and `prompt_mask` (B, L)."""
        return pad_rows(features)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """(z − mean) / std by channel; a picture is a clip of one frame."""
        vae = pipeline.vae
        latents = posterior_mode(vae, pixels)[:, :, 0]
        return standardised(latents, vae.config.latents_mean, vae.config.latents_std)

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """A picture is a video of one frame."""
        return unstandardised(latents, vae.config.latents_mean, vae.config.latents_std).unsqueeze(2)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Packed latents; time is σ itself."""
        height, width = noisy.shape[-2] // PATCH, noisy.shape[-1] // PATCH
        inputs = {
            "hidden_states": pack(noisy),
            "timestep": sigma,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_hidden_states_mask": batch["prompt_mask"],
            "img_shapes": [[(1, height, width)]] * len(noisy),
        }
        if self.transformer_config.get("guidance_embeds"):
            inputs["guidance"] = torch.full_like(sigma, guidance)
        return inputs

    @override
    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        return unpack(output[0], latent_shape)

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents) | {"latents": pack(latents)}


class QwenImageEditAdapter(QwenImageAdapter):
    """Qwen-Image-Edit: the picture that is edited is read with the caption, and its latents stand behind the noise."""

    pipelines: ClassVar[Mapping[str, str]] = {"edit": "QwenImageEditPipeline"}
    roles = {"edit": (SOURCE_PICTURE,)}
    text_reads_media = one_by_one = frozenset({"edit"})
    encoders: ClassVar[tuple[str, ...]] = (*QwenImageAdapter.encoders, "processor")
    latents_in_sequence = tuple(f"{role.name}{_LATENTS_OF}" for role in (SOURCE_PICTURE, *FURTHER_SOURCES))
    seen_area: ClassVar[int | None] = None
    """Pixels that the text encoder sees; None: those that latents are taken of."""

    @torch.no_grad()
    def encode_text_beside(
        self, pipeline: DiffusionPipeline, captions: Sequence[str], media: Mapping[str, torch.Tensor]
    ) -> list[TextFeatures]:
        """`prompt_embeds` (L, D), those of the picture among them."""
        seen = []
        for role in self.pictures_of(media):
            (picture,) = as_pil(media[role][:, :, 0])
            width, height = fitted_size(*picture.size, self.seen_area or _LATENT_AREA)
            seen.append(pipeline.image_processor.resize(picture, height, width))
        found = []
        for caption in captions:
            embeds, _ = pipeline.encode_prompt(caption, image=self._as_seen(seen), max_sequence_length=self.text_tokens)
            found.append({"prompt_embeds": embeds[0].clone()})
        return found

    def _as_seen(self, pictures: list[Image.Image]) -> Any:
        return pictures[0]

    def pictures_of(self, given: Collection[str], suffix: str = "") -> list[str]:
        """Names of the pictures that a sample has, or of what is made of them, in their order."""
        return [role.name + suffix for role in self.roles["edit"] if role.name + suffix in given]

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`source_latents` (B, C, H, W) of the picture in the pipeline's own size; the same of further ones."""
        names = self.pictures_of(media)
        return {f"{name}{_LATENTS_OF}": self._latents_of(pipeline, media[name]) for name in names}

    def _latents_of(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        vae, found = pipeline.vae, []
        for picture in as_pil(pixels[:, :, 0]):
            width, height = fitted_size(*picture.size, _LATENT_AREA)
            pixels = pipeline.image_processor.preprocess(
                pipeline.image_processor.resize(picture, height, width), height, width
            )
            latents = vae.encode(pixels[:, :, None].to(vae.device, vae.dtype)).latent_dist.mode()[:, :, 0]
            found.append(standardised(latents, vae.config.latents_mean, vae.config.latents_std))
        return torch.cat(found)

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        channels, height, width = latent_shape
        sides = fitted_size(width, height, _LATENT_AREA)
        shape = (channels, *(side // self.geometry.spatial_ratio for side in reversed(sides)))
        return dict.fromkeys((f"{name}{_LATENTS_OF}" for name in self.pictures_of({"source", *given})), shape)

    def seen_tokens(self, latent_shape: tuple[int, ...], given: Collection[str]) -> int:
        """Qwen2.5-VL makes one of each square of merged patches."""
        vision = self.component_config("text_encoder").get("vision_config") or {}
        square = int(vision.get("patch_size", 14)) * int(vision.get("spatial_merge_size", 2))
        width, height = fitted_size(latent_shape[-1], latent_shape[-2], self.seen_area or _LATENT_AREA)
        return len(self.pictures_of({"source", *given})) * round(width / square) * round(height / square)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Those of Qwen-Image, with the pictures behind."""
        inputs = super().inputs(noisy, sigma, batch, guidance)
        sources = [batch[name].to(noisy.dtype) for name in self.pictures_of(batch, _LATENTS_OF)]
        grids = [(1, source.shape[-2] // PATCH, source.shape[-1] // PATCH) for source in sources]
        return inputs | {
            "hidden_states": torch.cat([inputs["hidden_states"], *map(pack, sources)], dim=1),
            "img_shapes": [[*shapes, *grids] for shapes in inputs["img_shapes"]],
        }

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """Unpacked; what stands behind the noise are the pictures."""
        tokens = (latent_shape[-2] // PATCH) * (latent_shape[-1] // PATCH)
        return unpack(output[0][:, :tokens], latent_shape)


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """Qwen-Image-Edit-2509 and later, with one to three pictures: the text encoder sees them smaller."""

    pipelines: ClassVar[Mapping[str, str]] = {"edit": "QwenImageEditPlusPipeline"}
    roles = {"edit": (SOURCE_PICTURE, *FURTHER_SOURCES)}
    seen_area: ClassVar[int | None] = _SEEN_AREA

    def _as_seen(self, pictures: list[Image.Image]) -> Any:
        return pictures


def fitted_size(width: int, height: int, area: int) -> tuple[int, int]:
    """Width and height of about `area` pixels in the shape of a picture, multiples of 32, as the pipelines compute
    them."""
    ratio = width / height
    exact = math.sqrt(area * ratio)
    return round(exact / _SIDE_STEP) * _SIDE_STEP, round(exact / ratio / _SIDE_STEP) * _SIDE_STEP
