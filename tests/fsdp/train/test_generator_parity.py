"""Generators under any plan equal one process, in fp64, with raw media, dropped captions, recompute and adapters."""

from __future__ import annotations

import pytest

from tests.helpers.parity import compare_steps
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import FP64, HYBRID
from tests.helpers.tiny_generator_run import make_tiny_generator_run

FAMILIES = ("flux", "t2v")
RECOMPUTE, COPIES = "features.recompute=true", "parallel.fully_shard_parallel_size=1"

RUNS = ParityRuns(
    __file__,
    cases={
        "flux accumulation 2": Case("flux", 1, 1, 2),
        "flux recompute": Case("flux", 1, 1, 1, (RECOMPUTE,)),
        "flux fsdp 2": Case("flux", 2, 2, 1),
        "flux replicated 2": Case("flux", 2, 2, 2, (COPIES,)),
        "flux hsdp 2x2": Case("flux", 4, 4, 1, (HYBRID,)),
        "t2v recompute": Case("t2v", 1, 1, 1, (RECOMPUTE,)),
        "t2v fsdp 2, recompute": Case("t2v", 2, 2, 2, (RECOMPUTE,)),
    },
    slow={
        "flux fsdp 2, recompute": Case("flux", 2, 2, 2, (RECOMPUTE,)),
        "t2v hsdp 2x2": Case("t2v", 4, 4, 1, (HYBRID,)),
    },
    faults={
        "rank's own denominator": Fault("flux replicated 2", "rank's own denominator"),
        "gradients averaged over ranks": Fault("flux fsdp 2", "gradients averaged over ranks"),
        "dropped all-reduce": Fault("flux hsdp 2x2", "dropped all-reduce"),
    },
    kinds={"lora": ("training.lora.enable=true",)},
    tolerance=1e-10,
)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("generators")
    return {family: str(make_tiny_generator_run(folder / family, family, **FP64)) for family in FAMILIES}


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_is_equal_to_the_bit(family: str, yamls: dict[str, str]) -> None:
    compare_steps(RUNS.reference(family, yamls), RUNS.measured(f"{family} recompute", yamls)[0], 0.0)
