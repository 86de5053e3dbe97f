"""What a step is told before it starts: the counts of its batches, and the learning rate of the configuration."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.fsdp.loss.objectives import ModelLoss
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.build_engine import build_lr_schedule
from mindspeed_mm.fsdp.train.step.tally import Tally


class TokenCounter(torch.nn.Module):
    def forward(self, labels: torch.Tensor, num_items_in_batch: int) -> None: ...


def test_tally_counts_real_tokens_labels_and_samples() -> None:
    padded = {
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "shift_labels": torch.tensor([[-100, 5, -100, -100], [7, -100, -100, -100]]),
        "sample_ids": ["a", "b"],
    }
    packed = {"shift_labels": torch.tensor([[3, 4, -100]]), "sample_ids": ["c"]}
    tally = Tally.of(ModelLoss(TokenCounter()), [padded, packed], False, {"image": True, "video": False})
    assert (tally.tokens, tally.label_tokens, tally.samples) == (5 + 3, 2 + 2, 3)
    assert tally.towers == {"image": 1, "video": 0}
    assert tally.denominators == {"loss": 4}


def test_blank_rows_are_no_samples() -> None:
    filled = {"shift_labels": torch.tensor([[3]]), "sample_ids": ["a", "b", "b"], "blank_rows": 1}
    assert Tally.of(ModelLoss(TokenCounter()), [filled], False, {}).samples == 2


def test_a_denominator_is_never_zero() -> None:
    assert Tally.of(ModelLoss(TokenCounter()), [], False, {}).denominators == {"loss": 1}


def test_every_key_of_the_schedule_arrives() -> None:
    training = {
        "lr": 1.0, "lr_min": 0.2, "lr_start": 0.1, "lr_decay_style": "linear", "lr_warmup_ratio": 0.1,
        "lr_decay_ratio": 0.6,
    }  # fmt: skip
    schedule = build_lr_schedule(Arguments.model_validate({"training": training}).training, total_steps=100)
    assert schedule.at(0) == pytest.approx(0.1 + 0.9 / 10)
    assert schedule.at(9) == schedule.at(10) == pytest.approx(1.0)
    assert schedule.at(35) == pytest.approx(0.6)  # half of the way from step 10 to step 60
    assert schedule.at(60) == schedule.at(99) == pytest.approx(0.2)
