"""HunyuanVideo (text to video, image to video) as diffusers has it: captions by Llama behind a template and by CLIP,
guidance as an input; for image to video by LLaVA, which sees the picture."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes, as_pil, by_settings
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, POOLED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_INTERLEAVED = {"latent_concat": 2, "token_replace": 4}
"""How the transformer is given the picture → every how many features of it the pipeline keeps."""
_PICTURE_FEATURES = 576
"""What LLaVA makes of a picture of 336 pixels in patches of 14; so many are in the pipeline's template."""


@model_register.register("hunyuan_video")
class HunyuanVideoAdapter(DiffusionAdapter):
    """HunyuanVideo and HunyuanVideo-I2V: its first releases have the picture's latents behind the channels of the noise
    (`latent_concat`), later ones in place of the first latent frame (`token_replace`)."""

    transformer_class = "HunyuanVideoTransformer3DModel"
    true_guidance = "true_cfg_scale"
    # 24 frames a second: arXiv 2412.03603; guidance: the example of `HunyuanVideoImageToVideoPipeline`.
    uses = (
        ReleaseUse(fps=24.0),
        ReleaseUse("HunyuanVideo-I2V", {"transformer.image_condition_type": "token_replace"}, guidance=6.0),
    )
    pipelines = {"t2v": "HunyuanVideoPipeline", "i2v": "HunyuanVideoImageToVideoPipeline"}
    roles = {"i2v": (FIRST_FRAME,)}
    text_reads_media = one_by_one = frozenset({"i2v"})
    blocks = (
        "context_embedder.token_refiner.refiner_blocks.{*}",
        "transformer_blocks.{*}",
        "single_transformer_blocks.{*}",
    )
    sample_plan = SamplePlan(
        blocks={
            "*transformer_blocks.{*}": {"hidden_states": (IMAGE, 1), "encoder_hidden_states": (TEXT, 1)},
            "transformer_blocks.{*}": {"freqs_cis": (IMAGE, 0)},
            "single_transformer_blocks.{*}": {"image_rotary_emb": (IMAGE, 0)},
        },
        attention={"*transformer_blocks.{*}.attn": (IMAGE, TEXT)},
    )
    cut_points = CutPoints(
        layers=dict.fromkeys(
            ("transformer_blocks", "single_transformer_blocks"), ("hidden_states", "encoder_hidden_states")
        ),
        behind=("norm_out", "proj_out"),
        carried=("time_text_embed",),
    )
    lora_targets = (
        *layers_of("transformer_blocks.{*}.attn", with_captions=True),
        "single_transformer_blocks.{*}.attn.to_q",
        "single_transformer_blocks.{*}.attn.to_k",
        "single_transformer_blocks.{*}.attn.to_v",
    )
    streams = {
        "*time_text_embed*": "samples",
        "*norm*linear": "samples",
        "context_embedder*": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
        "single_transformer_blocks.*": "latents+caption",
    }
    memory_streams = ("samples",)
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    most_text_tokens = 256
    tokenizer_limits = False  # its length is for the caption and the template around it
    sizes = LatentSizes(
        16, ("transformer.out_channels", "transformer.in_channels"), by_settings(8, 4), is_video=True, step=16
    )
    widths = {
        "in_channels": "vae",
        "out_channels": "vae",
        "text_embed_dim": "text_encoder",
        "pooled_projection_dim": "text_encoder_2",
    }
    captions = CaptionRows((EMBEDS, POOLED, MASK), MASKED)
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK, "pooled_projections": POOLED}
    guidance_by_default = True
    starts_with_frame = frozenset({"i2v"})

    @property
    def _condition(self) -> str | None:
        if self.task == "i2v":
            return str(self.transformer_config.get("image_condition_type"))
        return None

    def check(self) -> None:
        """Also says what cannot be spread over ranks."""
        super().check()
        if self._condition == "token_replace":
            why = "its blocks count the tokens of the first frame, which is given, from the front"
            vars(self).update(sample_plan=None, whole_because=why)

    def input_channels(self, channels: int) -> tuple[int, str]:
        """With condition and mask where they stand behind the noise."""
        beside = channels + 1 if self._condition == "latent_concat" else 0
        return channels + beside, f", for {self._condition or self.task}"

    @torch.no_grad()
    def encode_text_beside(
        self, pipeline: DiffusionPipeline, captions: Sequence[str], media: Mapping[str, torch.Tensor]
    ) -> list[TextFeatures]:
        """By LLaVA, features of the picture in front."""
        (picture,) = as_pil(media["first_frame"][:, :, 0])
        lengths = {"max_sequence_length": self.text_tokens, "image_embed_interleave": self._kept_every}
        found: list[TextFeatures] = []
        for caption in captions:
            found += self.captions.split(pipeline.encode_prompt(picture, caption, **lengths))
        return found

    @property
    def _kept_every(self) -> int:
        return _INTERLEAVED.get(self._condition or "", 1)

    def seen_tokens(self, latent_shape: tuple[int, ...], given: Collection[str]) -> int:
        """The features of the picture that are kept, whatever its size."""
        if self.task == "i2v":
            return math.ceil(_PICTURE_FEATURES / self._kept_every)
        return 0

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """i2v: `condition_latents` (B, C, 1, H, W) of the first frame alone."""
        if self.task != "i2v":
            return {}
        return {"condition_latents": self.latents_of(pipeline.vae, media["first_frame"])}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        if self.task == "i2v":
            return {"condition_latents": (latent_shape[0], 1, *latent_shape[2:])}
        return {}

    def given_latents(self, batch: Batch) -> torch.Tensor | None:
        """Where the picture takes the place of the first latent frame."""
        if self._condition == "token_replace":
            return super().given_latents(batch)
        return None

    def _with_picture(self, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self._condition is None:
            return noisy
        picture = batch["condition_latents"].to(noisy.dtype)
        if self._condition == "token_replace":
            return torch.cat([picture, noisy[:, :, 1:]], dim=2)
        behind = noisy.new_zeros(len(noisy), noisy.shape[1] + 1, *noisy.shape[2:])
        behind[:, :-1, :1] = picture
        behind[:, -1, 0] = 1
        return torch.cat([noisy, behind], dim=1)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """A picture stands in place of the first latent frame, or behind the channels with a mask that is one there."""
        return super().inputs(self._with_picture(noisy, batch), sigma, batch, guidance)
