"""Building models: parameters on meta, buffers real, masters in fp32, ties live, classes found without an id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM

from mindspeed_mm.checkpoint.key_ops import Concat
from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.fsdp.models.base_model import BaseModel
from mindspeed_mm.fsdp.models.behaviour.attention import choose_attention
from mindspeed_mm.fsdp.models.loading.folder import code_hash
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta
from mindspeed_mm.fsdp.models.modelhub import LoadReport, ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.register import model_register

CPU = torch.device("cpu")


def arguments(folder: Path | None = None, **settings: Any) -> ModelArguments:
    return ModelArguments.model_validate({"model_name_or_path": folder and str(folder), **settings})


def load(model: nn.Module, args: ModelArguments, **options: Any) -> LoadReport:
    return ModelHub.load_weights(model, args, seed=0, device=CPU, **options)


def assert_equal_models(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters()) | dict(reference.named_buffers())
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_built_on_meta_with_real_buffers_and_live_ties(folders: dict[str, Path]) -> None:
    model = ModelHub.build(arguments(folders["vision"]))
    reference = AutoModelForImageTextToText.from_pretrained(folders["vision"])
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


@pytest.mark.parametrize("model_id", [None, "qwen3_vl"])
def test_loads_what_from_pretrained_loads(model_id: str | None, folders: dict[str, Path]) -> None:
    args = arguments(folders["vision"], model_id=model_id)
    model = ModelHub.build(args)
    report = load(model, args)
    reference = AutoModelForImageTextToText.from_pretrained(folders["vision"])
    assert type(model) is type(reference)
    assert_equal_models(model, reference)
    assert (report.tensors, report.size_bytes) == (63, 108096 * 4)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert model.generation_config.eos_token_id == reference.generation_config.eos_token_id


def test_text_folder_needs_no_id(folders: dict[str, Path]) -> None:
    args = arguments(folders["text"])
    model = ModelHub.build(args)
    load(model, args)
    assert_equal_models(model, AutoModelForCausalLM.from_pretrained(folders["text"]))


def test_masters_are_fp32_and_frozen_weights_are_not(folders: dict[str, Path]) -> None:
    args = arguments(folders["vision"], freeze=["model.visual"])
    model = ModelHub.build(args, param_dtype=torch.bfloat16)
    load(model, args)
    for name, parameter in model.named_parameters():
        frozen = name.startswith("model.visual.")
        assert parameter.requires_grad is not frozen
        assert parameter.dtype == (torch.bfloat16 if frozen else torch.float32)
    assert model.model.language_model.rotary_emb.inv_freq.dtype == torch.float32


def test_fp64_plan_has_fp64_masters(folders: dict[str, Path]) -> None:
    args = arguments(folders["vision"], freeze=["model.visual"])
    model = ModelHub.build(args, param_dtype=torch.float64)
    load(model, args)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_freeze_patterns_are_strict(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"model\.freeze.*model\.visuals"):
        ModelHub.build(arguments(folders["vision"], freeze=["model.visuals"]))
    with pytest.raises(ConfigError, match="nothing is left to train"):
        ModelHub.build(arguments(folders["text"], freeze=["model", "lm_head"]))


def test_id_and_folder_must_agree(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="builds qwen3_vl models, this is a qwen3 model"):
        ModelHub.build(arguments(folders["text"], model_id="qwen3_vl"))
    with pytest.raises(ConfigError, match=r"not registered.*Did you mean 'qwen3_vl'"):
        ModelHub.build(arguments(folders["text"], model_id="qwen3vl"))


def test_overrides_reach_the_configuration(folders: dict[str, Path]) -> None:
    args = arguments(folders["vision"], train_from_scratch=True)
    model = ModelHub.build(args, overrides={"text_config.num_hidden_layers": 1})
    assert len(model.model.language_model.layers) == 1
    with pytest.raises(ConfigError, match=r"text_config\.layers"):
        ModelHub.build(args, overrides={"text_config.layers": 1})


def test_attention_choice(folders: dict[str, Path]) -> None:
    assert choose_attention(None).name == "sdpa"
    assert choose_attention("flex").name == "flex_attention"
    assert choose_attention(None, type("NoSdpa", (), {"_supports_sdpa": False})).name == "eager"
    for name, expected in (("eager", "eager"), (None, "mm_varlen"), ("sdpa", "sdpa")):
        model = ModelHub.build(arguments(folders["vision"], attn_implementation=name))
        assert model.config._attn_implementation == expected


def test_parameter_on_two_modules_stays_one_on_meta() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(4, 4))
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.first.weight = weight
            self.second.weight = weight
            self.register_buffer("table", torch.arange(4))

    with parameters_on_meta():
        pair = Pair()
    assert pair.first.weight is pair.second.weight
    assert pair.first.weight.is_meta and not pair.table.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_layer_larger_than_memory_is_built() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.empty(1 << 20, 1 << 16, 1 << 8)
            )  # 64 TiB: more than a host gives addresses

    with parameters_on_meta():
        experts, linear = Experts(), nn.Linear(1 << 20, 1 << 20, bias=False)
    assert experts.weight.is_meta and experts.weight.shape == (1 << 20, 1 << 16, 1 << 8)
    assert linear.weight.is_meta and linear.weight.numel() == 1 << 40


CUSTOM_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class CustomConfig(Qwen3Config):
    model_type = "custom_qwen"
class CustomModel(Qwen3ForCausalLM):
    config_class = CustomConfig
"""


def test_code_of_the_folder_runs_only_when_trusted(
    copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copied("text")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "custom_qwen", "architectures": ["CustomModel"]}
    config["auto_map"] = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "custom.py").write_text(CUSTOM_CODE)
    with pytest.raises(ModelFolderError, match="trust_remote_code"):
        ModelHub.build(arguments(folder))
    args = arguments(folder, trust_remote_code=True)
    model = ModelHub.build(args)
    assert type(model).__name__ == "CustomModel"
    assert load(model, args).tensors == 25
    first = code_hash(folder)
    (folder / "custom.py").write_text(CUSTOM_CODE + "\n")
    assert len(first) == 64 and code_hash(folder) != first


class Toy(BaseModel):
    """A plugin's own model, configured by the YAML alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(2))


class ToyWithHooks(Toy):
    @classmethod
    def overwrite_transformer_config(cls, config: Any, model_args: ModelArguments, feature_args: Any) -> None:
        config.width = 6

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, config: Any, **options: Any) -> ToyWithHooks:
        model = cls(config)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7)
        return model


class MappedToy(Toy):
    key_map = KeyMap(
        [
            KeyRule(("blocks.{n}.halfa.w", "blocks.{n}.halfb.w"), "layers.{n}.weight", (Concat(0),)),
            KeyRule("blocks.{n}.b", "layers.{n}.bias"),
        ]
    )


class OwnQwen(Qwen3ForCausalLM):
    """A plugin's own transformers class with a configuration that transformers does not know."""

    class OwnConfig(Qwen3Config):
        model_type = "own_qwen"

    config_class = OwnConfig


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"toy": Toy, "hooks": ToyWithHooks, "mapped": MappedToy, "own": OwnQwen}
    monkeypatch.setattr(model_register, "_entries", entries)


@pytest.mark.usefixtures("registered")
def test_plugin_model_without_a_folder() -> None:
    args = ModelArguments.model_validate({"model_id": "toy", "train_from_scratch": True, "width": 4})
    model = ModelHub.build(args)
    assert all(parameter.is_meta for parameter in model.parameters())
    report = load(model, args)
    assert len(report.initialized) == 4
    assert all(parameter.isfinite().all() and parameter.std() > 0 for parameter in model.parameters())


@pytest.mark.usefixtures("registered")
def test_plugin_model_with_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy", "width": 4}')
    shapes = {"weight": (4, 4), "bias": (4,)}
    state = {f"layers.{i}.{name}": torch.randn(shape) for i in range(2) for name, shape in shapes.items()}
    save_file(state, tmp_path / "model.safetensors")
    args = arguments(tmp_path, model_id="toy")
    model = ModelHub.build(args)
    load(model, args)
    assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)


@pytest.mark.usefixtures("registered")
def test_plugin_key_map_leads_from_the_stored_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy", "width": 4}')
    halves = {f"blocks.{i}.half{half}.w": torch.randn(2, 4) for i in range(2) for half in "ab"}
    biases = {f"blocks.{i}.b": torch.randn(4) for i in range(2)}
    save_file(halves | biases, tmp_path / "model.safetensors")
    args = arguments(tmp_path, model_id="mapped")
    model = ModelHub.build(args)
    load(model, args)
    for i, layer in enumerate(model.layers):
        expected = torch.cat([halves[f"blocks.{i}.halfa.w"], halves[f"blocks.{i}.halfb.w"]])
        assert torch.equal(layer.weight, expected) and torch.equal(layer.bias, biases[f"blocks.{i}.b"])
    save_file(halves | biases | {"left.over": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"left\.over"):
        load(ModelHub.build(args), args)


@pytest.mark.usefixtures("registered")
def test_plugin_hooks_and_own_loading(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy", "width": 4}')
    args = arguments(tmp_path, model_id="hooks")
    model = ModelHub.build(args)
    load(model, args)
    assert model.layers[0].weight.shape == (6, 6)
    assert all((parameter == 7).all() for parameter in model.parameters())


@pytest.mark.usefixtures("registered")
def test_plugin_of_a_transformers_class(copied: Callable[[str], Path]) -> None:
    folder = copied("text")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own_qwen"}
    (folder / "config.json").write_text(json.dumps(config))
    args = arguments(folder, model_id="own")
    model = ModelHub.build(args)
    assert type(model) is OwnQwen and load(model, args).tensors == 25


@pytest.mark.usefixtures("registered")
def test_a_key_map_that_loading_would_pass_over_is_refused(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnQwen, "key_map", KeyMap([]), raising=False)
    folder = copied("text")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own_qwen"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"OwnQwen derives from .* no key_map.*register_checkpoint_conversion"):
        ModelHub.build(arguments(folder, model_id="own"))
