"""From process start to the end of the first step, and the peak memory of a short run.

The bare loop loads the model folder and reads each batch, collated beforehand, from its file when it is due: it has no
processor, tokenizer or images to load. `mm train` and the Trainer start from the rows and pictures.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.contenders import TIMEOUT_S, Contenders, Report, check_losses, total_work
from benchmarks.digits import prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.processes import Finished
from benchmarks.processes import run as run_process
from benchmarks.rounds import spread
from benchmarks.turns import FLOOR, Turns

STEPS = 20
ROUNDS = 6
MEMORY_RUNS = 3
TARGET_RATIO = 1.05
TARGET_MB = 30.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    workload = prepare(work / "digits", STEPS)
    contenders = Contenders(workload, STEPS, measure)
    others = {"mm train": contenders.ours, "transformers Trainer": contenders.trainer}
    turns = Turns(contenders.floor, others, TIMEOUT_S)
    turns.measure(ROUNDS)
    summary, everyone = turns.summary(), turns.everyone()
    memory = peak_memory(turns) | {"sum_of_proportional_set_sizes_mb": proportional(contenders)}
    return {
        "floor_batches": "collated beforehand, read from a file each",
        "steps": STEPS,
        "equal_work": everyone[0]["work"],
        "first_losses_differ_by": check_losses(everyone),
        "unit": "s from process start to the end of step 1",
        "memory": memory,
        **summary,
        "figures": [figure.to_dict() for figure in figures(summary, memory)],
    }


def measure(finished: Finished, report: Report) -> dict[str, Any]:
    """Time to the first step; the whole run's memory."""
    return {
        "value": finished.ran_s(report[0]["time"]),
        "work": total_work(report),
        "first_loss": report[0]["loss"],
        "wall_s": finished.wall_s,
        "peak_rss_mb": finished.peak_rss_mb,
        "peak_pss_mb": finished.peak_pss_mb,
    }


def peak_memory(turns: Turns) -> dict[str, Any]:
    """Peak resident size of each contender's largest process, over all runs."""
    names = {"bare loop": FLOOR, **{name: name for name in turns.contenders}}
    return {"peak_rss_mb": {told: spread([run["peak_rss_mb"] for run in turns.runs(n)]) for told, n in names.items()}}


def proportional(contenders: Contenders) -> dict[str, float]:
    """Peak sum over all processes of a run, data workers included; in runs of their own, for watching costs time."""
    makers = {"bare loop": contenders.floor, "mm train": contenders.ours, "transformers Trainer": contenders.trainer}
    peaks: dict[str, list[float]] = {name: [] for name in makers}
    for name, make in makers.items():
        for _ in range(MEMORY_RUNS):
            contender = make()
            finished = run_process(contender.command, timeout_s=TIMEOUT_S, watch_memory=True)
            peaks[name].append(contender.finish(finished)["peak_pss_mb"])
    return {name: statistics.median(values) for name, values in peaks.items()}


def figures(summary: dict[str, Any], memory: dict[str, Any]) -> list[Figure]:
    """Ratios, seconds and megabytes."""
    ratios, peaks = summary["ratio_to_floor"], memory["peak_rss_mb"]
    floor_mb = peaks["bare loop"]["median"]
    return [
        of_spread("mm train / bare loop, start to first step", ratios["mm train"], "×", TARGET_RATIO),
        of_spread("Trainer / bare loop, start to first step", ratios["transformers Trainer"], "×"),
        of_spread("bare loop, start to first step", summary["floor"], "s"),
        Figure("mm train − bare loop, peak memory", peaks["mm train"]["median"] - floor_mb, "MB", TARGET_MB),
        Figure("Trainer − bare loop, peak memory", peaks["transformers Trainer"]["median"] - floor_mb, "MB"),
        of_spread("bare loop, peak memory", peaks["bare loop"], "MB"),
    ]
