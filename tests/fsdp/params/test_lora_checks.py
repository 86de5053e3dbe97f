"""What adapters cannot do is said before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.model import lora_problems

TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def problems_of(run: Arguments) -> list[Problem]:
    return list(lora_problems(run.parallel, run.training))


@pytest.mark.parametrize(
    ("lora", "parallel", "key", "words"),
    [
        ({"quantize": "nf4", "init_lora_weights": "pissa"}, {}, "init_lora_weights", "loftq"),
        ({"quantize": "int8", "use_dora": True}, {}, "use_dora", "Keep one"),
        ({"init_lora_weights": "loftq"}, {}, "init_lora_weights", "quantize: nf4"),
        ({"init_lora_weights": "olora", "pretrained_lora_path": "a"}, {}, "init_lora_weights", "Keep one"),
        ({"use_dora": True}, TP, "use_dora", "tensor_parallel_size: 1"),
        ({"quantize": "nf4"}, TP, "quantize", "tensor_parallel_size: 1"),
        ({"quantize": "nf4"}, PP, "quantize", "pipeline_parallel_size: 1"),
        ({"init_lora_weights": "eva"}, PP, "init_lora_weights", "pipeline_parallel_size: 1"),
    ],
)
def test_refusals(lora: dict[str, Any], parallel: dict[str, Any], key: str, words: str) -> None:
    (problem,) = problems_of(tree(lora, parallel))
    assert problem.key == f"training.lora.{key}" and words in problem.way_out
    assert not problems_of(tree({**lora, "enable": False}, parallel))


@pytest.mark.parametrize(
    ("lora", "parallel"),
    [
        ({"quantize": "nf4", "init_lora_weights": "loftq"}, {}),
        ({"use_dora": True, "init_lora_weights": "pissa_niter_4"}, PP),
        ({"init_lora_weights": "gaussian"}, TP),
    ],
)
def test_what_goes_together(lora: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert not problems_of(tree(lora, parallel))


def tree(lora: dict[str, Any], parallel: dict[str, Any]) -> Arguments:
    return Arguments.model_validate({"training": {"lora": {"enable": True, **lora}}, "parallel": parallel})
