"""HunyuanVideo-1.5 (text to video, image to video) as diffusers has it: captions by Qwen2.5-VL, words in quotes by
ByT5, and room for a picture that text to video leaves empty."""

from __future__ import annotations

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
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PICTURE_TOKENS = 729
"""The pipelines' number of features of a picture; in no configuration."""
_GLYPHS, _GLYPHS_MASK = "glyph_embeds", "glyph_mask"
_GLYPH_TOKENS = 256
"""Most bytes of quoted words that the pipeline of diffusers reads (`tokenizer_2_max_length`)."""


@model_register.register("hunyuan_video_1_5")
class HunyuanVideo15Adapter(DiffusionAdapter):
    """HunyuanVideo-1.5, which makes videos from text or from a first frame."""

    transformer_class = "HunyuanVideo15Transformer3DModel"
    uses = (ReleaseUse(fps=24.0, guidance={}),)  # guidance is that of the folder's guider
    pipelines = {"t2v": "HunyuanVideo15Pipeline", "i2v": "HunyuanVideo15ImageToVideoPipeline"}
    roles = {"i2v": (FIRST_FRAME,)}
    blocks = ("context_embedder.token_refiner.refiner_blocks.{*}", "transformer_blocks.{*}")
    sample_plan = SamplePlan(
        blocks={
            "transformer_blocks.{*}": {
                "hidden_states": (IMAGE, 1),
                "encoder_hidden_states": (TEXT, 1),
                "attention_mask": (TEXT, 1),
                "freqs_cis": (IMAGE, 0),
            }
        },
        attention={"transformer_blocks.{*}.attn": (IMAGE, TEXT)},
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states", "encoder_hidden_states")},
        behind=("norm_out", "proj_out"),
        carried=("time_embed",),
    )
    lora_targets = layers_of("transformer_blocks.{*}.attn", with_captions=True)
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    most_text_tokens = 1000
    tokenizer_limits = False  # its length is for the caption and the template around it
    sizes = LatentSizes(32, ("transformer.out_channels",), by_settings(16, 4), patch=1, is_video=True)
    widths = {
        "in_channels": "vae",
        "out_channels": "vae",
        "text_embed_dim": "text_encoder",
        "text_embed_2_dim": "text_encoder_2",
    }
    captions = CaptionRows((EMBEDS, MASK, _GLYPHS, _GLYPHS_MASK), {**MASKED, _GLYPHS: _GLYPHS_MASK})
    text_inputs = {
        "encoder_hidden_states": EMBEDS,
        "encoder_attention_mask": MASK,
        "encoder_hidden_states_2": _GLYPHS,
        "encoder_attention_mask_2": _GLYPHS_MASK,
    }

    def input_channels(self, channels: int) -> tuple[int, str]:
        """The condition and its mask stand behind the noise, with or without a picture."""
        return 2 * channels + 1, " × 2 + 1"

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D) by Qwen2.5-VL, without the template before the caption; `glyph_embeds` (G, E) by ByT5
        of the words in quotes, G 0 where there are none."""
        return self.captions.split(pipeline.encode_prompt(list(captions), batch_size=len(captions)))

    @override
    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        width = int(self.transformer_config.get("text_embed_2_dim", 1472))
        return {_GLYPHS: (_GLYPH_TOKENS, width), _GLYPHS_MASK: (_GLYPH_TOKENS,)}

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """This VAE takes clips one by one: its causal mask fits no larger batch."""
        pipeline.vae.enable_slicing()
        return super().encode_media(pipeline, pixels)

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """i2v: `condition_latents` (B, C, 1, H, W) of the first frame, `image_embeds` (B, N, D) of it by SigLIP."""
        if self.task != "i2v":
            return {}
        pipeline.vae.enable_slicing()
        device, dtype = pipeline.image_encoder.device, pipeline.image_encoder.dtype
        embeds = [pipeline.encode_image(picture, 1, device, dtype) for picture in as_pil(media["first_frame"][:, :, 0])]
        latents = self.latents_of(pipeline.vae, media["first_frame"])
        return {"condition_latents": latents, "image_embeds": torch.cat(embeds)}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        if self.task != "i2v":
            return {}
        vision = self.component_config("image_encoder")
        tokens = (int(vision.get("image_size", 384)) // int(vision.get("patch_size", 14))) ** 2
        width = int(self.transformer_config.get("image_embed_dim", 1152))
        return {"condition_latents": (latent_shape[0], 1, *latent_shape[2:]), "image_embeds": (tokens, width)}

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Condition and mask stand behind the channels; without a picture they and its features are zeros."""
        behind = noisy.new_zeros(len(noisy), noisy.shape[1] + 1, *noisy.shape[2:])
        if "condition_latents" in batch:
            behind[:, :-1, :1] = batch["condition_latents"].to(noisy.dtype)
            behind[:, -1, 0] = 1  # the mask: the first latent frame is given
            picture = batch["image_embeds"].to(noisy.dtype)
        else:
            # All zeros: the transformer of diffusers takes that for text to video.
            picture = noisy.new_zeros(len(noisy), _PICTURE_TOKENS, self.transformer_config.get("image_embed_dim", 1152))
        return super().inputs(torch.cat([noisy, behind], dim=1), sigma, batch, guidance) | {"image_embeds": picture}

    def settle_transformer(self, transformer: Any) -> None:
        """Features of the time have the type of the time itself, which stays fp32: what is made of them is computed in
        the type of the weights."""
        transformer.time_embed.timestep_embedder.register_forward_pre_hook(_in_type_of_weights)

    def prepare_pipeline(self, pipeline: DiffusionPipeline, sampling: SamplingArguments) -> None:
        """Guidance is a part of this pipeline, its VAE takes clips one by one, and for image to video it would choose a
        size by the picture, which has the sample's here."""
        pipeline.vae.enable_slicing()
        if self.task == "i2v":
            size = (sampling.height, sampling.width)
            pipeline.video_processor.calculate_default_height_width = lambda *_, **__: size
        # Kept once: a later batch without a scale gets the folder's own again.
        stored = vars(pipeline).setdefault("stored_guider", pipeline.guider)
        pipeline.guider = stored
        if sampling.guidance_scale is not None:
            pipeline.guider = stored.new(guidance_scale=sampling.guidance_scale)

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """16:9 in the area that the transformer was trained on, as the pipeline chooses it for text alone."""
        processor = pipeline.video_processor  # whose own method `prepare_pipeline` replaces
        height, width = type(processor).calculate_default_height_width(processor, 9, 16, pipeline.target_size)
        return int(height), int(width)

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Lengths of text are the pipeline's own."""
        arguments = self.guided(sampling, prompts, latents)
        arguments.pop("guidance_scale", None)
        del arguments["max_sequence_length"]
        if self.task == "i2v":
            del arguments["height"], arguments["width"]
        return arguments


def _in_type_of_weights(embedder: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Hook in front of it."""
    return tuple(each.to(embedder.linear_1.weight.dtype) for each in args)
