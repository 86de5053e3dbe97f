"""The rule by which a measured round counts, and what is called equal work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.contenders import UnequalWorkError, check_losses, check_work
from benchmarks.figures import Figure, table
from benchmarks.rounds import Rounds


def replay(values: list[float]) -> Callable[[], dict[str, Any]]:
    """Gives one value after another."""
    left: Iterator[float] = iter(values)
    return lambda: {"value": next(left)}


def measured(floors: list[float], ours: list[float], accepted: int) -> Rounds:
    rounds = Rounds(replay(floors), {"ours": replay(ours)})
    rounds.measure(accepted, limit_s=60)
    return rounds


def test_a_round_counts_when_its_two_floors_agree() -> None:
    rounds = measured(floors=[100, 102, 106, 106], ours=[110, 111, 112], accepted=2)
    # 100 and 102 agree, 102 and 106 do not, 106 and 106 do.
    assert [rounds.counts(one) for one in rounds.rounds] == [True, False, True]
    assert rounds.ratios("ours") == [pytest.approx(110 / 101), pytest.approx(112 / 106)]


def test_a_round_far_above_the_best_floor_does_not_count_even_in_hindsight() -> None:
    rounds = measured(floors=[112, 112], ours=[120], accepted=1)
    assert rounds.counts(rounds.rounds[0])
    rounds.floors.append({"value": 100.0})
    assert not rounds.counts(rounds.rounds[0])


def test_a_round_that_does_not_count_stays_in_the_summary() -> None:
    summary = measured(floors=[100, 104, 104], ours=[90, 110], accepted=1).summary()
    assert [one["counts"] for one in summary["rounds"]] == [False, True]
    assert [one["value"] for one in summary["rounds"]] == [90, 110]
    assert summary["ratio_to_floor"]["ours"] == {"median": 110 / 104, "min": 110 / 104, "max": 110 / 104, "n": 1}


def test_time_that_runs_out_leaves_what_was_measured() -> None:
    rounds = Rounds(replay([100.0]), {"ours": replay([])})
    rounds.measure(5, limit_s=0)
    assert rounds.summary()["ratio_to_floor"]["ours"]["n"] == 0


def step(**changes: int) -> dict[str, Any]:
    return {"positions": 512, "patches": 96, "tokens": 356, "label_tokens": 47} | changes


def test_equal_work_is_checked_step_by_step() -> None:
    check_work([step(), step(tokens=300)], [step(), step(tokens=300)])
    with pytest.raises(UnequalWorkError, match=r"step 2 .*'patches': \(92, 96\)"):
        check_work([step(), step(patches=92)], [step(), step()])
    with pytest.raises(UnequalWorkError, match="1 steps instead of 2"):
        check_work([step()], [step(), step()])


def test_contenders_must_train_the_same_model() -> None:
    assert check_losses([{"first_loss": 5.8}, {"first_loss": 5.8001}]) < 1e-4
    with pytest.raises(UnequalWorkError, match="first losses"):
        check_losses([{"first_loss": 5.8}, {"first_loss": 5.9}])


def test_a_figure_that_was_not_measured_misses_its_target() -> None:
    assert Figure("ratio", None, "×", at_most=1.05).met is False
    assert Figure("ratio", 1.05, "×", at_most=1.05).met is True
    assert Figure("seconds", 3.0, "s").met is None
    assert Figure("rate", 0.94, "×", at_least=0.95).met is False
    assert Figure("rate", 0.95, "×", at_least=0.95).met is True
    assert "≥ 0.950" in table([("extraction", Figure("rate", 0.95, "×", at_least=0.95))])
    assert "NO" in table([("step_time", Figure("ratio", 1.06, "×", at_most=1.05))])
