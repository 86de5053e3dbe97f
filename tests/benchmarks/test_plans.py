"""The timing of plans: every plan on two ranks does the same work, and the figures are ratios to FSDP2's step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plans, plans_rank, processes
from benchmarks.plans_cases import PLANS, RANKS
from benchmarks.ranks import run_ranks as start_ranks
from tests.helpers.distributed import run_ranks


def test_figures_are_ratios_to_the_floor() -> None:
    spread = {"median": 2.0, "min": 1.5, "max": 2.5, "n": 5}
    shown = plans.figures("dense", {"floor": spread | {"median": 40.0}, "ratio_to_floor": {"tp2": spread}})
    assert [(figure.name, figure.value, figure.met) for figure in shown] == [
        ("dense, fsdp2: step", 40.0, None),
        ("dense, tp2 / fsdp2", 2.0, None),
    ]


def test_the_floor_is_one_of_the_plans_and_the_time_is_bounded() -> None:
    assert all(plans.FLOORS[model] in cases for model, cases in PLANS.items())
    assert all(case.ranks == RANKS for cases in PLANS.values() for case in cases.values())
    assert sum(plans.LIMIT_S.values()) <= 420


def last_losses(folder: str, model: str) -> dict[str, float]:
    """On each rank, of every plan."""
    return {name: plans_rank.train(Path(folder), case)["last_loss"] for name, case in PLANS[model].items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", PLANS)
def test_every_plan_does_the_same_work(model: str, tmp_path: Path) -> None:
    plans_rank.make_runs(tmp_path)
    first, *others = run_ranks(RANKS, last_losses, str(tmp_path), model)
    assert others == [first]
    assert max(first.values()) - min(first.values()) < 1e-3 * max(first.values())


@pytest.mark.slow
def test_rounds_are_kept_by_rank_0(tmp_path: Path) -> None:
    plans_rank.make_runs(tmp_path)
    out = tmp_path / "out.json"
    start_ranks(["benchmarks.plans_rank", "measure", str(tmp_path), str(out), "experts", "1", "1"], RANKS, 200)
    found = json.loads(out.read_text())
    assert [round_["contender"] for round_ in found["rounds"]] <= ["ep2, alltoall"]
    assert found["ratio_to_floor"].keys() == PLANS["experts"].keys() - {"fsdp2"}


def test_a_rank_that_fails_ends_the_others_with_its_words() -> None:
    with pytest.raises(processes.ProcessFailed, match="No module named"):
        start_ranks(["benchmarks.no_such_module"], 2, 30)
