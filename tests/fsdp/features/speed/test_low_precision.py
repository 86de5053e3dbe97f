"""Linear layers in 8 bits, by the arithmetic that a CPU can follow: converted, trained, sharded, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from mindspeed_mm.core.errors import MachineError, MMError
from mindspeed_mm.fsdp.features.speed import low_precision
from mindspeed_mm.fsdp.features.speed.low_precision import LowPrecision, MxForward, apply_low_precision
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.training_args import QuantizationPlan
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3
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


def test_experts_are_reported_where_a_file_wants_them_converted(folder: Path) -> None:
    """`quantize.moe.mx` of MindSpeed-MM's files for mixtures of experts: taken beside linear layers, and not alone."""
    model = build(folder)
    apply_low_precision(model, plan("mxfp8", quant_converters=["quantize.linear.mx", "quantize.moe.mx"]))
    noted = facts_of(model).noted(LowPrecision)
    assert noted is not None and noted.layers == len(linear_names(model)) > 0
    assert "grouped products of experts (not converted)" in str(noted)
    with pytest.raises(MMError, match=r"there is no converter 'quantize.moe.mx'"):
        apply_low_precision(build(folder), plan("mxfp8", quant_converters=["quantize.moe.mx"]))


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


@pytest.mark.slow
def test_sharded_and_gathered_in_8_bits_is_the_same_step(tmp_path: Path) -> None:
    """Weights that are cast before they are gathered, with scales found one by one or together, are those that are cast
    afterwards: the scale is that of the whole weight either way."""
    yaml, words = make(tmp_path), [*overrides(2, 2), "training.train_iters=2", *ON]
    expected = run_ranks(1, train_steps, yaml, [*overrides(1, 4), "training.train_iters=2", *ON, WHOLE])[0]
    for more in ([WHOLE], [], [TOGETHER]):
        for measured in run_ranks(2, train_steps, yaml, [*words, *more]):
            compare_steps(expected, measured, 2e-3)


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
