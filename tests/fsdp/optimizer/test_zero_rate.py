"""A learning rate of 0: steps are measured, weights stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import mindspeed_mm as mm
from tests.helpers.tiny_run import make_tiny_run


@pytest.mark.edge("U7")
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion"])
def test_without_a_learning_rate_the_weights_stay(optimizer: str, tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path, training={"lr": 0, "lr_decay_style": "cosine", "lr_warmup_ratio": 0.5})
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    run = mm.train(yaml, training={"optimizer": optimizer, "train_iters": 2, "weight_decay": 0.0})
    assert list(run.metrics["lr"]) == [0, 0] and min(run.metrics["grad_norm"]) > 0
    after = run.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
