"""`--ckpt-format torch` leaves Megatron's files beside each checkpoint, which `--load` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.hooks import division_of
from mindspeed_mm.fsdp.train.provider.trainer import ProviderOptions, ProviderTrainer
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run
from tests.models.test_both_doors import model_provider


def train(yaml: Path, overrides: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    from mindspeed_mm.fsdp.train.configuration import load_with_plugins

    config = load_with_plugins(yaml, [{"training": overrides}])
    scaling = ProviderOptions(writes_megatron=True)
    trainer = ProviderTrainer(config, Callbacks(model_provider), scaling, options=TrainOptions(**options))
    engine = trainer.train()
    assert engine is not None
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def test_round_trip(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    save = tmp_path / "run"
    trained = train(yaml, {"save": str(save), "train_iters": 3, "save_interval": 1, "save_total_limit": 2})
    megatron = tmp_path / "run_megatron" / "iter_0000003"
    kept = sorted(path.name for path in megatron.parent.iterdir())
    assert kept == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]  # the first was deleted
    assert (megatron / "release" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    for folder in (megatron, megatron.parent):  # a step, or what holds them: the newest
        loaded = train(yaml, {"load": str(folder), "train_iters": 1, "lr": 0.0, "weight_decay": 0.0})
        assert trained.keys() == loaded.keys()
        for name, value in trained.items():
            assert torch.equal(value, loaded[name]), name


def test_division_of_a_pipeline(tmp_path: Path) -> None:
    folder = make_tiny_qwen3_vl(tmp_path / "model", num_hidden_layers=4)
    arguments = Arguments.model_validate({"parallel": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}})
    sizes = resolve_parallel_sizes(arguments.parallel, 4)
    layers = tuple(f"model.language_model.layers.{number}" for number in range(4))
    plan = StagePlan(None, (1, 2, 3), layers, 2)  # type: ignore[arg-type]  # where it can be cut is not asked
    division = division_of(sizes, plan, folder)
    assert division.tp_size == 2
    assert division.llm_pp_layers == [[1, 1], [1, 1]]
    assert division.vit_pp_layers is not None
    assert division.vit_pp_layers[0][0] > 0 and sum(map(sum, division.vit_pp_layers)) == division.vit_pp_layers[0][0]


def test_what_cannot_be_divided_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_tiny_run(tmp_path), {"train_iters": 1})
    assert "--ckpt-format torch: checkpoints are distributed ones alone: nothing is saved" in capsys.readouterr().out
