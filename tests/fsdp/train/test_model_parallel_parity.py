"""Tensor and context parallelism through the trainer equal one process, in fp64: a vision-language model and one with
experts on uneven rows, and generators; alone, together, and with sharding, accumulation, recompute and adapters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.distributed.tensor import apply as tensor_parallel
from mindspeed_mm.fsdp.distributed.tensor import forward as tensor_parallel_forward
from mindspeed_mm.fsdp.distributed.tensor.collectives import TensorRanks
from tests.fsdp.distributed.tensor_parallel_step import make_tiny_qwen3_moe
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import DECODER, FP64, RING, TOWER, TP, ULYSSES
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_run import make_rows, make_tiny_run

SEQUENCE = f"parallel.tp_plan.sequence_parallel=[{DECODER}]"
SEQUENCE_EVERYWHERE = f"parallel.tp_plan.sequence_parallel=[{DECODER}, {TOWER}]"
SEQUENCE_OF_BLOCKS = 'parallel.tp_plan.sequence_parallel=["blocks.{*}"]'
RECOMPUTE = "features.recompute=true"

CASES = {
    "vlm tp2": Case("vlm", 2, 1, 2, (TP,)),
    "vlm ring2": Case("vlm", 2, 1, 2, (RING,)),
    "vlm ulysses2, recompute": Case("vlm", 2, 1, 1, (ULYSSES, "features.recompute=true")),
    "flux tp2": Case("flux", 2, 1, 2, (TP,)),
    "t2v ulysses2": Case("t2v", 2, 1, 2, (ULYSSES,)),
    "vlm fsdp2 × tp2": Case("vlm", 4, 2, 1, (TP,)),
    "vlm fsdp2 × ring2": Case("vlm", 4, 2, 2, (RING,)),
    "vlm tp2 × ring2, sequence": Case("vlm", 4, 1, 2, (TP, RING, SEQUENCE_EVERYWHERE)),
}
SLOW = {
    "moe tp2 × ring2": Case("moe", 4, 1, 2, (TP, RING)),
    "vlm ring2 × ulysses2": Case("vlm", 4, 1, 2, (RING, ULYSSES)),
    "flux ring2": Case("flux", 2, 1, 1, (RING,)),
    "vlm tp2, recompute": Case("vlm", 2, 1, 1, (TP, "features.recompute=true")),
    "flux tp2 × ulysses2": Case("flux", 4, 1, 1, (TP, ULYSSES)),
    "vlm hsdp × tp2": Case("vlm", 4, 2, 1, (TP, "parallel.fully_shard_parallel_size=1")),
    "vlm hsdp × ring2": Case("vlm", 4, 2, 1, (RING, "parallel.fully_shard_parallel_size=2")),
    "vlm lora tp2": Case("vlm lora", 2, 1, 1, (TP,)),
    "vlm lora ring2": Case("vlm lora", 2, 1, 1, (RING,)),
    "flux lora ulysses2": Case("flux lora", 2, 1, 1, (ULYSSES,)),
    "vlm tp2 × ring2": Case("vlm", 4, 1, 1, (TP, RING)),
    "vlm tp2 × ring2, one row at a time": Case("vlm", 4, 1, 8, (TP, RING, SEQUENCE)),
    "vlm tp2 × ulysses2": Case("vlm", 4, 1, 2, (TP, ULYSSES)),
    "vlm tp2 × ulysses2, sequence, recompute": Case("vlm", 4, 1, 1, (TP, ULYSSES, SEQUENCE_EVERYWHERE, RECOMPUTE)),
    "vlm lora tp2 × ring2, sequence": Case("vlm lora", 4, 1, 1, (TP, RING, SEQUENCE)),
    "flux tp2 × ring2, recompute": Case("flux", 4, 1, 2, (TP, RING, RECOMPUTE)),
    "t2v tp2 × ring2": Case("t2v", 4, 1, 2, (TP, RING)),
    "t2v tp2, sequence, recompute": Case("t2v", 2, 1, 1, (TP, SEQUENCE_OF_BLOCKS, RECOMPUTE)),
    "t2v tp2 × ulysses2": Case("t2v", 4, 1, 1, (TP, ULYSSES)),
    "moe tp2": Case("moe", 2, 1, 2, (TP,)),
    "moe tp2, recompute": Case("moe", 2, 1, 1, (TP, RECOMPUTE)),
    "moe tp2 × ulysses2": Case("moe", 4, 1, 1, (TP, ULYSSES)),
    "vlm fsdp2 × tp2 × ring2, sequence": Case("vlm", 8, 2, 1, (TP, RING, SEQUENCE_EVERYWHERE)),
    "vlm tp2 × ring2 × ulysses2": Case("vlm", 8, 1, 1, (TP, RING, ULYSSES)),
    "vlm hsdp × tp2 × ulysses2": Case("vlm", 8, 2, 1, (TP, ULYSSES, "parallel.fully_shard_parallel_size=2")),
    "moe fsdp2 × tp2 × ring2": Case("moe", 8, 2, 1, (TP, RING)),
    "flux fsdp2 × tp2 × ulysses2": Case("flux", 8, 2, 1, (TP, ULYSSES)),
    "t2v fsdp2 × tp2 × ring2": Case("t2v", 8, 2, 1, (TP, RING)),
}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    make_tiny_qwen3_moe(folder / "moe" / "model")  # four experts a layer, two a token
    make_rows(folder / "moe", images=(0,))
    made = {family: make_tiny_run(folder / family, **FP64) for family in ("vlm", "moe")}
    made |= {family: make_tiny_generator_run(folder / family, family, **FP64) for family in ("flux", "t2v")}
    return {family: str(path) for family, path in made.items()}


def experts_summed() -> AbstractContextManager[Any]:
    """As if each tensor rank computed a part of what experts return."""
    real = tensor_parallel.apply_tensor_parallel

    def with_experts(model: torch.nn.Module, tp_plan: Any, mesh: Any, **more: Any) -> Any:
        plan, ranks = real(model, tp_plan, mesh, **more), TensorRanks(mesh)
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.forward = tensor_parallel_forward.LocalForward(module, ranks)
        return plan

    return mock.patch.object(torch_parallelize, "apply_tensor_parallel", with_experts)


RUNS = ParityRuns(
    __file__,
    CASES,
    SLOW,
    faults={
        "gradients averaged over ranks": Fault("vlm fsdp2 × ring2", "gradients averaged over ranks"),
        "rank's own denominator": Fault("vlm fsdp2 × tp2", "rank's own denominator"),
    },
    slow_faults={
        "missing-norm-sum": Fault("vlm tp2 × ring2", "missing-norm-sum"),
        "lost-border-token": Fault("vlm tp2 × ring2", "lost-border-token"),
        "experts' gradients summed over tensor ranks": Fault("moe tp2", experts_summed),
    },
    kinds={"lora": ("training.lora.enable=true",)},
)


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
