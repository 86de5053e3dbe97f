"""Runs whose adapters start from data: alike on two ranks, and gone on from to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fsdp.checkpoint.small_run import differing, everything
from tests.fsdp.checkpoint.test_lora_checkpoints import train
from tests.helpers.adapters import float_keeps_double
from tests.helpers.distributed import run_ranks
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

EXACT = ("training.train_iters=2", "parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("start")
    make_tiny_qwen3(root / "model")
    make_rows(root, images=(0,))
    lora = {"enable": True, "rank": 4, "alpha": 12, "init_batches": 3}
    return make_tiny_run(root, training={"lora": lora, "train_iters": 4, "save_interval": 2})


@pytest.mark.parametrize("kind", ["eva", "corda"])
def test_two_ranks_start_alike(kind: str, yaml: Path) -> None:
    """The statistics are fp32 and summed in another order: alike, not to the bit."""
    word = f"training.lora.init_lora_weights={kind}"
    with float_keeps_double():
        expected = train_steps(str(yaml), overrides(1, 1, *EXACT, word))
    gradients = {n: g for n, g in expected[0]["gradients"].items() if g is not None and g.any()}
    assert all(".lora_" in name for name in gradients) and len(gradients) >= 6
    for found in run_ranks(2, on_two, str(yaml), word):
        assert abs(float(found[0]["loss"]) - float(expected[0]["loss"])) < 1e-9
        norms = [float(step[0]["grad_norm"]) for step in (found, expected)]
        assert abs(norms[0] / norms[1] - 1) < (0.2 if kind == "eva" else 1e-3)


def on_two(yaml: str, word: str) -> list[Any]:
    with float_keeps_double():
        return train_steps(yaml, overrides(2, 1, *EXACT, word))


def test_a_run_goes_on_to_the_bit(yaml: Path, tmp_path: Path) -> None:
    word = "training.lora.init_lora_weights=corda"
    straight = train(yaml, tmp_path / "straight", word, "training.ema.enable=true")
    train(yaml, tmp_path / "broken", word, "training.ema.enable=true", steps=2)
    resumed = train(yaml, tmp_path / "broken", word, "training.ema.enable=true")
    expected, found = (everything(engine.model, engine.optimizer) for engine in (straight, resumed))
    assert differing(expected, found) == []
