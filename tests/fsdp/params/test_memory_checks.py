"""Rules between the keys of recomputation and of slices, and others."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.plan import memory_problems
from tests.fsdp.params.test_checks import arguments

RECOMPUTE = {"features.recompute": True}
SLICES = {"features.enable_chunk_mbs": True, "training.micro_batch_size": 4}
REENTRANT = "features.recompute_plan.use_reentrant"
DIVIDED = "features.recompute_plan.distribute_saved_activations"
TWO_RANKS = {"parallel.tensor_parallel_size": 2}


def problems_of(run: Arguments) -> list[Problem]:
    return list(memory_problems(run.model, run.data, run.parallel, run.features))


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        (
            {**RECOMPUTE, "features.recompute_plan": {"mode": "selective", "use_reentrant": True}},
            REENTRANT,
            "mode: selective keeps results",
        ),
        ({**RECOMPUTE, REENTRANT: True, "model.skip_kda_recompute": True}, REENTRANT, "model.skip_kda_recompute keeps"),
        (
            {**RECOMPUTE, "model.skip_flash_attn_recompute": True, "model.attn_implementation": "eager"},
            "model.skip_flash_attn_recompute",
            "'eager' attention has no kernel",
        ),
        (
            {**RECOMPUTE, "model.skip_gdn_recompute": True, "features.compile": True},
            "model.skip_gdn_recompute",
            "compiles a block into one graph",
        ),
        (
            {**SLICES, "data.dataset_param.basic_parameters.packing": True},
            "features.enable_chunk_mbs",
            "packing makes one row",
        ),
        (
            {
                **SLICES,
                "parallel.expert_parallel_size": 2,
                "data.dataloader_param.sampler_type": "TokenBudgetSampler",
            },
            "features.enable_chunk_mbs",
            "different numbers of rows",
        ),
        ({**SLICES, "features.skip_moe_pad_tokens": True}, "features.enable_chunk_mbs", "skip_moe_pad_tokens"),
        ({DIVIDED: True, **TWO_RANKS}, DIVIDED, "nothing is computed again"),
        ({DIVIDED: True, **RECOMPUTE}, DIVIDED, "no other rank has the same inputs"),
        (
            {DIVIDED: True, **RECOMPUTE, **TWO_RANKS, "features.recompute_plan.mode": "selective"},
            DIVIDED,
            "mode is selective",
        ),
        ({DIVIDED: True, **RECOMPUTE, **TWO_RANKS, REENTRANT: True}, DIVIDED, "use_reentrant lets autograd keep"),
    ],
    ids=str,
)
def test_one_problem_that_names_the_key(values: dict[str, Any], key: str, message: str) -> None:
    (problem,) = problems_of(arguments(values))
    assert problem.key == key and message in problem.what and problem.way_out


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**RECOMPUTE, "features.recompute_plan.mode": "selective", "model.skip_gdn_recompute": True},
        {**RECOMPUTE, REENTRANT: True},
        {REENTRANT: True, "features.recompute_plan.mode": "selective", "model.skip_flash_attn_recompute": True},
        {**SLICES, "features.enable_activation_offload": True, **RECOMPUTE},
        {**SLICES, "features.chunkmbs_plan.chunk_mbs": 4},
        {DIVIDED: True, **RECOMPUTE, **TWO_RANKS},
        {DIVIDED: "auto", **RECOMPUTE, REENTRANT: True},
        {**SLICES, "features.chunkmbs_plan.chunk_mbs": 8, "data.dataloader_param.dataloader_mode": "variable"},
    ],
    ids=str,
)
def test_nothing_to_say(values: dict[str, Any]) -> None:
    assert problems_of(arguments(values)) == []
