"""Run folders as training leaves them, many and small: `python -m tests.helpers.many_runs FOLDER 1000` makes them and
times what the board answers."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_mm.core.folder_kinds import MARKER, MARKER_FORMAT, RUN_KIND

STEPS = 40
CONFIG = "model: {model_name_or_path: models/tiny}\ntraining: {lr: LR, save: SAVE}\n"


def make_run(folder: Path, *, status: str = "finished", steps: int = STEPS, lr: float = 1e-3, **facts: Any) -> Path:
    """A run folder with metrics, events, record and configuration; returns it."""
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(json.dumps({"format": MARKER_FORMAT, "kind": RUN_KIND}))
    record = {"status": status, "exit_code": 0, "packages": {}, "started": 1.7e9, "total_steps": STEPS, **facts}
    (folder / "run.json").write_text(json.dumps(record))
    lines = []
    for step in range(1, steps + 1):
        values = {"step": step, "loss": 2 / step + lr, "grad_norm": 1.0, "lr": lr, "step_ms": 10.0}
        lines.append(json.dumps(values) + "\n")
    lines.append(json.dumps({"step": steps, "val_loss": 0.5 + lr}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "events.jsonl").write_text(json.dumps({"time": 1.7e9, "kind": "save", "step": steps}) + "\n")
    text = CONFIG.replace("LR", str(lr)).replace("SAVE", folder.name)
    (folder / "config.yaml").write_text(text)
    (folder / "resolved.yaml").write_text(text)
    return folder


def measure(root: Path, count: int) -> None:
    """Make so many runs and print how long the list, a run and a comparison take, twice each."""
    from mindspeed_mm.tasks.ui.board import Showing
    from mindspeed_mm.tasks.ui.listing import Board

    for number in range(count):
        make_run(root / f"group{number % 10}" / f"run{number}", lr=1e-4 * (1 + number % 7))
    board = Board(root)
    showing = Showing(board.root)
    showing.show([board.look().runs[0].path])  # imports matplotlib
    fresh = Board(root)
    for title, work in (
        ("list, nothing known", lambda: fresh.look()),
        ("list again", lambda: fresh.look()),
        ("one run", lambda: showing.show([fresh.look().runs[1].path])),
        ("the same run again", lambda: showing.show([fresh.look().runs[1].path])),
        ("six runs beside one another", lambda: showing.show([run.path for run in fresh.look().runs[2:8]])),
    ):
        begun = time.perf_counter()
        work()
        print(f"{title:28} {1000 * (time.perf_counter() - begun):7.0f} ms")


if __name__ == "__main__":
    measure(Path(sys.argv[1]), int(sys.argv[2]))
