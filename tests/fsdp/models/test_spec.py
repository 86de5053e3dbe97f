"""What is read off a live model: blocks, ties, head and towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.models.structure.towers import Tower, find_towers, flat_tensors
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters, tie_groups
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_omni import make_tiny_omni


def loaded(folder: Path) -> Any:
    args = ModelArguments.model_validate({"model_name_or_path": str(folder)})
    model = ModelHub.build(args)
    ModelHub.load_weights(model, args, seed=0, device=torch.device("cpu"))
    return model


def test_vision_language_model(folders: dict[str, Path]) -> None:
    spec = resolve_spec(loaded(folders["vision"]))
    assert spec.shard_modules == [
        "model.visual.blocks.0",
        "model.visual.blocks.1",
        "model.visual",
        "model.language_model.layers.0",
        "model.language_model.layers.1",
    ]
    assert spec.tie_groups == [["model.language_model.embed_tokens", "lm_head"]]
    assert spec.head == "lm_head"
    assert [(tower.name, tower.module, tower.key, tower.decoder) for tower in spec.towers] == [
        ("image", "model.visual", "pixel_values", "model.language_model"),
        ("video", "model.visual", "pixel_values_videos", "model.language_model"),
    ]
    assert "model.visual" not in spec.blocks and len(spec.blocks) == 4


def test_untied_text_model_wraps_both_ends(folders: dict[str, Path]) -> None:
    spec = resolve_spec(loaded(folders["text"]))
    assert spec.shard_modules == ["model.layers.0", "model.layers.1", "model.embed_tokens", "lm_head"]
    assert (spec.tie_groups, spec.towers) == ([], [])


def test_ties_are_read_from_the_parameters_not_the_flag(tmp_path: Path) -> None:
    model = loaded(make_tiny_qwen3_vl(tmp_path, tie=False))
    assert resolve_spec(model).tie_groups == []
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    assert resolve_spec(model).tie_groups == [["model.language_model.embed_tokens", "lm_head"]]
    assert shared_parameters(model) == [["model.language_model.embed_tokens.weight", "lm_head.weight"]]


def test_overlapping_ties_are_one_group() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abcd"})
    model["b"].weight = model["a"].weight
    model["c"].bias = model["b"].bias
    assert tie_groups(model) == [["a", "b", "c"]]


@pytest.mark.parametrize("position", [0, 1])
def test_idle_tower_reaches_every_parameter_of_the_tower(position: int, folders: dict[str, Path]) -> None:
    """Deepstack mergers included: one without a gradient would leave its ranks out of step."""
    model = loaded(folders["vision"])
    outputs = resolve_spec(model).towers[position].run_idle(model)
    assert all(output.isfinite().all() for output in outputs)
    sum((output * 0).sum() for output in outputs).backward()
    for name, parameter in model.model.visual.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_flat_tensors_finds_each_once() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert flat_tensors({"a": (one, [two, one]), "b": None, "c": torch.ones(1, dtype=torch.int64)}) == [one, two]


def test_fixed_size_towers() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"vocab_size": 32, "model_type": "llama"}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, vision_feature_layer=-1))
    (tower,) = find_towers(model)
    assert tower.module == "model.vision_tower"
    assert any(output.shape[-1] == 16 for output in tower.run_idle(model))


def test_a_model_that_hears(tmp_path: Path) -> None:
    """Its class names whole towers beside the layers inside them; some of the tower's parameters are never used."""
    model = loaded(make_tiny_omni(tmp_path))
    spec = resolve_spec(model)
    holder, prefix = (model.model, "model.") if hasattr(model.model, "visual") else (model, "")  # as in 5.17
    towers = [f"{prefix}audio_tower", f"{prefix}visual"]
    assert {"Qwen2_5OmniAudioEncoder", "Qwen2_5OmniVisionEncoder"} <= set(model._no_split_modules)
    assert [name for name in spec.blocks if name in towers] == [] and len(spec.blocks) == 6
    assert [name for name in spec.shard_modules if name in towers] == towers
    assert spec.shard_modules.index(f"{towers[0]}.layers.1") < spec.shard_modules.index(towers[0])
    (audio,) = [tower for tower in spec.towers if tower.name == "audio"]
    assert (audio.module, audio.key) == (towers[0], "input_features")
    (heard,) = audio.run_idle(model)
    assert heard.isfinite().all() and heard.shape[-1] == 32
    (heard * 0).sum().backward()
    unreached = [name for name, p in holder.audio_tower.named_parameters() if p.grad is None or (p.grad != 0).any()]
    assert unreached == ["audio_bos_eos_token.weight"]


def test_a_model_may_name_its_towers_itself() -> None:
    tower = Tower("audio", "ears", "input_features", "decoder", lambda model: torch.zeros(1))

    class Hearing(nn.Module):
        def get_towers(self) -> list[Tower]:
            return [tower]

    assert find_towers(Hearing()) == [tower]


def test_a_plain_module_has_an_empty_spec() -> None:
    spec = resolve_spec(nn.Linear(2, 2))
    assert (spec.shard_modules, spec.tie_groups, spec.towers, spec.head) == ([], [], [], "")
