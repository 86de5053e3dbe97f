"""Step time of `mm train`, data work included, over a bare PyTorch loop whose batches lie ready.

Our output head works on labelled tokens only. What that alone is worth is shown apart: a second bare loop does so, too.

Model S: the digits example's Qwen3-VL of 398,016 parameters, batch 16, fp32, one thread a process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import TIMEOUT_S, Contenders, Report, check_losses, total_work
from benchmarks.digits import BATCH_SIZE, prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.processes import Finished
from benchmarks.rounds import spread
from benchmarks.turns import Contender, Turns

WARM_UP_STEPS = 30
MEASURED_STEPS = 150
ROUNDS = 6
TARGET = 0.97
LABELLED = "bare loop, labelled rows"


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    steps = WARM_UP_STEPS + MEASURED_STEPS
    workload = prepare(work / "digits", steps)
    contenders = Contenders(workload, steps, measure, preload=True)
    others: dict[str, Callable[[], Contender]] = {
        "mm train": contenders.ours,
        LABELLED: partial(contenders.floor, "--labelled-rows"),
        "transformers Trainer": contenders.trainer,
    }
    turns = Turns(contenders.floor, others, TIMEOUT_S)
    turns.measure(ROUNDS)
    summary, everyone = turns.summary(), turns.everyone()
    equal_rows = [one["mm train"]["value"] / one[LABELLED]["value"] for one in turns.rounds]
    return {
        "model": "Qwen3-VL, 398,016 parameters, fp32",
        "batch": BATCH_SIZE,
        "warm_up_steps": WARM_UP_STEPS,
        "measured_steps": MEASURED_STEPS,
        "equal_work": everyone[0]["work"],
        "first_losses_differ_by": check_losses(everyone),
        "unit": "ms a step",
        **summary,
        "ratio_at_equal_head_rows": spread(equal_rows),
        "figures": [figure.to_dict() for figure in figures(summary, spread(equal_rows))],
    }


def measure(finished: Finished, report: Report) -> dict[str, Any]:
    """Mean over the steps after the warm-up."""
    first, last = report[WARM_UP_STEPS - 1], report[-1]
    measured_s = finished.ran_s(last["time"]) - finished.ran_s(first["time"])
    return {
        "value": 1000 * measured_s / (len(report) - WARM_UP_STEPS),
        "steps": len(report) - WARM_UP_STEPS,
        "work": total_work(report[WARM_UP_STEPS:]),
        "first_loss": report[0]["loss"],
        "last_loss": last["loss"],
        "first_step_s": finished.ran_s(report[0]["time"]),
        "peak_rss_mb": finished.peak_rss_mb,
    }


def figures(summary: dict[str, Any], equal_rows: dict[str, Any]) -> list[Figure]:
    """Ratios and absolute times."""
    ratios = summary["ratio_to_floor"]
    return [
        of_spread("mm train / bare loop, step time", ratios["mm train"], "×", TARGET),
        of_spread("mm train / bare loop with labelled rows only in the head, step time", equal_rows, "×"),
        of_spread("Trainer / bare loop, step time", ratios["transformers Trainer"], "×"),
        of_spread("bare loop, step time", summary["floor"], "ms"),
        of_spread("mm train, step time", summary["contenders"]["mm train"], "ms"),
    ]
