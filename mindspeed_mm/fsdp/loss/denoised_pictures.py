"""Pictures that a model of words draws by denoising, in one sequence with the words (arXiv:2505.14683): two loss terms,
each with a denominator of its own.

    loss = a · Σ w_t · (−log p(word_t | before)) / Σ w_t,    picture = b · Σ |v − (ε − x)|² / n

over labelled words, and over the n numbers of the latents x of drawn pictures, which the model is shown as (1 − t) x +
t ε. Time t and noise ε of a picture are functions of the seed that its row gives it: of (seed, epoch, row) and its
number. A picture that is given has t = 0 and no loss. Shapes: N pictures with latents, of M tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from mindspeed_mm.core.batch import LATENT, Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import draw_level, noise_of, shift_sigma
from mindspeed_mm.fsdp.loss.drawn_pictures import PICTURE_TERM
from mindspeed_mm.fsdp.loss.head_loss import output_of
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms, TokenCrossEntropy
from mindspeed_mm.fsdp.models.diffusion.latents import patchified, places_of
from mindspeed_mm.fsdp.models.diffusion.picture_vae import drawn_from
from mindspeed_mm.fsdp.params.argument import FeatureArguments, TrainingArguments
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments
from mindspeed_mm.fsdp.params.feature_args import LossConfig
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

Encode = Callable[[torch.Tensor, int | None], torch.Tensor]
"""(pixels (3, H, W) uint8, seed of a draw; None: the likeliest) → latents (C, h, w)."""
TEXT_WEIGHT, PICTURE_WEIGHT = 0.25, 1.0
"""a and b of the published recipe."""
_ONLY_NULL = ("sigma_range", "prior_loss_weight")


class DenoisedSizes(Protocol):
    """What the configuration of such a model tells of its latents."""

    latent_patch_size: int
    latent_features: int
    timestep_shift: float

    @property
    def latent_side(self) -> int:
        """Pixels along a side of a token."""


def stand_beside_words(sizes: object) -> bool:
    """Whether latents are no tokens of the rows: the model reads them by a transformer of their own, which gives every
    token its place itself. Pictures that are given are the likeliest latents then, as when the model is asked."""
    return bool(attribute_at(sizes, "latents_beside_words", False))


class WithDenoisedPictures:
    """Next-token cross-entropy of words, with the denoising of pictures beside it.

    Args:
        objective: Of the words.
        sizes: Of the model's latents.
        loss: `features.loss_cfg`, with the weights of the two terms.
        diffusion: `training.diffusion`: how noise levels are drawn.
        encode: The frozen VAE; None: there is none, for pictures are features; latents of pixels are zeros then, for a
            step without data.
        exact_dtype: What noise is mixed in.
    """

    term = PICTURE_TERM

    def __init__(
        self,
        objective: TokenCrossEntropy,
        sizes: DenoisedSizes,
        loss: LossConfig,
        diffusion: DiffusionArguments,
        encode: Encode | None,
        exact_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._objective, self._sizes, self._encode = objective, sizes, encode
        self._diffusion, self._exact_dtype = diffusion, exact_dtype
        self._text_weight = TEXT_WEIGHT if loss.text_loss_weight is None else loss.text_loss_weight
        self._picture_weight = PICTURE_WEIGHT if loss.picture_loss_weight is None else loss.picture_loss_weight
        shift = diffusion.shift
        self._shift = shift if isinstance(shift, float) else sizes.timestep_shift

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective of words; encodes pictures, puts noise on those that are drawn, and adds where their tokens
        stand.

        Raises:
            DataError: There are not as many latents as places for them.
        """
        prepared = self._objective.prepare(batch, training=training)
        if "picture_sizes" not in batch:
            return prepared
        pictures = zip(self._pictures(batch), batch["picture_is_drawn"].tolist(), batch["picture_seeds"], strict=True)
        tokens, times, grids, is_drawn, targets = [], [], [], [], []
        for picture, drawn, seed in pictures:
            is_likeliest = not drawn and stand_beside_words(self._sizes)
            latents_mC, grid = self._tokens_of(picture, None if is_likeliest else derive_seed(int(seed), "posterior"))
            time = self._time(int(seed)) if drawn else 0.0
            if drawn:
                noise_mC = noise_of(derive_seed(int(seed), "noise"), latents_mC.shape).to(self._exact_dtype)
                # The velocity, of latents that have no noise yet.
                targets.append(noise_mC - latents_mC)
                latents_mC = (1 - time) * latents_mC + time * noise_mC
            tokens.append(latents_mC)
            times.append(torch.full((len(latents_mC),), time, dtype=self._exact_dtype))
            is_drawn.append(torch.full((len(latents_mC),), drawn))
            grids.append(grid)
        prepared = prepared | {
            "latent_tokens": torch.cat(tokens),
            "latent_times": torch.cat(times),
            "_velocities": torch.cat([tokens[0].new_zeros(0, self._sizes.latent_features), *targets]),
        }
        if stand_beside_words(self._sizes):
            return prepared
        return prepared | self._places(batch, grids, torch.cat(is_drawn))

    def _places(
        self, batch: Batch, grids: Sequence[tuple[int, int]], is_drawn_M: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Where the latents of a batch stand in its rows, and in the model's table."""
        places_M = (batch["token_kinds"] == LATENT).flatten().nonzero().squeeze(1)
        if len(places_M) != len(is_drawn_M):
            raise DataError(
                f"{len(places_M)} tokens stand for pictures that have {len(is_drawn_M)} latents",
                key="token_kinds",
                way_out="Let the data set give as many places as a picture has latents.",
            )
        most: int = attribute_at(self._sizes, "max_latent_size")
        return {
            "latent_positions": torch.cat([places_of(*grid, most) for grid in grids]),
            "latent_places": places_M,
            "drawn_places": places_M[is_drawn_M],
        }

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them, and the latents that are trained."""
        words = self._objective.tokens(batch)
        return BatchTokens(words.real, words.trained + len(batch.get("_velocities", ())))

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the objective's counts, and the numbers of all latents of drawn pictures."""
        numbers = sum(batch["_velocities"].numel() for batch in batches if "_velocities" in batch)
        return {**self._objective.count(batches), self.term: numbers}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's sums, and that of squared errors, each times its weight."""
        seen: list[Any] = []
        # The cross-entropy calls the model and takes its logits; its other outputs are caught here.
        hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        try:
            terms = self._objective.terms(model, batch)
        finally:
            hook.remove()
        terms = {name: self._text_weight * value for name, value in terms.items()}
        predicted = output_of(seen[-1], "velocities")
        exact = torch.promote_types(predicted.dtype, torch.float32)
        targets = batch.get("_velocities")
        error = predicted.to(exact)
        if targets is not None:
            error = error - targets.to(exact)
        return terms | {self.term: self._picture_weight * error.square().sum()}

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and the weights of the two terms."""
        return (
            f"{self._text_weight:g} · {self._objective.describe()}; {self._picture_weight:g} · flow matching of drawn "
            "pictures"
        )

    def _pictures(self, batch: Batch) -> list[torch.Tensor]:
        """Of each picture that has latents (3, H, W) uint8, or where they were extracted (2, C, h, w), what they are
        drawn from."""
        sizes = batch["picture_sizes"].tolist()
        if "picture_posteriors" not in batch:
            shapes = [(3, *size) for size in sizes]
            return _pieces(batch["picture_pixels"], shapes)
        squares = self._sizes.latent_patch_size
        pixels, channels = self._sizes.latent_side // squares, self._sizes.latent_features // squares**2
        shapes = [(2, channels, height // pixels, width // pixels) for height, width in sizes]
        return _pieces(batch["picture_posteriors"], shapes)

    def _tokens_of(self, picture: torch.Tensor, seed: int | None) -> tuple[torch.Tensor, tuple[int, int]]:
        """Latents of a picture as tokens, and how many stand along its height and its width."""
        side = self._sizes.latent_patch_size
        if picture.dim() == 4:
            latents = drawn_from(picture, seed)
        elif self._encode is not None:
            latents = self._encode(picture, seed)
        else:
            grid = (picture.shape[1] // self._sizes.latent_side, picture.shape[2] // self._sizes.latent_side)
            return torch.zeros(grid[0] * grid[1], self._sizes.latent_features, dtype=self._exact_dtype), grid
        grid = (latents.shape[1] // side, latents.shape[2] // side)
        return patchified(latents.to(self._exact_dtype), side), grid

    def _time(self, seed: int) -> float:
        density = self._diffusion.timestep_density or "logit_normal"
        random = np.random.Generator(np.random.Philox(key=derive_seed(seed, "time")))
        return shift_sigma(draw_level(density, self._diffusion, random), self._shift)


def _pieces(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors of these shapes that stand flattened one behind the other."""
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def check_unified_loss(training: TrainingArguments, features: FeatureArguments) -> None:
    """Raise `ConfigError` for what a model that answers and draws is not trained with."""
    loss_cfg, diffusion = features.loss_cfg, training.diffusion
    if loss_cfg.loss_type not in (None, "default", "per_token_loss", "per_sample_loss"):
        raise ConfigError(
            f"'{loss_cfg.loss_type}' is not built for models that answer and draw",
            key="features.loss_cfg.loss_type",
            way_out="Leave it out: words have cross-entropy, pictures their denoising.",
        )
    if diffusion.shift == "resolution":
        raise ConfigError(
            "'resolution' is a shift of generators; this model has one for all sizes",
            key="training.diffusion.shift",
            way_out="Give a number, or null for that of the model's folder.",
        )
    given = [name for name in _ONLY_NULL if getattr(diffusion, name) is not None]
    given += ["loss_weighting"] * (diffusion.loss_weighting != "none")
    given += ["caption_dropout"] * (diffusion.caption_dropout > 0)
    if given:
        raise ConfigError(
            f"{getattr(diffusion, given[0])} is for generators, and this model answers and draws",
            key=f"training.diffusion.{given[0]}",
            way_out="Leave it out; parts of rows are dropped by basic_parameters.text_cond_dropout_prob and its like.",
        )
