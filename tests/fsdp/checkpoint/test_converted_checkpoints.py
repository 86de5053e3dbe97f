"""A converted checkpoint is read as a run's own: by the loader of training and by an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.committed import open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import load_tensors
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe

IDS = torch.arange(12).reshape(1, 12)


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_qwen3_moe])
def test_training_load_gives_the_logits_of_the_folder(make: object, tmp_path: Path) -> None:
    source = make(tmp_path / "hf")  # type: ignore[operator]
    GenericDCPConverter().hf_to_dcp(source, tmp_path / "dcp")
    arguments = ModelArguments.model_validate({"model_name_or_path": str(source), "train_from_scratch": True})
    model = ModelHub.build(arguments)
    ModelHub.load_weights(model, arguments, seed=1, device=torch.device("cpu"))
    model = model.float().eval()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    load_tensors(open_checkpoint(tmp_path / "dcp", Ranks(), "none"), model, None, Ranks())
    with torch.no_grad():
        after = model(input_ids=IDS).logits
    assert torch.equal(after, logits_of(source))
    assert not torch.equal(before, after)


def test_an_export_of_it_is_the_folder_again(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "hf")
    GenericDCPConverter().hf_to_dcp(source, tmp_path / "dcp")
    export.run(ExportRequest(tmp_path / "dcp", tmp_path / "out", model_folder=source))
    one, two = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    GenericDCPConverter().hf_to_dcp(make_tiny_qwen3(tmp_path / "hf"), tmp_path / "dcp")
    other = make_tiny_qwen3_moe(tmp_path / "other")
    with pytest.raises(CheckpointError, match="was saved from another model"):
        export.run(ExportRequest(tmp_path / "dcp", tmp_path / "out", model_folder=other))
