"""Omni folders as they are released hold three models and do not train; the way out that is named leads to one that
does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    Qwen2_5OmniConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeConfig,
)

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.check import check
from tests.helpers.tiny_omni import make_tiny_omni, make_tiny_omni_run

pytestmark = pytest.mark.edge("R14")


def as_released(thinker: Path, folder: Path) -> Path:
    """A thinker's folder in the layout of a release: all configurations in one, names behind `thinker.`."""
    AutoProcessor.from_pretrained(thinker).save_pretrained(folder)
    config = Qwen2_5OmniConfig(thinker_config=json.loads((thinker / "config.json").read_text()))
    config.architectures = ["Qwen2_5OmniModel"]
    config.save_pretrained(folder)
    weights = load_file(thinker / "model.safetensors")
    save_file({f"thinker.{name}": value for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def build(folder: Path) -> torch.nn.Module:
    return ModelHub.build(ModelArguments(model_name_or_path=str(folder)))


def test_check_refuses_a_released_folder_and_names_the_way_out(tmp_path: Path) -> None:
    yaml = make_tiny_omni_run(tmp_path, {})
    released = as_released(tmp_path / "model", tmp_path / "released")
    result = check.run(yaml, [f"model.model_name_or_path={released}"])
    (finding,) = [each for each in result.findings if each.stage == "module patterns"]
    assert (finding.exit_code, finding.problem.where) == (4, str(released / "config.json"))
    assert "as a whole it cannot be trained yet" in finding.problem.what
    assert "Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained" in finding.problem.way_out


def test_the_way_out_leads_to_the_same_weights(tmp_path: Path) -> None:
    original = make_tiny_omni(tmp_path / "model")
    released = as_released(original, tmp_path / "released")
    thinker = tmp_path / "thinker"
    Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(released).save_pretrained(thinker)
    model = build(thinker)
    ModelHub.load_weights(model, ModelArguments(model_name_or_path=str(thinker)), seed=0, device=torch.device("cpu"))
    expected = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(original).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_mixture_of_experts_is_refused_too(tmp_path: Path) -> None:
    config = Qwen3OmniMoeConfig()
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"Qwen3OmniMoeThinkerForConditionalGeneration\.from_pretrained"):
        build(tmp_path)
