"""One call of a denoising transformer as it is trained: what samples post-training takes the same path, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS, DiffusionAdapter
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY

_BLANK = "_blank/"
"""Begins the batch keys of the features of no prompt."""


def blank_text(text: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Features of empty prompts as they stand in a batch beside those of the prompts: for `GuidedDenoiser`."""
    return {f"{_BLANK}{key}": value for key, value in text.items()}


@dataclass(frozen=True)
class Denoiser:
    """Calls the transformer of a family.

    Args:
        adapter: The family's conventions.
        compute_dtype: What the transformer computes in. What goes in and comes out is fp32 (fp64 in fp64).
        guidance: `training.diffusion.guidance`.
    """

    adapter: DiffusionAdapter
    compute_dtype: torch.dtype
    guidance: float

    @property
    def exact_dtype(self) -> torch.dtype:
        """What latents are kept, and losses are taken in."""
        if self.compute_dtype == torch.float64:
            return torch.float64
        return torch.float32

    def __call__(self, model: nn.Module, noisy: torch.Tensor, time: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The prediction for `noisy`, in its shape.

        Args:
            model: The transformer, as sharded as it is.
            noisy: (B, C, H, W) or (B, C, T, H, W).
            time: (B,) noise levels or numbers of steps.
            batch: Text features and conditions; keys that start with `_` and `latents` are not for the model.
        """
        return self.predict(model, {LATENTS: noisy}, time, batch)[LATENTS]

    def predict(
        self, model: nn.Module, noisy: Mapping[str, torch.Tensor], time: torch.Tensor, batch: Batch
    ) -> dict[str, torch.Tensor]:
        """The same for each of the latents that a sample has, by batch key.

        Args:
            model: As above.
            noisy: `latents` and `DiffusionAdapter.further_latents`.
            time: As above.
            batch: As above.
        """
        given = self._cast({**batch, **noisy})
        inputs = self.adapter.inputs(noisy[LATENTS].to(self.compute_dtype), time, given, self.guidance)
        if CONTEXT_KEY in batch:
            inputs[CONTEXT_KEY] = batch[CONTEXT_KEY]
        output = model(**inputs, return_dict=False)
        found = self.adapter.predictions(output, {key: tuple(value.shape) for key, value in noisy.items()})
        return {key: value.to(self.exact_dtype) for key, value in found.items()}

    def _cast(self, batch: Batch) -> Batch:
        """Text features and conditions in the dtype of the transformer."""
        cast: Batch = {}
        for key, value in batch.items():
            if key.startswith("_") or key == LATENTS:
                continue
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            cast[key] = value.to(self.compute_dtype) if is_float else value
        return cast


@dataclass(frozen=True)
class GuidedDenoiser(Denoiser):
    """With classifier-free guidance (arXiv 2207.12598), as pipelines draw: v₀ + s (v − v₀), where v₀ is predicted from
    an empty prompt. Both passes are trained.

    Args:
        scale: s; at 1 guidance has no effect.
    """

    scale: float = 1.0

    def predict(
        self, model: nn.Module, noisy: Mapping[str, torch.Tensor], time: torch.Tensor, batch: Batch
    ) -> dict[str, torch.Tensor]:
        """As above; the batch has `blank_text`, too."""
        blank = {key.removeprefix(_BLANK): value for key, value in batch.items() if key.startswith(_BLANK)}
        found = super().predict(model, noisy, time, batch)
        without = super().predict(model, noisy, time, {**batch, **blank})
        return {key: without[key] + self.scale * (v - without[key]) for key, v in found.items()}
