"""Rewards of drawn digits: the probability that a perceptron gives the digit of the prompt; and, to watch, whether a
support-vector machine sees it. Both have learned from scans that the generator never saw."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.fsdp.posttrain_rewards.registry import Row, reward_register

sys.path.append(str(Path(__file__).resolve().parents[1] / "digits_flux"))


class DigitReward:
    """Looks at pictures with one of the judges of `examples/digits_flux`.

    Args:
        name: `MLP` or `SVC`.
    """

    def __init__(self, name: str) -> None:
        from judges import stacked, train_judges  # of the other example; a second to train
        from scans import load_scans, split_scans

        self._judge = train_judges(*stacked(split_scans(load_scans())["judge"])).classifiers[name]

    def features(self, pictures: Sequence[Any]) -> np.ndarray:
        """(n, 64) in 0..1."""
        from judges import as_features

        return as_features(np.stack([np.asarray(picture.convert("L")) for picture in pictures]))

    def digits(self, prompts: Sequence[str]) -> np.ndarray:
        """(n,) that the prompts name."""
        from judges import digit_of

        return np.array([digit_of(prompt) for prompt in prompts])


@reward_register.register("digit_probability")
class DigitProbability(DigitReward):
    """The perceptron's probability of the digit that is meant."""

    def __init__(self) -> None:
        super().__init__("MLP")

    def __call__(self, prompts: Sequence[str], completions: Sequence[Any], rows: Sequence[Row]) -> list[float]:
        """0..1 each."""
        found = self._judge.predict_proba(self.features(completions))
        return [float(row[digit]) for row, digit in zip(found, self.digits(prompts), strict=True)]


@reward_register.register("digit_judge")
class DigitJudge(DigitReward):
    """Whether the support-vector machine sees the digit that is meant."""

    def __init__(self) -> None:
        super().__init__("SVC")

    def __call__(self, prompts: Sequence[str], completions: Sequence[Any], rows: Sequence[Row]) -> list[float]:
        """1 or 0."""
        seen = self._judge.predict(self.features(completions))
        return [float(digit == meant) for digit, meant in zip(seen, self.digits(prompts), strict=True)]
