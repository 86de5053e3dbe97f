"""Seconds of `mm infer` for 500 short rows over a bare `generate` loop in batches of the same size, and over one row at
a time, once the model is loaded; and of the whole command over a script with that loop, their start included. All say
the same. Those that are loaded take turns in one process: of processes that run one after the other, a shared machine
makes some two fifths slower than others of the same work. So commands are told by their processor seconds."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.bare_answers import BATCH, TOKENS
from benchmarks.contenders import UnequalWorkError
from benchmarks.digits import prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.machine import ROOT
from benchmarks.rounds import spread

ROUNDS = 12
COMMANDS = 3
ROWS = 500
TIMEOUT_S = 1800.0
MOST_OVER_BARE, LEAST_OVER_SINGLE = 1.05, 4.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    workload = prepare(work / "digits", 1)
    data = workload.folder / "data"
    rows = data / "short.jsonl"
    lines = (data / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    rows.write_text("".join(lines[:ROWS]), encoding="utf-8")
    model = workload.folder / "lively"
    processes.run(
        [sys.executable, "-m", "benchmarks.bare_answers", "make", str(workload.model), str(model)], timeout_s=TIMEOUT_S
    )
    words = [sys.executable, "-m", "benchmarks.bare_answers", str(model), str(rows), str(ROUNDS)]
    found: dict[str, Any] = processes.run(words, timeout_s=TIMEOUT_S).last_json()
    answers = found["answers"]
    if not answers["ours"] == answers["bare"] == answers["single"]:
        raise UnequalWorkError("the contenders say different things")
    if len(set(answers["ours"])) < ROWS / 10:
        raise UnequalWorkError("all rows have the same answers, which proves nothing")
    commands = [whole_commands(model, rows, work / "commands") for _ in range(COMMANDS)]
    shown = figures(found["rounds"], commands)
    return {
        "rows": ROWS,
        "rounds": found["rounds"],
        "commands": commands,
        "figures": [figure.to_dict() for figure in shown],
    }


def whole_commands(model: Path, rows: Path, folder: Path) -> dict[str, float]:
    """Processor seconds of `mm infer` and of a script with the bare loop."""
    folder.mkdir(exist_ok=True)
    asked = ["--data", str(rows), "--out", str(folder / "ours.jsonl"), "--overwrite"]
    chosen = ["--max-new-tokens", str(TOKENS), "--batch-size", str(BATCH), "--temperature", "0"]
    loop = ["benchmarks.bare_answers", "loop", str(model), str(rows), str(folder / "bare.jsonl")]
    return {
        "ours": cpu_s([sys.executable, "-m", "mindspeed_mm", "infer", str(model), *asked, *chosen]),
        "bare": cpu_s([sys.executable, "-m", *loop]),
    }


def cpu_s(words: list[str]) -> float:
    """Processor seconds of a command that succeeds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(rounds: list[dict[str, dict[str, float]]], commands: list[dict[str, float]]) -> list[Figure]:
    """Ratios."""
    over_bare = spread([one["ours"]["wall_s"] / one["bare"]["wall_s"] for one in rounds])
    cpu_over_bare = spread([one["ours"]["cpu_s"] / one["bare"]["cpu_s"] for one in rounds])
    with_single = [one for one in rounds if "single" in one]
    over_single = spread([one["single"]["wall_s"] / one["ours"]["wall_s"] for one in with_single])
    whole = spread([one["ours"] / one["bare"] for one in commands])
    return [
        of_spread("mm infer / bare generate loop", over_bare, "×", at_most=MOST_OVER_BARE),
        of_spread("mm infer / bare generate loop, processor time", cpu_over_bare, "×"),
        of_spread("one row at a time / mm infer", over_single, "×", at_least=LEAST_OVER_SINGLE),
        of_spread("the command mm infer / a script of the loop, processor time", whole, "×", at_most=MOST_OVER_BARE),
    ]
