"""HunyuanVideo (text to video, image to video) as diffusers has it: captions by Llama behind a template and by CLIP,
guidance as an input; for image to video by LLaVA, which sees the picture."""

from __future__ import annotations

import math
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
from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, scaled
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.pixels import as_pil
from mindspeed_mm.fsdp.models.diffusion.text_rows import own_rows, pad_rows
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PIPELINE_STEP = 16
"""The pipeline refuses other heights and widths than its multiples."""

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
    tokenizer = "tokenizer"
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    most_text_tokens = 256

    @property
    def text_tokens(self) -> int:
        """Of the caption: the template's come on top, and the tokenizer's length is for both."""
        return self.most_text_tokens

    @cached_property
    def geometry(self) -> MediaGeometry:
        """The VAE's ratios, the transformer's patches, and the pipeline's own rule for sides."""
        vae, transformer = self.component_config("vae"), self.transformer_config
        patch = int(transformer.get("patch_size", 2))
        return MediaGeometry(
            spatial_ratio=int(vae.get("spatial_compression_ratio", 8)),
            temporal_ratio=int(vae.get("temporal_compression_ratio", 4)),
            patch=(int(transformer.get("patch_size_t", 1)), patch, patch),
            latent_channels=int(transformer.get("out_channels") or transformer.get("in_channels", 16)),
            is_video=True,
            spatial_step=_PIPELINE_STEP,
        )

    @property
    def takes_guidance(self) -> bool:
        """Unless the configuration denies it."""
        return bool(self.transformer_config.get("guidance_embeds", True))

    @property
    def _condition(self) -> str | None:
        return str(self.transformer_config.get("image_condition_type")) if self.task == "i2v" else None

    def check(self) -> None:
        """Also says what cannot be spread over ranks."""
        super().check()
        if self._condition == "token_replace":
            why = "its blocks count the tokens of the first frame, which is given, from the front"
            vars(self).update(sample_plan=None, whole_because=why)

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE, with condition and mask where they stand behind; widths of the text encoders."""
        of_text, of_clip = (self.component_config(name) for name in ("text_encoder", "text_encoder_2"))
        text = (of_text.get("text_config") or of_text).get("hidden_size")
        pooled = of_clip.get("hidden_size")
        channels = self.component_config("vae").get("latent_channels")
        taken = 2 * channels + 1 if channels and self._condition == "latent_concat" else channels
        return [
            Requirement("in_channels", taken, f"vae: latent_channels, for {self._condition or self.task}"),
            Requirement("out_channels", channels, "vae: latent_channels"),
            Requirement("text_embed_dim", text, "text_encoder"),
            Requirement("pooled_projection_dim", pooled, "text_encoder_2"),
        ]

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the third last layer of Llama, without the template before the caption;
        `pooled_prompt_embeds` (D,) by CLIP."""
        embeds, pooled, mask = pipeline.encode_prompt(list(captions), max_sequence_length=self.text_tokens)
        return [
            {"prompt_embeds": rows, "pooled_prompt_embeds": pooled_each}
            for rows, pooled_each in zip(own_rows(embeds, mask), pooled, strict=True)
        ]

    @torch.no_grad()
    def encode_text_beside(
        self, pipeline: DiffusionPipeline, captions: Sequence[str], media: Mapping[str, torch.Tensor]
    ) -> list[TextFeatures]:
        """The same by LLaVA, features of the picture in front."""
        (picture,) = as_pil(media["first_frame"][:, :, 0])
        found = []
        for caption in captions:
            embeds, pooled, mask = pipeline.encode_prompt(
                picture,
                caption,
                max_sequence_length=self.text_tokens,
                image_embed_interleave=self._kept_every,
            )
            (rows,) = own_rows(embeds, mask)
            found.append({"prompt_embeds": rows, "pooled_prompt_embeds": pooled[0].clone()})
        return found

    @property
    def _kept_every(self) -> int:
        return _INTERLEAVED.get(self._condition or "", 1)

    def seen_tokens(self, latent_shape: tuple[int, ...], given: Collection[str]) -> int:
        """The features of the picture that are kept, whatever its size."""
        return math.ceil(_PICTURE_FEATURES / self._kept_every) if self.task == "i2v" else 0

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Pad captions to one length, with `prompt_mask` (B, L), and stack the pooled features, (B, D)."""
        return pad_rows(features) | {
            "pooled_prompt_embeds": torch.stack([each["pooled_prompt_embeds"] for each in features])
        }

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """Return the posterior's mode times `scaling_factor`, (B, C, T, H, W)."""
        return scaled(pipeline.vae, posterior_mode(pipeline.vae, pixels))

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """i2v: `condition_latents` (B, C, 1, H, W) of the first frame alone."""
        if self.task != "i2v":
            return {}
        return {"condition_latents": scaled(pipeline.vae, posterior_mode(pipeline.vae, media["first_frame"]))}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        return {"condition_latents": (latent_shape[0], 1, *latent_shape[2:])} if self.task == "i2v" else {}

    def given_latents(self, batch: Batch) -> torch.Tensor | None:
        """The first latent frame, where the picture takes its place: (1, 1, T, 1, 1)."""
        if self._condition != "token_replace":
            return None
        latents = batch["latents"]
        return (torch.arange(latents.shape[2], device=latents.device) == 0).view(1, 1, -1, 1, 1)

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
        """Time is 1000 σ, and guidance, where it is taken, a thousand times the scale. A picture stands in place of the
        first latent frame, or behind the channels with a mask that is one there."""
        inputs = {
            "hidden_states": self._with_picture(noisy, batch),
            "timestep": 1000 * sigma,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_attention_mask": batch["prompt_mask"],
            "pooled_projections": batch["pooled_prompt_embeds"],
        }
        if self.takes_guidance:
            inputs["guidance"] = torch.full_like(sigma, 1000 * guidance)
        return inputs

    @override
    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        return output[0]

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents)
