"""Wan2.1 VACE as diffusers has it: Wan with a second row of blocks that reads a control video and a mask."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS, ConditionShapes, Requirement, TransformerOutput
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.latents import model_range
from mindspeed_mm.fsdp.models.diffusion.media_roles import CONTROL_VIDEO, MASK_OF_VIDEO, REFERENCES, TARGET
from mindspeed_mm.fsdp.models.wan.modeling_wan import WanAdapter
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_REFERENCES = "reference_latents"


@model_register.register("wan_vace")
class WanVACEAdapter(WanAdapter):
    """Wan2.1 VACE 1.3B and 14B. Reference pictures stand in front of the video as frames of their own, which are
    learned as the video's are."""

    transformer_class = "WanVACETransformer3DModel"
    pipelines = {"vace": "WanVACEPipeline"}
    more_tasks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    roles = {"vace": (CONTROL_VIDEO, MASK_OF_VIDEO, *REFERENCES)}
    draws: ClassVar[frozenset[str]] = frozenset({"vace"})
    further_latents = (_REFERENCES,)
    latents_are_one = True
    latents_in_sequence = (_REFERENCES,)
    one_by_one = frozenset({"vace"})
    blocks = ("blocks.{*}", "vace_blocks.{*}")
    sample_plan: ClassVar[SamplePlan | None] = SamplePlan(
        blocks={
            "*blocks.{*}": {"hidden_states": (IMAGE, 1), "rotary_emb": (IMAGE, 1)},
            "vace_blocks.{*}": {"control_hidden_states": (IMAGE, 1)},
        },
        attention={"*blocks.{*}.attn1": (IMAGE,)},
    )
    cut_points = None
    uncut_because = "its blocks are no chain, since those of the control feed the others"
    lora_targets = layers_of("blocks.{*}.attn1", "blocks.{*}.attn2", "vace_blocks.{*}.attn1", "vace_blocks.{*}.attn2")
    streams: ClassVar[Mapping[str, str]] = {
        **WanAdapter.streams,
        **{f"vace_{name}": sequence for name, sequence in WanAdapter.streams.items() if name.startswith("blocks.")},
    }

    def requirements(self) -> list[Requirement]:
        """Channels of the VAE: twice for what is kept and what is to be made, and the mask's pixels of a position."""
        geometry = self.geometry
        control = 2 * geometry.latent_channels + geometry.spatial_ratio**2
        return [*super().requirements(), Requirement("vace_in_channels", control, "vae: z_dim and its ratio")]

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`control_latents` (B, C, N + T, H, W), by the pipeline's own code: latents of the N reference pictures, the
        last in front, and of the control video outside and inside the mask, then the mask, folded. Where there is no
        control video it is grey and the mask white throughout. `reference_latents` (B, C, N, H, W) of the pictures,
        where there are any."""
        device, found = pipeline.vae.device, []
        names = [role.name for role in REFERENCES if role.name in media]
        target = model_range(media[TARGET])
        videos, masks = torch.zeros_like(target), torch.ones_like(target)
        if "control" in media:
            videos = model_range(media["control"])
        if "mask" in media:
            masks = (model_range(media["mask"]) + 1) / 2  # back to 0..1
        for row in range(len(target)):
            video = videos[row : row + 1].to(device)
            white = masks[row : row + 1].clamp(0, 1).to(device)
            pictures = [[model_range(media[name][row, :, 0]).to(device) for name in names]]
            latents = pipeline.prepare_video_latents(video, white, pictures, None, device)
            found.append(torch.cat([latents, folded_masks(pipeline, white, pictures)], dim=1))
        controls = torch.cat(found).to(pipeline.vae.dtype)
        if not names:
            return {"control_latents": controls}
        # The pictures' own latents: first channels of the frames in front. Behind them stand zeros and mask.
        references = controls[:, : self.geometry.latent_channels, : len(names)].contiguous()
        return {"control_latents": controls, _REFERENCES: references}

    @override
    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        channels, frames, *sides = latent_shape
        pictures = sum(role.name in given for role in REFERENCES)
        control = (2 * channels + self.geometry.spatial_ratio**2, pictures + frames, *sides)
        shapes: ConditionShapes = {"control_latents": control}
        if pictures:
            shapes[_REFERENCES] = (channels, pictures, *sides)
        return shapes

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Those of Wan, and the control with its full strength."""
        if _REFERENCES in batch:
            noisy = torch.cat([batch[_REFERENCES].to(noisy.dtype), noisy], dim=2)
        inputs = super().inputs(noisy, sigma, batch, guidance)
        layers = len(self.transformer_config.get("vace_layers", ()))
        return inputs | {
            "control_hidden_states": batch["control_latents"].to(noisy.dtype),
            # One strength for each block that reads the control.
            "control_hidden_states_scale": noisy.new_ones(layers),
        }

    def predictions(self, output: TransformerOutput, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Of the reference pictures, which stand in front, and of the video."""
        frames = shapes[LATENTS][2]
        found = {LATENTS: output[0][:, :, -frames:]}
        if _REFERENCES in shapes:
            found[_REFERENCES] = output[0][:, :, :-frames]
        return found

    def pipeline_media(self, media: Mapping[str, object], sampling: SamplingArguments) -> dict[str, Any]:
        """With reference pictures there are frames more than the sample has: the pipeline draws the noise for all."""
        given = super().pipeline_media(media, sampling)
        if "reference_images" in given:
            given["latents"] = None
        return given

    def prepare_pipeline(self, pipeline: DiffusionPipeline, sampling: SamplingArguments) -> None:
        """For more reference pictures than the video has latent frames."""
        pipeline.prepare_masks = partial(folded_masks, pipeline)


def folded_masks(
    pipeline: DiffusionPipeline,
    mask: torch.Tensor,
    references: Sequence[Sequence[torch.Tensor]],
    _generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The pipeline's `prepare_masks`, which cuts the zeros of reference pictures out of the video's own mask, and so
    has too few of them for more pictures than latent frames.

    Args:
        pipeline: Folds the mask of the video.
        mask: (1, 3, T, H, W), 1 where the video is made.
        references: Of the one row.

    Returns:
        (1, ratio², N + latent T, latent H, latent W), 0 in front for each of the N pictures.
    """
    folded = type(pipeline).prepare_masks(pipeline, mask, [[]])
    batch, pixels, _, *sides = folded.shape
    return torch.cat([folded.new_zeros(batch, pixels, len(references[0]), *sides), folded], dim=2)
