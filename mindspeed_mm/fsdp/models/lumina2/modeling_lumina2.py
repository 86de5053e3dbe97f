"""Lumina-Image 2 (text to image) as diffusers has it: time runs from noise to data, captions behind a system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TextFeatures, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, UNGUIDED, CaptionRows, own_rows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import BOTH, IMAGE, SamplePlan
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@model_register.register("lumina2")
class Lumina2Adapter(DiffusionAdapter):
    """Lumina-Image 2.0, which draws pictures from text."""

    transformer_class = "Lumina2Transformer2DModel"
    pipelines = {"t2i": "Lumina2Pipeline"}
    blocks = ("context_refiner.{*}", "noise_refiner.{*}", "layers.{*}")
    sample_plan = SamplePlan(
        blocks={
            "noise_refiner.{*}": {"hidden_states": (IMAGE, 1), "image_rotary_emb": (IMAGE, 1)},
            "layers.{*}": {"hidden_states": (BOTH, 1), "image_rotary_emb": (BOTH, 1)},
        },
        attention={"noise_refiner.{*}.attn": (IMAGE,), "layers.{*}.attn": (BOTH,)},
        rejoined={"noise_refiner": (IMAGE, 1)},
        gathered=(("norm_out", (BOTH, 1)),),
    )
    cut_points = CutPoints(layers={"layers": ("hidden_states",)}, behind=("norm_out",), carried=("time_caption_embed",))
    lora_targets = layers_of("*.attn")
    older_lora_targets = layers_of("layers.{*}.attn")
    streams = {
        "time_caption_embed.timestep*": "samples",
        "time_caption_embed*": "caption",
        "*.norm1.linear": "samples",
        "norm_out.linear_1": "samples",
        "context_refiner.*": "caption",
        "layers.*": "latents+caption",
        "norm_out*": "latents+caption",
    }
    memory_streams = ("samples",)
    encoders = ("vae", "text_encoder", "tokenizer")
    most_text_tokens = 256
    sizes = LatentSizes(16, step=16, positions=("axes_lens", (300, 512, 512)))
    widths = {"in_channels": "vae", "cap_feat_dim": "text_encoder"}
    captions = CaptionRows((EMBEDS, MASK), MASKED, UNGUIDED)
    text_inputs = {"encoder_hidden_states": EMBEDS, "encoder_attention_mask": MASK}

    def released_shift(self, tokens: int) -> float:
        """Where the scheduler shifts dynamically, the pipeline hands it the latents' channels for tokens."""
        return super().released_shift(self.geometry.latent_channels)

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D): the last layer but one of Gemma 2, behind the pipeline's system prompt. The empty
        caption has none, as the pipeline's negative prompt."""
        device, found = pipeline._execution_device, []
        for caption in captions:
            if caption:
                embeds, mask, _, _ = pipeline.encode_prompt(
                    caption, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
                )
            else:
                # As the pipeline reads a negative prompt: without the system prompt.
                embeds, mask = pipeline._get_gemma_prompt_embeds(
                    prompt=[caption], device=device, max_sequence_length=self.text_tokens
                )
            found.append({"prompt_embeds": own_rows(embeds, mask)[0]})
        return found

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Time is 1 − σ."""
        inputs = super().inputs(noisy, sigma, batch, guidance)
        # The time runs from noise at 0 to data at 1.
        return inputs | {"timestep": 1 - sigma, "encoder_attention_mask": batch[MASK].bool()}

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The model says x − ε."""
        return -output[0]
