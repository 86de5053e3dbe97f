"""Folders in the layout of the hub load as `from_pretrained` loads them, and go back under the hub's names."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    GptOssConfig,
    GptOssForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaPreTrainedModel,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    conversion_mapping,
)
from transformers.core_model_loading import ConversionOps, WeightConverter

from mindspeed_mm.checkpoint.keymap import check_used_once
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored, Zeros
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.checkpoint.transformers_map import conversion_rules, inherit_rules, loading_steps, saving_steps
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.tasks.answer.generation import load_model
from tests.helpers.megatron_models import save_tiny

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
QWEN_VISION |= {"patch_size": 4, "num_position_embeddings": 16}
CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP |= {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model"}


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **EXPERTS))


def qwen3_vl_moe(moe_intermediate_size: int = 24) -> PreTrainedModel:
    text = TEXT | EXPERTS | {"rope_parameters": ROPE, "moe_intermediate_size": moe_intermediate_size}
    vision = QWEN_VISION | {"deepstack_visual_indexes": [0]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))


def llava() -> PreTrainedModel:
    text = TEXT | {"model_type": "llama"}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=CLIP))


def gpt_oss() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    return GptOssForCausalLM(GptOssConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2, layer_types=layers))


FAMILIES = {"qwen3_moe": qwen3_moe, "qwen3_vl_moe": qwen3_vl_moe, "llava": llava, "gpt_oss": gpt_oss}


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_as_from_pretrained_and_goes_back_to_the_same_file(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    folder = saved(model, tmp_path)
    reference = type(model).from_pretrained(folder)
    rules = conversion_rules(model)
    wanted = set(model.state_dict())
    with open_weights(folder) as stored:
        steps = loading_steps(model, stored, wanted, rules)
        check_used_once(steps, stored, wanted)
        made = {key: tensor.read().clone() for step in steps for key, tensor in step.targets.items()}
    assert all(torch.equal(made[key], tensor) for key, tensor in reference.state_dict().items())

    on_disk = load_file(folder / "model.safetensors")
    lazy = {key: Stored(key, tensor.shape, tensor.dtype, lambda: Memory(made)) for key, tensor in made.items()}
    back = {key: tensor.read() for step in saving_steps(model, lazy, rules) for key, tensor in step.targets.items()}
    assert back.keys() == on_disk.keys()
    assert all(torch.equal(back[key], on_disk[key]) for key in on_disk)


class Memory:
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def get_tensor(self, key: str) -> torch.Tensor:
        return self.state[key]


def test_experts_are_stored_one_by_one_and_a_shard_reads_only_its_own(tmp_path: Path) -> None:
    model = qwen3_moe()
    folder = saved(model, tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.11.gate_proj.weight" in file.keys()  # noqa: SIM118
    key = "model.layers.0.mlp.experts.gate_up_proj"
    with open_weights(folder) as stored:
        steps = loading_steps(model, stored, set(model.state_dict()), conversion_rules(model))
        (experts,) = [step.targets[key] for step in steps if key in step.targets]
        out = torch.empty(2, 30, 32)
        experts.copy_to(out, ((9, 2), (10, 30), (0, 32)))
    assert torch.equal(out, model.state_dict()[key][9:11, 10:40])


def test_experts_that_may_be_stored_either_way_round_are_refused(tmp_path: Path) -> None:
    """Square experts look the same transposed: transformers itself loads them wrong without a word."""
    model = qwen3_vl_moe(moe_intermediate_size=16)  # 2 · 16 = hidden size
    folder = saved(model, tmp_path)
    with (
        open_weights(folder) as stored,
        pytest.raises(ModelFolderError, match=r"square.*does not show which way round"),
    ):
        loading_steps(model, stored, set(model.state_dict()), conversion_rules(model))


class Doubled(ConversionOps):
    """An operation that this project does not know."""

    def convert(self, input_dict: dict[str, Any], **others: Any) -> dict[str, torch.Tensor]:
        (value,) = input_dict.values()
        return {others["target_patterns"][0]: (value[0] if isinstance(value, list) else value) * 2}


def test_an_unknown_operation_runs_on_whole_tensors(tmp_path: Path) -> None:
    model = qwen3_moe()
    folder = saved(model, tmp_path)
    rules = [*conversion_rules(model), WeightConverter("embed_tokens.weight", "embed_tokens.weight", [Doubled()])]
    with open_weights(folder) as stored:
        steps = loading_steps(model, stored, set(model.state_dict()), rules)
        made = {key: tensor for step in steps for key, tensor in step.targets.items()}
        out = torch.empty(3, 32)
        made["model.embed_tokens.weight"].copy_to(out, ((5, 3), (0, 32)))
    assert torch.equal(out, model.state_dict()["model.embed_tokens.weight"][5:8] * 2)


def test_an_absent_expert_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = qwen3_moe()
    folder = saved(model, tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    told = r"there are 12 of \S+gate_proj\.weight and 11 of \S+up_proj"
    with open_weights(folder) as stored, pytest.raises(ModelFolderError, match=told):
        loading_steps(model, stored, set(model.state_dict()), conversion_rules(model))


@pytest.mark.parametrize("name", ["glm4v", "qwen2_5_vl"])
def test_a_model_that_was_not_loaded_is_written_as_transformers_writes_it(name: str, tmp_path: Path) -> None:
    """Nothing goes back to the names of very old folders."""
    written = load_file(save_tiny(name, tmp_path) / "model.safetensors")
    outline = TransformersOutline.of(tmp_path)
    assert outline is not None
    own: dict[str, LazyTensor] = {key: Zeros(shape, torch.float32) for key, shape in outline.shapes.items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in written.items()}
    assert {key: tensor.shape for key, tensor in outline.hub_tensors(own, tmp_path).items()} == shapes
    assert outline.hub_shapes() == shapes


class OwnLlava(LlavaForConditionalGeneration):
    """As a plugin derives one."""


class NamedLlavaConfig(LlavaConfig):
    model_type = "named_llava"


class NamedLlava(LlavaForConditionalGeneration):
    """As a plugin derives one whose exported folders transformers is to find by a model type of its own."""

    config_class = NamedLlavaConfig


class BareLlava(LlavaPreTrainedModel):
    """Derived from what LLaVA's models share: its module tree is its own."""


@pytest.mark.parametrize("own", [OwnLlava, NamedLlava])
def test_a_plugins_class_is_stored_as_the_class_it_derives_from(
    own: type[PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for held in ("USER_REGISTERED_MAPPINGS", "_checkpoint_conversion_mapping_cache"):
        monkeypatch.setattr(conversion_mapping, held, copy(getattr(conversion_mapping, held)))
    released = llava()
    folder = saved(released, tmp_path / "released")
    assert "language_model.lm_head.weight" in load_file(folder / "model.safetensors")  # not a module's name today
    inherit_rules(own)
    config = own.config_class.from_pretrained(folder)
    loaded, report = own.from_pretrained(folder, config=config, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(map(torch.equal, loaded.state_dict().values(), released.state_dict().values()))
    with open_weights(folder) as stored:
        steps = loading_steps(loaded, stored, set(loaded.state_dict()), conversion_rules(loaded))
        check_used_once(steps, stored, loaded.state_dict())
    fresh = own(config)
    lazy: dict[str, LazyTensor] = {key: Zeros(tuple(it.shape), it.dtype) for key, it in fresh.state_dict().items()}
    made = saving_steps(fresh, lazy, conversion_rules(fresh, legacy=False))
    check_used_once(made, fresh.state_dict(), load_file(folder / "model.safetensors"))


def test_a_plugins_class_that_transformers_finds_by_its_model_type_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `mm infer` loads an exported folder, after the plugin was imported."""
    for held in ("USER_REGISTERED_MAPPINGS", "_checkpoint_conversion_mapping_cache"):
        monkeypatch.setattr(conversion_mapping, held, copy(getattr(conversion_mapping, held)))
    for mapping in (CONFIG_MAPPING, AutoModelForImageTextToText._model_mapping):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    AutoConfig.register("named_llava", NamedLlavaConfig)
    AutoModelForImageTextToText.register(NamedLlavaConfig, NamedLlava)
    released = llava()
    folder = saved(released, tmp_path / "released")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "named_llava", "architectures": ["NamedLlava"]}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(folder)
    assert type(loaded) is NamedLlava
    assert all(map(torch.equal, loaded.state_dict().values(), released.state_dict().values()))


def test_a_base_class_gives_no_rules() -> None:
    registered = set(conversion_mapping.USER_REGISTERED_MAPPINGS)
    inherit_rules(BareLlava)
    assert registered == conversion_mapping.USER_REGISTERED_MAPPINGS
