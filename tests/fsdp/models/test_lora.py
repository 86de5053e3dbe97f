"""Adapters: on which layers, with which first values, over which base weights, under which plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading import stream as weight_loading
from mindspeed_mm.fsdp.models.lora import names as lora_names
from mindspeed_mm.fsdp.models.lora.apply import apply_lora, initialize_lora
from mindspeed_mm.fsdp.models.lora.names import adapter_weight, base_name, is_adapter_weight
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.helpers.adapters import FEW, adapted_model, logits
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import full

CPU = torch.device("cpu")


def arguments(**changes: Any) -> LoraArguments:
    return LoraArguments.model_validate({"enable": True, "rank": 4, "alpha": 12, "target_modules": FEW, **changes})


def outline(folder: Path, dtype: torch.dtype | None = None, **model: Any) -> nn.Module:
    return ModelHub.build(ModelArguments(model_name_or_path=str(folder), **model), param_dtype=dtype)


def adapted(folder: Path, dtype: torch.dtype | None = None, **lora: Any) -> Any:
    return adapted_model(folder, dtype=dtype, random=False, **lora)


# --- which layers -----------------------------------------------------------------------------------------------------


def test_language_model_trains_adapters_and_nothing_else(folders: dict[str, Path]) -> None:
    model = adapted(folders["vision"], torch.bfloat16, alpha=6)
    report = facts_of(model).lora
    assert report is not None and (report.rank, report.scale) == (4, 1.5)
    layers = [f"model.language_model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkv"]
    assert report.targets == tuple(layers)  # the tower has no layers of these names
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == report.trained == {adapter_weight(layer, side) for layer in layers for side in "AB"}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert report.parameters == sum(p.numel() for p in trained.values())


@pytest.mark.parametrize("family", ["flux", "t2v"])
def test_generator_has_targets_of_its_own(family: str, generators: dict[str, Path]) -> None:
    report = facts_of(adapted(generators[family])).lora
    assert report is not None
    ends = {name.split(".", 2)[2] for name in report.targets}
    assert {"attn.to_q", "attn.to_out.0", "attn.add_k_proj"} <= ends or {"attn1.to_q", "attn2.to_out.0"} <= ends
    named = facts_of(adapted(generators[family], target_modules=["to_k"])).lora
    assert named is not None and {name.rpartition(".")[2] for name in named.targets} == {"to_k"}


def test_a_name_that_ends_another_one_is_not_that_one(generators: dict[str, Path]) -> None:
    """FLUX has `proj_out` at its end and in each single block."""
    model = adapted(generators["flux"], target_modules=["single_transformer_blocks.{*}.proj_out"])
    report = facts_of(model).lora
    assert report is not None and report.targets == ("single_transformer_blocks.0.proj_out",)
    assert report.peft_targets == ("0.proj_out",)
    assert type(model.proj_out) is nn.Linear
    both = facts_of(adapted(generators["flux"], target_modules=["proj_out"])).lora
    assert both is not None and len(both.targets) == 2 and both.peft_targets == ("proj_out",)


def test_frozen_layers_get_none(folders: dict[str, Path]) -> None:
    model = outline(folders["text"], freeze=["*.layers.{0}"])
    report = apply_lora(model, arguments(target_modules=["*.layers.{*}.self_attn.q_proj"]))
    assert report.targets == ("model.layers.1.self_attn.q_proj",)


def test_what_is_trained_whole(folders: dict[str, Path]) -> None:
    model = adapted(folders["text"], torch.bfloat16, modules_to_save=["lm_head", "model.norm"])
    report = facts_of(model).lora
    assert report is not None and report.modules_to_save == ("model.norm", "lm_head")
    assert {"lm_head.weight", "model.norm.weight"} <= report.trained
    assert model.lm_head.weight.requires_grad and model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("text", {"target_modules": ["q_prj"]}, r"'q_prj' matches no module.*q_proj"),
        ("text", {"target_modules": ["k_proj", "self_attn"]}, r"'self_attn' matches 2 module.*self_attn\.q_proj"),
        ("text", {"target_modules": ["model.norm"]}, r"'model.norm' matches 1 module\(s\), none of them a linear"),
        ("tied", {"target_modules": ["lm_head"]}, r"'lm_head' shares its weight with 'model.embed_tokens'"),
        ("tied", {"modules_to_save": ["lm_head"]}, r"'lm_head' shares its weight with 'model.embed_tokens'.*all"),
        ("text", {"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]}, r"'lm_head' is trained whole"),
        ("text", {"modules_to_save": ["head"]}, r"'head' matches no module"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_refusals(kind: str, changes: dict[str, Any], message: str, folders: dict[str, Path]) -> None:
    model = outline(folders[kind])
    with pytest.raises(ConfigError, match=message):
        apply_lora(model, arguments(**changes))
    assert facts_of(model).lora is None and not any(".lora_" in name for name, _ in model.named_modules())


def test_refusals_that_depend_on_the_model(folders: dict[str, Path], generators: dict[str, Path]) -> None:
    frozen = outline(folders["text"], freeze=["model.layers.{*}"])
    with pytest.raises(ConfigError, match=r"only layers that model\.freeze freezes"):
        apply_lora(frozen, arguments())
    generator = outline(generators["flux"])
    with pytest.raises(ConfigError, match=r"norm_out.*pipelines load adapters only"):
        apply_lora(generator, arguments(target_modules=["to_k"], modules_to_save=["norm_out"]))
    twice = adapted(folders["text"])
    with pytest.raises(ConfigError, match="has adapters already"):
        apply_lora(twice, arguments())


# --- base weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "tied", "vision"])
def test_base_weights_are_those_of_the_folder(kind: str, folders: dict[str, Path]) -> None:
    model = adapted(folders[kind])
    plain = outline(folders[kind])
    ModelHub.load_weights(plain, ModelArguments(model_name_or_path=str(folders[kind])), seed=0, device=CPU)
    held = {base_name(name): p for name, p in model.named_parameters() if not is_adapter_weight(name)}
    expected = dict(plain.named_parameters())
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_a_generator_reads_its_transformer(generators: dict[str, Path]) -> None:
    model = adapted(generators["flux"])
    stored = load_file(generators["flux"] / "transformer" / "diffusion_pytorch_model.safetensors")
    layer = model.transformer_blocks[0].attn.to_q.base_layer
    assert torch.equal(layer.weight, stored["transformer_blocks.0.attn.to_q.weight"])
    assert torch.equal(layer.bias, stored["transformer_blocks.0.attn.to_q.bias"])


def test_base_layers_that_are_not_loaded_would_show(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: names of base layers are taken as they are, so the folder has no such weights."""
    monkeypatch.setattr(weight_loading, "naming_of", lambda model: str)
    with pytest.raises(Exception, match="6 missing, 6 unexpected"):
        adapted(folders["text"])


def test_fresh_adapters_change_nothing(folders: dict[str, Path]) -> None:
    tokens = torch.arange(12).reshape(1, -1)
    plain = outline(folders["text"])
    ModelHub.load_weights(plain, ModelArguments(model_name_or_path=str(folders["text"])), seed=0, device=CPU)
    with torch.no_grad():
        expected = plain.eval()(tokens).logits
        assert torch.equal(logits(adapted(folders["text"])), expected)
        assert not torch.equal(logits(adapted(folders["text"], init_lora_weights=False)), expected)


# --- first values -----------------------------------------------------------------------------------------------------


def test_first_values_are_drawn_as_peft_draws_them(folders: dict[str, Path]) -> None:
    values = dict(adapted(folders["text"], rank=16).named_parameters())
    a, b = (
        torch.cat([p.detach().flatten() for name, p in values.items() if f".lora_{side}." in name]) for side in "AB"
    )
    bound = 1 / math.sqrt(32)
    assert float(a.abs().max()) <= bound and abs(float(a.std()) / (bound / math.sqrt(3)) - 1) < 0.05
    assert not b.any()
    values = dict(adapted(folders["text"], rank=16, init_lora_weights="gaussian").named_parameters())
    a = torch.cat([p.detach().flatten() for name, p in values.items() if ".lora_A." in name])
    assert abs(float(a.std()) * 16 - 1) < 0.05
    layers = [p for name, p in values.items() if "q_proj.lora_A" in name]
    assert not torch.equal(layers[0], layers[1])


def test_first_values_do_not_depend_on_the_plan(folders: dict[str, Path]) -> None:
    expected = {name: p.detach() for name, p in adapted(folders["text"]).named_parameters() if p.requires_grad}
    for found in run_ranks(2, sharded_values, str(folders["text"])):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def sharded_values(folder: str) -> dict[str, torch.Tensor]:
    """With a base in bf16 and adapters in fp32 in one unit."""
    section = arguments()
    model = outline(Path(folder), torch.bfloat16)
    apply_lora(model, section, param_dtype=torch.bfloat16)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    ModelHub.load_weights(model, ModelArguments(model_name_or_path=folder), seed=0, device=CPU)
    initialize_lora(model, section, 7)
    return {name: full(p) for name, p in model.named_parameters() if p.requires_grad}


def test_names_lead_back() -> None:
    name = adapter_weight("model.layers.3.q_proj", "A")
    assert name == "model.layers.3.q_proj.lora_A.default.weight"
    assert lora_names.split_adapter_weight(name) == ("model.layers.3.q_proj", "A")
    assert lora_names.split_adapter_weight("model.layers.3.q_proj.base_layer.weight") is None
    assert base_name("model.layers.3.q_proj.base_layer.weight") == "model.layers.3.q_proj.weight"
