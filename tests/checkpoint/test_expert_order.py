"""Stacked experts whose last two dims are a square: config.json tells which way round they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.key_ops import in_order_of_module
from mindspeed_mm.checkpoint.megatron.families import QWEN3_VL
from mindspeed_mm.checkpoint.megatron.folder import megatron_tensors
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import ModelFolderError
from tests.helpers.tiny_models import make_tiny_qwen3_vl_moe

SQUARE = "model.language_model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers 5 saves it: [E, 2·inner, hidden] with 2·inner = hidden."""
    return make_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("square"), moe_intermediate_size=16)


def write_as(folder: Path, saved: Path, version: str | None) -> dict[str, torch.Tensor]:
    """A folder that says this version, experts as that version stores them; what its file holds."""
    folder.mkdir()
    config = json.loads((saved / "config.json").read_text())
    config.pop("transformers_version", None)
    config |= {"transformers_version": version} if version else {}
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(saved / "model.safetensors")
    if not in_order_of_module(version):
        held = {k: t.mT.contiguous() if ".experts." in k else t for k, t in held.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return held


@pytest.mark.parametrize("version", ["5.17.0", "4.57.1"])
def test_the_version_tells_the_order_there_and_back(version: str, saved: Path, tmp_path: Path) -> None:
    before = load_file(saved / "model.safetensors")  # the module's own order
    held = write_as(tmp_path / "hf", saved, version)
    outline = TransformersOutline.of(tmp_path / "hf")
    assert outline is not None
    with open_weights(tmp_path / "hf") as stored:
        own, _ = outline.own_tensors(stored)
        assert torch.equal(own[SQUARE].read(), before[SQUARE])
        back = outline.hub_tensors(own, tmp_path)
        assert torch.equal(back[SQUARE].read(), held[SQUARE])
        config: dict[str, Any] = json.loads((tmp_path / "hf/config.json").read_text())
        model = QWEN3_VL.model(config)
        whole = megatron_tensors(stored, model)
        expert = whole["text_decoder.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"]
        assert torch.equal(expert.read(), before[SQUARE][1])
        steps = model.key_map.inverse.steps(whole)
        again = {key: tensor for step in steps for key, tensor in step.targets.items()}
        assert torch.equal(again[SQUARE].read(), held[SQUARE])


def test_where_nothing_is_said_the_way_out_is_named(saved: Path, tmp_path: Path) -> None:
    write_as(tmp_path / "hf", saved, None)
    outline = TransformersOutline.of(tmp_path / "hf")
    assert outline is not None
    config = json.loads((tmp_path / "hf/config.json").read_text())
    told = r'experts\.gate_up_proj  .*square.*"transformers_version": "5\.0\.0" where'
    with open_weights(tmp_path / "hf") as stored:
        with pytest.raises(ModelFolderError, match=told):
            outline.own_tensors(stored)
        with pytest.raises(ModelFolderError, match=told):
            megatron_tensors(stored, QWEN3_VL.model(config))
