"""`mm export --weights`: the average of the weights is what leaves a run that kept one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mindspeed_mm.cli.export import command
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.diffusion_args import EmaArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.tasks.test_export import make_run

KEY = "model.language_model.norm.weight"
FROZEN = "model.visual.merger.norm.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 4 without an average; step 5 with one, that of twice the weights."""
    folder = tmp_path_factory.mktemp("average")
    path, model = make_run(folder, make_tiny_qwen3_vl(folder / "tiny-qwen"))
    ema = Ema(model, EmaArguments(enable=True))
    ema.load({name: 2 * tensor for name, tensor in ema.tensors().items()})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    CheckpointManager(path, TrainingArguments(), context={}, note=print).save(5, model, optimizer, {}, ema)
    return path


@pytest.mark.edge("BN15")
def test_average_is_the_default_and_frozen_weights_stay(run: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(command, [str(run), str(tmp_path / "default")])
    assert "the average of the weights from" in told.output, told.output
    exported = export.run(ExportRequest(run, tmp_path / "model", weights="model"))
    average, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("default", "model"))
    assert exported.weights == "model"
    assert torch.equal(average[KEY], 2 * trained[KEY])
    assert torch.equal(average[FROZEN], trained[FROZEN])
    assert average.keys() == trained.keys()


def test_checkpoint_without_an_average(run: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(command, [str(run), str(tmp_path / "out"), "--step", "4", "--json"])
    assert json.loads(told.output)["weights"] == "model"
    with pytest.raises(CheckpointError, match="holds no average of the weights"):
        export.run(ExportRequest(run, tmp_path / "other", step=4, weights="ema"))
    assert not (tmp_path / "other").exists()
