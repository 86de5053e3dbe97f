"""Any plan and any split of a batch equals one process, in fp64: loss, every gradient, clip norm, weights after steps.

The runs are whole: the configuration goes through the trainer, on uneven answers of uneven weight and uneven image
counts. Each planted fault goes through the same comparison and must fail it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import FP64, HYBRID
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = make_tiny_run(tmp_path_factory.mktemp("parity"), **FP64)
    give_weights(path.with_name("rows.jsonl"))
    return {"vlm": str(path)}


def give_weights(path: Path) -> None:
    """Answers of some rows count for more or less than others: denominators are fractions."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        if number % 4:
            row["messages"][-1]["weight"] = 0.3 * (number % 4)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


RUNS = ParityRuns(
    __file__,
    cases={
        "accumulation 2": Case("vlm", 1, 1, 2),
        "fsdp 2": Case("vlm", 2, 2, 1),
        "fsdp 4, accumulation 2": Case("vlm", 4, 4, 2),
        "zero-2": Case("vlm", 2, 2, 2, ("parallel.fsdp_plan.reshard_after_forward=false",)),
        "hsdp 2x2": Case("vlm", 4, 4, 1, (HYBRID,)),
        "replicated 2": Case("vlm", 2, 2, 2, ("parallel.fully_shard_parallel_size=1",)),
        "by micro-batch, fsdp 2": Case("vlm by micro-batch", 2, 2, 1),
    },
    slow={
        "accumulation 4": Case("vlm", 1, 1, 4),
        "fsdp 2, accumulation 2": Case("vlm", 2, 2, 2),
        "by micro-batch, ring 2": Case("vlm by micro-batch", 2, 1, 2, ("parallel.ring_attention_size=2",)),
    },
    faults={
        "rank's own denominator": Fault("fsdp 2", "rank's own denominator"),
        "gradients averaged over ranks": Fault("fsdp 4, accumulation 2", "gradients averaged over ranks"),
        "dropped all-reduce": Fault("hsdp 2x2", "dropped all-reduce"),
        "averaged over micro-batches": Fault("accumulation 2", "averaged over micro-batches"),
        "norm of the local shard": Fault("zero-2", "norm of the local shard"),
        "mask off by one": Fault("replicated 2", "mask off by one"),
    },
    kinds={"by micro-batch": ("features.loss_cfg.loss_type=per_micro_batch_loss",)},
    accumulated={"vlm by micro-batch": 2},
    tolerance=1e-10,
)


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
