"""SANA (text to image) as diffusers has it: a deep autoencoder of 32 × 32, linear attention, Gemma 2 for captions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes, by_blocks
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, UNGUIDED, CaptionRows, own_rows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@model_register.register("sana")
class SanaAdapter(DiffusionAdapter):
    """SANA and SANA 1.5, which draw pictures from text."""

    transformer_class = "SanaTransformer2DModel"
    pipelines = {"t2i": "SanaPipeline"}
    blocks = ("transformer_blocks.{*}",)
    whole_because = "its feed-forward layers are convolutions over neighbouring tokens, which other ranks would hold"
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states",)},
        behind=("norm_out", "proj_out"),
        behind_parameters=("scale_shift_table",),
        carried=("time_embed", "caption_norm"),
    )
    lora_targets: ClassVar[tuple[str, ...]] = ("*.to_q", "*.to_k", "*.to_v")
    older_lora_targets = layers_of("*.attn1", "*.attn2")
    encoders = ("vae", "text_encoder", "tokenizer")
    most_text_tokens = 300
    sizes: ClassVar[LatentSizes] = LatentSizes(32, ratios=by_blocks("encoder_block_out_channels", 6), patch=1, step=32)
    widths = {"in_channels": "vae", "caption_channels": "text_encoder"}
    captions = CaptionRows((EMBEDS, MASK), MASKED, UNGUIDED)
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK}
    uses: ClassVar[tuple[ReleaseUse, ...]] = (ReleaseUse(call={"use_resolution_binning": False}),)

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): a caption's own tokens, read by Gemma 2 behind the instruction that the pipeline puts
        before prompts. The empty caption has none, as the pipeline's negative prompt."""
        return [{"prompt_embeds": self._caption_rows(pipeline, caption)} for caption in captions]

    def _caption_rows(self, pipeline: DiffusionPipeline, caption: str) -> torch.Tensor:
        instruction: Any = None
        if caption:
            instruction = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
        embeds, mask, _, _ = pipeline.encode_prompt(
            [caption],
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_tokens,
            complex_human_instruction=instruction,
        )
        return own_rows(embeds, mask)[0]

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1000 σ · `timestep_scale`."""
        inputs = super().inputs(noisy, sigma, batch, guidance)
        inputs["timestep"] = inputs["timestep"] * self.transformer_config.get("timestep_scale", 1.0)
        if self.embeds_guidance:
            scale = self.transformer_config.get("guidance_embeds_scale", 0.1)
            # Not 1000 times: the transformer has a scale of its own for guidance.
            inputs["guidance"] = torch.full_like(sigma, guidance) * scale
        return inputs

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The first channels: some release has as many again, which were for variances."""
        return output[0][:, : latent_shape[1]]

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """The one that the release was trained on, of which the pipeline knows 1024 pixels alone."""
        side = int(self.transformer_config.get("sample_size", 32)) * self.geometry.spatial_ratio
        return side, side
