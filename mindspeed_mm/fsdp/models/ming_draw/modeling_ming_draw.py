"""What draws in Ming-Lite-Omni 1.5 (arXiv:2506.09344): a transformer after Stable Diffusion 3's, told of captions, and
of pictures that are edited, by the model that understands. That model is frozen, and so are learned tokens and
connector, as in MindSpeed-MM's `finetune_t2i.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter, Requirement, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes, as_pil
from mindspeed_mm.fsdp.models.diffusion.media_roles import SOURCE_PICTURE
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import nn

_HERE = "mindspeed_mm.fsdp.models.ming_draw"
_SOURCE_LATENTS = "source_latents"
_OF_EDITING = ("ref_pos_embed", "ref_image_refiner")
"""Modules that nothing goes through where no picture is edited."""


@model_register.register("ming_draw")
class MingDrawAdapter(DiffusionAdapter):
    """Ming-Lite-Omni 1.5, brought into diffusers' layout."""

    transformer_class = "MingImageTransformer"
    own_classes = {
        "MingImageTransformer": f"{_HERE}.transformer",
        "MingReader": f"{_HERE}.pipeline_ming_draw",
        "MingQueries": f"{_HERE}.pipeline_ming_draw",
        "BailingMMProcessor": "mindspeed_mm.fsdp.models.ming.processing_ming",
        "MingDrawPipeline": f"{_HERE}.pipeline_ming_draw",
    }
    pipelines = {"t2i": "MingDrawPipeline", "edit": "MingDrawPipeline"}
    roles = {"edit": (SOURCE_PICTURE,)}
    text_reads_media = one_by_one = frozenset({"edit"})
    latents_in_sequence = (_SOURCE_LATENTS,)
    blocks = ("noise_refiner.{*}", "ref_image_refiner.{*}", "transformer_blocks.{*}")
    sample_plan = SamplePlan(
        blocks={"transformer_blocks.{*}": {"hidden_states": (IMAGE, 1), "encoder_hidden_states": (TEXT, 1)}},
        attention={"transformer_blocks.{*}.attn": (IMAGE, TEXT), "transformer_blocks.{*}.attn2": (IMAGE,)},
    )
    never_split = ("mlp.fc1", "mlp.fc2")  # a norm stands between them
    uncut_because = "blocks in front of the joint ones go over the noise and over the picture that is edited"
    lora_targets = layers_of("*.attn", with_captions=True)
    streams = {
        "time_text_embed*": "samples",
        "*.norm*linear": "samples",
        "norm_out.linear": "samples",
        "mlp*": "caption",
        "context_embedder": "caption",
        "ref_*": "picture",
        "transformer_blocks.{*}.attn.*add_*": "caption",
        "transformer_blocks.{*}.ff_context*": "caption",
    }
    memory_streams = ("samples",)
    encoders = ("vae", "text_encoder", "tokenizer", "queries", "connector")
    layout_way_out = (
        "Bring the released folder into diffusers' layout: mm-convert MingConverter source_to_hf "
        "--cfg.source_path RELEASED --cfg.target_path FOLDER; then name that one."
    )
    tokenizer_limits = False
    most_text_tokens = 2048
    uses = (ReleaseUse(steps=30, guidance=5.0, size=(512, 512)),)  # test_infer_gen_image.py, modeling_bailingmm.py
    sizes = LatentSizes(16, positions=("pos_embed_max_size", 96))
    widths = {"in_channels": "vae"}

    def requirements(self) -> list[Requirement]:
        """Also the features of a condition: those of the language model."""
        language = self.component_config("text_encoder").get("llm_config") or {}
        return [*super().requirements(), Requirement("condition_dim", language.get("hidden_size"), "text_encoder")]

    @override
    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        side = max(self.component_config("queries").get("scales") or (16,))
        return {EMBEDS: (side**2, int(self.transformer_config.get("condition_dim", 2048)))}

    def encode_text_beside(
        self, pipeline: DiffusionPipeline, captions: Sequence[str], media: Mapping[str, torch.Tensor]
    ) -> list[TextFeatures]:
        """The picture stands in front of the caption."""
        (picture,) = as_pil(media[SOURCE_PICTURE.name][:, :, 0])
        return self.captions.split(pipeline.encode_prompt(list(captions), picture, self.text_tokens))

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """edit: `source_latents` (B, C, h, w)."""
        if self.task != "edit":
            return {}
        return {_SOURCE_LATENTS: self.latents_of(pipeline.vae, media[SOURCE_PICTURE.name][:, :, 0])}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        if self.task == "edit":
            return {_SOURCE_LATENTS: latent_shape}
        return {}

    def settle_transformer(self, transformer: nn.Module) -> None:
        """What nothing goes through learns nothing: it stays as it is."""
        if self.task != "edit":
            for name in _OF_EDITING:
                transformer.get_submodule(name).requires_grad_(False)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """edit: also the latents of the picture."""
        inputs = super().inputs(noisy, sigma, batch, guidance)
        if _SOURCE_LATENTS in batch:
            inputs["ref_hidden_states"] = batch[_SOURCE_LATENTS].to(noisy.dtype)
        return inputs

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Without negative prompts: guidance leads away from the condition 0.

        Raises:
            ConfigError: There is one.
        """
        self.refuse_negative_prompt(sampling, "Ming-Lite-Omni guides away from the condition 0")
        arguments = self.guided(sampling, prompts, latents)
        del arguments["negative_prompt"]
        return arguments
