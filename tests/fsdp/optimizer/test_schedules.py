"""Schedules against torch's own, and their corner cases."""

from typing import Any, get_args

import pytest
import torch

from mindspeed_mm.fsdp.optimizer.schedules import ANNEALS, STYLES, Schedule
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.provider import flag_rules


def schedule(style="cosine", **changes):
    settings = {
        "style": style, "lr": 1.0, "lr_min": 0.1, "lr_start": 0.0, "warmup_steps": 0, "decay_ratio": 1.0,
        "total_steps": 100,
    }  # fmt: skip
    return Schedule(**settings | changes)


def test_cosine_equals_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=0.1)
    ours = schedule()
    for step in range(100):
        assert ours.at(step) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()


def test_warmup_reaches_the_peak_at_its_last_step():
    ours = schedule(warmup_steps=10, lr_start=0.2)
    assert ours.at(0) == pytest.approx(0.2 + 0.8 / 10)
    assert ours.at(9) == pytest.approx(1.0)
    assert ours.at(10) == pytest.approx(1.0)
    assert ours.at(99) < ours.at(50) < ours.at(10)


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [("constant", 99, 1.0), ("linear", 50, 0.55), ("wsd", 79, 1.0), ("wsd", 90, 0.55), ("linear", 1000, 0.1)],
)
def test_styles(style, step, expected):
    ratio = 0.2 if style == "wsd" else 1.0
    assert schedule(style, decay_ratio=ratio).at(step) == pytest.approx(expected)


def named_by(key: str) -> set[str]:
    annotation: Any = TrainingArguments.model_fields[key].annotation
    return set(get_args(annotation))


def test_every_schedule_that_can_be_named_is_there():
    assert named_by("lr_decay_style") == set(STYLES) == set(flag_rules._STYLES.values())
    assert named_by("lr_wsd_style") == set(ANNEALS) == set(flag_rules._ANNEALS)
