"""One process of `benchmarks.features`: writes the model and its rows, or trains a few steps and says what they cost.

`python -m benchmarks.features_run make FOLDER`; `… measure FOLDER WORD…`, which prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import communication_rank
from benchmarks.features_cases import MEASURED_STEPS, ROWS, SHAPE, TOKENS_A_ROW, WARM_UP_STEPS
from benchmarks.processes import status_kb
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.tasks.train import load_with_plugins

GIB = 2**20
"""KiB in one."""


class Costs(Hook):
    """Seconds and loss of each step, and the peak of this process over them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib = 0.0

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Forget the peak of loading: the file that was mapped counted in it."""
        Path("/proc/self/clear_refs").write_text("5")

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Note them."""
        self.seconds.append(result.seconds - result.data_seconds)
        self.losses.append(result.loss)
        self.peak_gib = status_kb("self", "VmHWM") / GIB


def make(folder: Path) -> None:
    """Write them."""
    training = {
        "train_iters": WARM_UP_STEPS + MEASURED_STEPS,
        "micro_batch_size": ROWS,
        "adam_fused": True,
        "lr": 1e-5,
    }
    communication_rank.make(folder, {"dense": SHAPE}, TOKENS_A_ROW, training, param_dtype="bf16")


def measure(folder: Path, words: list[str]) -> dict[str, Any]:
    """Train, and say what it cost."""
    costs = Costs()
    config = load_with_plugins(folder / "dense" / "run.yaml", words)
    before_gib = status_kb("self", "VmRSS") / GIB  # imports; the model and all that belongs to it come later
    engine = communication_rank.Quiet(config, hooks=[costs]).train()
    assert engine is not None
    return {
        "value": 1000 * statistics.median(costs.seconds[WARM_UP_STEPS:]),
        "first_step_ms": 1000 * costs.seconds[0],
        "peak_gib": costs.peak_gib - before_gib,
        "imports_gib": before_gib,
        "losses": costs.losses,
        "trained_parameters": sum(p.numel() for p in engine.model.parameters() if p.requires_grad),
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3:])))
