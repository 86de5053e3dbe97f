"""Losses of preference pairs: how the probabilities that a policy and a reference give to two answers should differ.

P pairs. s is the log-probability of an answer under the policy, r is s minus the same under the reference, n is how
many tokens an answer has; c is the chosen answer, j the rejected one; h = r_c − r_j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_mm.fsdp.params.posttrain_args import DpoArguments

DEFAULT_BETA = 0.1
"""Of language models (arXiv:2305.18290)."""


@dataclass(frozen=True)
class PairScores:
    """What a loss is computed from; each (P,)."""

    chosen: Tensor
    """s_c."""
    rejected: Tensor
    """s_j."""
    chosen_ratio: Tensor
    """r_c; s_c where there is no reference."""
    rejected_ratio: Tensor
    """r_j; s_j where there is no reference."""
    chosen_tokens: Tensor
    """n_c, at least 1."""
    rejected_tokens: Tensor
    """n_j, at least 1."""

    @property
    def margin(self) -> Tensor:
        """The margin h = r_c − r_j, (P,): how much the policy prefers the chosen answer more than the reference
        does."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_margin(self) -> Tensor:
        """r_c / n_c − r_j / n_j."""
        return self.chosen_ratio / self.chosen_tokens - self.rejected_ratio / self.rejected_tokens

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """s_c / n_c and s_j / n_j."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


PairLoss = Callable[[PairScores, float, DpoArguments], Tensor]
"""The scores, β and the other settings → (P,), differentiable."""


def _smoothed(logits: Tensor, epsilon: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x): the label is wrong with probability ε (cDPO)."""
    loss = -F.logsigmoid(logits)
    if epsilon:
        loss = (1 - epsilon) * loss - epsilon * F.logsigmoid(-logits)
    return loss


def _sigmoid(pair: PairScores, beta: float, given: DpoArguments) -> Tensor:
    """Return the DPO loss −log σ(β · h), smoothed by ε (arXiv:2305.18290, equation 7)."""
    return _smoothed(beta * pair.margin, given.label_smoothing)


def _sigmoid_norm(pair: PairScores, beta: float, given: DpoArguments) -> Tensor:
    """The same of means over tokens."""
    return _smoothed(beta * pair.mean_margin, given.label_smoothing)


def _hinge(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """Return the hinge loss max(0, 1 − β · h) (arXiv:2305.10425, section 2.3)."""
    return torch.relu(1 - beta * pair.margin)


def _ipo(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """arXiv:2310.12036, equation 17, of means over tokens."""
    return (pair.mean_margin - 1 / (2 * beta)).square()


def _robust(pair: PairScores, beta: float, given: DpoArguments) -> Tensor:
    """arXiv:2403.00409, equation 14: unbiased where labels are wrong with probability ε."""
    epsilon, logits = given.label_smoothing, beta * pair.margin
    return (-(1 - epsilon) * F.logsigmoid(logits) + epsilon * F.logsigmoid(-logits)) / (1 - 2 * epsilon)


def _exo_pair(pair: PairScores, beta: float, given: DpoArguments) -> Tensor:
    """arXiv:2402.00856, equation 16: the reverse divergence from (1 − ε, ε)."""
    logits = beta * pair.margin
    log_prior = torch.tensor([1 - given.label_smoothing, given.label_smoothing], dtype=torch.float64).log().tolist()
    log_chosen, log_rejected = F.logsigmoid(logits), F.logsigmoid(-logits)
    return log_chosen.exp() * (log_chosen - log_prior[0]) + log_rejected.exp() * (log_rejected - log_prior[1])


def _nca_pair(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """Return the NCA loss −log σ(β · r_c) − ½ log σ(−β · r_c) − ½ log σ(−β · r_j) (arXiv:2402.05369)."""
    chosen, rejected = beta * pair.chosen_ratio, beta * pair.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _bco_pair(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """arXiv:2404.04656, without its moving threshold."""
    return -F.logsigmoid(beta * pair.chosen_ratio) - F.logsigmoid(-beta * pair.rejected_ratio)


def _sppo_hard(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """arXiv:2405.00675, equation 4.7, with winning probabilities of 1 and 0."""
    half = 0.5 / beta
    return (pair.chosen_ratio - half).square() + (pair.rejected_ratio + half).square()


def _apo_zero(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """arXiv:2408.06266, equation 7: for answers better than the model's own."""
    return 1 - torch.sigmoid(beta * pair.chosen_ratio) + torch.sigmoid(beta * pair.rejected_ratio)


def _apo_down(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """arXiv:2408.06266, equation 8: for answers worse than the model's own."""
    return torch.sigmoid(beta * pair.chosen_ratio) + 1 - torch.sigmoid(beta * pair.margin)


def _discopop(pair: PairScores, beta: float, given: DpoArguments) -> Tensor:
    """arXiv:2406.08414, equation 5: a blend of the logistic and the exponential loss."""
    logits = beta * pair.margin
    share = torch.sigmoid(logits / given.discopop_tau)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _simpo(pair: PairScores, beta: float, given: DpoArguments) -> Tensor:
    """Return the SimPO loss −log σ(β · (s_c / n_c − s_j / n_j) − γ) (arXiv:2405.14734, equation 6)."""
    chosen, rejected = pair.means
    return -F.logsigmoid(beta * (chosen - rejected) - given.simpo_gamma)


def _orpo(pair: PairScores, beta: float, _given: DpoArguments) -> Tensor:
    """arXiv:2403.07691, equation 7, of which the cross-entropy is a term of its own: the log odds ratio of the answers,
    whose probabilities are means over tokens."""
    chosen, rejected = pair.means
    odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return -beta * F.logsigmoid(odds)


def _log_of_rest(log_p: Tensor) -> Tensor:
    """Return log(1 − p) of log p, which is clamped below 0 so that the result is finite."""
    return torch.log(-torch.expm1(log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)))


PAIR_LOSS: dict[str, PairLoss] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sigmoid_norm": _sigmoid_norm,
    "discopop": _discopop,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""Name in `posttrain.dpo.loss_type` → the loss; `sft` is a cross-entropy beside them."""


def beta_of(dpo: DpoArguments) -> float:
    """Return β of a section `posttrain.dpo`, for language models: 0.1 where it names none."""
    if dpo.beta is None:
        return DEFAULT_BETA
    return dpo.beta


def loss_weights(dpo: DpoArguments) -> dict[str, float]:
    """The weight of each loss; `sft` has what `orpo`, and `pref_ftx` where it is a mean over tokens, add to it."""
    given = dpo.loss_weights or (1.0,) * len(dpo.loss_type)
    weights: dict[str, float] = {}
    for name, weight in zip(dpo.loss_type, given, strict=True):
        weights[name] = weights.get(name, 0.0) + weight
    sft = weights.pop("sft", 0.0) + weights.get("orpo", 0.0)
    if dpo.pref_ftx_by == "token":
        sft += dpo.pref_ftx
    if sft:
        weights["sft"] = sft
    return weights
