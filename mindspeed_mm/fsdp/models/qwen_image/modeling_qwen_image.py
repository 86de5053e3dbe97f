"""Qwen-Image (text to image, editing) as diffusers has it: packed latents of a video VAE, captions by Qwen2.5-VL, which
looks at the picture that is edited."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.latents import BY_SETTINGS, LatentSizes, as_pil, pack
from mindspeed_mm.fsdp.models.diffusion.media_roles import FURTHER_SOURCES, SOURCE_PICTURE
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
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


def _vae_ratios(vae: JsonMapping) -> tuple[int, int]:
    """One factor of two for each entry of `temperal_downsample`; pictures have no time."""
    return 2 ** len(vae.get("temperal_downsample", (0,) * 3)), 1


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
        # In the order in which attention joins the two: captions first.
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
    encoders: ClassVar[tuple[str, ...]] = ("vae", "text_encoder", "tokenizer")
    sizes = LatentSizes(64, ratios=_vae_ratios, packs=True)
    widths = {"in_channels": "vae", "joint_attention_dim": "text_encoder"}
    captions = CaptionRows((EMBEDS, MASK), MASKED)
    scale = BY_SETTINGS
    takes_tokens = pipeline_takes_tokens = True
    time_scale = 1
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_hidden_states_mask": MASK}

    @classmethod
    def of_release(cls, index: Mapping[str, object]) -> type[DiffusionAdapter]:
        """Models that edit look at a picture."""
        by_pipeline = {each.pipelines["edit"]: each for each in (QwenImageEditAdapter, QwenImageEditPlusAdapter)}
        return by_pipeline.get(str(index.get("_class_name")), cls)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """The VAE is one of videos: a picture is a clip of one frame."""
        return self.latents_of(pipeline.vae, pixels)[:, :, 0]

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """The inverse, again as a clip of one frame."""
        return super().vae_latents(vae, latents).unsqueeze(2)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Also the size of each sample in tokens."""
        grid = self.geometry.grid(tuple(noisy.shape))
        return super().inputs(noisy, sigma, batch, guidance) | {"img_shapes": [[grid]] * len(noisy)}


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
        # One by one: of several captions, the pipeline pads the shorter ones.
        for caption in captions:
            embeds, _ = pipeline.encode_prompt(caption, image=self._as_seen(seen), max_sequence_length=self.text_tokens)
            found.append({"prompt_embeds": embeds[0].clone()})
        return found

    def _as_seen(self, pictures: list[Image.Image]) -> object:
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
        found = []
        for picture in as_pil(pixels[:, :, 0]):
            width, height = fitted_size(*picture.size, _LATENT_AREA)
            resized = pipeline.image_processor.resize(picture, height, width)
            ready = pipeline.image_processor.preprocess(resized, height, width)
            found.append(self.latents_of(pipeline.vae, ready[:, :, None])[:, :, 0])
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
        grids = [self.geometry.grid(tuple(source.shape)) for source in sources]
        return inputs | {
            "hidden_states": torch.cat([inputs["hidden_states"], *map(pack, sources)], dim=1),
            # (frames, rows, columns) of the noise, then of each picture: positions are made of them.
            "img_shapes": [[*shapes, *grids] for shapes in inputs["img_shapes"]],
        }


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """Qwen-Image-Edit-2509 and later, with one to three pictures: the text encoder sees them smaller."""

    pipelines: ClassVar[Mapping[str, str]] = {"edit": "QwenImageEditPlusPipeline"}
    roles = {"edit": (SOURCE_PICTURE, *FURTHER_SOURCES)}
    seen_area: ClassVar[int | None] = _SEEN_AREA

    def _as_seen(self, pictures: list[Image.Image]) -> object:
        return pictures


def fitted_size(width: int, height: int, area: int) -> tuple[int, int]:
    """Width and height of about `area` pixels in the shape of a picture, multiples of 32, as the pipelines compute
    them."""
    ratio = width / height
    exact = math.sqrt(area * ratio)
    return round(exact / _SIDE_STEP) * _SIDE_STEP, round(exact / ratio / _SIDE_STEP) * _SIDE_STEP
