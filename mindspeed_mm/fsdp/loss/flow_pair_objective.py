"""Preference pairs of generators: both sides of a pair are given the same noise at the same level, and go through the
transformer together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective, real_rows
from mindspeed_mm.fsdp.loss.flow_pairs import ScoreHistogram, pair_loss, pair_margin, pair_weights, timestep_factor
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED_LATENTS
from mindspeed_mm.fsdp.params.posttrain_args import DpoArguments

BETA = 2000.0
"""Of `posttrain.dpo.beta: null`."""
Switch = Callable[[], AbstractContextManager[nn.Module | None]]
"""Enters the reference, and gives the model to call meanwhile; None: the policy, which is changed inside."""
_WEIGHED_STEPS = {"constant": "", "sigma": " · 200 σ"}
"""`timestep_weight` → what β is multiplied by, for the log."""


class FlowPairObjective:
    """Diffusion-DPO (arXiv:2311.12908, equation 14), of flows Flow-DPO (arXiv:2501.13918): with e the mean squared
    error of a prediction, the sum over pairs of −log σ(−β/2 · ω · [(e_w − e_w of the reference) − (e_l − e_l of the
    reference)]), divided by the pairs of the step. ω is `training.diffusion.loss_weighting`. With `pref_ftx` stands
    beside it the chosen sides' ω · e.

    Measured beside them: `rewards/margins`, β/2 · ω · the margin; `rewards/accuracies`, the share of pairs that the
    policy has moved the right way; `errors/chosen`, `errors/rejected`, the errors themselves.

    Args:
        denoising: Draws noise and times, encodes, and takes errors.
        dpo: The section.
        reference: See `Switch`.
        reference_name: For the log.
    """

    term, sft_term = "loss", "sft"

    def __init__(
        self, denoising: DenoisingObjective, dpo: DpoArguments, reference: Switch, reference_name: str = ""
    ) -> None:
        self._denoising, self._dpo, self._reference = denoising, dpo, reference
        self._reference_name = reference_name
        self._beta = BETA if dpo.beta is None else dpo.beta
        self._histogram: ScoreHistogram | None = None
        if dpo.histogram_path:
            self._histogram = ScoreHistogram.read(dpo.histogram_path)

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As denoising prepares the chosen sides; adds `_pair_weights` (B,).

        Raises:
            DataError: The rows are no pairs, their sides differ in size, or scores are missing.
        """
        batch = self._denoising.prepare(batch, training=training)
        if REJECTED_LATENTS not in batch:
            raise DataError(
                "the batch holds no preference pairs",
                key="data.dataset_param.basic_parameters.stage",
                way_out="Set stage: rm, for rows with file and file_rejected.",
            )
        weights = torch.ones(len(batch["sample_ids"]), dtype=batch["_weights"].dtype)
        if self._histogram is not None:
            weights = torch.tensor(pair_weights(self._histogram, batch, self._dpo), dtype=batch["_weights"].dtype)
        weights[real_rows(batch) :] = 0
        return batch | {"_pair_weights": weights}

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the pairs, without blank rows; the number is the same for every term."""
        names = [self.term, "rewards/margins", "rewards/accuracies", "errors/chosen", "errors/rejected"]
        if self._dpo.pref_ftx:
            names.append(self.sft_term)
        return dict.fromkeys(names, float(sum(map(real_rows, batches))))

    def tokens(self, batch: Batch) -> BatchTokens:
        """Latent tokens of both sides."""
        of_one = self._denoising.tokens(batch)
        return BatchTokens(2 * of_one.real, 2 * of_one.trained)

    def describe(self) -> str:
        """Return a phrase for the log: beta, how steps and pairs are weighed, the reference, and the noise path."""
        described = f"preferences, beta {self._beta:g}{_WEIGHED_STEPS[self._dpo.timestep_weight]}"
        if self._dpo.pref_ftx:
            described += f" + {self._dpo.pref_ftx:g} · errors of the chosen"
        if self._histogram is not None:
            described += f", pairs weighed by rarity, alpha {self._dpo.weight_alpha:g}"
        return f"{described}, reference: {self._reference_name}, {self._denoising.describe()}"

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sums over the pairs of this micro-batch."""
        both = as_sides(batch)
        with torch.no_grad(), self._reference() as reference:
            asked = model if reference is None else reference
            reference_w, reference_l = self._denoising.errors(asked, both).chunk(2)
        error_w, error_l = self._denoising.errors(model, both).chunk(2)
        omega, counts = batch["_weights"], batch["_pair_weights"]
        beta = self._beta * omega * timestep_factor(self._dpo.timestep_weight, batch["_time"])
        margin = pair_margin(error_w, error_l, reference_w, reference_l)
        is_real = (counts > 0).to(margin)
        found = {
            self.term: (pair_loss(margin, beta) * counts).sum(),
            "rewards/margins": (0.5 * beta * margin.detach() * is_real).sum(),
            "rewards/accuracies": ((margin.detach() > 0).to(margin) * is_real).sum(),
            "errors/chosen": (error_w.detach() * is_real).sum(),
            "errors/rejected": (error_l.detach() * is_real).sum(),
        }
        if self._dpo.pref_ftx:
            found[self.sft_term] = self._dpo.pref_ftx * (error_w * omega * is_real).sum()
        return found


def as_sides(batch: Batch) -> Batch:
    """B prepared pairs as 2B samples: the chosen sides, then the rejected ones, with the same text, noise and times."""
    rows = len(batch["sample_ids"])
    sides = dict(batch)
    rejected = sides.pop(REJECTED_LATENTS)
    for key, value in sides.items():
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
            sides[key] = torch.cat([value, rejected if key == LATENTS else value])
        elif isinstance(value, list) and len(value) == rows:
            sides[key] = [*value, *value]
    return sides
