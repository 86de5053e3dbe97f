"""Checkpoints of adapters: what they hold, that a run goes on from them to the bit, and under which plans.

The runs are whole: the configuration goes through the trainer.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.core.errors import CheckpointError, ConfigError
from mindspeed_mm.fsdp.checkpoint.base_weights import base_weights_mark
from mindspeed_mm.fsdp.checkpoint.committed import open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors
from mindspeed_mm.fsdp.checkpoint.resume import check_resumable
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.fsdp.checkpoint.small_run import differing, everything
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

LORA = {"enable": True, "rank": 4, "alpha": 12, "dropout": 0.1}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of four steps that save every two, of a language model and of a generator."""
    root = tmp_path_factory.mktemp("adapters")
    training = {"lora": LORA, "train_iters": 4, "save_interval": 2, "weight_decay": 0.1}
    return {
        "language": make_tiny_run(root / "language", training=training),
        "generator": make_tiny_generator_run(root / "generator", training=training),
    }


def train(yaml: Path, save: Path, *changes: str, **options: Any) -> TrainEngine:
    engine = Trainer(load_with_plugins(yaml, [f"training.save={save}", *changes]), TrainOptions(**options)).train()
    assert engine is not None
    return engine


@pytest.mark.parametrize("kind", ["language", "generator"])
def test_resume_is_bitwise_and_holds_adapters_only(kind: str, yamls: dict[str, Path], tmp_path: Path) -> None:
    straight = train(yamls[kind], tmp_path / "straight")
    train(yamls[kind], tmp_path / "broken", steps=2)
    resumed = train(yamls[kind], tmp_path / "broken")
    assert resumed.iteration == 4
    expected, found = (everything(engine.model, engine.optimizer) for engine in (straight, resumed))
    assert differing(expected, found) == []
    lora = facts_of(resumed.model).lora
    held = DcpTensors(open_checkpoint(tmp_path / "broken", Ranks(), "hash")).lazy()
    assert lora is not None and held.keys() == lora.trained and all(map(is_adapter_weight, held))
    moved = [name for name in held if name.endswith("lora_B.default.weight") and expected[name].any()]
    assert len(moved) == len(lora.targets)


def test_a_frozen_base_does_not_move_and_modules_trained_whole_do(yamls: dict[str, Path], tmp_path: Path) -> None:
    whole = "training.lora.modules_to_save=[model.language_model.norm]"
    engine = train(yamls["language"], tmp_path / "run", whole)
    name = "model.language_model.norm.weight"
    held = DcpTensors(open_checkpoint(tmp_path / "run", Ranks(), "hash")).lazy()
    assert name in held and not torch.equal(held[name].read(), torch.ones_like(held[name].read()))
    trained = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    assert trained == set(held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.lora.rank=8", r"training\.lora\.rank +was 4, is 8"),
        ("training.lora.alpha=4", r"training\.lora\.alpha +was 12.*is 4"),
        ("training.lora.target_modules=[q_proj]", r"training\.lora\.target_modules +was"),
        ("training.lora.enable=false", r"training\.lora\.enable +was true, is false"),
    ],
)
def test_another_run_may_not_go_on(change: str, message: str, saved: Path, yamls: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=message):
        train(yamls["language"], saved, change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.lora.rank=8"], r"28 of another shape.*\[4, 32\] in the checkpoint, \[8, 32\] in the model"),
        (["training.lora.target_modules=[q_proj,o_proj]"], r"0 tensors are missing, 20 unknown"),
        (["training.lora.enable=false"], r"holds adapters only.*mm export --merge"),
    ],
)
def test_adapters_of_another_kind(
    changes: list[str], message: str, saved: Path, yamls: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s){message}"):
        train(yamls["language"], tmp_path, f"training.load={saved}", "training.no_load_optim=true", *changes)


@pytest.fixture(scope="module")
def saved(yamls: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    train(yamls["language"], folder, steps=2)
    return folder


def test_whole_weights_are_no_adapters(yamls: dict[str, Path], tmp_path: Path) -> None:
    train(yamls["language"], tmp_path / "whole", "training.lora.enable=false", steps=2)
    load = (f"training.load={tmp_path / 'whole'}", "training.no_load_optim=true")
    with pytest.raises(CheckpointError, match=r"training\.load  holds whole weights.*mm export") as refused:
        train(yamls["language"], tmp_path / "run", *load)
    checked = mm("check", yamls["language"], f"training.save={tmp_path / 'run'}", *load)
    (problem,) = refused.value.problems
    assert checked.code == 4 and f"{problem.what}. {problem.way_out}" in checked.out


def test_weights_and_a_name_that_do_not_exist(yamls: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'q_prj' matches no module.*'q_proj'"):
        train(yamls["language"], tmp_path, "training.lora.target_modules=[q_prj]")
    assert not list(tmp_path.glob("iter_*"))


def test_mark_of_the_base_weights(yamls: dict[str, Path], tmp_path: Path) -> None:
    model = yamls["language"].parent / "model"
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    mark = base_weights_mark(model)
    assert base_weights_mark(copy) == mark
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = base_weights_mark(copy)
    assert other != mark
    assert base_weights_mark(yamls["generator"].parent / "model") not in {mark, other}
    assert check_resumable({"base_weights": mark}, {"base_weights": mark}) == []
    with pytest.raises(CheckpointError, match=r"model_name_or_path +the folder does not hold the weights"):
        check_resumable({"base_weights": mark}, {"base_weights": other})


def test_a_run_that_goes_on_takes_the_same_base(yamls: dict[str, Path], tmp_path: Path) -> None:
    """Weights that `training.load` names are under the adapters again; other ones are refused."""
    base = Path(shutil.copytree(yamls["language"].parent / "model", tmp_path / "base"))
    other = make_tiny_qwen3_vl(tmp_path / "other", seed=5)
    load = f"training.load={other}"
    train(yamls["language"], tmp_path / "run", load, steps=2)
    resumed = train(yamls["language"], tmp_path / "run", load)
    stored = load_file(other / "model.safetensors")
    layer = "model.language_model.layers.0.self_attn.q_proj"
    assert torch.equal(resumed.model.get_submodule(layer).base_layer.weight, stored[f"{layer}.weight"])  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="does not hold the weights that the adapters were trained on"):
        train(yamls["language"], tmp_path / "run", f"training.load={base}", "training.train_iters=6")
    exported = export.run(ExportRequest(tmp_path / "run", tmp_path / "out", merge=True)).folder
    norm = "model.language_model.norm.weight"
    frozen = "model.language_model.embed_tokens.weight"
    merged = load_file(exported / "model.safetensors")
    assert torch.equal(merged[frozen], stored[frozen]) and torch.equal(merged[norm], stored[norm])


# --- plans ------------------------------------------------------------------------------------------------------------

COMMON = ("training.train_iters=2", "training.lora.dropout=0")
EXACT = (*COMMON, "parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")
SHORT = (*COMMON, "parallel.fsdp_plan.param_dtype=bf16")


@pytest.mark.slow
def test_two_ranks_equal_one(yamls: dict[str, Path]) -> None:
    """In fp64 as one process; with a base in bf16 and adapters in fp32 in one unit it runs, close to fp64. The planted
    fault, gradients averaged over the ranks, is found."""
    single = {kind: trained_only(train_steps(str(yaml), overrides(1, 1, *EXACT))) for kind, yaml in yamls.items()}
    for measured in run_ranks(2, plans_of_two, {kind: str(yaml) for kind, yaml in yamls.items()}):
        with pytest.raises(ParityError):
            compare_steps(single["language"], measured["averaged"], 1e-9)
        for kind, expected in single.items():
            compare_steps(expected, measured[kind], 1e-9)
            short = measured[f"{kind}, bf16"]
            assert abs(float(short[0]["loss"]) / float(expected[0]["loss"]) - 1) < 0.02
            gradients = [g for name, g in short[1]["gradients"].items() if ".lora_A." in name]
            assert gradients and all(g is not None and g.any() and g.dtype == torch.float32 for g in gradients)


def plans_of_two(yamls: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, yaml in yamls.items():
        found[kind] = trained_only(train_steps(yaml, overrides(2, 1, *EXACT)))
        found[f"{kind}, bf16"] = trained_only(train_steps(yaml, overrides(2, 1, *SHORT)))
    fault = "gradients averaged over ranks"
    return {**found, "averaged": trained_only(train_steps(yamls["language"], overrides(2, 1, *EXACT), fault))}


def trained_only(steps: list[Any]) -> list[Any]:
    """The frozen weights of the base are of no interest."""
    kinds = ("gradients", "weights")
    return [
        {**step, **{kind: {n: t for n, t in step[kind].items() if is_adapter_weight(n)} for kind in kinds}}
        for step in steps
    ]
