"""Clipping at a moving average of the norm, against the formula written out, and through a run that goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mindspeed_mm.fsdp.optimizer.clip_grad import NormAverage
from tests.helpers.runs import differing, lines, mm, tensors, train
from tests.helpers.tiny_run import make_tiny_run

DECAY = 0.9


def bounds_by_hand(norms: list[float]) -> list[float]:
    """Bound of each step but the first."""
    mean, variance = min(3 * norms[0], 1.0), 0.0
    found = []
    for norm in norms[1:]:
        found.append(mean + 3 * math.sqrt(variance))
        if norm <= found[-1]:
            mean = DECAY * mean + (1 - DECAY) * norm
            variance = DECAY * variance + (1 - DECAY) * (mean - norm) ** 2
    return found


def test_the_bound_follows_the_norms() -> None:
    norms = [0.3, 0.4, 0.9, 0.5, 7.0, 0.6, 0.2, 0.7]  # the first average is 0.9; one step is far above it
    average, found = NormAverage(DECAY), []
    assert average.bound(5.0) == 5.0
    for norm in norms:
        found.append(average.bound(5.0))
        average.after_step(norm)
    assert found[1:] == pytest.approx(bounds_by_hand(norms))
    assert found[5] == found[4] < 7.0  # what was clipped does not move it
    again = NormAverage(DECAY)
    again.load_state(average.state())
    assert again == average


CLIP = "mindspeed_mm.fsdp.train.train_engine.clip_grads_"


def clipped_at(yaml: Path, save: Path, *words: object) -> list[float]:
    """The bound of each step of a run."""
    from mindspeed_mm.fsdp.train import train_engine

    real, found = train_engine.clip_grads_, []

    def watched(parameters: Any, norm: Any, bound: float, **options: Any) -> None:
        found.append(bound)
        real(parameters, norm, bound, **options)

    with mock.patch(CLIP, watched):
        train(yaml, save, f"training.clip_grad_ema_decay={DECAY}", *words)
    return found


def test_a_run_clips_at_the_average_and_goes_on_with_it(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    whole = clipped_at(yaml, tmp_path / "whole", "training.train_iters=4")
    norms = [line["grad_norm"] for line in lines(tmp_path / "whole" / "metrics.jsonl") if "grad_norm" in line]
    assert len(norms) == 4 and whole[0] == 1.0 and whole[1:] == pytest.approx(bounds_by_hand(norms), rel=1e-5)
    parts = clipped_at(yaml, tmp_path / "parts", "training.train_iters=2")
    parts += clipped_at(yaml, tmp_path / "parts", "training.train_iters=4")
    assert parts == whole
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts")) == []


def test_an_average_without_clipping_is_refused(tmp_path: Path) -> None:
    said = mm("check", make_tiny_run(tmp_path), "training.clip_grad=0", f"training.clip_grad_ema_decay={DECAY}")
    assert said.code != 0 and "clip_grad_ema_decay" in said.err + said.out
