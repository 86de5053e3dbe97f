"""CogVideoX 1.0 and 1.5 (text to video, image to video) as diffusers has them: learned in 1000 steps with v prediction,
frames before channels, text without a mask."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import ConditionShapes, DiffusionAdapter, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.components import load_component
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import GIVEN, ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import LatentSizes, by_blocks, model_range, posterior_mode
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME
from mindspeed_mm.fsdp.models.diffusion.noise_paths import DiscretePath, NoisePath
from mindspeed_mm.fsdp.models.diffusion.text_rows import UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, TEXT, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_LOG_NOISE = (-3.0, 0.5)
"""Mean and deviation of the logarithm of how much noise the released models saw on the given picture."""
_OFS = 2.0
"""What 1.5 takes for `ofs` in image to video; in no configuration."""
_TABLES_KEPT = 4
"""Sizes whose rotary tables are kept; at 81 frames of 768 × 1360 pixels they take 23 MB."""
_DECODED_TOGETHER = 8
"""The VAE decodes latent frames in pairs, of which the first may be three, and so gives back 8k + 1 frames alone; the
model cards ask for such numbers, too."""


@model_register.register("cogvideox")
class CogVideoXAdapter(DiffusionAdapter):
    """CogVideoX 2B, 5B and 1.5 5B; 5B and 1.5 5B of image to video."""

    transformer_class = "CogVideoXTransformer3DModel"
    pipelines = {"t2v": "CogVideoXPipeline", "i2v": "CogVideoXImageToVideoPipeline"}
    roles = {"i2v": (FIRST_FRAME,)}
    one_by_one = frozenset({"i2v"})
    # Rates and size of the model cards (zai-org/CogVideoX-5b, zai-org/CogVideoX1.5-5B). The configuration of 1.5 has
    # the largest sides for `sample_height` and `sample_width`.
    uses = (
        ReleaseUse(fps=8.0),
        ReleaseUse("CogVideoX 1.5", {"transformer.patch_size_t": GIVEN}, fps=16.0, size=(768, 1360)),
    )
    blocks = ("transformer_blocks.{*}",)
    sample_plan = SamplePlan(
        blocks={
            "transformer_blocks.{*}": {
                "hidden_states": (IMAGE, 1),
                "encoder_hidden_states": (TEXT, 1),
                "image_rotary_emb": (IMAGE, 0),
            }
        },
        # In the order in which attention joins the two: captions first.
        attention={"*.attn1": (TEXT, IMAGE)},
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states", "encoder_hidden_states")},
        behind=("norm_final", "norm_out", "proj_out"),
        carried=("time_embedding", "ofs_embedding"),
    )
    lora_targets = layers_of("*.attn1")
    streams = {
        "time_embedding*": "samples",
        "ofs_embedding*": "samples",
        "*norm*.linear": "samples",
        "patch_embed.text_proj": "caption",
        "transformer_blocks.*": "latents+caption",
    }
    memory_streams = ("samples",)
    encoders = ("vae", "text_encoder", "tokenizer")
    tokenizer_limits = False  # the transformer's positions of the video stand behind all of them
    sizes = LatentSizes(16, ratios=by_blocks(frames=4), is_video=True)
    widths = {"in_channels": "vae", "out_channels": "vae", "text_embed_dim": "text_encoder"}
    captions = CaptionRows(call=UNGUIDED)

    @property
    def most_text_tokens(self) -> int:  # type: ignore[override]
        """What the transformer's positions are made for."""
        return int(self.transformer_config.get("max_text_seq_length", 226))

    @cached_property
    def usage(self) -> ReleaseUse:
        """Frames and size are those of the transformer, as the pipelines read them, where no entry names others."""
        found, config, ratio = super().usage, self.transformer_config, self.geometry.spatial_ratio
        sides = config.get("sample_height", 60) * ratio, config.get("sample_width", 90) * ratio
        return replace(found, frames=config.get("sample_frames", 49), size=found.size or sides)

    @cached_property
    def geometry(self) -> MediaGeometry:
        """1.5 has patches of two latent frames, and puts one frame before the 2k + 1 of a video; it has positions up to
        `sample_height` and `sample_width`. Where positions are learned (5B image to video) there is that size alone."""
        config = self.transformer_config
        sizes = self.sizes.geometry(self.component_config("vae"), config)
        patch_t, ratio = config.get("patch_size_t"), sizes.spatial_ratio
        largest = config.get("sample_height", 60) * ratio, config.get("sample_width", 90) * ratio
        limits: JsonObject = {}
        if patch_t is not None:
            limits = {"heights": (0, largest[0]), "widths": (0, largest[1])}
        elif config.get("use_learned_positional_embeddings"):
            limits = {"heights": (largest[0],) * 2, "widths": (largest[1],) * 2}
        return replace(
            sizes,
            latent_channels=sizes.latent_channels // self._inputs,
            leading_frames=sizes.patch[0] - 1,
            frame_multiple=_DECODED_TOGETHER,
            **limits,
        )

    def input_channels(self, channels: int) -> tuple[int, str]:
        """Noise, and of i2v the condition, each as the VAE has them."""
        return self._inputs * channels, f", for {self.task}"

    @property
    def _inputs(self) -> int:
        """Noise, and of i2v the condition."""
        return 1 + (self.task == "i2v")

    @cached_property
    def noise_path(self) -> NoisePath:
        """The released scheduler's: signal-to-noise ratios shifted, the last step all noise."""
        scheduler = load_component(self, "scheduler")
        return DiscretePath(scheduler.alphas_cumprod, scheduler.config.prediction_type)

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """Where a patch takes more frames than there are, the first one is repeated before them."""
        latents = super().encode_media(pipeline, pixels)
        first = latents[:, :, :1].expand(-1, -1, self.geometry.leading_frames, -1, -1)
        return torch.cat([first, latents], dim=2)

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """i2v: `condition_latents` (B, C, 1, H, W) of the first frame with a little noise; for VAEs that say so
        divided by scaling_factor, as the model was trained."""
        if self.task != "i2v":
            return {}
        vae = pipeline.vae
        latents = posterior_mode(vae, noised_picture(media["first_frame"]))
        if not vae.config.invert_scale_latents:
            return {"condition_latents": self.normalised(vae, latents)}
        return {"condition_latents": (latents.double() / vae.config.scaling_factor).to(vae.dtype)}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        if self.task == "i2v":
            return {"condition_latents": (latent_shape[0], 1, *latent_shape[2:])}
        return {}

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """(B, T, C, H, W), the number of the step, and rotary tables where the transformer takes them. i2v: the picture
        stands behind the channels of the first latent frame, zeros behind the others."""
        hidden = noisy
        if "condition_latents" in batch:
            behind = torch.zeros_like(noisy)
            behind[:, :, :1] = batch["condition_latents"].to(noisy.dtype)
            hidden = torch.cat([noisy, behind], dim=1)
        inputs = super().inputs(hidden.transpose(1, 2), sigma, batch, guidance) | {"timestep": sigma.long()}
        if self.transformer_config.get("use_rotary_positional_embeddings"):
            inputs["image_rotary_emb"] = self.rotary_tables(tuple(noisy.shape[-3:]), noisy.device)
        if self.transformer_config.get("ofs_embed_dim"):
            inputs["ofs"] = noisy.new_full((1,), _OFS)
        return inputs

    def rotary_tables(self, latent_size: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (tokens, head width) each, in fp32. 1.0 scales the positions of a picture so that it
        covers the one that the model was trained on; 1.5 counts from its corner. Those of the sizes seen last are kept:
        they are made by a hundred small operations.

        Args:
            latent_size: Frames, height and width of the latents.
            device: Of the tables.
        """
        place = latent_size, device
        if place in self._tables:
            return self._tables[place]
        with torch.inference_mode(False):  # what is kept may be trained with later
            made = self._make_tables(latent_size, device)
        if type(made[0]) is torch.Tensor:  # others hold no numbers: they are of a simulated run
            self._tables[place] = made
            if len(self._tables) > _TABLES_KEPT:
                del self._tables[next(iter(self._tables))]
        return made

    @cached_property
    def _tables(self) -> dict[tuple[tuple[int, ...], torch.device], tuple[torch.Tensor, torch.Tensor]]:
        """Size and device → what `rotary_tables` has made for them, the oldest first."""
        return {}

    def _make_tables(self, latent_size: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed  # an extra, and seconds to import

        config, (frames, height, width) = self.transformer_config, latent_size
        patch, patch_t = config.get("patch_size", 2), config.get("patch_size_t")
        grid = (height // patch, width // patch)
        trained = (config.get("sample_height", 60) // patch, config.get("sample_width", 90) // patch)
        if patch_t is None:
            kind = {"crops_coords": _covered(grid, trained), "temporal_size": frames}
        else:
            in_time = -(-frames // patch_t)
            kind = {"crops_coords": None, "grid_type": "slice", "max_size": trained, "temporal_size": in_time}
        return get_3d_rotary_pos_embed(
            embed_dim=config.get("attention_head_dim", 64), grid_size=grid, device=device, **kind
        )

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """Move channels before frames: (B, T, C, H, W) → (B, C, T, H, W)."""
        return output[0].transpose(1, 2)

    @override
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        return self.guided(sampling, prompts, latents) | {"latents": latents.transpose(1, 2)}


def noised_picture(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 → −1..1 with noise of deviation exp(N(−3, ½)), so that the model does not copy the given picture to every
    frame (Yang et al. 2024, arXiv 2408.06072; the values are those of the authors' training code). It is drawn from
    the picture: features and raw media have the same.

    Args:
        pixels: (B, 3, 1, H, W).
    """
    noised: list[torch.Tensor] = []
    for picture in model_range(pixels).split(1):
        bytes_of = pixels[len(noised)].cpu().contiguous().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(bytes_of).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        mean, deviation = _LOG_NOISE
        sigma = math.exp(mean + deviation * float(torch.randn((), generator=generator)))
        noised.append(picture + sigma * torch.randn(picture.shape, generator=generator).to(picture.device))
    return torch.cat(noised)


def _covered(grid: tuple[int, int], trained: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Top left and bottom right of a grid (rows, columns) that is scaled into the trained one, in its middle."""
    scale = min(trained[0] / grid[0], trained[1] / grid[1])
    sides = [round(scale * side) for side in grid]
    corner = [round((whole - side) / 2.0) for whole, side in zip(trained, sides, strict=True)]
    return (corner[0], corner[1]), (corner[0] + sides[0], corner[1] + sides[1])
