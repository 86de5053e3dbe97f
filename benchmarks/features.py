"""What each memory and fine-tuning feature gains and costs, on a model of 0.32 B parameters on a CPU.

Every feature runs in a process of its own; three of them stand between two runs of the plain configuration. Peak
memory is the most that the tensors of a step held, by an instrument that follows them; beside it stand the prediction,
and what the process had resident, with what its allocator keeps. The same prediction says what each would hold with so
many tokens that activations are the peak. On a CPU the host is the device: what is moved to the
host saves nothing here, and its price shows.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.features_cases import (
    FEATURES,
    MEASURED_STEPS,
    MORE_ROWS,
    OF_ACTIVATIONS,
    OFF,
    PREDICTED_ROWS,
    PREDICTED_TOKENS_A_ROW,
    ROWS,
    SHAPE,
    TOKENS_A_ROW,
)
from benchmarks.figures import Figure
from benchmarks.processes import run as run_process
from benchmarks.rounds import ROUGH, spread

BETWEEN_FLOORS = 3
TIMEOUT_S = 420.0
SAME_LOSS_WITHIN = 2e-3
"""Relative, of the last step: bf16 products whose order differs."""

Run = dict[str, Any]


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "features"
    run_process([sys.executable, "-m", "benchmarks.features_run", "make", str(folder)], timeout_s=TIMEOUT_S)
    floors, runs = [measured(folder, OFF)], {}
    for names in groups():
        taken = {name: measured(folder, name) for name in names}
        floors.append(measured(folder, OFF))
        runs |= {name: one | ratio(one, floors[-2:]) for name, one in taken.items()}
    check_losses(floors[0], runs)
    command = [sys.executable, "-m", "benchmarks.features_run", "predict", str(folder)]
    predicted = run_process(command, timeout_s=TIMEOUT_S).last_json()
    return {
        "model": f"Qwen3-shaped, {SHAPE}; {ROWS} rows of {TOKENS_A_ROW} tokens a step, bf16 products, fp32 masters",
        "measured_steps": MEASURED_STEPS,
        "unit": "ms a step",
        "rule": f"a ratio counts when the floors around it agree within {ROUGH[0]:.0%}",
        "features": {name: list(feature.words) for name, feature in FEATURES.items()},
        "floor": spread([floor["value"] for floor in floors]),
        "floor_runs": floors,
        "runs": runs,
        "more_rows": MORE_ROWS,
        "with_more_rows": {name: peak(folder, name) for name in OF_ACTIVATIONS},
        "predicted_rows": PREDICTED_ROWS,
        "predicted_tokens_a_row": PREDICTED_TOKENS_A_ROW,
        "predicted": predicted,
        "figures": [figure.to_dict() for figure in figures(floors, runs)],
    }


def groups() -> list[list[str]]:
    """Features that share two floors."""
    names = list(FEATURES)
    return [names[start : start + BETWEEN_FLOORS] for start in range(0, len(names), BETWEEN_FLOORS)]


def measured(folder: Path, name: str) -> Run:
    """One run."""
    words = FEATURES[name].words if name != OFF else ()
    command = [sys.executable, "-m", "benchmarks.features_run", "measure", str(folder), *words]
    found: Run = run_process(command, timeout_s=TIMEOUT_S).last_json()
    print(f"  {name}: {found['value']:.0f} ms, {found['peak_gib']:.2f} GiB, predicted {found['predicted_gib']:.2f}")
    return found


def peak(folder: Path, name: str) -> Run:
    """Bytes alone, of a larger micro-batch."""
    words = FEATURES[name].words if name != OFF else ()
    command = [sys.executable, "-m", "benchmarks.features_run", "peak", str(folder), *words]
    found: Run = run_process(command, timeout_s=TIMEOUT_S).last_json()
    return found


def ratio(one: Run, floors: list[Run]) -> Run:
    """Step time over that of the floors around it, and whether it counts."""
    before, after = (floor["value"] for floor in floors)
    agree = abs(before - after) <= ROUGH[0] * min(before, after)
    return {"ratio": 2 * one["value"] / (before + after), "counts": agree}


def check_losses(floor: Run, runs: dict[str, Run]) -> None:
    """Raise when a feature that should change nothing trained something else."""
    expected = floor["losses"][-1]
    for name, one in runs.items():
        found = one["losses"][-1]
        if FEATURES[name].same_loss and not abs(found - expected) <= SAME_LOSS_WITHIN * expected:
            raise ValueError(f"{name}: the loss of the last step is {found}, without it {expected}")


def figures(floors: list[Run], runs: dict[str, Run]) -> list[Figure]:
    """Peak memory beside its prediction, and step time, of each."""
    found = [Figure("off: step", statistics.median(floor["value"] for floor in floors), "ms")]
    for name, one in ({OFF: floors[0]} | runs).items():
        found.append(Figure(f"{name}: most held in a step", one["peak_gib"], "GiB"))
        predicted = one["predicted_gib"] / one["peak_gib"]
        found.append(Figure(f"{name}: predicted / measured", predicted, "×", at_most=1.1, at_least=0.9))
        if name != OFF:
            found.append(Figure(f"{name} / off, step time", one["ratio"] if one["counts"] else None, "×"))
    return found
