"""Stable Diffusion 3 and 3.5 (text to image) as diffusers has them: three text encoders, of which T5 may be absent."""

from __future__ import annotations

from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, Requirement
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, POOLED, UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("sd3")
class StableDiffusion3Adapter(DiffusionAdapter):
    """Stable Diffusion 3 medium, 3.5 medium and 3.5 large."""

    transformer_class = "SD3Transformer2DModel"
    pipelines = {"t2i": "StableDiffusion3Pipeline"}
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        blocks={
            "transformer_blocks.{*}": {
                "hidden_states": (IMAGE, 1),
                "encoder_hidden_states": (TEXT, 1),
            }
        },
        attention={"*.attn": (IMAGE, TEXT), "*.attn2": (IMAGE,)},
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("encoder_hidden_states", "hidden_states")},
        behind=("norm_out", "proj_out"),
        carried=("time_text_embed",),
    )
    lora_targets = layers_of("*.attn", with_captions=True)
    streams = {
        "time_text_embed*": "samples",
        "*.norm*linear": "samples",
        "norm_out.linear": "samples",
        "context_embedder": "caption",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
    }
    memory_streams = ("samples",)
    tokenizer = "tokenizer_3"
    encoders = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    most_text_tokens = 256
    # The calls of their model cards; the pipeline's default is that of Stable Diffusion 3.
    uses = (
        ReleaseUse(
            "Stable Diffusion 3.5 medium",
            {"transformer.qk_norm": "rms_norm", "transformer.num_layers": 24},
            steps=40,
            guidance=4.5,
        ),
        ReleaseUse(
            "Stable Diffusion 3.5 large",
            {"transformer.qk_norm": "rms_norm", "transformer.num_layers": 38},
            steps=28,
            guidance=3.5,
        ),
    )
    sizes = LatentSizes(16, positions=("pos_embed_max_size", 96))
    widths = {"in_channels": "vae", "joint_attention_dim": "text_encoder_3"}
    # The pipeline returns negative features in the second place, which are not used.
    captions = CaptionRows((EMBEDS, "", POOLED), call={"prompt_2": None, "prompt_3": None, **UNGUIDED})
    text_inputs = {"encoder_hidden_states": EMBEDS, "pooled_projections": POOLED}

    def requirements(self) -> list[Requirement]:
        """Also both CLIP encoders' features side by side."""
        first, second = (self.setting(name, "projection_dim") for name in ("text_encoder", "text_encoder_2"))
        both = first and second and first + second  # None where one of them is unknown
        return [*super().requirements(), Requirement("pooled_projection_dim", both, "text_encoder_2")]
