"""The objective of image and video generators: noise is put on latents as the family's `NoisePath` says, and the
model learns what the path asks for. σ, the noise level, is 0 for data and 1 for noise; how it is drawn, shifted and
weighted stands here, too.

Which caption is dropped, time and ε of a sample are functions of (seed, epoch, sample id): the same for every batch
size, number of ranks, order and resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS
from mindspeed_mm.fsdp.models.diffusion.media_roles import SOUND
from mindspeed_mm.fsdp.models.diffusion.noise_paths import Density
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
    from mindspeed_mm.fsdp.models.diffusion.noise_paths import NoisePath

_MOST_DRAWS = 10_000
PRIOR = "prior"
"""The term of samples that preserve the prior."""
VALIDATION = "validation"
"""Stands for the epoch when a sample is validated: its noise is always the same."""


@dataclass(frozen=True)
class Draw:
    """What chance decides of one sample."""

    seed: int
    drops_caption: bool
    random: np.random.Generator
    """What draws its time."""


class DenoisingObjective:
    """Mean squared error of the prediction: mean over a sample's latents, but for those that the model is given without
    noise; weighted mean over samples. Where a sample has several latents (pictures and sound), each has noise of its
    own, all have one time, and the means are added. With
    `prior_loss_weight` w, samples that preserve the prior are a term of their own: mean over the others + w · mean over
    these.

    Args:
        adapter: The family's conventions.
        arguments: `training.diffusion`.
        seed: `training.seed`.
        compute_dtype: What the transformer computes in. Noise is mixed and losses are taken in fp32 (fp64 in fp64).
        null_text: Features of the empty caption by batch key, without batch axis; for caption dropout on features.
        encode: Batch with `pixels` and `captions` → latents and features by batch key; for training on raw media.

    Raises:
        ConfigError: Captions are dropped, and there are features for none; a setting has no meaning on the family's
            path.
    """

    term = "loss"

    def __init__(
        self,
        adapter: DiffusionAdapter,
        arguments: DiffusionArguments,
        *,
        seed: int,
        compute_dtype: torch.dtype = torch.float32,
        null_text: Mapping[str, torch.Tensor] | None = None,
        encode: Callable[[Batch], Batch] | None = None,
    ) -> None:
        encodes, has_empty_caption = encode is not None, null_text is not None
        check_caption_dropout(adapter, arguments, encodes=encodes, has_empty_caption=has_empty_caption)
        check_path_settings(adapter.noise_path, arguments)
        self._adapter, self._arguments, self._seed = adapter, arguments, seed
        self._path = adapter.noise_path
        self._denoise = Denoiser(adapter, compute_dtype, arguments.guidance)
        self._exact_dtype = self._denoise.exact_dtype
        self._null_text, self._encode = null_text, encode

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Draw what chance decides, drop captions, encode raw media; adds `_noise` and that of further latents
        (`noise_key`), `_time` (B,), `_weights` (B,)."""
        draws = []
        for sample, epoch in zip(batch["sample_ids"], batch["epochs"], strict=True):
            draws.append(self.draw(sample, epoch if training else VALIDATION))
        dropped = [row for row, draw in enumerate(draws) if draw.drops_caption and training]
        if "pixels" in batch:
            prepared = dict(self._encoded(batch, dropped))
        else:
            prepared = dict(self._without_captions(batch, dropped))
        latent_shape = prepared[LATENTS].shape[1:]
        times, weights = [], []
        for draw in draws:  # times are drawn behind what drops captions, from the same generator of the sample
            time = self._time(draw.random, latent_shape)
            times.append(time)
            weights.append(self._weight(time))
        for row in range(real_rows(prepared), len(weights)):  # blank rows stand behind the samples
            weights[row] = 0.0
        for key in self._keys(prepared):
            prepared[noise_key(key)] = self._noise(draws, key, prepared[key].shape[1:])
        prepared["_time"], prepared["_weights"] = self._exact(times), self._exact(weights)
        return prepared

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count samples, without blank rows; with `prior_loss_weight`, those that preserve the prior are counted
        apart."""
        samples = sum(map(real_rows, batches))
        if self._arguments.prior_loss_weight is None:
            return {self.term: samples}
        prior = sum(int(_is_prior(batch)[: real_rows(batch)].sum()) for batch in batches)
        return {self.term: samples - prior, PRIOR: prior}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Latent tokens, all of which are learned from."""
        each = self._adapter.geometry.tokens(tuple(batch["latents"].shape[1:]))
        whole = each * len(batch["sample_ids"])
        return BatchTokens(whole, whole)

    def describe(self) -> str:
        """Return the phrase of the noise path for the log."""
        return self._path.describe()

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sum over samples of the weighted mean squared error."""
        weighted = self.errors(model, batch) * batch["_weights"]
        if self._arguments.prior_loss_weight is None:
            return {self.term: weighted.sum()}
        is_prior = _is_prior(batch).to(weighted.device)
        return {
            self.term: (weighted * ~is_prior).sum(),
            PRIOR: self._arguments.prior_loss_weight * (weighted * is_prior).sum(),
        }

    def errors(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(B,) mean over a sample's latents of the squared error of the prediction, of a prepared batch."""
        exact, time = self._exact_dtype, batch["_time"]
        noisy, targets = {}, {}
        for key in self._keys(batch):
            latents, noise = batch[key].to(exact), batch[noise_key(key)].to(exact)
            time_of_each = time.reshape(-1, *[1] * (latents.dim() - 1))
            noisy[key] = self._path.mix(latents, noise, time_of_each)
            targets[key] = self._path.target(latents, noise, time_of_each)
        given = self._adapter.given_latents(batch)
        if given is not None:
            noisy[LATENTS] = torch.where(given, batch[LATENTS].to(exact), noisy[LATENTS])
        predicted = self._denoise.predict(model, noisy, time, batch)
        squares = {key: (predicted[key] - targets[key]).square() for key in targets}
        if self._adapter.latents_are_one:
            squares = {LATENTS: torch.cat([each.flatten(1) for each in squares.values()], dim=1)}
        errors = torch.zeros_like(batch["_weights"])
        for key, of_key in squares.items():
            errors = errors + _mean_of_samples(of_key, given if key == LATENTS else None)
        return errors

    def _keys(self, batch: Batch) -> tuple[str, ...]:
        """Of the latents that these samples have."""
        return (LATENTS, *(key for key in self._adapter.further_latents if key in batch))

    @staticmethod
    def _noise(draws: Sequence[Draw], key: str, shape: Sequence[int]) -> torch.Tensor:
        """ε of the latents under a key; further ones have a seed of their own."""
        noise = []
        for draw in draws:
            seed = draw.seed if key == LATENTS else derive_seed(draw.seed, key)
            noise.append(noise_of(seed, shape))
        return torch.stack(noise)

    def draw(self, sample_id: str, epoch: int | str) -> Draw:
        """What chance decides of a sample in an epoch."""
        seed = derive_seed(self._seed, epoch, sample_id)
        random = np.random.Generator(np.random.Philox(key=seed))
        drops_caption = bool(random.random() < self._arguments.caption_dropout)
        return Draw(seed, drops_caption, random)

    def _time(self, random: np.random.Generator, latent_shape: tuple[int, ...]) -> float:
        """A time for latents of this shape, in the range that is trained.

        Raises:
            ConfigError: None of many falls into the range.
        """
        density = self._arguments.timestep_density or self._path.density
        if not self._path.is_flow:
            return self._path.time(draw_level(density, self._arguments, random))
        shift, least = self.shift(latent_shape), self._least_sigma
        low, high = self._arguments.sigma_range or (0.0, 1.0)
        for _ in range(_MOST_DRAWS):
            shifted = shift_sigma(draw_level(density, self._arguments, random), shift)
            sigma = least + (1 - least) * shifted
            if low <= sigma <= high:
                return self._path.time(sigma)
        raise ConfigError(
            f"none of {_MOST_DRAWS} noise levels of this density lies between {low:g} and {high:g}",
            key="training.diffusion.sigma_range",
            way_out="Widen the range, or move the density there by timestep_density and shift.",
        )

    @property
    def _least_sigma(self) -> float:
        """What σ = 0 is stretched to: where the shift is the folder's scheduler's, its end is, too."""
        if self._arguments.shift is None:
            return self._adapter.released_end()
        return 0.0

    def _weight(self, time: float) -> float:
        gamma = self._arguments.snr_gamma
        if gamma is None:
            return loss_weight(self._arguments.loss_weighting, time)
        return self._path.min_snr_weight(time, gamma)

    def shift(self, latent_shape: tuple[int, ...]) -> float:
        """The shift for latents of this shape, (C, H, W) or (C, T, H, W)."""
        shift = self._arguments.shift
        if isinstance(shift, float):
            return shift
        tokens = self._adapter.shift_tokens(tuple(latent_shape))
        if shift == "resolution":
            return self._adapter.resolution_shift(tokens)
        return self._adapter.released_shift(tokens)

    def _exact(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self._exact_dtype)

    def _encoded(self, batch: Batch, dropped: Sequence[int]) -> Batch:
        if self._encode is None:
            raise ConfigError(
                "the data are raw media and no encoders are loaded",
                key="data.dataset_param.basic_parameters.features_dir",
                way_out="Extract features with mm extract.",
            )
        captions = list(batch["captions"])
        for row in dropped:
            captions[row] = ""
        raw: Batch = {"captions": captions}
        kept: Batch = {}
        for key, value in batch.items():
            if key.startswith("pixels") or key == SOUND.batch_key:
                raw[key] = value
            elif key != "captions":
                kept[key] = value
        return kept | self._encode(raw)

    def _without_captions(self, batch: Batch, dropped: list[int]) -> Batch:
        if not dropped:
            return batch
        if self._null_text is None:  # validation on raw media loads encoders, training on features does not use them
            raise _no_empty_caption(self._arguments)
        changed = {}
        for key, empty in self._null_text.items():
            longest = max(batch[key].shape[1], len(empty)) if empty.dim() else 0
            changed[key] = _lengthened(batch[key], 1, longest).clone()
            changed[key][dropped] = _lengthened(empty, 0, longest).to(changed[key].dtype)
        return batch | changed


def _is_prior(batch: Batch) -> torch.Tensor:
    """(B,) bool; a data set without such samples says nothing."""
    if "is_prior" in batch:
        return batch["is_prior"]
    return torch.zeros(len(batch["sample_ids"]), dtype=torch.bool)


def real_rows(batch: Batch) -> int:
    """Samples of a batch, without the rows that only fill it up."""
    return len(batch["sample_ids"]) - int(batch.get("blank_rows", 0))


def check_caption_dropout(
    adapter: DiffusionAdapter, arguments: DiffusionArguments, *, encodes: bool, has_empty_caption: bool
) -> None:
    """Raise `ConfigError` where captions are dropped and there is no empty one to take their place.

    Args:
        adapter: The family's conventions.
        arguments: `training.diffusion`.
        encodes: Captions are encoded while training.
        has_empty_caption: The features hold that of the empty caption.
    """
    if not arguments.caption_dropout or encodes:
        return
    if not has_empty_caption:
        raise _no_empty_caption(arguments)
    if adapter.task in adapter.text_reads_media:
        raise ConfigError(
            f"{arguments.caption_dropout}, but an empty caption is read together with each sample's picture, and "
            "the features hold it for none",
            key="training.diffusion.caption_dropout",
            way_out="Train on raw media (leave features_dir out), or set it to 0.",
        )


def check_path_settings(path: NoisePath, arguments: DiffusionArguments) -> None:
    """Raise `ConfigError` for settings of `training.diffusion` that mean something for noise levels alone, where times
    are numbers of steps, or the other way round."""
    if path.is_flow:
        if arguments.snr_gamma is not None:
            raise ConfigError(
                f"{arguments.snr_gamma:g}, but this model learns by {path.describe()}, which has no steps",
                key="training.diffusion.snr_gamma",
                way_out="Leave it out; loss_weighting weighs noise levels.",
            )
        return
    given: dict[str, object] = {}
    if arguments.shift is not None:
        given["shift"] = arguments.shift
    if arguments.loss_weighting != "none":
        given["loss_weighting"] = arguments.loss_weighting
    if arguments.sigma_range is not None:
        given["sigma_range"] = arguments.sigma_range
    problems = []
    for name, value in given.items():
        what = f"{value}, but this model learns by {path.describe()}, which has no noise levels"
        problems.append(Problem(what, key=f"training.diffusion.{name}", way_out="Leave it out."))
    if problems:
        raise ConfigError("settings of flow matching for a model of another objective", problems=problems)


def _mean_of_samples(errors: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """(B, …) → (B,): mean over what is not given."""
    if given is None:
        return errors.flatten(1).mean(dim=1)
    learned = (~given).expand_as(errors).flatten(1)
    return (errors.flatten(1) * learned).sum(dim=1) / learned.sum(dim=1).clamp(min=1)


def _lengthened(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """With zeros behind, as `pad_text` pads."""
    if tensor.dim() <= dim or tensor.shape[dim] >= length:
        return tensor
    shape = [*tensor.shape[:dim], length - tensor.shape[dim], *tensor.shape[dim + 1 :]]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def _no_empty_caption(arguments: DiffusionArguments) -> ConfigError:
    return ConfigError(
        f"{arguments.caption_dropout}, but the features hold no empty caption",
        key="training.diffusion.caption_dropout",
        way_out="Extract them with mm extract, or set it to 0.",
    )


def noise_key(key: str) -> str:
    """Where a prepared batch has the noise of its latents."""
    if key == LATENTS:
        return "_noise"
    return f"_noise_{key}"


def noise_of(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """ε of a sample: fp32 from the CPU's generator, on every machine and device the same."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed % 2**63))


# --- noise levels -----------------------------------------------------------------------------------------------------

_BELL_FLOOR = math.exp(-0.5)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _BELL_FLOOR
"""Mean of exp(−2 (σ − ½)²) − exp(−½) over 0..1."""


def draw_level(density: Density, arguments: DiffusionArguments, random: np.random.Generator) -> float:
    """A number in 0..1 by a density: one noise level before the shift.

    Densities: Esser et al. 2024 (arXiv 2403.03206), section 3.1: logit-normal, and mode with scale s,
    σ = 1 − u − s (cos²(πu/2) − 1 + u); Black et al. 2024 (arXiv 2410.24164), section IV: Beta.
    """
    if density == "logit_normal":
        return 1.0 / (1.0 + math.exp(-random.normal(arguments.logit_mean, arguments.logit_std)))
    if density == "beta":
        return float(random.beta(arguments.beta_alpha, arguments.beta_beta))
    uniform = float(random.random())
    if density == "uniform":
        return uniform
    return 1.0 - uniform - arguments.mode_scale * (math.cos(math.pi * uniform / 2) ** 2 - 1.0 + uniform)


def shift_sigma(sigma: float, shift: float) -> float:
    """s σ / (1 + (s − 1) σ): more noise for more pixels (Esser et al. 2024, equation 23)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def loss_weight(name: str, sigma: float) -> float:
    """Weight of a sample's loss by its noise level.

    sigma_sqrt and cosmap: Esser et al. 2024, section 3.1; sigma_squared: the error of x = x_σ − σ v in place of that of
    v, as some scripts of diffusers have it; bell: exp(−2 (σ − ½)²) − exp(−½), scaled to mean 1, as DiffSynth-Studio
    weights its video models.
    """
    if name == "sigma_sqrt":
        return sigma**-2
    if name == "sigma_squared":
        return sigma**2
    if name == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma**2))
    if name == "bell":
        return (math.exp(-2.0 * (sigma - 0.5) ** 2) - _BELL_FLOOR) / _BELL_MEAN
    return 1.0
