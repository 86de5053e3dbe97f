"""Seconds of `mm extract` on a feature set to which 1 % of its rows were added, over those of extracting it whole.

Both are whole processes, start-up included, each run once: the whole extraction takes minutes. Pictures are those of
`extraction`. `python -m benchmarks.growth ROWS` tries it out with fewer rows and prints the figures.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders import UnequalWorkError
from benchmarks.figures import Figure, table
from benchmarks.processes import run as run_process
from benchmarks.raw_media import PICTURES, Workload, prepare

ROWS = 10_000
SHARE = 100
"""One row is added for so many."""
TARGET = 0.03
TIMEOUT_S = 7200.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    return measured(work, ROWS)


def measured(work: Path, rows: int) -> dict[str, Any]:
    """The whole extraction of so many rows, one that finds nothing new, and one that finds 1 % more."""
    added = max(1, rows // SHARE)
    workload = prepare(PICTURES, work / "growth", rows + added, with_inputs=False)
    table_of_rows = workload.folder / "rows.jsonl"
    lines = table_of_rows.read_text(encoding="utf-8").splitlines(keepends=True)
    seconds = {}
    for name, count in (("whole", rows), ("again", rows), ("grown", rows + added)):
        table_of_rows.write_text("".join(lines[:count]), encoding="utf-8")
        seconds[name] = extracted(workload, count)
    return {"rows": rows, "added": added, "seconds": seconds, "figures": [each.to_dict() for each in figures(seconds)]}


def extracted(workload: Workload, rows: int) -> float:
    """Seconds of one `mm extract`; raise `UnequalWorkError` when the set has another number of rows afterwards."""
    features = workload.folder / "features"
    key = f"data.dataset_param.basic_parameters.features_dir={features}"
    words = ["extract", str(workload.config), key, "--batch-size", str(workload.kind.batch_size)]
    finished = run_process([sys.executable, "-m", "mindspeed_mm.cli.main", *words], timeout_s=TIMEOUT_S)
    counted = [sys.executable, "-m", "benchmarks.growth", "count", str(features), str(workload.model)]
    held = run_process(counted, timeout_s=TIMEOUT_S).last_json()
    if held != rows:
        raise UnequalWorkError(f"{held} rows have features instead of {rows}")
    return finished.wall_s


def figures(seconds: dict[str, float]) -> list[Figure]:
    """Shares of the whole extraction."""
    whole = seconds["whole"]
    return [
        Figure("1 % more rows / whole extraction, seconds", seconds["grown"] / whole, "×", at_most=TARGET),
        Figure("nothing new / whole extraction, seconds", seconds["again"] / whole, "×"),
        *(Figure(f"{name}, whole process", each, "s") for name, each in seconds.items()),
    ]


def count(features: Path, model: Path) -> int:
    """Rows of a feature set."""
    from mindspeed_mm.fsdp.data.feature_store import open_features
    from mindspeed_mm.fsdp.models.diffusion.find import find_adapter

    return len(open_features(features, find_adapter(model)))


def main(words: list[str]) -> None:
    """As a script."""
    if words[0] == "count":
        print(json.dumps(count(Path(words[1]), Path(words[2]))))
        return
    with tempfile.TemporaryDirectory(prefix="mm-growth-") as folder:
        found = measured(Path(folder), int(words[0]))
    known = Figure.__dataclass_fields__
    shown = [Figure(**{key: value for key, value in each.items() if key in known}) for each in found["figures"]]
    print(table([("growth", figure) for figure in shown]))


if __name__ == "__main__":
    main(sys.argv[1:])
