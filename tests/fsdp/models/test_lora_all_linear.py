"""`target_modules: all-linear`, `all` and unset: the layers that PEFT and diffusers' scripts take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.lora.apply import apply_lora
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.helpers.runs import mm, tensors, train
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_tiny_run

import transformers  # isort: skip  (after the guard of the lines above)


def targets(folder: Path, **lora: Any) -> set[str]:
    """Names of the layers that get adapters."""
    model = ModelHub.build(ModelArguments(model_name_or_path=str(folder)))
    report = apply_lora(model, LoraArguments.model_validate({"enable": True, "rank": 2, **lora}))
    return {*report.targets, *report.parameters_targeted}


def through_peft(folder: Path, auto: Any, words: Any = "all-linear") -> set[str]:
    """The layers that PEFT's own model adapts."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    model = get_peft_model(auto.from_pretrained(folder), LoraConfig(r=2, target_modules=words))
    names = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name.removeprefix("base_model.model.") for name in names}


@pytest.mark.edge("BR15")
@pytest.mark.parametrize("words", [{}, {"target_modules": "all-linear"}, {"target_modules": ["all"]}])
def test_a_model_of_text_is_adapted_as_by_peft(words: dict[str, Any], folders: dict[str, Path]) -> None:
    assert targets(folders["text"], **words) == through_peft(folders["text"], transformers.AutoModelForCausalLM)
    assert targets(folders["tied"], **words) == through_peft(folders["tied"], transformers.AutoModelForCausalLM)


@pytest.mark.edge("BR15")
def test_a_vision_tower_is_left_out_unless_it_is_named(folders: dict[str, Path]) -> None:
    everywhere = through_peft(folders["vision"], transformers.AutoModelForImageTextToText)
    decoder = {name for name in everywhere if name.startswith("model.language_model.")}
    assert targets(folders["vision"]) == decoder
    assert decoder != everywhere
    assert targets(folders["vision"], target_modules=["all-linear", "model.visual.*"]) == everywhere


@pytest.mark.edge("BR15")
@pytest.mark.parametrize(
    ("make", "auto"),
    [
        (make_tiny_qwen3_moe, transformers.AutoModelForCausalLM),
        (make_tiny_qwen3_vl_moe, transformers.AutoModelForImageTextToText),
    ],
)
def test_experts_are_named(make: Any, auto: Any, tmp_path: Path) -> None:
    """PEFT's word takes fused experts and routers of some families with it; here they are named."""
    folder = make(tmp_path)
    plain = targets(folder)
    left_out = (".experts", ".experts.base_layer", ".gate")
    assert plain == {n for n in through_peft(folder, auto) if "visual" not in n and not n.endswith(left_out)}
    assert targets(folder, target_modules=["all-linear", "mlp.experts"]) > plain


@pytest.mark.edge("BR15")
def test_routers_are_left_out(tmp_path: Path) -> None:
    """Qwen3-Next has a linear gate for its shared expert."""
    config = transformers.Qwen3NextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )  # fmt: skip
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    gates = {name for name in linear if name.endswith("shared_expert_gate")}
    assert gates and targets(tmp_path) == linear - gates - {"lm_head"}
    assert gates < through_peft(tmp_path, transformers.AutoModelForCausalLM)


class Routed(nn.Module):
    """A model of one's own: experts in a list, and a linear router beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 4)


@pytest.mark.edge("BR15")
def test_routers_of_a_model_of_ones_own_are_left_out() -> None:
    model = Routed()
    report = apply_lora(model, LoraArguments(enable=True, rank=2))
    assert set(report.targets) == {"experts.0", "experts.1", "experts.2", "out"}


SCRIPTS = {
    "flux": [
        "attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj",
        "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ],
    "flux2": ["to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj", "single_transformer_blocks.0.attn.to_out"],
    "sd3": [
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_k", "attn.to_out.0",
        "attn.to_q", "attn.to_v",
    ],
    "sana": ["to_k", "to_q", "to_v"],
    "lumina2": ["to_k", "to_q", "to_v", "to_out.0"],
    "qwen_image": ["to_k", "to_q", "to_v", "to_out.0"],
    "zimage": ["to_k", "to_q", "to_v", "to_out.0"],
    "cogvideox": ["to_k", "to_q", "to_v", "to_out.0"],
}  # fmt: skip
"""Family → `target_modules` of diffusers' script for it, at 58eb52c0."""
KONTEXT = [*SCRIPTS["flux"], "proj_mlp"]


@pytest.mark.edge("BR15")
@pytest.mark.parametrize("family", [*SCRIPTS, "kontext"])
def test_a_generator_is_adapted_as_by_the_script_of_diffusers(family: str, tmp_path: Path) -> None:
    import diffusers
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    from tests.helpers.tiny_generator_families import FAMILIES

    FAMILIES[{"zimage": "z_image", "kontext": "flux"}.get(family, family)].make(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    if family == "kontext":
        (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}))
    theirs = getattr(diffusers, index["transformer"][1]).from_pretrained(tmp_path / "transformer")
    theirs.add_adapter(LoraConfig(r=2, target_modules=SCRIPTS.get(family, KONTEXT)))
    expected = {name for name, module in theirs.named_modules() if isinstance(module, LoraLayer)}
    assert targets(tmp_path) == expected


@pytest.mark.edge("BR15")
def test_a_run_of_an_older_version_keeps_its_layers(generators: dict[str, Path], folders: dict[str, Path]) -> None:
    """Their resolved.yaml holds q_proj, k_proj, v_proj, which meant the attention layers of a generator."""
    older = targets(generators["flux"], target_modules=["q_proj", "k_proj", "v_proj"])
    assert older and all(".attn." in name for name in older)
    ends = {name.rpartition(".")[2] for name in targets(folders["text"], target_modules=["q_proj", "k_proj", "v_proj"])}
    assert ends == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.edge("BR15")
def test_errors_list_the_linear_layers(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as raised:
        targets(folders["text"], target_modules=["query"])
    assert "Linear layers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(raised.value)
    with pytest.raises(ConfigError, match="freezes"):
        model = ModelHub.build(ModelArguments(model_name_or_path=str(folders["text"])))
        model.requires_grad_(False)
        apply_lora(model, LoraArguments(enable=True))


@pytest.mark.edge("BR15")
def test_adapters_go_on_with_the_layers_of_their_file(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    words = ("training.train_iters=1", "training.lora.enable=true", "training.lora.rank=2", "training.lora.alpha=4")
    train(yaml, tmp_path / "one", *words, "training.lora.target_modules=[q_proj, down_proj]")
    export.run(ExportRequest(tmp_path / "one", tmp_path / "adapter"))
    train(yaml, tmp_path / "two", *words, f"training.lora.pretrained_lora_path={tmp_path / 'adapter'}")
    assert tensors(tmp_path / "two").keys() == tensors(tmp_path / "one").keys()
    assert mm("check", yaml, *words).code == 0
