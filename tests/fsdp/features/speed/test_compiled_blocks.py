"""Compiled blocks give the same loss and gradients as plain ones, under every feature that stands around them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.speed import compiled_blocks
from mindspeed_mm.fsdp.features.speed.compiled_blocks import GraphCount, modules_to_compile
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.attention import register_attention
from mindspeed_mm.fsdp.params.feature_args import CompilePlan, FeatureArguments
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import PATCH_SIZE, VOCAB_SIZE, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

TRACED = {"compile": True, "compile_plan": {"backend": "aot_eager"}}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def build(folder: Path) -> nn.Module:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).double()
    model.set_attn_implementation(register_attention())
    return model.train()


def batch(model: Any, words: int, rows: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(words)
    picture = torch.full((rows, 4), model.config.image_token_id)
    tokens = torch.randint(10, VOCAB_SIZE // 2, (rows, words), generator=generator)
    return {
        "input_ids": torch.cat([picture, tokens], 1),
        "pixel_values": torch.randn(rows * 16, 3 * 2 * PATCH_SIZE**2, generator=generator).double(),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": torch.cat([torch.ones_like(picture), torch.zeros_like(tokens)], 1),
        "use_cache": False,
    }


def packed(model: Any, *lengths: int) -> dict[str, Any]:
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.randint(10, 99, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    ends = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    return {"input_ids": ids, "position_ids": places.expand(4, 1, -1), "use_cache": False} | longest | ends


def outcome(model: nn.Module, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    loss = sum(model(**each).logits.square().mean() for each in batches)
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.allclose(one[name], other[name], rtol=1e-12, atol=1e-14)]


def applied(model: nn.Module, **features: Any) -> nn.Module:
    return FeaturesApplier(FeatureArguments.model_validate(TRACED | features), find_blocks(model))(model)


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [{}, {"recompute": True}], ids=["", "recompute"])
def test_loss_gradients_and_names_are_those_of_plain_blocks(folder: Path, features: dict[str, Any]) -> None:
    plain = build(folder)
    compiled = applied(copy.deepcopy(plain), **features)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in compiled.named_parameters()]
    batches = [batch(plain, words) for words in (9, 12, 15)]
    count = GraphCount()
    assert differing(outcome(plain, batches), outcome(compiled, batches)) == []
    # Of two kinds of blocks, those of towers in pieces around their attention, each with fixed and with variable sizes.
    assert 0 < count.graphs <= 8
    settled = count.graphs
    outcome(compiled, [batch(plain, words) for words in (21, 30)])
    assert count.graphs == settled


def test_packed_rows_are_not_compiled_again_for_other_borders(folder: Path) -> None:
    plain = build(folder)
    apply_packed_rows(plain)
    compiled = applied(copy.deepcopy(plain), compile_plan={"backend": "aot_eager", "apply_modules": ["*.layers.{*}"]})
    rows = [packed(plain, 7, 9), packed(plain, 3, 4, 9), packed(plain, 5, 11), packed(plain, 2, 3, 4, 7)]
    count = GraphCount()
    assert differing(outcome(plain, rows[:2]), outcome(compiled, rows[:2])) == []
    settled = count.graphs
    assert settled > 0
    assert differing(outcome(plain, rows), outcome(compiled, rows)) == []
    assert count.graphs == settled


def test_a_copy_runs_its_own_weights(folder: Path) -> None:
    compiled = applied(build(folder))
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        twin.model.language_model.layers[0].mlp.down_proj.weight.zero_()
    one, other = (outcome(each, [batch(each, 9)]) for each in (compiled, twin))
    assert not torch.equal(one["loss"], other["loss"])


# --- through the trainer ----------------------------------------------------------------------------------------------

ON = ("features.compile=true", "features.compile_plan.backend=aot_eager")
BASIC = "data.dataset_param.basic_parameters"
PACKING = (f"{BASIC}.packing=true", f"{BASIC}.cutoff_len=128", "training.micro_batch_size=1")
LORA = ("training.lora.enable=true", "training.lora.target_modules=[q_proj,down_proj]")
AUX = "features.loss_cfg.router_aux_loss_coef=0.01"
CASES: dict[str, tuple[str, list[str]]] = {
    "vlm": ("vlm", []),
    "vlm, packed, recompute": ("vlm", [*PACKING, "features.recompute=true"]),
    "moe": ("moe", [AUX]),
    "lora": ("vlm", [*LORA]),
    "wan": ("wan", []),
}


def make(folder: Path, family: str) -> str:
    if family == "wan":
        return str(make_tiny_generator_run(folder, "t2v"))  # in fp32: a graph does not see that fp64 stays
    if family == "moe":
        from tests.helpers.tiny_models import make_tiny_qwen3_moe

        make_tiny_qwen3_moe(folder / "model")
        make_rows(folder, images=(0,))
    return str(make_tiny_run(folder, **FP64))


def steps(yaml: str, words: list[str]) -> Any:
    with keeping_double():
        return train_steps(yaml, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sharded_steps_through_the_trainer(name: str, tmp_path: Path) -> None:
    family, more = CASES[name]
    yaml = make(tmp_path, family)
    words = [*overrides(2, 2), "training.train_iters=2", *more]
    work = train_steps if family == "wan" else steps
    expected = run_ranks(2, work, yaml, words)
    measured = run_ranks(2, work, yaml, [*words, *ON])
    for plain, compiled in zip(expected, measured, strict=True):
        compare_steps(plain, compiled, 2e-5 if family == "wan" else 1e-11)


def broken(yaml: str, words: list[str]) -> Any:
    """A compiler that doubles the outputs of a block's last operation would be seen."""
    real = compiled_blocks.CompiledForward

    def compiled_forward(forward: Any, kind: Any) -> Any:
        return real(lambda *args, **kwargs: forward(*args, **kwargs) * 1.001, kind)

    compiled_blocks.CompiledForward = compiled_forward  # type: ignore[assignment,misc]
    return steps(yaml, words)


@pytest.mark.slow
def test_a_fault_is_seen(tmp_path: Path) -> None:
    yaml = make(tmp_path, "vlm")
    words = [*overrides(1, 2), "training.train_iters=2"]
    plain = run_ranks(1, steps, yaml, words)[0]
    with pytest.raises(ParityError):
        compare_steps(plain, run_ranks(1, broken, yaml, [*words, *ON])[0], 1e-11)


@pytest.mark.slow
def test_inductor_makes_kernels(folder: Path) -> None:
    plain = build(folder)
    plan = {"apply_modules": ["*.layers.{0-0}"]}
    compiled = applied(copy.deepcopy(plain), compile_plan=plan)
    batches = [batch(plain, 9)]
    one, other = outcome(plain, batches), outcome(compiled, batches)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-8)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "key", "words"),
    [
        ({"backend": "inducter"}, "backend", "Did you mean 'inductor'"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "mode", "takes no modes"),
        ({"backend": "aot_eager", "apply_modules": ["*.layer.{*}"]}, "apply_modules", "match"),
        ({"backend": "aot_eager", "apply_modules": ["*.layers"]}, "apply_modules", "never called itself"),
    ],
)
def test_what_cannot_be_compiled_is_one_error(folder: Path, plan: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        applied(build(folder), compile_plan=plan)
    assert caught.value.problems[0].key == f"features.compile_plan.{key}"


def test_inductor_without_a_compiler_is_one_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks.shutil, "which", lambda _name: None)
    with pytest.raises(MachineError, match="C\\+\\+ compiler"):
        applied(build(folder), compile_plan={})


def test_of_modules_inside_each_other_the_outer_one_is_compiled(folder: Path) -> None:
    plan = CompilePlan(apply_modules=("*.layers.{*}", "*.layers.{*}.mlp"))
    found = modules_to_compile(build(folder), plan, ())
    assert found == [f"model.language_model.layers.{n}" for n in range(3)]
