"""Tensor and context parallelism through the trainer equal one process, in fp64: a vision-language model and one with
experts on uneven rows, and generators; alone, together, and with sharding, accumulation, recompute and adapters."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.distributed.tensor import apply as tensor_parallel
from mindspeed_mm.fsdp.distributed.tensor import forward as tensor_parallel_forward
from mindspeed_mm.fsdp.distributed.tensor.collectives import TensorRanks
from tests.fsdp.distributed.tensor_parallel_step import make_tiny_qwen3_moe
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
TP = "parallel.tensor_parallel_size=2"
RING, ULYSSES = "parallel.ring_attention_size=2", "parallel.ulysses_parallel_size=2"
DECODER = '"*.layers.{*}.input_layernorm", "*.layers.{*}.post_attention_layernorm"'
TOWER = '"*.visual.blocks.{*}.norm1", "*.visual.blocks.{*}.norm2"'
SEQUENCE = f"parallel.tp_plan.sequence_parallel=[{DECODER}]"
SEQUENCE_EVERYWHERE = f"parallel.tp_plan.sequence_parallel=[{DECODER}, {TOWER}]"
SEQUENCE_OF_BLOCKS = 'parallel.tp_plan.sequence_parallel=["blocks.{*}"]'
RECOMPUTE = "features.recompute=true"

CASES = {  # name → (model, ranks, data ranks, accumulation, overrides)
    "vlm tp2": ("vlm", 2, 1, 2, (TP,)),
    "vlm tp2, recompute": ("vlm", 2, 1, 1, (TP, "features.recompute=true")),
    "vlm ring2": ("vlm", 2, 1, 2, (RING,)),
    "vlm ulysses2, recompute": ("vlm", 2, 1, 1, (ULYSSES, "features.recompute=true")),
    "flux tp2": ("flux", 2, 1, 2, (TP,)),
    "flux ring2": ("flux", 2, 1, 1, (RING,)),
    "t2v ulysses2": ("t2v", 2, 1, 2, (ULYSSES,)),
    "vlm fsdp2 × tp2": ("vlm", 4, 2, 1, (TP,)),
    "vlm fsdp2 × ring2": ("vlm", 4, 2, 2, (RING,)),
    "vlm ring2 × ulysses2": ("vlm", 4, 1, 2, (RING, ULYSSES)),
    "vlm tp2 × ring2, sequence": ("vlm", 4, 1, 2, (TP, RING, SEQUENCE_EVERYWHERE)),
    "flux tp2 × ulysses2": ("flux", 4, 1, 1, (TP, ULYSSES)),
    "moe tp2 × ring2": ("moe", 4, 1, 2, (TP, RING)),
}
SLOW = {
    "vlm hsdp × tp2": ("vlm", 4, 2, 1, (TP, "parallel.fully_shard_parallel_size=1")),
    "vlm hsdp × ring2": ("vlm", 4, 2, 1, (RING, "parallel.fully_shard_parallel_size=2")),
    "vlm lora tp2": ("vlm lora", 2, 1, 1, (TP,)),
    "vlm lora ring2": ("vlm lora", 2, 1, 1, (RING,)),
    "flux lora ulysses2": ("flux lora", 2, 1, 1, (ULYSSES,)),
    "vlm tp2 × ring2": ("vlm", 4, 1, 1, (TP, RING)),
    "vlm tp2 × ring2, one row at a time": ("vlm", 4, 1, 8, (TP, RING, SEQUENCE)),
    "vlm tp2 × ulysses2": ("vlm", 4, 1, 2, (TP, ULYSSES)),
    "vlm tp2 × ulysses2, sequence, recompute": ("vlm", 4, 1, 1, (TP, ULYSSES, SEQUENCE_EVERYWHERE, RECOMPUTE)),
    "vlm lora tp2 × ring2, sequence": ("vlm lora", 4, 1, 1, (TP, RING, SEQUENCE)),
    "flux tp2 × ring2, recompute": ("flux", 4, 1, 2, (TP, RING, RECOMPUTE)),
    "t2v tp2 × ring2": ("t2v", 4, 1, 2, (TP, RING)),
    "t2v tp2, sequence, recompute": ("t2v", 2, 1, 1, (TP, SEQUENCE_OF_BLOCKS, RECOMPUTE)),
    "t2v tp2 × ulysses2": ("t2v", 4, 1, 1, (TP, ULYSSES)),
    "moe tp2": ("moe", 2, 1, 2, (TP,)),
    "moe tp2, recompute": ("moe", 2, 1, 1, (TP, RECOMPUTE)),
    "moe tp2 × ulysses2": ("moe", 4, 1, 1, (TP, ULYSSES)),
    "vlm fsdp2 × tp2 × ring2, sequence": ("vlm", 8, 2, 1, (TP, RING, SEQUENCE_EVERYWHERE)),
    "vlm tp2 × ring2 × ulysses2": ("vlm", 8, 1, 1, (TP, RING, ULYSSES)),
    "vlm hsdp × tp2 × ulysses2": ("vlm", 8, 2, 1, (TP, ULYSSES, "parallel.fully_shard_parallel_size=2")),
    "moe fsdp2 × tp2 × ring2": ("moe", 8, 2, 1, (TP, RING)),
    "flux fsdp2 × tp2 × ulysses2": ("flux", 8, 2, 1, (TP, ULYSSES)),
    "t2v fsdp2 × tp2 × ring2": ("t2v", 8, 2, 1, (TP, RING)),
}
FAULTS = {  # name → case
    "gradients averaged over ranks": "vlm fsdp2 × ring2",
    "rank's own denominator": "vlm fsdp2 × tp2",
}
SLOW_FAULTS = {
    "missing-norm-sum": "vlm tp2 × ring2",
    "lost-border-token": "vlm tp2 × ring2",
    "experts' gradients summed over tensor ranks": "moe tp2",
}

FP64 = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ...]:
    folder = tmp_path_factory.mktemp("plans")
    made = {"vlm": make_tiny_run(folder / "vlm", **FP64)}
    made["moe"] = make_tiny_moe_run(folder / "moe")
    made |= {family: make_tiny_generator_run(folder / family, family, **FP64) for family in ("flux", "t2v")}
    return tuple((name, str(path)) for name, path in made.items())


def make_tiny_moe_run(folder: Path) -> Path:
    """A run of a text decoder with four experts a layer, two a token."""
    folder.mkdir()
    make_tiny_qwen3_moe(folder / "model")
    with make_rows(folder).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        row["images"], row["messages"][0]["content"] = [], "What is it like?"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_tiny_run(folder, **FP64)


def run_of(model: str, yamls: dict[str, str], data_ranks: int, accumulation: int, *words: str) -> tuple[str, list[str]]:
    micro = GLOBAL_BATCH // data_ranks // accumulation
    sizes = [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}"]
    family, *adapters = model.split()
    return yamls[family], [*sizes, *words, *(["training.lora.enable=true"] if adapters else [])]


def run_cases(ranks: int, yamls: dict[str, str], slow: bool) -> dict[str, list[StepRecord]]:
    """Every case that takes this many ranks; 1: the references."""
    cases = SLOW if slow else CASES
    measured = {}
    with mock.patch.object(torch.Tensor, "float", float_unless_double):
        if ranks == 1:
            return {model: train_steps(*run_of(model, yamls, 1, 1)) for model in {case[0] for case in cases.values()}}
        for name, (model, needed, data_ranks, accumulation, words) in cases.items():
            if needed == ranks:
                measured[name] = train_steps(*run_of(model, yamls, data_ranks, accumulation, *words))
        for fault, name in (SLOW_FAULTS if slow else FAULTS).items():
            if cases[name][1] == ranks:
                model, _, data_ranks, accumulation, words = cases[name]
                run = run_of(model, yamls, data_ranks, accumulation, *words)
                with OWN_FAULTS.get(fault, nullcontext)():
                    measured[fault] = train_steps(*run, None if fault in OWN_FAULTS else fault)
    return measured


def experts_summed() -> Any:
    """As if each tensor rank computed a part of what experts return."""
    real = tensor_parallel.apply_tensor_parallel

    def with_experts(model: torch.nn.Module, tp_plan: Any, mesh: Any, **more: Any) -> Any:
        plan, ranks = real(model, tp_plan, mesh, **more), TensorRanks(mesh)
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.forward = tensor_parallel_forward.LocalForward(module, ranks)
        return plan

    return mock.patch.object(torch_parallelize, "apply_tensor_parallel", with_experts)


OWN_FAULTS = {"experts' gradients summed over tensor ranks": experts_summed}


def float_unless_double(tensor: torch.Tensor) -> torch.Tensor:
    """Models round to fp32 here and there, which would be all that could be seen in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...], slow: bool = False) -> list[dict[str, list[StepRecord]]]:
    return run_ranks(ranks, run_cases, ranks, dict(yamls), slow, timeout_s=600)


def check(name: str, yamls: tuple[tuple[str, str], ...], slow: bool) -> None:
    model, ranks, *_ = (SLOW if slow else CASES)[name]
    expected = results_of(1, yamls, slow)[0][model]
    for measured in results_of(ranks, yamls, slow):
        compare_steps(expected, measured[name], TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_plan_equals_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_plans_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=True)


def check_fault(fault: str, yamls: tuple[tuple[str, str], ...], slow: bool) -> None:
    model, ranks, *_ = (SLOW if slow else CASES)[(SLOW_FAULTS if slow else FAULTS)[fault]]
    measured = results_of(ranks, yamls, slow)[0][fault]
    with pytest.raises(ParityError):
        compare_steps(results_of(1, yamls, slow)[0][model], measured, TOLERANCE)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check_fault(fault, yamls, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOW_FAULTS)
def test_more_planted_faults_are_found(fault: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check_fault(fault, yamls, slow=True)
