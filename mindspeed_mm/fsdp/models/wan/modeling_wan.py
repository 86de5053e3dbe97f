"""Wan2.1 and Wan2.2 (text to video, image to video) as diffusers has them: latents with a time axis, text without a
mask, time in 0..1000."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.model_kinds import EXPERT_PARTS, GENERATOR_INDEX
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter, Requirement, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.few_steps import CausalModel
from mindspeed_mm.fsdp.models.diffusion.generator_folder import GIVEN, ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import BY_SETTINGS, LatentSizes, as_pil, by_settings, model_range
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME, LAST_FRAME, SOURCE_VIDEO
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.models.wan.causal import CausalWan
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_IMAGE_TOKENS = 257
"""Of CLIP ViT-H/14 at 224 pixels, the released image encoder."""
_PAIR = "it is two transformers, each of which has samples of its own"


@model_register.register("wan2_2")
@model_register.register("wan2_1")
class WanAdapter(DiffusionAdapter):
    """Wan2.1 1.3B and 14B; Wan2.2 A14B, whose two transformers share the noise levels between them."""

    transformer_class = "WanTransformer3DModel"
    # Rates, steps and scales of the authors' wan/configs (Wan-Video/Wan2.2), which model cards call with; FLF2V: the
    # example in docs/source/en/api/pipelines/wan.md of diffusers.
    uses: ClassVar[tuple[ReleaseUse, ...]] = (
        ReleaseUse(fps=16.0),
        ReleaseUse("Wan2.1 FLF2V", {"transformer.pos_embed_seq_len": GIVEN}, guidance=5.5),
        ReleaseUse(
            "Wan2.2 T2V A14B",
            {"index.transformer_2": GIVEN, "index._class_name": "WanPipeline"},
            steps=40,
            guidance={"guidance_scale": 4.0, "guidance_scale_2": 3.0},
        ),
        ReleaseUse(
            "Wan2.2 I2V A14B",
            {"index.transformer_2": GIVEN, "index._class_name": "WanImageToVideoPipeline"},
            steps=40,
            guidance=3.5,
        ),
    )
    pipelines: ClassVar[Mapping[str, str]] = {
        "t2v": "WanPipeline",
        "i2v": "WanImageToVideoPipeline",
        "flf2v": "WanImageToVideoPipeline",
        "v2v": "WanVideoToVideoPipeline",
    }
    more_tasks: ClassVar[Mapping[str, tuple[str, ...]]] = {"WanPipeline": ("v2v",), "WanVideoToVideoPipeline": ("t2v",)}
    roles = {"i2v": (FIRST_FRAME,), "flf2v": (FIRST_FRAME, LAST_FRAME), "v2v": (SOURCE_VIDEO,)}
    draws: ClassVar[frozenset[str]] = frozenset({"v2v"})
    one_by_one: ClassVar[frozenset[str]] = frozenset({"v2v"})
    blocks: ClassVar[tuple[str, ...]] = ("blocks.{*}",)
    sample_plan: ClassVar[SamplePlan | None] = SamplePlan(
        inputs={"timestep": (IMAGE, 1)},
        blocks={"blocks.{*}": {"hidden_states": (IMAGE, 1), "rotary_emb": (IMAGE, 1)}},
        attention={"blocks.{*}.attn1": (IMAGE,)},
    )
    cut_points: ClassVar[CutPoints | None] = CutPoints(
        layers={"blocks": ("hidden_states",)},
        behind=("norm_out", "proj_out"),
        behind_parameters=("scale_shift_table",),
        carried=("condition_embedder",),
    )
    lora_targets = layers_of("blocks.{*}.attn1", "blocks.{*}.attn2")
    streams: ClassVar[Mapping[str, str]] = {
        "condition_embedder.text_embedder*": "caption",
        "condition_embedder.image_embedder*": "picture",
        "condition_embedder*": "samples",
        "blocks.{*}.attn2.to_q": "latents",
        "blocks.{*}.attn2.to_?": "caption",
        "blocks.{*}.attn2.add_*": "picture",
    }
    memory_streams: ClassVar[tuple[str, ...]] = ("caption", "picture", "samples")
    encoders = ("vae", "text_encoder", "tokenizer")
    sizes = LatentSizes(
        16, ("vae.z_dim",), by_settings(8, 4), is_video=True, step=16, positions=("rope_max_seq_len", 1024)
    )
    widths = {"in_channels": "vae", "out_channels": "vae", "text_dim": "text_encoder"}
    captions = CaptionRows(call=UNGUIDED)
    scale = BY_SETTINGS
    zeros = ("pos_embed",)
    draws_blocks: ClassVar[bool] = True
    distilled_tasks: ClassVar[frozenset[str]] = frozenset({"t2v", "i2v", "flf2v"})

    @property
    def text_tokens(self) -> int:
        """Beside image features the transformer takes the last 512 tokens for text, whatever the tokenizer says."""
        if self._takes_image_embeds:
            return self.most_text_tokens
        return super().text_tokens

    @property
    def _takes_image_embeds(self) -> bool:
        return self.transformer_config.get("image_dim") is not None

    def input_channels(self, channels: int) -> tuple[int, str]:
        """i2v and flf2v: noise, a mask of one channel a frame, and the condition."""
        given = channels + self.geometry.temporal_ratio if self.task in ("i2v", "flf2v") else 0
        return channels + given, f", for {self.task}"

    def requirements(self) -> list[Requirement]:
        """Also the width of the image encoder, where the transformer takes its features."""
        image = [Requirement("image_dim", *self.width_of("image_encoder"))] if self._takes_image_embeds else []
        return super().requirements() + image

    @property
    @override
    def transformers(self) -> tuple[str, ...]:
        if self.has_component("transformer_2"):
            return EXPERT_PARTS
        return super().transformers

    @property
    def boundary_time(self) -> float:
        """`boundary_ratio` of the pipeline, as the pipelines apply it."""
        return 1000.0 * float(self.index["boundary_ratio"])

    @classmethod
    def of_release(cls, index: JsonMapping) -> type[DiffusionAdapter]:
        """Wan2.2 5B takes a time for each token."""
        if index.get("expand_timesteps"):
            return WanTokenTimeAdapter
        return cls

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if (self.folder / GENERATOR_INDEX).is_file() and len(self.transformers) == 2:
            vars(self).update(self._of_two())

    def _of_two(self) -> JsonObject:
        """What is said of one transformer, for two: patterns of both. They take rows apart, so that layers are not
        spread over ranks; nobody knows how many samples each will have."""
        blocks: list[str] = []
        targets: list[str] = []
        for part in self.transformers:
            blocks += [f"{part}.{pattern}" for pattern in type(self).blocks]
            targets += [f"{part}.{pattern}" for pattern in type(self).lora_targets]
        plan = type(self).sample_plan
        return {
            "blocks": tuple(blocks),
            "lora_targets": tuple(targets),
            "streams": {},
            "sample_plan": plan and plan.inside(self.transformers),
            "cut_points": None,
            "uncut_because": _PAIR,
        }

    def check(self) -> None:
        """Also refuses half of a pair, and a pair without its boundary."""
        super().check()
        if self.task == "i2v" and self._tells_frames_apart:
            raise ConfigError(
                "the transformer has places for two pictures, and i2v gives it one",
                where=str(self.transformer_folder / "config.json"),
                key="model.task",
                way_out="Set model.task: flf2v.",
            )
        where = str(self.folder / "model_index.json")
        is_pair, has_boundary = len(self.transformers) == 2, self.index.get("boundary_ratio") is not None
        if is_pair != has_boundary:
            raise ModelFolderError(
                "Wan2.2 A14B has two transformers and the boundary between them: one of these is missing",
                where=where,
                key="boundary_ratio" if is_pair else "transformer_2",
                way_out="Copy the model folder again.",
            )
        if is_pair and not self.has_component("transformer"):
            raise ModelFolderError("the transformer of much noise is missing", where=where, key="transformer")

    # --- encoding ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D) by UMT5, L the caption's own tokens: the pipelines pad with zeros, `pad_text` too."""
        padded = [each[EMBEDS] for each in super().encode_text(pipeline, captions)]
        return [{EMBEDS: rows[: _used_rows(rows)].clone()} for rows in padded]

    @property
    def _tells_frames_apart(self) -> bool:
        """Whether features of the first and of the last frame have positions (first and last frame to video)."""
        return self.transformer_config.get("pos_embed_seq_len") is not None

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """i2v and flf2v: `condition_latents`, the given frames with grey between or behind them; `image_embeds`
        (B, N, D), CLIP's last but one layer for each given frame in turn, when the transformer takes them."""
        given = [media[role.name] for role in self.media_roles]
        if not given:
            return {}
        video = torch.zeros_like(model_range(media["target"]))
        video[:, :, :1] = model_range(given[0])
        if len(given) > 1:
            video[:, :, -1:] = model_range(given[1])
        conditions = {"condition_latents": self.latents_of(pipeline.vae, video)}
        if self._takes_image_embeds:
            device = pipeline.image_encoder.device
            embeds = [pipeline.encode_image(as_pil(frame[:, :, 0]), device) for frame in given]
            conditions["image_embeds"] = torch.cat(embeds, dim=1)
        return conditions

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        if not self.media_roles:
            return {}
        shapes = {"condition_latents": latent_shape}
        if self._takes_image_embeds:
            tokens = len(self.media_roles) * _IMAGE_TOKENS
            shapes["image_embeds"] = (tokens, int(self.transformer_config["image_dim"]))
        return shapes

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """`prompt_embeds` (B, `text_tokens`, D), zeros behind each caption; no mask, the model takes none."""
        rows = [each[EMBEDS] for each in features]
        padded = rows[0].new_zeros(len(rows), self.text_tokens, rows[0].shape[-1])
        for row, embeds in enumerate(rows):
            padded[row, : len(embeds)] = embeds
        return {EMBEDS: padded}

    # --- training ---------------------------------------------------------------------------------------------------

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1000 σ; for i2v the mask and the condition stand behind the noisy channels."""
        hidden = noisy
        if "condition_latents" in batch:
            condition = batch["condition_latents"].to(noisy.dtype)
            hidden = torch.cat([noisy, self._given_mask(noisy), condition], dim=1)
        inputs = super().inputs(hidden, sigma, batch, guidance)
        if "image_embeds" in batch:
            embeds = batch["image_embeds"]
            if self._tells_frames_apart:  # with positions, the model wants a row for each of the two pictures
                embeds = embeds.unflatten(1, (2, -1)).flatten(0, 1)
            inputs["encoder_hidden_states_image"] = embeds
        return inputs

    def _given_mask(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """(B, frames of a latent frame, T, H, W): one where frames are given."""
        B, _, *size = latents_BCTHW.shape
        mask = latents_BCTHW.new_zeros(B, self.geometry.temporal_ratio, *size)
        mask[:, :, 0] = 1
        if self.task == "flf2v":
            mask[:, -1, -1] = 1
        return mask

    @override
    def causal(self, model: nn.Module) -> CausalModel:
        return CausalWan(model)

    @override
    def kept_of_blocks(self, tokens: int) -> int:
        config = self.transformer_config
        width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
        return 2 * int(config["num_layers"]) * tokens * width

    # --- sampling ---------------------------------------------------------------------------------------------------

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Classifier-free guidance; sizes follow from the latents."""
        arguments = self.guided(sampling, prompts, latents)
        if self.task == "v2v":
            del arguments["num_frames"]  # as many as the video has
            arguments.pop("guidance_scale_2", None)  # this pipeline has one scale
            return arguments
        return arguments | {"num_frames": self._asked_frames(latents.shape[-3])}

    def pipeline_media(self, media: Mapping[str, object], sampling: SamplingArguments) -> dict[str, Any]:
        """v2v begins with the video, noised to `strength`, and draws the noise itself."""
        given = super().pipeline_media(media, sampling)
        if self.task == "v2v":
            given |= {"strength": sampling.strength, "latents": None}
        return given

    def _asked_frames(self, latent_frames: int) -> int:
        """The pipelines round to a multiple of the temporal ratio plus one, and with ratio 1 add one to any number."""
        ratio = self.geometry.temporal_ratio
        return (latent_frames - 1) * ratio + (ratio > 1)


class WanTokenTimeAdapter(WanAdapter):
    """Wan2.2 5B: text to video; with a first frame (ti2v), which stands among the latents without noise, at time 0.

    In training the first frame is the clip's own: the VAE is causal, so that its latents are those of the picture
    alone.
    """

    # wan/configs/wan_ti2v_5B.py of Wan-Video/Wan2.2
    uses: ClassVar[tuple[ReleaseUse, ...]] = (ReleaseUse("Wan2.2 TI2V 5B", fps=24.0, frames=121, size=(704, 1280)),)
    pipelines: ClassVar[Mapping[str, str]] = {"t2v": "WanPipeline", "ti2v": "WanImageToVideoPipeline"}
    more_tasks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "WanPipeline": ("ti2v",),
        "WanImageToVideoPipeline": ("t2v",),
    }
    roles = {"ti2v": (replace(FIRST_FRAME, is_trained=False),)}
    draws: ClassVar[frozenset[str]] = frozenset()
    one_by_one: ClassVar[frozenset[str]] = frozenset()
    streams: ClassVar[Mapping[str, str]] = {"condition_embedder.time*": "latents", **WanAdapter.streams}
    draws_blocks: ClassVar[bool] = False
    distilled_tasks: ClassVar[frozenset[str]] = frozenset({"t2v"})
    memory_streams: ClassVar[tuple[str, ...]] = ("caption",)
    starts_with_frame = frozenset({"ti2v"})

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Those of Wan with a time for each token, (B, N): 0 where the frame is given."""
        inputs = super().inputs(noisy, sigma, batch, guidance)
        return inputs | {"timestep": self.token_times(inputs["timestep"], tuple(noisy.shape))}


def _used_rows(embeds_LD: torch.Tensor) -> int:
    """Rows before the zeros that the pipeline padded with."""
    used = embeds_LD.ne(0).any(dim=-1).nonzero()
    if len(used):
        return int(used[-1]) + 1
    return 0
