"""Preference pairs of generators: Diffusion-DPO (arXiv 2311.12908, equation 14) in the form of flow matching (Flow-DPO,
2501.13918), and the weights of pairs by how rare their scores are. Both sides of a pair are given the same noise at the
same level, and go through the transformer together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective, real_rows
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED_LATENTS
from mindspeed_mm.fsdp.params.posttrain_args import DpoArguments

# --- the loss of a pair -----------------------------------------------------------------------------------------------

TimestepWeight = Literal["constant", "sigma"]
_BINS = 20
_LEAST_PROBABILITY = 1e-3
_HISTOGRAM = "posttrain.dpo.histogram_path"
_ABOUT_BINS = ("total_num", "max_num", "min_bin", "max_bin", "bin_width", "bin_size")
_FIRST_NUMBER = re.compile(r"-?[0-9.]+(?:e[+-]?[0-9]+)?")
_Bins = tuple[tuple[float, ...], tuple[float, ...]]
"""Borders and counts."""


def pair_margin(
    error_w: torch.Tensor, error_l: torch.Tensor, reference_w: torch.Tensor, reference_l: torch.Tensor
) -> torch.Tensor:
    """(B,) how much better the policy has become on the chosen than on the rejected side, against the reference."""
    return -((error_w - reference_w) - (error_l - reference_l))


def pair_loss(margin: torch.Tensor, beta: torch.Tensor | float) -> torch.Tensor:
    """(B,) −log σ(β / 2 · margin)."""
    return -F.logsigmoid(0.5 * beta * margin)


def timestep_factor(name: TimestepWeight, sigma: torch.Tensor) -> torch.Tensor:
    """(B,) what β is multiplied by at a noise level. `constant`: 1, as Flow-DPO recommends; `sigma`: 0.2 · 1000 σ, as
    older trainers do, whose β is one of the number of the step (in 0..1000)."""
    if name == "sigma":
        return 200 * sigma
    return torch.ones_like(sigma)


@dataclass(frozen=True)
class ScoreHistogram:
    """How common scores are, in bins of equal width."""

    edges: tuple[float, ...]
    """Borders of the bins, one more than there are bins, ascending."""
    counts: tuple[float, ...]
    """Scores in each."""
    where: str = ""
    """The file, for messages."""

    @classmethod
    def of_scores(cls, scores: Sequence[float]) -> ScoreHistogram:
        """Of scores that are at hand."""
        low, high = min(scores), max(scores)
        width = (high - low) / _BINS or 1.0
        edges = tuple(low + width * number for number in range(_BINS + 1))
        counts = [0.0] * _BINS
        for score in scores:
            counts[min(int((score - low) / width), _BINS - 1)] += 1
        return cls(edges, tuple(counts))

    @classmethod
    def read(cls, path: str | Path) -> ScoreHistogram:
        """From JSON: an object with `bin_edges` (or `edges`) and `counts` (or `hist`); or as MindSpeed-MM's
        histogram_generator.py writes it, an entry a bin beside `min_bin` and `bin_width`.

        Raises:
            DataError: It is missing, or it holds no histogram.
        """
        try:
            content: Any = parse_json(Path(path).read_text(encoding="utf-8"))
            edges, counts = _bins_by_name(content) if "bin_width" in content else _bins_in_lists(content)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataError(
                f"is no histogram of scores: {error}",
                where=str(path),
                key=_HISTOGRAM,
                way_out='Write an object with two lists, {"bin_edges", "counts"}.',
            ) from None
        if len(edges) != len(counts) + 1 or not sum(counts):
            raise DataError(
                f"has {len(edges)} borders and {len(counts)} counts; there must be one border more, and a score",
                where=str(path),
                key=_HISTOGRAM,
                way_out="Correct it.",
            )
        return cls(edges, counts, str(path))

    def probability(self, score: float) -> float:
        """The share of the scores in the bin of this one, at least 1e-3.

        Raises:
            DataError: It lies in no bin.
        """
        for number, count in enumerate(self.counts):
            is_last = number == len(self.counts) - 1
            if self.edges[number] <= score < self.edges[number + 1] or (is_last and score == self.edges[-1]):
                return max(count / sum(self.counts), _LEAST_PROBABILITY)
        raise DataError(
            f"the score {score:g} lies in none of its bins ({self.edges[0]:g} to {self.edges[-1]:g})",
            where=self.where,
            key=_HISTOGRAM,
            way_out="Make the histogram of the scores of these rows.",
        )

    @property
    def default_beta(self) -> float:
        """The share of the fullest bin: weights of common pairs are then 1."""
        return max(self.counts) / sum(self.counts)


def _bins_in_lists(content: Any) -> _Bins:
    edges, counts = content.get("bin_edges", content.get("edges")), content.get("counts", content.get("hist"))
    return tuple(map(float, edges)), tuple(map(float, counts))


def _bins_by_name(content: Any) -> _Bins:
    """Bin number n begins at n · width, and its entry is named after its two ends."""
    width, first = float(content["bin_width"]), int(content["min_bin"])
    count_from: dict[float, float] = {}
    """Where a bin begins → its count."""
    for name, count in content.items():
        if name not in _ABOUT_BINS:
            start = float(_FIRST_NUMBER.match(name)[0])  # type: ignore[index]
            count_from[start] = float(count)
    edges = tuple(width * (first + number) for number in range(len(count_from) + 1))
    return edges, tuple(count_from[start] for start in sorted(count_from))


def pair_weights(histogram: ScoreHistogram, batch: Batch, dpo: DpoArguments) -> list[float]:
    """(B,) what the pairs of a batch count, by its `scores` (B, 2) of the chosen and of the rejected side.

    Raises:
        ConfigError: As of `pair_weight`.
        DataError: The rows have no scores, or one lies in no bin.
    """
    if "scores" not in batch:
        raise DataError(
            "the rows have no scores, by which posttrain.dpo.weight_alpha weighs pairs",
            key="posttrain.dpo.weight_alpha",
            way_out="Give rows score and score_rejected, or set it to 0.",
        )
    alpha, beta = dpo.weight_alpha, dpo.weight_beta
    return [pair_weight(histogram, chosen, rejected, alpha, beta) for chosen, rejected in batch["scores"].tolist()]


def pair_weight(histogram: ScoreHistogram, score_w: float, score_l: float, alpha: float, beta: float | None) -> float:
    """(b / √(p_w p_l))^α: pairs with rare scores count more.

    Args:
        histogram: Of all scores.
        score_w: Of the chosen side.
        score_l: Of the rejected side.
        alpha: 0: all pairs count alike.
        beta: b; None: the share of the fullest bin.

    Raises:
        ConfigError: b is not positive.
        DataError: A score lies in no bin.
    """
    if alpha == 0:
        return 1.0
    b = histogram.default_beta if beta is None else beta
    if b <= 0:
        raise ConfigError(f"{b:g} is not above 0", key="posttrain.dpo.weight_beta", way_out="Leave it out.")
    both = histogram.probability(score_w) * histogram.probability(score_l)
    return float((b / both**0.5) ** alpha)


# --- the objective ----------------------------------------------------------------------------------------------------

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
