"""Tensor and context parallelism through the trainer equal one process, in fp64: a vision-language model on uneven
rows, and generators, alone and with sharding, accumulation, recompute and adapters."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_run import make_tiny_run

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
TP = "parallel.tensor_parallel_size=2"
RING, ULYSSES = "parallel.ring_attention_size=2", "parallel.ulysses_parallel_size=2"

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
    "flux fsdp2 × ulysses2": ("flux", 4, 2, 1, (ULYSSES,)),
}
SLOW = {
    "t2v fsdp2 × tp2": ("t2v", 4, 2, 1, (TP,)),
    "t2v fsdp2 × ring2": ("t2v", 4, 2, 2, (RING,)),
    "vlm hsdp × tp2": ("vlm", 4, 2, 1, (TP, "parallel.fully_shard_parallel_size=1")),
    "vlm hsdp × ring2": ("vlm", 4, 2, 1, (RING, "parallel.fully_shard_parallel_size=2")),
    "vlm lora tp2": ("vlm lora", 2, 1, 1, (TP,)),
    "vlm lora ring2": ("vlm lora", 2, 1, 1, (RING,)),
    "flux lora ulysses2": ("flux lora", 2, 1, 1, (ULYSSES,)),
}
FAULTS = {"gradients averaged over ranks": "vlm fsdp2 × ring2", "rank's own denominator": "vlm fsdp2 × tp2"}

FP64 = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ...]:
    folder = tmp_path_factory.mktemp("plans")
    made = {"vlm": make_tiny_run(folder / "vlm", **FP64)}
    made |= {family: make_tiny_generator_run(folder / family, family, **FP64) for family in ("flux", "t2v")}
    return tuple((name, str(path)) for name, path in made.items())


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
        for fault, name in FAULTS.items():
            if not slow and cases[name][1] == ranks:
                model, _, data_ranks, accumulation, words = cases[name]
                measured[fault] = train_steps(*run_of(model, yamls, data_ranks, accumulation, *words), fault)
    return measured


def float_unless_double(tensor: torch.Tensor) -> torch.Tensor:
    """Models round to fp32 here and there, which would be all that could be seen in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...], slow: bool = False) -> list[dict[str, list[StepRecord]]]:
    return run_ranks(ranks, run_cases, ranks, dict(yamls), slow, timeout_s=400)


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


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yamls: tuple[tuple[str, str], ...]) -> None:
    measured = results_of(CASES[FAULTS[fault]][1], yamls)[0][fault]
    with pytest.raises(ParityError):
        compare_steps(results_of(1, yamls)[0]["vlm"], measured, TOLERANCE)
