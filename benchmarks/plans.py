"""Step time of each plan over FSDP2's, on the same rows and the same two ranks, by gloo on the CPU.

It tells what a plan costs beside the work itself: two ranks on two cores that talk through the host's memory, a small
model, no overlap. Which plan is fastest on devices with fast links it does not tell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.plans_cases import FLOORS, MEASURED_STEPS, RANKS, ROWS_A_STEP, SHAPES, TOKENS_A_ROW, WARM_UP_STEPS
from benchmarks.ranks import run_ranks

ACCEPTED_ROUNDS = 5
LIMIT_S = {"dense": 300.0, "experts": 100.0}
"""Time for the rounds of each model: less than eight minutes in all."""
STARTING_S = 120.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "plans"
    processes.run([sys.executable, "-m", "benchmarks.plans_rank", "make", str(folder)], timeout_s=STARTING_S)
    rounds = {}
    for model, limit_s in LIMIT_S.items():
        out = folder / f"{model}.json"
        print(f"  {model}: at most {limit_s:.0f} s on {RANKS} ranks", flush=True)
        words = ["benchmarks.plans_rank", "measure", str(folder), str(out), model, str(ACCEPTED_ROUNDS), str(limit_s)]
        run_ranks(words, RANKS, limit_s + STARTING_S)
        rounds[model] = json.loads(out.read_text(encoding="utf-8"))
    return {
        "ranks": RANKS,
        "models": {name: vars(shape) | {"parameters": shape.parameters} for name, shape in SHAPES.items()},
        "work": f"{ROWS_A_STEP} rows of {TOKENS_A_ROW} tokens a step, fp32, the same rows in the same order",
        "warm_up_steps": WARM_UP_STEPS,
        "measured_steps": MEASURED_STEPS,
        "unit": "ms a step, median of the measured ones, data left out",
        "rounds": rounds,
        "figures": [figure.to_dict() for name, summary in rounds.items() for figure in figures(name, summary)],
    }


def figures(model: str, summary: dict[str, Any]) -> list[Figure]:
    """The floor in ms, and each plan over it."""
    floor = f"{model}, {FLOORS[model]}"
    found = [of_spread(f"{floor}: step", summary["floor"], "ms")]
    ratios = summary["ratio_to_floor"].items()
    return found + [of_spread(f"{model}, {name} / {FLOORS[model]}", ratio, "×") for name, ratio in ratios]
