"""Every kind of adapter computes what PEFT's own model computes on the same weights: outputs and gradients in fp64, and
the values that it starts with; whole and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.lora.apply import apply_lora, initialize_lora
from mindspeed_mm.fsdp.models.lora.first_values import adapted_layers
from mindspeed_mm.fsdp.models.lora.names import ADAPTER, base_name
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.helpers.adapters import FEW, adapted_model, logits
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import full
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl_moe

TOKENS = torch.arange(12).reshape(1, -1)
EXPERTS = {"target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("moe")
    return {
        "text moe": make_tiny_qwen3_moe(root / "text", initializer_range=0.3),
        "vision moe": make_tiny_qwen3_vl_moe(root / "vision", initializer_range=0.3),
    }


def through_peft(folder: Path, dtype: torch.dtype, **config: Any) -> Any:
    """PEFT's own model over the folder's weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    takes_pictures = type(AutoConfig.from_pretrained(folder)) in AutoModelForImageTextToText._model_mapping
    auto = AutoModelForImageTextToText if takes_pictures else AutoModelForCausalLM
    base = auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    if dtype == torch.float64 and hasattr(base, "set_experts_implementation"):
        base.set_experts_implementation("eager")
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=12, **config), autocast_adapter_dtype=False)


def without_adapters(folder: Path, dtype: torch.dtype | None = None) -> Any:
    arguments = ModelArguments(model_name_or_path=str(folder))
    plain = ModelHub.build(arguments, param_dtype=dtype)
    ModelHub.load_weights(plain, arguments, seed=0, device=torch.device("cpu"))
    return plain


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}


def assert_same_computation(ours: Any, theirs: Any) -> None:
    """With our values in both: outputs and the gradient of every adapter."""
    own, other = trained(ours), trained(theirs)
    assert own.keys() == other.keys()
    with torch.no_grad():
        for name in own:
            other[name].copy_(own[name])
    weights = torch.randn(12, 320, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = []
    for model in (ours, theirs):
        output = model(TOKENS).logits[0]
        (output * weights[:, : output.shape[1]]).sum().backward()
        found.append(output.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    for name in own:
        torch.testing.assert_close(own[name].grad, other[name].grad, rtol=1e-12, atol=1e-12, msg=name)
        assert other[name].grad.any()


# --- computing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_dora(kind: str, folders: dict[str, Path]) -> None:
    ours = adapted_model(folders[kind], dtype=torch.float64, use_dora=True)
    targets = ".*language_model.*[qkv]_proj" if kind == "vision" else ["q_proj", "k_proj", "v_proj"]
    assert_same_computation(ours, through_peft(folders[kind], torch.float64, target_modules=targets, use_dora=True))


@pytest.mark.parametrize("kind", ["text moe", "vision moe"])
def test_fused_experts(kind: str, moe: dict[str, Path]) -> None:
    ours = adapted_model(moe[kind], dtype=torch.float64, **EXPERTS)
    theirs = through_peft(
        moe[kind],
        torch.float64,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    assert_same_computation(ours, theirs)


def test_names_of_single_experts_are_read_as_peft_reads_them(moe: dict[str, Path]) -> None:
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    ours = adapted_model(moe["text moe"], dtype=torch.float64, target_modules=names, disable_peft_moe_conversion=False)
    theirs = through_peft(moe["text moe"], torch.float64, target_modules=names)
    assert ours.model.layers[0].mlp.experts.base_layer.r[ADAPTER] == 8  # gate and up, of rank 4 each
    assert_same_computation(ours, theirs)


def test_targets_of_one_layer_stay_there(moe: dict[str, Path]) -> None:
    """PEFT by itself would take the last names of an expression for targets everywhere in a model of experts."""
    ours = adapted_model(moe["text moe"], target_modules=["*.layers.{1}.self_attn.q_proj", "*.layers.{0}.mlp.experts"])
    layers = {name.split(".lora_")[0] for name in trained(ours)}
    assert layers == {
        "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer",
    }  # fmt: skip


def test_a_bare_last_name_means_linear_layers(moe: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"'down_proj' matches"):
        adapted_model(moe["text moe"], target_modules=["down_proj"])
    with pytest.raises(ConfigError, match=r"'gate_proj' alone cannot be adapted.*'up_proj'"):
        adapted_model(moe["text moe"], target_modules=["gate_proj"], disable_peft_moe_conversion=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dropout": 0.1}, "lora.dropout"), ({"use_dora": True}, "use_dora"), ({"init_lora_weights": "pissa"}, "pissa")],
)
def test_what_experts_cannot_have(changes: dict[str, Any], message: str, moe: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted_model(moe["text moe"], **EXPERTS, **changes)


# --- first values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initialisation", ["pissa", "olora"])
def test_first_values_are_pefts(initialisation: str, folders: dict[str, Path]) -> None:
    ours = adapted_model(folders["text"], random=False, init_lora_weights=initialisation)
    theirs = through_peft(
        folders["text"], torch.float32, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=initialisation
    )
    other = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, other[name], rtol=0, atol=1e-6, msg=name)
    assert ours.model.layers[0].self_attn.q_proj.lora_B[ADAPTER].weight.any()


@pytest.mark.parametrize("initialisation", ["pissa_niter_2", "orthogonal"])
def test_drawn_values_are_pefts_for_the_same_seed(initialisation: str, folders: dict[str, Path]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    from mindspeed_mm.core.seeds import derive_seed

    ours = adapted_model(folders["text"], random=False, init_lora_weights=initialisation)
    plain = ModelHub.build(ModelArguments(model_name_or_path=str(folders["text"])))
    ModelHub.load_weights(
        plain, ModelArguments(model_name_or_path=str(folders["text"])), seed=0, device=torch.device("cpu")
    )
    for name, layer in adapted_layers(ours):
        holder = nn.Module()
        holder.layer = plain.get_submodule(name)
        torch.manual_seed(derive_seed(7, name))
        config = LoraConfig(r=4, lora_alpha=12, init_lora_weights=initialisation, target_modules=["layer"])
        inject_adapter_in_model(config, holder)
        for side in ("lora_A", "lora_B"):
            assert torch.equal(getattr(layer, side)[ADAPTER].weight, getattr(holder.layer, side)[ADAPTER].weight)


@pytest.mark.parametrize(
    "lora",
    [
        {"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "olora"},
        {"use_dora": True}, {"use_dora": True, "init_lora_weights": "pissa"},
    ],
)  # fmt: skip
def test_a_start_that_changes_nothing(lora: dict[str, Any], folders: dict[str, Path]) -> None:
    """What the adapter starts with is out of the base, or nothing; with DoRA lengths are those of the sum."""
    plain = ModelHub.build(ModelArguments(model_name_or_path=str(folders["text"])), param_dtype=torch.float64)
    ModelHub.load_weights(
        plain, ModelArguments(model_name_or_path=str(folders["text"])), seed=0, device=torch.device("cpu")
    )
    with torch.no_grad():
        expected = plain.eval()(TOKENS).logits
    ours = adapted_model(folders["text"], dtype=torch.float64, random=False, **lora)
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-12)
    layer: Any = ours.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight += 1e-6  # the fault: a base that is not what it gave away
    assert not torch.allclose(logits(ours), expected, atol=1e-12)


@pytest.mark.parametrize(
    "lora",
    [{"init_lora_weights": "pissa_niter_2", "use_dora": True}, {"init_lora_weights": "orthogonal"}],
    ids=["of the weight", "of shapes"],
)
def test_first_values_do_not_depend_on_the_plan(lora: dict[str, Any], folders: dict[str, Path]) -> None:
    model = adapted_model(folders["text"], random=False, **lora)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for found in run_ranks(2, sharded_values, str(folders["text"]), lora):
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def sharded_values(folder: str, lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    section = LoraArguments.model_validate({"enable": True, "rank": 4, "alpha": 12, "target_modules": FEW, **lora})
    arguments = ModelArguments(model_name_or_path=folder)
    model: Any = ModelHub.build(arguments)
    apply_lora(model, section)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    initialize_lora(model, section, 7)
    return {name: full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "orthogonal", "rank": 3}, r"the rank is 3.*even"),
        (
            {"init_lora_weights": "pissa", "rank": 40},
            r"takes 40 directions.*rank to 32",
        ),
    ],
)
def test_ranks_that_do_not_fit(changes: dict[str, Any], message: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted_model(folders["text"], **changes)


def test_names_lead_back_through_all_levels() -> None:
    assert base_name("m.0.experts.base_layer.base_layer.gate_up_proj") == "m.0.experts.gate_up_proj"
