"""Linear layers and experts in 8 bits, by the arithmetic that a CPU can follow: converted, trained, sharded, spread,
saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from mindspeed_mm.core.errors import MachineError, MMError
from mindspeed_mm.fsdp.features.speed import low_precision
from mindspeed_mm.fsdp.features.speed.low_precision import RECIPES, LowPrecision, apply_low_precision
from mindspeed_mm.fsdp.features.speed.mx_products import MxForward, MxGroupedLinear
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops import experts
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.training_args import QuantizationPlan
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao
from mindspeed_mm.tasks.check import check
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import EP
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

EMULATED = {"emulate": True}


def linear_names(model: nn.Module) -> list[str]:
    """Names of the layers that compute in 8 bits."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "Float8Linear" or isinstance(module.forward, MxForward)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def build(folder: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder)


def plan(recipe: str = "tensorwise", **more: Any) -> QuantizationPlan:
    return QuantizationPlan.model_validate({"recipe_name": recipe, "extra_args": EMULATED} | more)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 200, (2, 17), generator=torch.Generator().manual_seed(1))
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error_of(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n].float() - other[n].float()).norm() / one[n].norm()) for n in one)


@pytest.mark.parametrize("recipe", ["fp8", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_gradients_are_near_and_names_are_the_same(recipe: str, folder: Path) -> None:
    model, plain = build(folder), build(folder)
    names = list(plain.state_dict())
    apply_low_precision(model, plan(recipe))
    assert list(model.state_dict()) == names
    assert all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in model.state_dict().values())
    assert len(linear_names(model)) == 14
    assert 1e-3 < error_of(gradients(plain), gradients(model)) < 0.25  # three bits of mantissa
    described = str(facts_of(model).noted(LowPrecision))
    assert "14 linear layers" in described and "lm_head (the output head)" in described


def test_rows_that_fill_no_block_are_computed_as_those_that_do(folder: Path) -> None:
    """Microscaling sums over blocks of 32 rows; 2 × 17 of them leave a rest, and biases count."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32))
    exact = [torch.zeros_like(p) for p in layer.parameters()]
    x = torch.randn(2, 17, 64)
    layer(x).square().sum().backward()
    exact = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    apply_low_precision(layer, plan("mxfp8"))
    layer(x).square().sum().backward()
    for one, parameter in zip(exact, layer.parameters(), strict=True):
        assert float((one - parameter.grad).norm() / one.norm()) < 0.1


def test_patterns_choose_layers_and_holders(folder: Path) -> None:
    model = build(folder)
    chosen = plan(apply_modules=["model.layers.{*}.mlp"], ignored_modules=["*.down_proj"])
    apply_low_precision(model, chosen)
    assert sorted(linear_names(model)) == [
        f"model.layers.{n}.mlp.{name}_proj" for n in range(2) for name in ("gate", "up")
    ]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("mixture"), moe_intermediate_size=32)


def build_mixture(folder: Path) -> Any:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder)


EXPERTS = "quantize.moe.mx"
BOTH = ["quantize.linear.mx", EXPERTS]
OF_MINDSPEED_MM = {
    "apply_modules": ["model.layers.{*}"],
    "ignored_modules": ["*lm_head", "*gate"],
    "quant_converters": BOTH,
    "enable_fsdp_low_precision_all_gather": True,
    "fsdp_low_precision_all_gather_mode": "on-demand",
}
"""As its file for a mixture of experts."""


def expert_names(model: nn.Module) -> list[str]:
    """Names of the modules whose grouped products are microscaled."""
    modules = model.named_modules()
    return [name for name, each in modules if isinstance(vars(each).get(experts._PRODUCT), MxGroupedLinear)]


@pytest.mark.parametrize(
    ("more", "linears", "layers", "said"),
    [
        ({"quant_converters": BOTH}, 8, [0, 1], "mxfp8, 8 linear layers, 2 layers of experts, weights gathered in the"),
        ({"quant_converters": [EXPERTS]}, 0, [0, 1], "mxfp8, 0 linear layers, 2 layers of experts"),
        ({"quant_converters": BOTH, "ignored_modules": ["*.1.mlp.experts"]}, 8, [0], "1 layers of experts"),
        ({"quant_converters": BOTH, "apply_modules": ["model.layers.1"]}, 4, [1], "1 layers of experts"),
        (OF_MINDSPEED_MM, 8, [0, 1], "mxfp8, 8 linear layers, 2 layers of experts"),
        ({}, 8, [], "mxfp8, 8 linear layers, weights gathered in the"),
    ],
)
def test_experts_are_converted_where_a_plan_names_their_converter(
    mixture: Path, more: dict[str, Any], linears: int, layers: list[int], said: str
) -> None:
    model, plain = build_mixture(mixture), build_mixture(mixture)
    apply_low_precision(model, plan("mxfp8", **more))
    assert len(linear_names(model)) == linears
    assert expert_names(model) == [f"model.layers.{layer}.mlp.experts" for layer in layers]
    assert said in str(facts_of(model).noted(LowPrecision))
    assert list(model.state_dict()) == list(plain.state_dict())


def test_gradients_of_experts_are_near(mixture: Path) -> None:
    """With the linear layers as they are: what is rounded before a router makes it choose others."""
    model, plain = build_mixture(mixture), build_mixture(mixture)
    apply_low_precision(model, plan("mxfp8", quant_converters=[EXPERTS]))
    found, exact = gradients(model), gradients(plain)
    for name in (name for name in exact if "experts" in name):
        error = float((found[name] - exact[name]).norm() / exact[name].norm())
        assert 1e-2 < error < 0.25


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe_name": "fp8"}, "has no products of experts with the recipe 'tensorwise'"),
        ({"quant_converters": ["quantize.moe.mxx"]}, "Did you mean 'quantize.moe.mx'"),
        ({"ignored_modules": ["*.experts"]}, "the patterns of the plan take none of them"),
    ],
)
def test_a_plan_for_experts_that_takes_none_is_refused(mixture: Path, changes: dict[str, Any], words: str) -> None:
    model = build_mixture(mixture)
    with pytest.raises(MMError) as caught:
        apply_low_precision(model, plan(**{"recipe_name": "mxfp8", "quant_converters": BOTH} | changes))
    assert words in str(caught.value)
    assert caught.value.problems[0].key == "training.quantization_plan.quant_converters"
    assert expert_names(model) == []


def test_experts_that_no_grouped_product_of_ours_computes_are_refused(folder: Path, mixture: Path) -> None:
    with pytest.raises(MMError, match="Qwen3ForCausalLM has no experts in fused parameters"):
        apply_low_precision(build(folder), plan("mxfp8", quant_converters=BOTH))
    model = build_mixture(mixture)
    model.model.layers[1].mlp.experts.ep_forward = lambda *args: args
    with pytest.raises(MMError, match=r"'model.layers.1.mlp.experts' has a forward of its own"):
        apply_low_precision(model, plan("mxfp8", quant_converters=BOTH))


def test_experts_on_a_device_need_kernels_and_sizes_of_theirs(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao's kernels take multiples of 128, and need packages of their own."""
    monkeypatch.setattr(low_precision, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(low_precision, "device_capability", lambda: (10, 0))
    with pytest.raises(MMError, match="take multiples of 128"):
        apply_low_precision(build_mixture(mixture), plan("mxfp8", quant_converters=BOTH, extra_args={}))
    wide = make_tiny_qwen3_moe(tmp_path, hidden_size=128, moe_intermediate_size=64)
    model = build_mixture(wide)
    with pytest.raises(MMError, match="down_proj' holds weights of 128 × 64"):
        apply_low_precision(model, plan("mxfp8", quant_converters=BOTH, extra_args={}))
    for layer in model.model.layers:
        layer.mlp.experts.down_proj = nn.Parameter(torch.zeros(8, 128, 128))
    with pytest.raises(MachineError, match="torchao's kernels for grouped products are not here"):
        apply_low_precision(model, plan("mxfp8", quant_converters=BOTH, extra_args={}))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_gathers_in_8_bits_what_recipes_say(recipe: str) -> None:
    config = load_torchao("float8", key="test").Float8LinearConfig.from_recipe_name(recipe)
    if RECIPES[recipe].gathers_low:
        assert replace(config, enable_fsdp_float8_all_gather=True).enable_fsdp_float8_all_gather
    else:
        with pytest.raises(AssertionError, match="only supports tensorwise"):
            replace(config, enable_fsdp_float8_all_gather=True)


@pytest.mark.parametrize(
    ("recipe", "asked", "keys"),
    [
        ("rowwise", {"enable_fsdp_low_precision_all_gather": True}, ["enable_fsdp_low_precision_all_gather"]),
        ("mxfp8", {"fsdp_low_precision_all_gather_mode": "all"}, ["fsdp_low_precision_all_gather_mode"]),
        ("rowwise", {"enable_fsdp_low_precision_all_gather": False}, []),
        ("rowwise", {}, []),
        ("fp8", {"enable_fsdp_low_precision_all_gather": True}, []),
    ],
)
def test_weights_that_are_not_gathered_in_8_bits_as_was_asked_are_a_warning(
    recipe: str, asked: dict[str, Any], keys: list[str], folder: Path
) -> None:
    model = build(folder)
    apply_low_precision(model, plan(recipe, **asked))
    noted = facts_of(model).noted(LowPrecision)
    assert noted is not None and noted.gathers_low is (recipe == "fp8")
    found = [warning.partition(" has no effect: torchao gathers weights in 8 bits with tensorwise")
             for warning in noted.warnings]  # fmt: skip
    assert [(key, bool(reason)) for key, reason, _ in found] == [
        (f"training.quantization_plan.{key}", True) for key in keys
    ]


def test_of_a_holder_the_layers_that_fit_are_taken(folder: Path) -> None:
    model = build(folder)
    model.model.layers[0].mlp.gate_proj = nn.Linear(32, 63, bias=False)
    apply_low_precision(model, plan(apply_modules=["model.layers.0"]))
    assert len(linear_names(model)) == 6
    assert "model.layers.0.mlp.gate_proj (not a multiple of 16)" in str(facts_of(model).noted(LowPrecision))


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"recipe_name": "rowise"}, "recipe_name", "Did you mean 'rowwise'"),
        ({"quant_converters": ["quantize.grouped_mm.mx"]}, "quant_converters", "Linear layers are converted"),
        ({"extra_args": {"emulat": True}}, "extra_args", "Did you mean 'emulate'"),
        ({"apply_modules": ["*.norm"]}, "apply_modules", "holds no linear layer"),
        ({"apply_modules": ["*.qkv"]}, "apply_modules", "match"),
        ({"apply_modules": ["odd"]}, "apply_modules", "multiples of 16"),
        ({"extra_args": {}}, "recipe_name", "a CPU has none"),
        (
            {"recipe_name": "mxfp8", "extra_args": {"block_size": 16, "emulate": True}},
            "extra_args.block_size",
            "are 32",
        ),
        (
            {"recipe_name": "mxfp8", "extra_args": {"scale_calculation_mode": "even", "emulate": True}},
            "extra_args.scale_calculation_mode",
            "There are rceil, floor",
        ),
    ],
)
def test_what_does_not_fit_is_one_error(folder: Path, changes: dict[str, Any], key: str, words: str) -> None:
    model = build(folder)
    model.odd = nn.Linear(16, 17)
    with pytest.raises(MMError) as caught:
        apply_low_precision(model, QuantizationPlan.model_validate(plan().model_dump() | changes))
    assert words in str(caught.value)
    assert caught.value.problems[0].key == f"training.quantization_plan.{key}"


def test_older_devices_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(low_precision, "device_capability", lambda: (8, 0))
    with pytest.raises(MachineError, match=r"compute capability 8\.9, this device has 8\.0"):
        apply_low_precision(build(folder), plan(extra_args={}))
    monkeypatch.setattr(low_precision, "get_device_type", lambda: "npu")
    with pytest.raises(MachineError, match="torchao has for 'npu' none"):
        apply_low_precision(build(folder), plan(extra_args={}))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"lora": {"enable": True}}}, ""),
        ({"parallel": {"tensor_parallel_size": 2}}, ""),
        ({"training": {"quantization_plan": {}}}, ".recipe_name"),
        (
            {
                "training": {
                    "ema": {"enable": True, "use_for_evaluation": True},
                    "quantization_plan": {"recipe_name": "fp8", "fsdp_low_precision_all_gather_mode": "all"},
                }
            },
            ".fsdp_low_precision_all_gather_mode",
        ),
    ],
)
def test_conflicts_are_found_in_the_configuration(sections: dict[str, Any], key: str) -> None:
    sections.setdefault("training", {}).setdefault("quantization_plan", {"recipe_name": "fp8"})
    problems = check_cross_section(Arguments.model_validate(sections))
    assert [p.key for p in problems if "quantization" in p.key] == [f"training.quantization_plan{key}"]


# --- through the trainer ----------------------------------------------------------------------------------------------

ON = ["training.quantization_plan.recipe_name=fp8", "training.quantization_plan.extra_args={emulate: true}"]
WHOLE = "training.quantization_plan.enable_fsdp_low_precision_all_gather=false"
TOGETHER = "training.quantization_plan.fsdp_low_precision_all_gather_mode=all"


def make(folder: Path) -> str:
    make_tiny_qwen3(folder / "model")
    make_rows(folder, images=(0,))
    return str(make_tiny_run(folder))


def test_mm_check_says_what_has_no_effect(tmp_path: Path) -> None:
    words = ["training.quantization_plan.recipe_name=rowwise", ON[1], TOGETHER]
    (said,) = [warning for warning in check.run(Path(make(tmp_path)), words).warnings if "8 bits" in warning]
    assert said.startswith("training.quantization_plan.fsdp_low_precision_all_gather_mode has no effect")


@pytest.mark.slow
def test_sharded_and_gathered_in_8_bits_is_the_same_step(tmp_path: Path) -> None:
    """Weights that are cast before they are gathered, with scales found one by one or together, are those that are cast
    afterwards: the scale is that of the whole weight either way."""
    yaml, words = make(tmp_path), [*overrides(2, 2), "training.train_iters=2", *ON]
    expected = run_ranks(1, train_steps, yaml, [*overrides(1, 4), "training.train_iters=2", *ON, WHOLE])[0]
    for more in ([WHOLE], [], [TOGETHER]):
        for measured in run_ranks(2, train_steps, yaml, [*words, *more]):
            compare_steps(expected, measured, 2e-3)


MX_EXPERTS = [
    "training.quantization_plan.recipe_name=mxfp8",
    "training.quantization_plan.quant_converters=[quantize.moe.mx]",
]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("more", [(), (EP,), (EP, "parallel.ep_plan.dispatcher=allgather")])
def test_experts_under_a_plan_are_the_same_step(more: tuple[str, ...], exact: bool, tmp_path: Path) -> None:
    """A row's products do not depend on the rows beside it. The gradient of a weight does, as blocks of it hold rows of
    one rank: it is compared closely where it stays exact."""
    make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=32, initializer_range=0.3)
    make_rows(tmp_path, images=(0,))
    yaml, settings = str(make_tiny_run(tmp_path)), f"{{emulate: true, wgrad_with_hp: {str(exact).lower()}}}"
    words = [*MX_EXPERTS, f"training.quantization_plan.extra_args={settings}", "training.train_iters=1"]
    expected = run_ranks(1, train_steps, yaml, [*overrides(1, 2), *words])[0]
    for measured in run_ranks(2, train_steps, yaml, [*overrides(2, 1), *words, *more]):
        compare_steps(expected, measured, {True: 1e-2, False: 0.1}[exact])


def saved_keys(folder: Path) -> dict[str, Any]:
    (checkpoint,) = folder.glob("iter_*")
    (metadata,) = [path.parent for path in checkpoint.rglob(".metadata")][:1]
    return dict(dcp.FileSystemReader(metadata).read_metadata().state_dict_metadata)


@pytest.mark.slow
def test_a_checkpoint_is_that_of_a_plain_run_and_resumes(tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.train.configuration import load_with_plugins
    from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
    from mindspeed_mm.fsdp.train.trainer import Trainer

    yaml = make(tmp_path)

    def run(save: str, *more: str) -> None:
        words = [f"training.save={tmp_path / save}", "training.train_iters=2", *more]
        Trainer(load_with_plugins(Path(yaml), words)).train()

    run("plain")
    run("low", *ON)
    plain, low = saved_keys(tmp_path / "plain"), saved_keys(tmp_path / "low")
    assert plain.keys() == low.keys()
    Trainer(load_with_plugins(Path(yaml), [f"training.save={tmp_path / 'low'}", "training.train_iters=3", *ON])).train()
    # And a plain run goes on from it: what is stored are plain weights.
    words = [f"training.load={tmp_path / 'low'}", f"training.save={tmp_path / 'on'}", "training.train_iters=1"]
    assert Trainer(load_with_plugins(Path(yaml), words), TrainOptions(weights_only=True)).train() is not None


def test_a_recipe_is_refused_under_the_name_that_was_given() -> None:
    with pytest.raises(MachineError, match="'fp8' needs 8-bit matrix instructions"):
        low_precision.check_plan(QuantizationPlan(recipe_name="fp8"))
