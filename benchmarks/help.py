"""`mm --help` as a whole process, beside Python starting and doing nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import of_spread
from benchmarks.processes import run as run_process
from benchmarks.rounds import spread

RUNS = 20
TARGET_S = 0.3


def run(_work: Path) -> dict[str, Any]:
    """Measure; the two take turns, and one run of each before counts nothing."""
    commands = {"mm --help": [*mm(), "--help"], "python -c pass": [sys.executable, "-c", "pass"]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS + 1):
        for name, command in commands.items():
            times[name].append(run_process(command, timeout_s=60).wall_s)
    spreads = {name: spread(values[1:]) for name, values in times.items()}
    figures = [
        of_spread("mm --help", spreads["mm --help"], "s", TARGET_S),
        of_spread("python -c pass", spreads["python -c pass"], "s"),
    ]
    return {
        "unit": "s, whole process",
        "runs": {name: values[1:] for name, values in times.items()},
        "spreads": spreads,
        "figures": [figure.to_dict() for figure in figures],
    }


def mm() -> list[str]:
    """The installed command, or the module where only the checkout is there."""
    installed = Path(sys.executable).with_name("mm")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "mindspeed_mm"]
