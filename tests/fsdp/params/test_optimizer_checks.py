"""Optimizers and what they do not go with are found in the configuration alone."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.training import optimizer_problems
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS, TrainingArguments


def keys(**sections: dict[str, Any]) -> list[str]:
    run = Arguments.model_validate(sections)
    return [problem.key for problem in optimizer_problems(run.parallel, run.training, run.features)]


OFFLOADED = {"enable_gradient_offload": True}
ON_HOST = {"fsdp_plan": {"cpu_offload": True}}


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"training": {"optimizer": "adamw_swap"}, "parallel": ON_HOST}, "training.optimizer"),
        ({"features": OFFLOADED, "parallel": ON_HOST}, "features.enable_gradient_offload"),
        ({"features": OFFLOADED, "parallel": {"pipeline_parallel_size": 2}}, "features.enable_gradient_offload"),
        ({"training": {"optimizer": "muon", "optimizer_state_dtype": "int8"}}, "training.optimizer_state_dtype"),
        ({"training": {"optimizer": "lion", "optimizer_state_dtype": "int8"}}, "training.optimizer_state_dtype"),
        ({"training": {"optimizer": "muon", "lora": {"enable": True}}}, "training.optimizer"),
    ],
)
def test_refused(sections: dict[str, Any], found: str) -> None:
    assert keys(**sections) == [found]


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"optimizer": "adamw_swap", "optimizer_state_dtype": "bf16"}, "features": OFFLOADED},
        {"training": {"optimizer": "muon"}, "features": OFFLOADED},
        {"training": {"optimizer": "lion", "lora": {"enable": True}}, "parallel": ON_HOST},
        {"training": {"optimizer_state_dtype": "int8"}, "parallel": ON_HOST},
        {"training": {"optimizer": "muon", "lora": {"enable": True, "modules_to_save": ["visual"]}}},
        {"training": {"optimizer": "muon"}, "parallel": {"pipeline_parallel_size": 2}},
    ],
)
def test_taken(sections: dict[str, Any]) -> None:
    assert keys(**sections) == []


def test_every_optimizer_that_can_be_named_has_its_facts() -> None:
    assert set(get_args(TrainingArguments.model_fields["optimizer"].annotation)) == set(OPTIMIZERS)
