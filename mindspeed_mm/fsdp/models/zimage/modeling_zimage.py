"""Z-Image (text to image) as diffusers has it: samples and captions as lists, time from noise to data, captions by
Qwen3."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes
from mindspeed_mm.fsdp.models.diffusion.text_rows import MASKED, UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import BOTH, IMAGE, SamplePlan
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("z_image")
class ZImageAdapter(DiffusionAdapter):
    """Z-Image and Z-Image Turbo, which draw pictures from text."""

    transformer_class = "ZImageTransformer2DModel"
    pipelines = {"t2i": "ZImagePipeline"}
    blocks = ("noise_refiner.{*}", "context_refiner.{*}", "layers.{*}")
    sample_plan = SamplePlan(
        blocks={
            "noise_refiner.{*}": {"x": (IMAGE, 1), "freqs_cis": (IMAGE, 1)},
            "layers.{*}": {"x": (BOTH, 1), "freqs_cis": (BOTH, 1)},
        },
        attention={"noise_refiner.{*}.attention": (IMAGE,), "layers.{*}.attention": (BOTH,)},
        rejoined={"noise_refiner": (IMAGE, 1)},
        gathered=(("all_final_layer.2-1", (BOTH, 1)),),
    )
    cut_points = CutPoints(layers={"layers": ("x",)}, behind=("all_final_layer.2-1",), carried=("t_embedder",))
    lora_targets = layers_of("*.attention")
    older_lora_targets = layers_of("layers.{*}.attention")
    streams = {
        "t_embedder*": "samples",
        "*adaLN_modulation*": "samples",
        "cap_embedder*": "caption",
        "context_refiner.*": "caption",
        "layers.*": "latents+caption",
        "all_final_layer*": "latents+caption",
    }
    memory_streams = ("samples",)
    encoders = ("vae", "text_encoder", "tokenizer")
    guidance_off = 0.0
    # README of Tongyi-MAI/Z-Image; its folders differ in the scheduler's shift, 6 of Z-Image and 3 of Turbo.
    uses = (
        ReleaseUse(size=(1024, 1024)),
        ReleaseUse("Z-Image Turbo", {"scheduler.shift": 3.0, "transformer.n_layers": 30}, steps=9, guidance=0.0),
    )
    sizes = LatentSizes(16, positions=("axes_lens", (1024, 512, 512)))
    widths = {"in_channels": "vae", "cap_feat_dim": "text_encoder"}
    captions = CaptionRows(masks=MASKED, call=UNGUIDED)
    zeros = ("x_pad_token", "cap_pad_token", "siglip_pad_token")

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """(C, 1, H, W) and (L, D) of each sample; time is 1 − σ."""
        # Waits for the device: captions go in as lists, whose lengths the host must know.
        lengths = batch["prompt_mask"].sum(dim=1).tolist()
        return {
            "x": list(noisy.unsqueeze(2)),
            "t": 1 - sigma,
            "cap_feats": [rows[:length] for rows, length in zip(batch["prompt_embeds"], lengths, strict=True)],
        }

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The model says x − ε."""
        return -torch.stack(output[0]).squeeze(2)
