"""Preference pairs through the whole trainer: loss, every gradient, clip norm and weights are the same however a step
is split, and under every plan.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest

from mindspeed_mm.fsdp.loss.pair_objective import PairObjective
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import FP64, LAYERS, ONE_F_ONE_B, PP, RING, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_pairs import make_tiny_pairs

TOLERANCE = 1e-9
LORA = ("training.lora.enable=true", "training.lora.rank=2")
SLICES = ("features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=3")
FTX = "posttrain.dpo.pref_ftx=0.5"
TAIL = "posttrain.dpo.ld_alpha=0.25"
MIXED = ("posttrain.dpo.loss_type=[sigmoid, ipo]", "posttrain.dpo.loss_weights=[1, 0.5]", FTX)
SIMPO = ("posttrain.dpo.loss_type=[simpo, orpo]",)
STORED = "posttrain.reference.kind=stored"

PLANS: dict[str, tuple[int, int, int, list[str]]] = {  # name → (ranks, data ranks, accumulation, overrides)
    "1 + 1 + …": (1, 1, 8, [*LORA, *MIXED]),
    "4 + 4, tails": (1, 1, 2, [*LORA, *MIXED, TAIL]),
    "without a reference": (1, 1, 4, [*LORA, *SIMPO]),
    "frozen, slices": (1, 1, 2, [*MIXED, *SLICES]),
    "fsdp2": (2, 2, 2, [*LORA, *MIXED]),
    "fsdp2, frozen, slices": (2, 2, 2, [*MIXED, TAIL, *SLICES]),
    "tp2": (2, 1, 2, [*LORA, *MIXED, TP]),
    "tp2, frozen, slices": (2, 1, 2, [*MIXED, TP, *SLICES]),
    "ring2": (2, 1, 2, [*LORA, *MIXED, TAIL, RING]),
    "ulysses2, frozen": (2, 1, 2, [*MIXED, ULYSSES]),
    "pp2, without a reference": (2, 1, 4, [*LORA, *SIMPO, PP, ONE_F_ONE_B]),
}
DEFAULT = ("4 + 4, tails",)


def steps(yaml: str, words: list[str], fault: bool = False) -> Any:
    with keeping_double(), own_denominators() if fault else mock.MagicMock():
        return train_steps(yaml, words)


def own_denominators() -> Any:
    """Each micro-batch is divided by its own pairs, and the sum by their number."""
    real = PairObjective.terms

    def terms(self: PairObjective, model: Any, batch: Any) -> Any:
        found = real(self, model, batch)
        own = self.count([batch])
        return {name: value * (5 / (own[name] or 1)) for name, value in found.items()}

    return mock.patch.object(PairObjective, "terms", terms)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is computed → YAML and the steps of one process with one micro-batch."""
    folder, made = tmp_path_factory.mktemp("pairs"), {}
    make_tiny_qwen3_vl(folder / "model", **LAYERS)
    yaml = str(make_tiny_pairs(folder, **FP64))

    def of(words: list[str]) -> tuple[str, Any]:
        plain = tuple(word for word in words if not word.startswith(("parallel.", "features.")))
        if plain not in made:
            made[plain] = steps(yaml, overrides(1, 1, *plain))
        return yaml, made[plain]

    return of


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in PLANS])
def test_a_plan_computes_what_one_process_computes(whole: Any, name: str) -> None:
    ranks, data_ranks, accumulation, words = PLANS[name]
    yaml, expected = whole(words)
    given = overrides(data_ranks, accumulation, *words)
    for record in run_ranks(ranks, steps, yaml, given) if ranks > 1 else [steps(yaml, given)]:
        compare_steps(expected, record, TOLERANCE)


@pytest.mark.slow
def test_denominators_of_micro_batches_are_seen(whole: Any) -> None:
    *_, words = PLANS["4 + 4, tails"]
    yaml, expected = whole(words)
    with pytest.raises(ParityError):
        compare_steps(expected, steps(yaml, overrides(1, 2, *words), fault=True), TOLERANCE)


def test_training_starts_at_the_logarithm_of_two(whole: Any) -> None:
    _, (first, second) = whole([*LORA])
    assert float(first["loss"]) == pytest.approx(math.log(2), abs=1e-12)
    assert second["loss"] < first["loss"]
