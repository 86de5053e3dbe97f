"""Preference pairs of a generator through the whole trainer: the same on ranks as in one process, and when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.runs import differing, tensors, train
from tests.helpers.tiny_media_pairs import LORA, PAIRS, make_tiny_media_pairs

FTX = "posttrain.dpo.pref_ftx=0.5"


def steps(yaml: str, words: list[str]) -> Any:
    with keeping_double():
        return train_steps(yaml, words)


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_media_pairs(tmp_path_factory.mktemp("pairs"), **FP64))


@pytest.mark.slow
@pytest.mark.parametrize("words", [LORA, ()], ids=["adapters_off", "frozen"])
def test_two_ranks_compute_what_one_process_computes(yaml: str, words: tuple[str, ...]) -> None:
    expected = steps(yaml, overrides(1, 1, *PAIRS, FTX, *words))
    compare_steps(expected, steps(yaml, overrides(1, 4, *PAIRS, FTX, *words)), 1e-9)
    for record in run_ranks(2, steps, yaml, overrides(2, 2, *PAIRS, FTX, *words)):
        compare_steps(expected, record, 1e-9)
    shared = overrides(1, 4, *PAIRS, FTX, *words, "parallel.ulysses_parallel_size=2")  # as launches with stages ask for
    for record in run_ranks(2, steps, yaml, shared):
        compare_steps(expected, record, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("words", [LORA, ()], ids=["adapters_off", "frozen"])
def test_a_run_in_two_parts_equals_a_whole_one(yaml: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    given = [*PAIRS, *words, "training.lr_decay_style=constant", "training.save_interval=2"]
    train(yaml, tmp_path / "whole", *given, "training.train_iters=4")
    train(yaml, tmp_path / "parts", *given, "training.train_iters=2")
    train(yaml, tmp_path / "parts", *given, "training.train_iters=4")
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert len(whole) > 20 and differing(whole, parts) == []
