"""A plugin's rules of stored names that do not lead back: what is made instead is named, before training too."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mindspeed_mm.checkpoint.transformers_map import conversion_rules
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.checkpoint.hf import live_tensors, remember_layout
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.export.contents import complete

prepare_for_transformers()

from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping  # noqa: E402  (the guard comes first)
from transformers.core_model_loading import Chunk, WeightConverter  # noqa: E402


class JoinedConfig(PreTrainedConfig):
    """Of a model whose two attentions are stored with query, key and value in one."""

    model_type = "joined_for_export"


class JoinedAttentions(PreTrainedModel):
    """The projections of a tower and of a text model: the name of the one's is an end of the other's."""

    config_class = JoinedConfig

    def __init__(self, config: JoinedConfig) -> None:
        super().__init__(config)
        for part in ("eye", "text"):
            projections = {f"{name}_proj": nn.Linear(4, 4, bias=False) for name in "qkv"}
            self.add_module(part, nn.ModuleDict({"attn": nn.ModuleDict(projections)}))
        self.post_init()


@pytest.mark.parametrize(("own", "lost"), [("eye.attn", []), ("attn", ["text.attn.wqkv.weight"])])
def test_what_a_rule_makes_that_does_not_lead_back_is_named(
    own: str, lost: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for held in ("USER_REGISTERED_MAPPINGS", "_checkpoint_conversion_mapping_cache"):
        monkeypatch.setattr(conversion_mapping, held, copy(getattr(conversion_mapping, held)))
    rules = []
    for stored, part in {"text.attn.wqkv.weight": "text.attn", f"{own}.qkv.weight": own}.items():
        rules.append(WeightConverter(stored, [f"{part}.{name}_proj.weight" for name in "qkv"], [Chunk(dim=0)]))
    conversion_mapping.register_checkpoint_conversion_mapping("joined_for_export", rules, overwrite=True)
    names = {"eye.attn.qkv.weight", "text.attn.wqkv.weight"}
    save_file({name: torch.randn(12, 4) for name in names}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = JoinedAttentions(JoinedConfig())
    facts_of(model).conversion_rules = list(conversion_rules(model))
    expected = remember_layout(model, tmp_path)
    assert expected == names
    monkeypatch.setattr(ModelHub, "build", lambda *_, **__: model)
    (tmp_path / "run.yaml").write_text(f"model: {{model_name_or_path: {tmp_path}}}\ntraining: {{plugin: [json]}}\n")
    checked = [each for each in check.run(tmp_path / "run.yaml").findings if each.stage == "module patterns"]
    assert [each.problem.key for each in checked if "is not made" in each.problem.what] == lost
    assert all("1 of the weights" in each.headline for each in checked) and bool(checked) == bool(lost)
    if not lost:
        assert complete(model, live_tensors(model), expected, tmp_path, {}).keys() == names
        return
    with pytest.raises(ModelFolderError, match="1 of the weights") as caught:
        complete(model, live_tensors(model), expected, tmp_path, {})
    lacking, instead = caught.value.problems
    assert [lacking.key] == lost
    assert instead.key == "text.attn.qkv.weight"
    assert "turned round" in instead.way_out
