"""Answers that are drawn so that they depend on nothing but the model, the prompt, a seed and a name.

For each (seed, sample, position) there is one uniform number, and the token is the one at which the cumulated
probabilities, in fp64, pass it. Which rows share a batch, which rank draws, and how often somebody drew before do not
matter. `generate` of transformers is used as it is: a logits processor makes the drawn token the only likely one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.sampling.finite import not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DrawRule:
    """Seed and settings by which the tokens of answers are drawn."""

    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    suppressed: tuple[int, ...] = ()
    """Ids that are never drawn: placeholders of media, which the model would look for behind."""


@dataclass(frozen=True)
class DrawnAnswer:
    """An answer, its end token included."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each token under the temperature, without `top_p` and `top_k`."""
    entropy: float
    """Mean over its tokens, in nats."""
    is_truncated: bool
    """It was cut at the longest length."""


def uniforms(seed: int, key: str, count: int) -> np.ndarray:
    """(count,) fp64 in [0, 1), one for each position of a sample; the first ones do not depend on `count`."""
    stream = np.random.Generator(np.random.Philox(derive_seed(seed, key)))
    return stream.random(count)


class InverseDraws:
    """A logits processor of transformers that leaves one token of each row: the drawn one.

    Args:
        rule: How tokens are drawn.
        keys: Names of the samples, row by row.
    """

    def __init__(self, rule: DrawRule, keys: Sequence[str]) -> None:
        self._rule = rule
        self._uniforms = torch.from_numpy(np.stack([uniforms(rule.seed, key, rule.max_new_tokens) for key in keys]))
        self.tokens: list[torch.Tensor] = []
        """(B,) of each position."""
        self.log_probs: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) → 0 at the drawn token, -∞ elsewhere."""
        log_probs_BV = policy_log_probs(scores_BV, self._rule)
        drawn_B = self._draw(log_probs_BV)
        at_drawn = drawn_B.unsqueeze(1)
        self.tokens.append(drawn_B)
        self.log_probs.append(log_probs_BV.gather(1, at_drawn).squeeze(1))
        # The clamp keeps 0 · -∞ from being NaN.
        self.entropies.append(-(log_probs_BV.exp() * log_probs_BV.clamp(min=-1e9)).sum(dim=1))
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, at_drawn, 0.0)

    def _draw(self, log_probs_BV: torch.Tensor) -> torch.Tensor:
        position = len(self.tokens)
        uniform_B = self._uniforms[:, position].to(log_probs_BV.device)
        shares_BV = truncated(log_probs_BV.exp(), self._rule.top_p, self._rule.top_k)
        cumulated_BV = shares_BV.cumsum(dim=1)
        # Scaled by the sum: what top_k and top_p leave is not normalised.
        aim_B1 = (uniform_B * cumulated_BV[:, -1]).unsqueeze(1)
        found_B = torch.searchsorted(cumulated_BV, aim_B1, right=True).squeeze(1)
        # Rounding may carry the aim to the end of the sum, behind which there is no token.
        last_B = (shares_BV > 0).long().cumsum(dim=1).argmax(dim=1)
        return torch.minimum(found_B, last_B)

    def answers(self, end_ids: Sequence[int]) -> list[DrawnAnswer]:
        """What was drawn, each answer up to its first end token."""
        tokens_BT, log_probs_BT, entropies_BT = (
            torch.stack(columns, dim=1).cpu() for columns in (self.tokens, self.log_probs, self.entropies)
        )
        ends = torch.tensor(list(end_ids))
        answers = []
        for tokens, log_probs, entropies in zip(tokens_BT, log_probs_BT, entropies_BT, strict=True):
            is_end = torch.isin(tokens, ends).nonzero()
            length = len(tokens)
            if len(is_end):
                length = int(is_end[0]) + 1
            kept = slice(0, length)
            entropy = float(entropies[kept].mean())
            answers.append(
                DrawnAnswer(tokens[kept].tolist(), log_probs[kept].tolist(), entropy, is_truncated=not len(is_end))
            )
        return answers


def policy_log_probs(logits_BV: torch.Tensor, rule: DrawRule) -> torch.Tensor:
    """(B, V) fp64 log-probabilities under the temperature, -∞ for what is never drawn."""
    logits_BV = logits_BV.double() / rule.temperature
    if rule.suppressed:
        never = torch.tensor(rule.suppressed, device=logits_BV.device)
        logits_BV = logits_BV.index_fill(1, never, -torch.inf)
    return logits_BV.log_softmax(dim=1)


def truncated(shares_BV: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Probabilities (B, V) with 0 for the tokens that `top_k` and `top_p` leave out; not normalised again."""
    if top_k:
        least = shares_BV.topk(min(top_k, shares_BV.shape[1]), dim=1).values[:, -1:]
        shares_BV = shares_BV.where(shares_BV >= least, 0.0)
    if top_p < 1:
        ordered, order = shares_BV.sort(dim=1, descending=True)
        ordered = ordered / ordered.sum(dim=1, keepdim=True)
        # The share of all likelier tokens: the one that crosses top_p is still kept.
        before = ordered.cumsum(dim=1) - ordered
        keeps = torch.zeros_like(shares_BV, dtype=torch.bool).scatter_(1, order, before < top_p)
        shares_BV = shares_BV.where(keeps, 0.0)
    return shares_BV


def draw_answers(
    model: PreTrainedModel,
    inputs: Mapping[str, object],
    keys: Sequence[str],
    rule: DrawRule,
    *,
    end_ids: Sequence[int],
    pad_id: int | None,
) -> list[DrawnAnswer]:
    """One answer for each row.

    Args:
        model: Of transformers, in evaluation mode, its parameters and its logits whole.
        inputs: What its `generate` takes; rows padded on the left.
        keys: Names of the samples; they decide what is drawn.
        rule: How tokens are drawn.
        end_ids: Tokens that end an answer.
        pad_id: Of the tokenizer.

    Raises:
        NotFiniteError: The scores for a row are not finite.
    """
    draws = InverseDraws(rule, keys)
    with torch.no_grad():
        model.generate(
            **inputs,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            min_p=None,
            repetition_penalty=1.0,
            eos_token_id=list(end_ids) or None,
            pad_token_id=pad_id,
            max_new_tokens=rule.max_new_tokens,
            logits_processor=[draws],
        )
    found = draws.answers(end_ids)
    for key, answer in zip(keys, found, strict=True):
        # Scores that are not finite leave no log-probability that is.
        for number, log_prob in enumerate(answer.log_probs, start=1):
            if not math.isfinite(log_prob):
                raise not_finite(f"the scores of token {number}", {"": model}, where=f"answer {key} of the rollout")
    return found
