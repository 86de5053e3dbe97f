"""Process seconds of `mm infer` for 500 short rows over a bare `generate` loop in batches of the same size, and over
one row at a time, once the model is loaded. All say the same. They take turns in one process: of processes that run one
after the other, a shared machine makes some two fifths slower than others of the same work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.contenders import UnequalWorkError
from benchmarks.digits import prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

ROUNDS = 9
ROWS = 500
TIMEOUT_S = 300.0
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
    shown = figures(found["rounds"])
    return {"rows": ROWS, "rounds": found["rounds"], "figures": [figure.to_dict() for figure in shown]}


def figures(rounds: list[dict[str, float]]) -> list[Figure]:
    """Ratios."""
    over_bare = spread([one["ours"] / one["bare"] for one in rounds])
    over_single = spread([one["single"] / one["ours"] for one in rounds])
    return [
        of_spread("mm infer / bare generate loop, process time", over_bare, "×", at_most=MOST_OVER_BARE),
        of_spread("one row at a time / mm infer, process time", over_single, "×", at_least=LEAST_OVER_SINGLE),
    ]
