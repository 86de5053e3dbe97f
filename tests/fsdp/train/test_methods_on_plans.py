"""Methods of post-training × plans: losses, every gradient, clip norm and weights are those of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import FP64, LAYERS, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_pairs import make_tiny_pairs
from tests.helpers.tiny_run import make_tiny_run

TOLERANCE = 1e-9
ANSWERS: dict[str, Any] = {
    "method": "grpo",
    "grpo": {"num_generations": 4},
    "rollout": {"max_completion_length": 6},
    "rewards": [{"name": "regex", "settings": {"pattern": "[a-f]"}}, {"name": "repetition", "settings": {"words": 1}}],
}
METHODS: dict[str, tuple[str, list[str]]] = {  # name → (rows, overrides)
    "dpo": ("pairs", []),
    "dpo + pref_ftx": ("pairs", ["posttrain.dpo.pref_ftx=0.5"]),
    "simpo": ("pairs", ["posttrain.dpo.loss_type=[simpo]"]),
    "grpo": ("answers", []),
    "grpo + beta": ("answers", ["posttrain.grpo.beta=0.1"]),
}
PLANS: dict[str, tuple[int, int, int, list[str]]] = {  # name → (ranks, data ranks, accumulation, overrides)
    "1 process, 4 + 4": (1, 1, 2, []),
    "FSDP2": (2, 2, 1, []),
    "TP2": (2, 1, 2, [TP]),
    "CP2": (2, 1, 2, [ULYSSES]),
}


def steps(yaml: str, words: list[str], fault: str | None = None) -> Any:
    with keeping_double():
        return train_steps(yaml, words, fault)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The YAML of a method and its steps in one process with one micro-batch."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("pairs", "answers")}
    for folder in folders.values():
        make_tiny_qwen3_vl(folder / "model", **LAYERS)

    @cache
    def of(method: str) -> tuple[str, Any]:
        rows, words = METHODS[method]
        folder: Path = folders[rows]
        yaml = make_tiny_pairs(folder, **FP64) if rows == "pairs" else make_tiny_run(folder, posttrain=ANSWERS, **FP64)
        return str(yaml), steps(str(yaml), overrides(1, 1, *words))

    return of


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("method", METHODS)
def test_a_plan_trains_as_one_process(whole: Any, method: str, plan: str) -> None:
    yaml, expected = whole(method)
    ranks, data_ranks, accumulation, words = PLANS[plan]
    given = overrides(data_ranks, accumulation, *METHODS[method][1], *words)
    for record in run_ranks(ranks, steps, yaml, given) if ranks > 1 else [steps(yaml, given)]:
        compare_steps(expected, record, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo + pref_ftx", "grpo"])
@pytest.mark.parametrize("fault", ["rank's own denominator", "gradients averaged over ranks"])
def test_a_planted_fault_is_seen(whole: Any, method: str, fault: str) -> None:
    yaml, expected = whole(method)
    given = overrides(2, 1, *METHODS[method][1])
    found = run_ranks(2, steps, yaml, given, fault)
    with pytest.raises(ParityError):
        compare_steps(expected, found[0], TOLERANCE)
