"""Bytes that a rank sends: counted in real steps they are those of the formula, and one collective too many is seen."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import communication
from benchmarks.communication_cases import CASES, DENSE, MODELS
from benchmarks.communication_formula import QWEN3_8B, Decoder, Plan, Step, bytes_sent
from benchmarks.communication_rank import STEPS, TOKENS_A_ROW, count, make
from mindspeed_mm.fsdp.distributed.tensor import collectives as tensor_parallel_collectives
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from tests.helpers.distributed import run_ranks

ONE = ParallelSizes(world=1, pp=1, dp_replicate=1, dp_shard=1, ring=1, ulysses=1, tp=1, edp=1, efsdp=1, ep=1)
QUICK = ("tp2, sequence parallel", "ring2", "ep2, alltoall")
FAULT = "a sum over ranks is taken twice"


def counted(folder: str, names: list[str], fault: bool) -> dict[str, dict[str, Any]]:
    """On each rank."""
    with summed_twice() if fault else nullcontext():
        return {name: count(Path(folder), CASES[name]) for name in names}


def summed_twice() -> Any:
    real = tensor_parallel_collectives.all_reduce

    def twice(tensor: torch.Tensor, ranks: Any) -> torch.Tensor:
        dist.all_reduce(tensor.clone(), group=ranks.group)
        return real(tensor, ranks)

    return mock.patch.object(tensor_parallel_collectives, "all_reduce", twice)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("communication")
    make(folder, MODELS, TOKENS_A_ROW, {"train_iters": STEPS}, param_dtype="bf16")
    return folder


def ratios(folder: Path, ranks: int, names: list[str], *, fault: bool = False) -> dict[str, list[float]]:
    found = run_ranks(ranks, counted, str(folder), names, fault)
    rows = {name: communication.row(CASES[name], folder, [on_rank[name] for on_rank in found]) for name in names}
    return {name: [rank["ratio"] for rank in row["on_ranks"]] for name, row in rows.items()}


def test_a_step_sends_what_the_formula_says(folder: Path) -> None:
    assert ratios(folder, 2, [*QUICK]) == {name: [1.0, 1.0] for name in QUICK}


def test_a_collective_too_many_is_seen(folder: Path) -> None:
    assert min(ratios(folder, 2, ["tp2"], fault=True)["tp2"]) > 1 + communication.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_plan_sends_what_the_formula_says(folder: Path, ranks: int) -> None:
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    assert ratios(folder, ranks, names) == {name: [1.0] * ranks for name in names}


def test_parameters_of_the_formula_are_those_of_the_models() -> None:
    assert QWEN3_8B.parameters == 8_190_735_360  # as its model card counts them
    assert DENSE.parameters == 4 * (64 * 16 * 24 + 2 * 64 + 2 * 16 + 3 * 64 * 128) + 2 * 320 * 64 + 64


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_the_tiny_models(name: str, folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / name / "model" / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118  it is not a dict
    stored = sum(torch.Size(shape).numel() for shape in shapes)
    assert MODELS[name].parameters == stored


def test_plans_by_hand() -> None:
    tiny = Decoder(layers=1, hidden=2, intermediate=3, heads=2, key_heads=1, head_width=1, vocabulary=5)
    # 2·1·(2·2 + 2·1) + (2·2 + 2·1) + 3·2·3 = 36 a layer, 2 × 10 at the ends, 2 behind.
    assert tiny.parameters == 58
    step = Step(micro_batches=1, tokens=8, labelled=4)
    four = replace(ONE, world=4)
    zero_3 = replace(four, dp_shard=4, efsdp=4)
    assert bytes_sent(tiny, Plan(zero_3), step) == {"fsdp": 0.75 * (2 * (2 * 56 + 2) + 4 * 58)}
    assert bytes_sent(tiny, Plan(zero_3, keeps_parameters=True), step) == {"fsdp": 0.75 * 58 * (2 + 4)}
    assert bytes_sent(tiny, Plan(replace(four, dp_replicate=4, edp=4)), step) == {"dp_replicate": 2 * 0.75 * 4 * 58}
    # Keys and values of 2 of 8 tokens, three times in bf16 twice, their gradients three times in fp32.
    ring = bytes_sent(tiny, Plan(replace(four, ring=4)), step)
    assert ring["ring"] == 3 * (2 * 2 * 1 * 1) * (2 + 2 + 4)
    assert bytes_sent(tiny, Plan(ONE), step) == {}


def test_ends_of_stages_by_hand() -> None:
    two = replace(ONE, world=2, pp=2)
    ends = {
        "a stage each": Plan(two),
        "round and round: 0 1 0 1": Plan(two, chunks=2),
        "forth and back: 0 1 1 0": Plan(two, chunks=2, is_v=True),
    }
    assert [plan.stage_ends for plan in ends.values()] == [1, 3, 2]
    assert [replace(plan, pipeline_rank=1).stage_ends for plan in ends.values()] == [1, 3, 2]
    assert Plan(replace(ONE, world=4, pp=4), pipeline_rank=1).stage_ends == 2


def test_experts_with_tensor_parallelism_have_no_formula() -> None:
    with pytest.raises(ValueError, match="no formula"):
        bytes_sent(MODELS["experts"], Plan(replace(ONE, tp=2)), Step(1, 8, 4))
