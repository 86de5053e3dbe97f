"""Any plan and any split of a batch equals one process, in fp64: loss, every gradient, clip norm, weights after steps.

The runs are whole: the configuration goes through the trainer, on uneven answers of uneven weight and uneven image
counts. Each planted
fault goes through the same comparison and must fail it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_run import make_tiny_run

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("parity")
    path = make_tiny_run(
        folder,
        parallel={"fsdp_plan": {"param_dtype": "fp64"}},
        training={"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
    )
    give_weights(folder / "rows.jsonl")
    return str(path)


def give_weights(path: Path) -> None:
    """Answers of some rows count for more or less than others: denominators are fractions."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        if number % 4:
            row["messages"][-1]["weight"] = 0.3 * (number % 4)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


PLANS = {
    "accumulation 2": (1, 2, ()),
    "accumulation 4": (1, 4, ()),
    "fsdp 2": (2, 1, ()),
    "fsdp 2, accumulation 2": (2, 2, ()),
    "fsdp 4, accumulation 2": (4, 2, ()),
    "zero-2": (2, 2, ("parallel.fsdp_plan.reshard_after_forward=false",)),
    "hsdp 2x2": (4, 1, ("parallel.fully_shard_parallel_size=2",)),
    "replicated 2": (2, 2, ("parallel.fully_shard_parallel_size=1",)),
}

FAULTS = {
    "rank's own denominator": "fsdp 2",
    "gradients averaged over ranks": "fsdp 4, accumulation 2",
    "dropped all-reduce": "hsdp 2x2",
    "averaged over micro-batches": "accumulation 2",
    "norm of the local shard": "zero-2",
    "mask off by one": "replicated 2",
}


@pytest.fixture(scope="module")
def reference(yaml: str) -> list[StepRecord]:
    return run_ranks(1, train_steps, yaml, overrides(1, 1))[0]


@cache
def results_of(ranks: int, yaml: str) -> list[dict[str, list[StepRecord]]]:
    """Every plan and fault that takes this many ranks, by rank, in one start of the processes."""
    return run_ranks(ranks, run_cases, ranks, yaml, timeout_s=240)


def run_cases(ranks: int, yaml: str) -> dict[str, list[StepRecord]]:
    cases = {plan: (plan, None) for plan in PLANS} | {fault: (plan, fault) for fault, plan in FAULTS.items()}
    mine = {name: case for name, case in cases.items() if PLANS[case[0]][0] == ranks}
    return {
        name: train_steps(yaml, overrides(ranks, PLANS[plan][1], *PLANS[plan][2]), fault)
        for name, (plan, fault) in mine.items()
    }


@pytest.mark.parametrize("plan", PLANS)
def test_plan_equals_one_process(plan: str, yaml: str, reference: list[StepRecord]) -> None:
    for measured in results_of(PLANS[plan][0], yaml):
        compare_steps(reference, measured[plan], TOLERANCE)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yaml: str, reference: list[StepRecord]) -> None:
    with pytest.raises(ParityError):
        compare_steps(reference, results_of(PLANS[FAULTS[fault]][0], yaml)[0][fault], TOLERANCE)
