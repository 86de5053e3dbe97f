"""Tensor and sequence parallelism train like one plain process: loss, gradients, norm and weights, in fp64.

Each planted fault passes through the same assertion and must fail it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.distributed.tensor import forward as tensor_parallel_forward
from mindspeed_mm.fsdp.distributed.tensor import sequence as tensor_parallel_sequence
from mindspeed_mm.fsdp.distributed.tensor.collectives import pad_tokens
from tests.fsdp.distributed.tensor_parallel_step import (
    NORMS,
    SAMPLES,
    SEQUENCE,
    Case,
    make_tiny_qwen3_moe,
    parallel_steps,
    plain_steps,
)
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

TOLERANCE = 1e-9

SEQUENCE_AND_LAST_NORM = {"tp_plan": {"sequence_parallel": [*NORMS, "model.norm"]}}
BLOCKS = {"tp_plan": {"sequence_parallel": ["blocks.{*}"]}}
ALONE = {"tensor_parallel_size": 1}
NO_IMAGES = (0,) * SAMPLES
NAMED = {"tp_plan": {"colwise_parallel": ["*.q_proj", "*.k_proj", "*.v_proj"], "rowwise_parallel": ["*.o_proj"]}}

# name → (ranks, case, steps)
CASES: dict[str, tuple[int, Case, int]] = {
    "text, tp, sequence": (2, Case("text", SEQUENCE_AND_LAST_NORM), 2),
    "flux, tp": (2, Case("flux"), 1),
    "vlm, fsdp × tp, sequence": (4, Case("vlm", SEQUENCE, accumulation=2), 1),
}
SLOW_CASES: dict[str, tuple[int, Case, int]] = {
    "text, tp": (2, Case("text"), 2),
    "text, tp, logits gathered, recompute": (2, Case("text", recompute=True, gather_logits=True), 1),
    "text, tp, layers named": (2, Case("text", NAMED), 1),
    "text, tp, adapters": (2, Case("text", lora=True), 2),
    "text, tp, adapters, sequence": (2, Case("text", SEQUENCE, lora=True), 2),
    "packed, tp, sequence": (2, Case("packed", SEQUENCE), 2),
    "vlm, tp": (2, Case("vlm"), 2),
    "vlm, tp, no image": (2, Case("vlm", images=NO_IMAGES), 1),
    "vlm, tp, sequence, recompute": (2, Case("vlm", SEQUENCE, recompute=True, accumulation=2), 1),
    "wan, tp": (2, Case("wan"), 2),
    "wan, tp, sequence": (2, Case("wan", BLOCKS), 2),
    "wan, fsdp × tp, sequence": (4, Case("wan", BLOCKS), 1),
    "moe, tp": (2, Case("moe"), 2),
    "text, fsdp × tp": (4, Case("text"), 1),
    "text, hsdp × tp": (4, Case("text", {"fully_shard_parallel_size": 1}), 1),
    "text, fsdp × tp, adapters, sequence": (4, Case("text", SEQUENCE, lora=True), 1),
    "vlm, fsdp × tp": (4, Case("vlm"), 2),
    "flux, fsdp × tp": (4, Case("flux"), 2),
    "wan, fsdp × tp": (4, Case("wan"), 2),
}
ALL_CASES = CASES | SLOW_CASES
BY_SPEED = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)]


def norm_of_one_mesh(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Squares summed over all ranks, whatever mesh a gradient is on."""
    squares = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        if p.grad is not None:
            squares += (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def without(name: str) -> Any:
    """The function of the forward passes without its collective."""
    if name == "share_others":
        return mock.patch.object(tensor_parallel_sequence, "copy_to_ranks", lambda tensor, ranks: tensor)
    kept = {"sum_to_own_tokens": lambda tensor, ranks: pad_tokens(tensor, ranks).chunk(ranks.size, -2)[ranks.rank]}
    return mock.patch.object(tensor_parallel_forward, name, kept.get(name, lambda tensor, ranks: tensor))


# name → (case, arguments of `parallel_steps`)
FAULTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "all-reduce behind rowwise dropped": (Case("text"), {"fault": "sum_over_ranks"}),
    "norms' gradient not summed, sequence": (Case("vlm", SEQUENCE), {"fault": "sum_gradient"}),
    "norm taken per mesh": (Case("text"), {"norm": norm_of_one_mesh}),
}
SLOW_FAULTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "gradient not summed on the way in": (Case("text"), {"fault": "copy_to_ranks"}),
    "head norms' gradient not summed": (Case("text"), {"fault": "sum_gradient"}),
    "mean of a wide norm over own heads": (Case("wan"), {"fault": "sum_of_all"}),
    "gradient of timesteps not summed, sequence": (Case("wan", BLOCKS), {"fault": "share_others"}),
    "own tokens without the other ranks' part": (Case("text", SEQUENCE), {"fault": "sum_to_own_tokens"}),
}
ALL_FAULTS = FAULTS | SLOW_FAULTS


def run_on_ranks(folders: dict[str, str], names: list[str]) -> dict[str, list[StepRecord]]:
    records = {}
    for name in names:
        if name in ALL_CASES:
            _, case, steps = ALL_CASES[name]
            records[name] = parallel_steps(case, folders[case.kind], steps)
        else:
            case, how = ALL_FAULTS[name]
            planted = {"fault": without(how["fault"])} if "fault" in how else how
            records[name] = parallel_steps(case, folders[case.kind], **planted)
    return records


def run_alone(folders: dict[str, str]) -> dict[str, list[StepRecord]]:
    """Adapters have no reference outside of this package."""
    return {"text": parallel_steps(Case("text", ALONE, lora=True), folders["text"], 2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "text": make_tiny_qwen3(root / "text"),
        "vlm": make_tiny_qwen3_vl(root / "vlm"),
        "flux": make_tiny_flux(root / "flux"),
        "wan": make_tiny_wan(root / "wan"),
        "moe": make_tiny_qwen3_moe(root / "moe"),
    }
    return {kind: str(folder) for kind, folder in made.items()} | {"packed": str(made["text"])}


@pytest.fixture(scope="module")
def reference(folders: dict[str, str]) -> Callable[[Case, int], list[StepRecord]]:
    """The plain steps of a case."""

    @cache
    def plain(kind: str, images: tuple[int, ...], lora: bool) -> list[StepRecord]:
        if lora:
            return run_ranks(1, run_alone, folders)[0][kind]
        return plain_steps(kind, folders[kind], 2, images)

    return lambda case, steps: plain(case.kind, case.images, case.lora)[:steps]


@pytest.fixture(scope="module")
def measured(folders: dict[str, str]) -> Callable[[str], list[list[StepRecord]]]:
    """Records of a case or a fault by rank; those that are equally slow share a start of the processes."""

    @cache
    def together(ranks: int, slow: bool) -> list[dict[str, list[StepRecord]]]:
        cases = SLOW_CASES if slow else CASES
        names = [name for name, (wanted, *_) in cases.items() if wanted == ranks]
        names += (SLOW_FAULTS if slow else FAULTS) if ranks == 2 else ()
        return run_ranks(ranks, run_on_ranks, folders, names)

    def of(name: str) -> list[list[StepRecord]]:
        ranks = ALL_CASES[name][0] if name in ALL_CASES else 2
        return [on_rank[name] for on_rank in together(ranks, name in (SLOW_CASES | SLOW_FAULTS))]

    return of


@pytest.mark.parametrize("name", BY_SPEED)
def test_equals_one_process(name, measured, reference):
    _, case, steps = ALL_CASES[name]
    for on_rank in measured(name):
        compare_steps(reference(case, steps), on_rank, TOLERANCE)


@pytest.mark.parametrize("name", BY_SPEED)
def test_ranks_agree_to_the_bit(name, measured):
    for one, other in itertools.pairwise(measured(name)):
        compare_steps(one, other, 0.0)


@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAULTS)])
def test_planted_fault_is_seen(name, measured, reference):
    case, _ = ALL_FAULTS[name]
    with pytest.raises(ParityError):
        for on_rank in measured(name):
            compare_steps(reference(case, 1), on_rank, TOLERANCE)
