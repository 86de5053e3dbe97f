"""Flow matching: the objective of image and video generators.

x_σ = (1 − σ) x + σ ε; the model predicts ε − x (Lipman et al. 2022, arXiv 2210.02747; Liu et al. 2022, 2209.03003).
Which caption is dropped, σ and ε of a sample are functions of (seed, epoch, sample id): the same for every batch size,
number of ranks, order and resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.noise_levels import draw_sigma, loss_weight, shift_sigma
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

VALIDATION = "validation"
"""Stands for the epoch when a sample is validated: its noise is always the same."""


@dataclass(frozen=True)
class Draw:
    """What chance decides of one sample."""

    seed: int
    drops_caption: bool
    sigma: float
    """Before the shift."""


class FlowMatching:
    """Mean squared error of the predicted velocity: mean over a sample's latents, weighted mean over samples.

    Args:
        adapter: The family's conventions.
        arguments: `training.diffusion`.
        seed: `training.seed`.
        compute_dtype: What the transformer computes in. Noise is mixed and losses are taken in fp32 (fp64 in fp64).
        null_text: Features of the empty caption by batch key, without batch axis; for caption dropout on features.
        encode: Batch with `pixels` and `captions` → latents and features by batch key; for training on raw media.

    Raises:
        ConfigError: Captions are dropped, and there are features for none.
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
        if arguments.caption_dropout > 0 and null_text is None and encode is None:
            raise _no_empty_caption(arguments)
        self._adapter, self._arguments, self._seed = adapter, arguments, seed
        self._compute_dtype = compute_dtype
        self._exact_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        self._null_text, self._encode = null_text, encode

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Draw what chance decides, drop captions, encode raw media; adds `_noise`, `_sigma` (B,), `_weights` (B,)."""
        draws = []
        for sample, epoch in zip(batch["sample_ids"], batch["epochs"], strict=True):
            draws.append(self.draw(sample, epoch if training else VALIDATION))
        dropped = [draw.drops_caption and training for draw in draws]
        batch = self._encoded(batch, dropped) if "pixels" in batch else self._without_captions(batch, dropped)
        latents = batch["latents"]
        shift = self.shift(latents.shape[1:])
        sigmas = [shift_sigma(draw.sigma, shift) for draw in draws]
        weights = [loss_weight(self._arguments.loss_weighting, sigma) for sigma in sigmas]
        blanks = batch.get("blank_rows", 0)
        return batch | {
            "_noise": torch.stack([noise_of(draw.seed, latents.shape[1:]) for draw in draws]),
            "_sigma": self._exact(sigmas),
            "_weights": self._exact(weights[: len(weights) - blanks] + [0.0] * blanks),
        }

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Samples."""
        return {self.term: sum(len(batch["sample_ids"]) - batch.get("blank_rows", 0) for batch in batches)}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Latent tokens, all of which are learned from."""
        each = self._adapter.geometry.tokens(tuple(batch["latents"].shape[1:]))
        whole = each * len(batch["sample_ids"])
        return BatchTokens(whole, whole)

    def describe(self) -> str:
        """For the log."""
        return "flow matching"

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sum over samples of the weighted mean squared error."""
        exact, latents = self._exact_dtype, batch["latents"].to(self._exact_dtype)
        noise, sigma = batch["_noise"].to(exact), batch["_sigma"]
        level = sigma.reshape(-1, *[1] * (latents.dim() - 1))
        noisy = (1 - level) * latents + level * noise
        inputs = self._adapter.inputs(noisy.to(self._compute_dtype), sigma, self._cast(batch), self._arguments.guidance)
        if CONTEXT_KEY in batch:
            inputs[CONTEXT_KEY] = batch[CONTEXT_KEY]
        predicted = self._adapter.prediction(model(**inputs, return_dict=False), tuple(latents.shape))
        errors = (predicted.to(exact) - (noise - latents)).square().flatten(1).mean(dim=1)
        return {self.term: (errors * batch["_weights"]).sum()}

    def draw(self, sample_id: str, epoch: int | str) -> Draw:
        """What chance decides of a sample in an epoch."""
        seed = derive_seed(self._seed, epoch, sample_id)
        random = np.random.Generator(np.random.Philox(key=seed))
        drops_caption = bool(random.random() < self._arguments.caption_dropout)
        return Draw(seed, drops_caption, draw_sigma(self._arguments, random))

    def shift(self, latent_shape: tuple[int, ...]) -> float:
        """The shift for latents of this shape, (C, H, W) or (C, T, H, W)."""
        shift = self._arguments.shift
        if isinstance(shift, float):
            return shift
        tokens = self._adapter.geometry.tokens(tuple(latent_shape))
        if shift == "resolution":
            return self._adapter.resolution_shift(tokens)
        return self._adapter.released_shift(tokens)

    def _exact(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self._exact_dtype)

    def _encoded(self, batch: Batch, dropped: Sequence[bool]) -> Batch:
        if self._encode is None:
            raise ConfigError(
                "the data are raw media and no encoders are loaded",
                key="data.dataset_param.basic_parameters.features_dir",
                way_out="Extract features with mm extract.",
            )
        captions = ["" if drops else caption for caption, drops in zip(batch["captions"], dropped, strict=True)]
        kept = {key: value for key, value in batch.items() if key not in ("pixels", "captions")}
        return kept | self._encode({"pixels": batch["pixels"], "captions": captions})

    def _without_captions(self, batch: Batch, dropped: Sequence[bool]) -> Batch:
        rows = [row for row, drops in enumerate(dropped) if drops]
        if not rows:
            return batch
        if self._null_text is None:  # validation on raw media loads encoders, training on features does not use them
            raise _no_empty_caption(self._arguments)
        changed = {}
        for key, empty in self._null_text.items():
            changed[key] = batch[key].clone()
            changed[key][rows] = empty.to(changed[key].dtype)
        return batch | changed

    def _cast(self, batch: Batch) -> Batch:
        """Text features and conditions in the dtype of the transformer."""
        cast: Batch = {}
        for key, value in batch.items():
            if key.startswith("_") or key == "latents":
                continue
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            cast[key] = value.to(self._compute_dtype) if is_float else value
        return cast


def _no_empty_caption(arguments: DiffusionArguments) -> ConfigError:
    return ConfigError(
        f"{arguments.caption_dropout}, but the features hold no empty caption",
        key="training.diffusion.caption_dropout",
        way_out="Extract them with mm extract, or set it to 0.",
    )


def noise_of(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """ε of a sample: fp32 from the CPU's generator, on every machine and device the same."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed % 2**63))
