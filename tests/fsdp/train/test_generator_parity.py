"""Generators under any plan equal one process, in fp64, with raw media, dropped captions, recompute and adapters."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run

TOLERANCE = 1e-10
FAMILIES = ("flux", "t2v")
LORA = "training.lora.enable=true"

PLANS = {
    "accumulation 2": (1, 2, ()),
    "recompute": (1, 1, ("features.recompute=true",)),
    "fsdp 2": (2, 1, ()),
    "fsdp 2, recompute": (2, 2, ("features.recompute=true",)),
    "replicated 2": (2, 2, ("parallel.fully_shard_parallel_size=1",)),
    "hsdp 2x2": (4, 1, ("parallel.fully_shard_parallel_size=2",)),
}

CASES = [
    *(("flux", plan) for plan in PLANS),
    *(("t2v", plan) for plan in ("recompute", "fsdp 2, recompute", "hsdp 2x2")),
    *((f"{family} lora", plan) for family, plan in (("flux", "fsdp 2, recompute"), ("t2v", "replicated 2"))),
]

FAULTS = {
    "rank's own denominator": "replicated 2",
    "gradients averaged over ranks": "fsdp 2",
    "dropped all-reduce": "hsdp 2x2",
}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("generators")
    sections = {
        "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
        "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
    }
    return {family: str(make_tiny_generator_run(folder / family, family, **sections)) for family in FAMILIES}


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...]) -> list[dict[str, list[StepRecord]]]:
    """Every case that takes this many ranks, by rank, in one start of the processes; 1 rank: the references too."""
    return run_ranks(ranks, run_cases, ranks, dict(yamls), timeout_s=240)


def run_cases(ranks: int, yamls: dict[str, str]) -> dict[str, list[StepRecord]]:
    wanted = {f"{name}, {plan}": (name, plan, None) for name, plan in CASES}
    wanted |= {fault: ("flux", plan, fault) for fault, plan in FAULTS.items()}
    measured = {}
    with mock.patch.object(torch.Tensor, "float", float_unless_double):
        for case, (name, plan, fault) in wanted.items():
            needed, accumulation, words = PLANS[plan]
            if needed == ranks:
                measured[case] = train_steps(*run_of(name, yamls, ranks, accumulation, *words), fault)
        if ranks == 1:
            for name in {name for name, _ in CASES}:
                measured[name] = train_steps(*run_of(name, yamls, 1, 1))
    return measured


def run_of(name: str, yamls: dict[str, str], ranks: int, accumulation: int, *words: str) -> tuple[str, list[str]]:
    family, *adapters = name.split()
    return yamls[family], overrides(ranks, accumulation, *words, *([LORA] if adapters else []))


def float_unless_double(tensor: torch.Tensor) -> torch.Tensor:
    """Wan rounds to fp32 inside of its blocks, which would be all that could be seen in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def reference(name: str, yamls: dict[str, str]) -> list[StepRecord]:
    return results_of(1, tuple(yamls.items()))[0][name]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_plan_equals_one_process(name: str, plan: str, yamls: dict[str, str]) -> None:
    expected = reference(name, yamls)
    for measured in results_of(PLANS[plan][0], tuple(yamls.items())):
        compare_steps(expected, measured[f"{name}, {plan}"], TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_is_equal_to_the_bit(name: str, yamls: dict[str, str]) -> None:
    compare_steps(reference(name, yamls), reference(f"{name}, recompute", yamls), 0.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    measured = results_of(PLANS[FAULTS[fault]][0], tuple(yamls.items()))[0][fault]
    with pytest.raises(ParityError):
        compare_steps(reference("flux", yamls), measured, TOLERANCE)
