"""What a plugin puts into a configuration is in the folders that are written afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from mindspeed_mm.fsdp.models.loading.construction import as_written, changed, write_own_settings
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.register import model_register
from tests.helpers.tiny_models import make_tiny_qwen3


class Hotter(Qwen3ForCausalLM):
    @staticmethod
    def overwrite_transformer_config(config: Any, model_args: ModelArguments, feature_args: Any) -> Any:
        config.temperature = 0.5
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 77.0}
        return config


def test_settings_of_a_plugin_are_written_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_register, "_entries", {"hotter": Hotter})
    folder = make_tiny_qwen3(tmp_path / "model")
    before = json.loads((folder / "config.json").read_text())
    for name in ("hotter", None):
        model = ModelHub.build(ModelArguments(model_id=name, model_name_or_path=str(folder), train_from_scratch=True))
        (tmp_path / "config.json").write_text(json.dumps(before))
        write_own_settings(model, tmp_path)
        expected = before
        if name:
            rope = before.get("rope_parameters", {}) | {"rope_theta": 77.0}
            expected = before | {"temperature": 0.5, "rope_parameters": rope}
        assert json.loads((tmp_path / "config.json").read_text()) == expected


def test_sections_differ_by_their_settings() -> None:
    before = {"a": 1, "vision": {"depth": 2, "width": 3}, "same": [1]}
    after = {"a": 1, "vision": {"depth": 2, "width": 4}, "same": [1], "new": None, "code": object()}
    assert changed(before, after) == {"vision": {"width": 4}, "new": None}
    assert as_written(SimpleNamespace(**before)) == before
