"""Ranks with copies of the same weights draw the same random numbers, also where a tower encodes other media."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook
from tests.helpers.distributed import run_ranks
from tests.helpers.planned_steps import Quiet
from tests.helpers.tiny_run import make_rows, make_tiny_run

TARGETS = [
    "*.layers.{*}.self_attn.q_proj",
    "model.visual.blocks.{*}.attn.proj",
    "model.visual.blocks.{*}.mlp.linear_fc2",
]


class Copies(Hook):
    """Keeps the trained weights that every rank has whole, after the last step."""

    def on_step_end(self, engine: Any, report: Any) -> None:
        held = {
            name: (p, p.to_local() if isinstance(p, DTensor) else p)
            for name, p in engine.model.named_parameters()
            if p.requires_grad
        }
        self.weights = {name: own.detach().clone() for name, (p, own) in held.items() if own.shape == p.shape}


def copies_after_steps(yaml: str) -> dict[str, torch.Tensor]:
    kept = Copies()
    Quiet(load_with_plugins(Path(yaml), []), TrainOptions(), hooks=[kept]).train()
    return kept.weights


def test_copies_of_adapters_stay_the_same_under_dropout(tmp_path: Path) -> None:
    make_rows(tmp_path, count=16, images=(1, 2, 3))
    yaml = make_tiny_run(
        tmp_path,
        parallel={"tensor_parallel_size": 2, "encoder_plan": {"tensor_parallel_size": 1}},
        training={
            "train_iters": 3,
            "micro_batch_size": 4,
            "lora": {"enable": True, "rank": 4, "dropout": 0.3, "target_modules": TARGETS},
        },
    )
    first, second = run_ranks(2, copies_after_steps, str(yaml))
    copies = [name for name in first if name in second and "lora_A" in name]
    assert len(copies) >= 2
    assert [name for name in copies if not torch.equal(first[name], second[name])] == []
