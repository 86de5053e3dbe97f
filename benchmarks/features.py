"""What each memory and fine-tuning feature gains and costs, on a model of 0.32 B parameters on a CPU.

Every feature runs in a process of its own, between two runs of the plain configuration. Peak memory is the highest
resident size over the steps, above what the process held before it built anything. On a CPU the host is the device:
what is moved to the host saves nothing here, and its price shows.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.features_cases import FEATURES, MEASURED_STEPS, OFF, ROWS, SHAPE, TOKENS_A_ROW
from benchmarks.figures import Figure, of_spread
from benchmarks.processes import run as run_process
from benchmarks.rounds import ROUGH, Rounds, spread

ACCEPTED_ROUNDS = 1
LIMIT_S = 1500.0
TIMEOUT_S = 300.0
SAME_LOSS_WITHIN = 2e-3
"""Relative, of the last step: bf16 products whose order differs."""


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "features"
    run_process([sys.executable, "-m", "benchmarks.features_run", "make", str(folder)], timeout_s=TIMEOUT_S)
    runs = {name: partial(measured, folder, list(feature.words)) for name, feature in FEATURES.items()}
    rounds = Rounds(partial(measured, folder, []), runs, *ROUGH)
    rounds.measure(ACCEPTED_ROUNDS, LIMIT_S)
    summary = rounds.summary()
    peaks = {OFF: spread([floor["peak_gib"] for floor in rounds.floors])}
    peaks |= {name: spread([r.run["peak_gib"] for r in rounds.rounds if r.contender == name]) for name in FEATURES}
    check_losses(rounds)
    predicted = {OFF: rounds.floors[0]["predicted_gib"]}
    predicted |= {r.contender: r.run["predicted_gib"] for r in rounds.rounds}
    return {
        "model": f"Qwen3-shaped, {SHAPE}; {ROWS} rows of {TOKENS_A_ROW} tokens a step, bf16 products, fp32 masters",
        "measured_steps": MEASURED_STEPS,
        "unit": "ms a step",
        "features": {name: list(feature.words) for name, feature in FEATURES.items()},
        "peak_gib": peaks,
        "predicted_gib": predicted,
        **summary,
        "figures": [figure.to_dict() for figure in figures(summary, peaks, predicted)],
    }


def measured(folder: Path, words: list[str]) -> dict[str, Any]:
    """One run."""
    command = [sys.executable, "-m", "benchmarks.features_run", "measure", str(folder), *words]
    found: dict[str, Any] = run_process(command, timeout_s=TIMEOUT_S).last_json()
    return found


def check_losses(rounds: Rounds) -> None:
    """Raise when a feature that should change nothing trained something else."""
    expected = rounds.floors[0]["losses"][-1]
    for one in rounds.rounds:
        if FEATURES[one.contender].same_loss:
            found = one.run["losses"][-1]
            if not abs(found - expected) <= SAME_LOSS_WITHIN * expected:
                raise ValueError(f"{one.contender}: the loss of the last step is {found}, without it {expected}")


def figures(summary: dict[str, Any], peaks: dict[str, Any], predicted: dict[str, float]) -> list[Figure]:
    """Peak memory beside its prediction, and step time, of each."""
    found = [of_spread("off: step", summary["floor"], "ms")]
    for name in (OFF, *FEATURES):
        if peaks[name]["n"]:
            found.append(of_spread(f"{name}: peak memory", peaks[name], "GiB"))
            ratio = predicted[name] / peaks[name]["median"]
            found.append(Figure(f"{name}: predicted / measured", ratio, "×", at_most=1.1, at_least=0.9))
    for name in FEATURES:
        found.append(of_spread(f"{name} / off, step time", summary["ratio_to_floor"][name], "×"))
    return found
