"""Rules between the keys of a pipeline and the others."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section

STEPS = "training.gradient_accumulation_steps"
PLAN = "parallel.pp_plan"


def problems_of(**keys: Any) -> list[str]:
    tree: dict[str, Any] = {"training": {"train_iters": 1, "gradient_accumulation_steps": 4}}
    for key, value in {"parallel__pipeline_parallel_size": 2, **keys}.items():
        node, *path = tree, *key.split("__")
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return [str(problem) for problem in check_cross_section(Arguments.model_validate(tree))]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"parallel__pp_plan__schedule": "zbv"},
        {"parallel__pp_plan__schedule": "zbv", "parallel__pp_plan__virtual_stages": 2},
        {"parallel__pp_plan__schedule": "interleaved1f1b", "parallel__pp_plan__virtual_stages": 3},
        {"parallel__pp_plan__micro_batches": 2},
        {"parallel__pp_plan__schedule": "gpipe", "parallel__pp_plan__micro_batches": 1},
        {"features__recompute": True},
        {"parallel__pipeline_parallel_size": 1, "parallel__fsdp_plan__output_dtype": "fp32"},
    ],
)
def test_what_fits(keys: dict[str, Any]) -> None:
    assert problems_of(**keys) == []


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"parallel__pp_plan__virtual_stages": 2}, f"{PLAN}.virtual_stages", "2, but the schedule 1f1b runs 1 chunk"),
        ({"parallel__pp_plan__schedule": "interleaved1f1b"}, f"{PLAN}.virtual_stages", "1, but the schedule"),
        (
            {"parallel__pp_plan__schedule": "zbv", "parallel__pp_plan__virtual_stages": 3},
            f"{PLAN}.virtual_stages",
            "3, but the schedule zbv has 2",
        ),
        ({"parallel__pp_plan__micro_batches": 3}, f"{PLAN}.micro_batches", "Sizes that divide them: 2, 4"),
        ({"parallel__pipeline_parallel_size": 8}, STEPS, "4 micro-batches are fewer than the 8 ranks"),
        ({"parallel__pp_plan__micro_batches": 1}, f"{PLAN}.micro_batches", "Raise it to 2, or set"),
        (
            {
                "parallel__pp_plan__schedule": "interleaved1f1b",
                "parallel__pp_plan__virtual_stages": 2,
                "training__gradient_accumulation_steps": 5,
            },
            STEPS,
            "Nearest numbers that do: 4, 6",
        ),
        ({"parallel__pp_plan__schedule": "zbv", "features__recompute": True}, "features.recompute", "again for each"),
        ({"parallel__fsdp_plan__output_dtype": "fp32"}, "parallel.fsdp_plan.output_dtype", "2 stages"),
        ({"parallel__fsdp_plan__ignored_modules": ["a"]}, "parallel.fsdp_plan.ignored_modules", "2 stages"),
    ],
)
def test_what_does_not(keys: dict[str, Any], key: str, words: str) -> None:
    found = problems_of(**keys)
    assert any(key in problem and words in problem for problem in found), found
