"""What must be known of a family of denoising transformers to extract for it, train it and sample from it.

diffusers has the models and the pipelines. A family is one subclass of `DiffusionAdapter`, registered with
`@model_register.register("<id>")` in `models/<id>/modeling_<id>.py`, and a `card.yaml` beside it; nothing else in the
package names it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.family_facts import FamilyFolder
from mindspeed_mm.fsdp.models.diffusion.family_facts import Requirement as Requirement  # plugins take it from here
from mindspeed_mm.fsdp.models.diffusion.few_steps import CausalModel
from mindspeed_mm.fsdp.models.diffusion.latents import as_bytes, pack, posterior_mode, unpack
from mindspeed_mm.fsdp.models.diffusion.noise_paths import FlowPath, NoisePath
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

LATENTS = "latents"
"""Batch key of a sample's latents: of what `encode_media` makes."""
TextFeatures = dict[str, torch.Tensor]
"""One caption's features by batch key, without the batch axis: `prompt_embeds` (L, D), `pooled_prompt_embeds` (D,)."""
ConditionShapes = dict[str, tuple[int, ...]]
"""Batch key of a condition → its shape, without the batch axis."""
TransformerOutput = tuple[Any, ...]
"""What forward of a transformer of diffusers returns with `return_dict=False`: tensors, or lists of them."""


class DiffusionAdapter(FamilyFolder):
    """How one family is encoded, trained and sampled from."""

    @classmethod
    def of_release(cls, index: Mapping[str, object]) -> type[DiffusionAdapter]:
        """The class for a folder: another one where releases of a family differ in what a sample is made of.

        Args:
            index: The folder's `model_index.json`.
        """
        return cls

    # --- encoding: what is done once, or while training on raw media ------------------------------------------------

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """Features of captions, one entry each, without padding that training can add again. Here: as `captions` says.

        Args:
            pipeline: From `components.load_encoders`: the family's pipeline without its transformer.
            captions: As they stand in the data; the empty one is what caption dropout and guidance use.
        """
        found = pipeline.encode_prompt(list(captions), **self.captions.call, max_sequence_length=self.text_tokens)
        return self.captions.split(found)

    def encode_text_beside(
        self, pipeline: DiffusionPipeline, captions: Sequence[str], media: Mapping[str, torch.Tensor]
    ) -> list[TextFeatures]:
        """Features of captions that are read together with the media of a sample, for tasks of `text_reads_media`.

        Args:
            pipeline: As above.
            captions: Of one sample.
            media: The sample's, as `encode_conditions` is given them: (1, 3, T, H, W) uint8.
        """
        raise NotImplementedError

    @torch.no_grad()
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents: the mode of the VAE's posterior, (B, C, H, W) or (B, C, T, H, W), in the VAE's dtype.

        Args:
            pipeline: As above.
            pixels: (B, 3, T, H, W) uint8 on any device; T is 1 for images.
        """
        return self.latents_of(pipeline.vae, pixels if self.geometry.is_video else pixels[:, :, 0])

    def latents_of(self, vae: ModelMixin, media: torch.Tensor) -> torch.Tensor:
        """Normalised latents of media, for `encode_media` and `encode_conditions`.

        Args:
            vae: Of the pipeline.
            media: As the VAE takes it, with or without a time axis: uint8, or floats in −1..1.
        """
        return self.normalised(vae, posterior_mode(vae, media))

    def normalised(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """What the VAE made, in the scale that the transformer takes. Here: by `scale`."""
        return self.scale.apply(vae, latents)

    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What else a task is conditioned on, by batch key (i2v: `condition_latents`, `image_embeds`); (B, …) each.

        Args:
            pipeline: As above.
            media: `target`, and each of `media_roles` by its name: (B, 3, T, H, W) uint8. Optional ones may lack.
        """
        return {}

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the VAE decodes them. Here: the inverse of `normalised`.

        Args:
            vae: Of the pipeline.
            latents: (B, C, H, W) or (B, C, T, H, W), normalised, of any floating type.

        Raises:
            ConfigError: Its decoder needs more than latents.
        """
        return self.scale.undo(vae, latents)

    @torch.no_grad()
    def decode(self, pipeline: DiffusionPipeline, latents: torch.Tensor) -> torch.Tensor:
        """Pictures or clips of normalised latents, (B, 3, T, H, W) uint8 on the VAE's device; T is 1 for pictures.

        Args:
            pipeline: From `components.load_encoders`.
            latents: (B, C, H, W) or (B, C, T, H, W).

        Raises:
            ConfigError: Its decoder needs more than latents.
        """
        vae = pipeline.vae
        ready = self.vae_latents(vae, latents.to(vae.device)).to(vae.dtype)
        pixels = as_bytes(vae.decode(ready, return_dict=False)[0])
        if pixels.dim() == 5:
            return pixels
        return pixels.unsqueeze(2)

    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        """Shapes of what `encode_conditions` gives for a sample, for forecasts that encode nothing.

        Args:
            latent_shape: (C, H, W) or (C, T, H, W).
            given: Names of the media that the sample has. Those that every sample has may be left out.
        """
        return {}

    def seen_tokens(self, latent_shape: tuple[int, ...], given: Collection[str]) -> int:
        """How many tokens the media of a sample are among those of its caption, for tasks of `text_reads_media`, for
        forecasts that encode nothing. Arguments as of `condition_shapes`."""
        return 0

    def given_tokens(self, batch: Batch) -> int:
        """How many tokens the sequence of a sample's latents has for `latents_in_sequence`, for counts of FLOPs."""
        given = (batch[name] for name in self.latents_in_sequence if name in batch)
        return sum(self.geometry.tokens(tuple(each.shape[1:])) for each in given)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a padded caption's features that do not follow from the transformer's configuration as most
        families' do, for forecasts that encode nothing."""
        return {}

    def text_of_connectors(self, content: Mapping[str, object], where: str) -> TextFeatures:
        """Features of a caption from a file of Lightricks' trainer (`feature_store/legacy.py`), for the families
        that it trains.

        Args:
            content: Of the file.
            where: The file.

        Raises:
            DataError: The file is not for this model.
        """
        raise DataError(f"features of LTX-2 are not for {self.transformer_class}", where=where)

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Captions' features as batch entries, (B, …). Here: as `captions` says."""
        return self.captions.joined(features)

    # --- training ---------------------------------------------------------------------------------------------------

    @cached_property
    def noise_path(self) -> NoisePath:
        """How noise is put on latents, and what is learned. Here: flow matching."""
        return FlowPath()

    def given_latents(self, batch: Batch) -> torch.Tensor | None:
        """Which latents the model is given without noise, and learns nothing of: bool, broadcastable to the latents.
        None: it is given none. Here: the first latent frame, (1, 1, T, 1, 1), in tasks of `starts_with_frame`.

        Args:
            batch: Latents, text features and conditions; also what `inputs` is called with.
        """
        if self.task not in self.starts_with_frame:
            return None
        latents = batch[LATENTS]
        return (torch.arange(latents.shape[2], device=latents.device) == 0).view(1, 1, -1, 1, 1)

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Arguments of the transformer's forward. Here: latents, or tokens of them, the time, the text features of
        `text_inputs`, and guidance where it is an input.

        Args:
            noisy: Latents with noise, in the shape of `batch["latents"]`.
            sigma: (B,) noise levels in 0..1, or numbers of steps (`noise_path`), fp32 or fp64. What is made of them for
                the timestep keeps that precision.
            batch: Text features and conditions, in the dtype that the transformer computes in.
            guidance: `training.diffusion.guidance`, for transformers that take it as an input.
        """
        inputs = {
            "hidden_states": pack(noisy, self.geometry.patch) if self.takes_tokens else noisy,
            "timestep": self.time_scale * sigma,
            **{argument: batch[key] for argument, key in self.text_inputs.items()},
        }
        if self.embeds_guidance:
            inputs["guidance"] = torch.full_like(sigma, self.time_scale * guidance)
        return inputs

    def token_times(self, times: torch.Tensor, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """(B,) times for each token of latents, (B, N): 0 for those of a frame that is given."""
        frames, height, width = self.geometry.grid(latent_shape)
        of_tokens = times.view(-1, 1, 1).repeat(1, frames, height * width)
        if self.task in self.starts_with_frame:
            of_tokens[:, 0] = 0
        return of_tokens.flatten(1)

    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The transformer's output (called with `return_dict=False`) as a prediction of what `noise_path` asks for (in
        flow matching ε − x), in the shape of latents. Here: the first output; of tokens those of the noise, which stand
        in front.

        Args:
            output: What forward returned.
            latent_shape: (B, C, H, W) or (B, C, T, H, W).
        """
        if not self.takes_tokens:
            return output[0]
        return unpack(output[0][:, : self.geometry.tokens(latent_shape)], latent_shape, self.geometry.patch)

    def predictions(self, output: TransformerOutput, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """`prediction` of each of the latents that a sample has, by batch key. Here: of the only ones.

        Args:
            output: As above.
            shapes: Batch key → shape.
        """
        return {LATENTS: self.prediction(output, shapes[LATENTS])}

    def causal(self, model: nn.Module) -> CausalModel:
        """The transformer as blocks of frames are drawn with it, for families with `draws_blocks`.

        Args:
            model: The live transformer, sharded or not.
        """
        raise NotImplementedError

    def kept_of_blocks(self, tokens: int) -> int:
        """How many numbers are kept of so many tokens of finished blocks, for families with `draws_blocks`."""
        raise NotImplementedError

    def settle_transformer(self, transformer: nn.Module) -> None:
        """Set right what a transformer of diffusers gets wrong in training. Most get nothing wrong.

        Args:
            transformer: Just built, parameters on meta.
        """
        return

    def init_weights(self, module: nn.Module) -> None:
        """From scratch: set a module's own parameters that torch's `reset_parameters` does not know. A module that has
        none of them is left alone. Here: modulation tables are drawn from N(0, 1/width), as in diffusers' constructors,
        and `zeros` set to zero."""
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("scale_shift_table"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name in self.zeros:
                parameter.zero_()

    def released_shift(self, tokens: int) -> float:
        """The shift of noise levels that the folder's scheduler uses for a sample of so many tokens: by resolution when
        it shifts dynamically, otherwise its `shift`, or UniPC's `flow_shift`."""
        scheduler = self.component_config("scheduler")
        if scheduler.get("use_dynamic_shifting"):
            return self.resolution_shift(tokens)
        shift = next((scheduler[key] for key in ("flow_shift", "shift") if key in scheduler), 1.0)
        return float(shift)

    def shift_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Tokens that the shift by resolution goes by, of latents (C, H, W) or (C, T, H, W). Here: all of them."""
        return self.geometry.tokens(latent_shape)

    def released_end(self) -> float:
        """The noise level that the folder's scheduler stretches its last step to (`shift_terminal`), else 0."""
        return float(self.component_config("scheduler").get("shift_terminal") or 0.0)

    def resolution_shift(self, tokens: int) -> float:
        """exp(μ), μ linear in the tokens through the scheduler's (base_image_seq_len, base_shift) and
        (max_image_seq_len, max_shift); the defaults are FLUX.1's (Esser et al. 2024, section 5.3.2)."""
        scheduler = self.component_config("scheduler")
        few, many = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
        low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
        return math.exp(low + (high - low) / (many - few) * (tokens - few))

    # --- sampling ---------------------------------------------------------------------------------------------------

    def guided(self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor) -> dict[str, Any]:
        """The arguments that most pipelines take: size, steps, noise and guidance, which is classifier-free and away
        from the negative prompt unless the transformer takes it as an input. Arguments as of `pipeline_arguments`.

        Raises:
            ConfigError: There is a negative prompt, which would have no effect.
        """
        geometry = self.geometry
        size: JsonObject = {
            "height": latents.shape[-2] * geometry.spatial_ratio,
            "width": latents.shape[-1] * geometry.spatial_ratio,
        }
        if geometry.is_video:
            size[self.frames_argument] = geometry.frames(tuple(latents.shape[1:]))
        if self.rate_argument:
            size[self.rate_argument] = sampling.fps
        if self.takes_guidance:
            self.refuse_negative_prompt(sampling, "this transformer takes guidance as an input")
            negative = {}
        else:
            negative = {"negative_prompt": [sampling.negative_prompt] * len(prompts)}
        return {
            **size,
            **self.usage.call,
            **self._guidance(sampling),
            **negative,
            "num_inference_steps": sampling.num_inference_steps,
            "latents": pack(latents, geometry.patch) if self.pipeline_takes_tokens else latents,
            "max_sequence_length": self.text_tokens,
            "output_type": "np",
        }

    def _guidance(self, sampling: SamplingArguments) -> Mapping[str, float]:
        """The request's scale, or the several numbers of the release (`ReleaseUse.guidance`)."""
        if sampling.guidance_scale is not None:
            return {self.guidance_argument: sampling.guidance_scale}
        if isinstance(self.usage.guidance, Mapping):
            return self.usage.guidance
        return {}

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """Height and width of a sample when a request names none: the release's, the default of the pipeline's
        argument, or its sample size in latents.

        Args:
            pipeline: The family's.
        """
        if self.usage.size is not None:
            return self.usage.size
        parameters = inspect.signature(pipeline.__call__).parameters
        latents: int | None = attribute_at(pipeline, "default_sample_size")
        ratio: int | None = attribute_at(pipeline, "vae_scale_factor")
        square = latents * ratio if latents and ratio else None
        height, width = (
            parameters[name].default or square if name in parameters else None for name in ("height", "width")
        )
        return height, width

    def refuse_negative_prompt(self, sampling: SamplingArguments, reason: str) -> None:
        """Raise `ConfigError` when there is a negative prompt, which would have no effect."""
        if sampling.negative_prompt:
            raise ConfigError(
                f"'{sampling.negative_prompt}' has no effect: {reason}",
                key="sampling.negative_prompt",
                way_out="Leave it out.",
            )

    def prepare_pipeline(self, pipeline: DiffusionPipeline, sampling: SamplingArguments) -> None:
        """Set what a pipeline takes otherwise than by arguments, before each batch. Most take all by arguments."""
        return

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Keyword arguments of the family's pipeline for a batch, besides `prompt`, `generator` and `image`. Here:
        those that most pipelines take, `guided`.

        Args:
            sampling: Steps, guidance, size.
            prompts: As many as latents.
            latents: (B, C, H, W) or (B, C, T, H, W) starting noise; the pipeline's own layout is made of it here.
        """
        return self.guided(sampling, prompts, latents)

    def further_shapes(self, frames: int, fps: float) -> dict[str, tuple[int, ...]]:
        """Shapes of the `further_latents` of a clip, without the batch axis."""
        return {}

    def starting_noise(self, pipeline: DiffusionPipeline, noise: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of the pipeline for the noise that a sample starts from, where it does not take it as
        `pipeline_arguments` gives it.

        Args:
            pipeline: The family's.
            noise: Batch key → (B, …), of `latents` and of `further_latents`.
        """
        return {}

    def pipeline_media(self, media: Mapping[str, object], sampling: SamplingArguments) -> dict[str, Any]:
        """Keyword arguments of the pipeline for the media of a prompt: each under the argument that its role names.

        Args:
            media: Role → picture, or list of pictures, in the size of the sample.
            sampling: As above.
        """
        roles = self.roles.get(self.task, ())
        several = {role.argument for role in roles if role.is_whole}
        given: dict[str, Any] = {}
        for role in roles:
            if role.name in media and role.argument in several:
                given.setdefault(role.argument, []).append(media[role.name])
            elif role.name in media:
                given[role.argument] = media[role.name]
        return given
