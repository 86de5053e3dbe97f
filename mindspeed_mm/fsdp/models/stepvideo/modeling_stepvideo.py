"""Step-Video (text to video; TI2V: text and a first frame to video): frames before channels, time from noise to data,
captions by Step-LLM behind those by Hunyuan's CLIP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.cogvideox.modeling_cogvideox import noised_picture
from mindspeed_mm.fsdp.models.diffusion.adapter import (
    ConditionShapes,
    DiffusionAdapter,
    Requirement,
    TransformerOutput,
)
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, CaptionRows
from mindspeed_mm.fsdp.models.stepvideo.sizes import CLIP_TOKENS, GROUP_FRAMES, MOTION_SCORE, SHIFT
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, SamplePlan
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_HERE = "mindspeed_mm.fsdp.models.stepvideo"
_CLIP = "clip_embeds"


@model_register.register("stepvideo")
class StepVideoAdapter(DiffusionAdapter):
    """Step-Video-T2V and Step-Video-TI2V, which differ in their transformer's `use_additional_conditions`."""

    transformer_class = "StepVideoModel"
    own_classes = {
        "StepVideoModel": f"{_HERE}.transformer",
        "StepVideoVAE": f"{_HERE}.vae",
        "StepLLMModel": f"{_HERE}.step_llm",
        "StepChatTokenizer": f"{_HERE}.step_llm",
        "FlowMatchDiscreteScheduler": f"{_HERE}.pipeline_stepvideo",
        "StepVideoPipeline": f"{_HERE}.pipeline_stepvideo",
    }
    # 25 frames a second, 102 frames of TI2V: the authors' video_process.py and config.py.
    uses = (
        ReleaseUse(fps=25.0, frames=204),
        ReleaseUse("Step-Video-TI2V", {"transformer.use_additional_conditions": True}, frames=102),
    )
    pipelines = {"t2v": "StepVideoPipeline", "i2v": "StepVideoPipeline"}
    roles = {"i2v": (FIRST_FRAME,)}
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        blocks={"transformer_blocks.{*}": {"hidden_states": (IMAGE, 1), "rotary_emb": (IMAGE, 1)}},
        attention={"transformer_blocks.{*}.attn1": (IMAGE,)},
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states",)},
        behind=("norm_out", "proj_out"),
        behind_parameters=("scale_shift_table",),
        carried=("adaln_single", "caption_projection", "clip_projection"),
    )
    lora_targets = tuple(
        f"transformer_blocks.{{*}}.{layer}" for layer in ("attn1.wqkv", "attn1.wo", "attn2.wq", "attn2.wkv", "attn2.wo")
    )
    streams = {
        "adaln_single*": "samples",
        "caption_projection*": "caption",
        "clip_projection": "caption",
        "transformer_blocks.{*}.attn2.wkv": "caption",
    }
    memory_streams = ("caption", "samples")
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    unlisted_way_out = (
        "Bring the released folder into diffusers' layout: mm-convert StepVideoConverter source_to_hf "
        "--cfg.source_path RELEASED --cfg.target_path FOLDER; or train on features, and do not sample."
    )
    most_text_tokens = 320
    sizes = LatentSizes(
        64, ("vae.latent_channels", "transformer.in_channels"), lambda _: (16, 8), patch=1, is_video=True
    )
    vae_class = "StepVideoVAE"
    widths = {"in_channels": "vae", "out_channels": "vae"}
    captions = CaptionRows((EMBEDS, _CLIP, MASK), MASKED)
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK, "encoder_hidden_states_2": _CLIP}

    @cached_property
    def task(self) -> str:
        """The transformer says it: that of TI2V takes a first frame."""
        known = "i2v" if self.transformer_config.get("use_additional_conditions") else "t2v"
        if self._asked_task not in (None, known):
            raise ConfigError(
                f"'{self._asked_task}' is not what this transformer is for",
                where=str(self.transformer_folder / "config.json"),
                key="model.task",
                way_out=f"Set {known}, or name the folder of Step-Video-{'T2V' if known == 'i2v' else 'TI2V'}.",
            )
        return known

    @cached_property
    def geometry(self) -> MediaGeometry:
        """Frames come in groups of 17."""
        return replace(super().geometry, frame_group=GROUP_FRAMES)

    def requirements(self) -> list[Requirement]:
        """Also the widths of both text encoders."""
        widths = [self.width_of(name)[0] for name in ("text_encoder", "text_encoder_2")]
        whole = widths if None not in widths else None
        return [*super().requirements(), Requirement("caption_channels", whole, "text_encoder")]

    def released_shift(self, tokens: int) -> float:
        """The released one where the scheduler's file says nothing, as the release's does."""
        return float(self.component_config("scheduler").get("shift", SHIFT))

    @override
    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        words, clip = self.transformer_config.get("caption_channels", (6144, 1024))
        length = self.text_tokens
        return {EMBEDS: (length, int(words)), MASK: (length,), _CLIP: (CLIP_TOKENS, int(clip))}

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """i2v: `condition_latents` (B, C, 1, H, W) of the first frame with a little noise, as MindSpeed-MM trains
        it."""
        if self.task != "i2v":
            return {}
        return {"condition_latents": self.latents_of(pipeline.vae, noised_picture(media["first_frame"]))}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        if self.task == "i2v":
            return {"condition_latents": (latent_shape[0], 1, *latent_shape[2:])}
        return {}

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """(B, T, C, H, W), time 1 − σ. i2v: the picture's latents with zeros behind them, and the motion score."""
        inputs = super().inputs(noisy.transpose(1, 2), sigma, batch, guidance) | {"timestep": 1 - sigma}
        if "condition_latents" in batch:
            behind = torch.zeros_like(noisy)
            behind[:, :, :1] = batch["condition_latents"].to(noisy.dtype)
            inputs["condition_hidden_states"] = behind.transpose(1, 2)
            inputs["motion_score"] = torch.full_like(sigma, MOTION_SCORE)
        return inputs

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The model says x − ε, frames before channels."""
        return -output[0].transpose(1, 2)
